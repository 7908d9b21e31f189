"""A step's sampling and scoring, shared out over the ranks; every rank ends with all of it.

A sampler that lives in each rank draws that rank's share; one that only rank 0 talks to (`led`)
draws everything there. Rewards always see a rank's share of whole groups: those of one rank are
one call's rows where a reward's scope is the batch.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from rloo_cli.data.batch import Group
from rloo_cli.distributed.world import World
from rloo_cli.generation import Generator
from rloo_cli.rewards.engine.scoring import Scores, ScoringStep
from rloo_cli.utils.timers import StepTimer

SampleGroups = Callable[..., None]  # (places, arrived=...): draws for the groups at these places


def sample_and_score(
    world: World,
    generator: Generator,
    groups: Sequence[Group],
    sample_groups: SampleGroups,
    make_scoring_step: Callable[[Sequence[Group]], ScoringStep],
    clock: StepTimer,
) -> Scores:
    """Fill every group's rollouts, on every rank, and say what the rewards say of all of them.

    `stage` makes the scoring of some of the groups. Raises RewardError and GenerationError on all
    ranks where it arises on one.
    """
    places = world.rank_shard(len(groups))
    mine = [groups[i] for i in places]
    if getattr(generator, "samples_on_rank0", False) and world.size > 1:
        scoring = make_scoring_step(mine) if mine else None
        with clock.phase("generation"):
            _sample_for_all_ranks(len(groups), places, sample_groups, scoring)
        with clock.phase("reward"):
            parts = world.run_on_all_ranks(
                lambda: None if scoring is None else scoring.wait_for_scores()
            )
        return merge_scores([p for p in parts if p is not None])
    if world.size == 1:
        _, scores = _sample_and_score_share(mine, places, sample_groups, make_scoring_step, clock)
        return merge_scores([scores] if scores is not None else [])
    with clock.phase("waiting"):
        told = world.run_on_all_ranks(
            lambda: _sample_and_score_share(mine, places, sample_groups, make_scoring_step, clock)
        )
    rollouts = [r for own, _ in told for r in own]
    for group, own in zip(groups, rollouts, strict=True):
        group.rollouts = own
    return merge_scores([scores for _, scores in told if scores is not None])


def _sample_and_score_share(
    groups: Sequence[Group],
    group_indices: range,
    sample_groups: SampleGroups,
    make_scoring_step: Callable[..., ScoringStep],
    clock: StepTimer,
) -> tuple[list[Any], Scores | None]:
    if not groups:
        return [], None
    scoring = make_scoring_step(groups)
    try:
        with clock.phase("generation"):
            sample_groups(group_indices, arrived=scoring.submit_group)
    except BaseException:
        scoring.abandon()
        raise
    with clock.phase("reward"):
        return [g.rollouts for g in groups], scoring.wait_for_scores()


def _sample_for_all_ranks(
    num_groups: int,
    group_indices: range,
    sample_groups: SampleGroups,
    scoring_step: ScoringStep | None,
) -> None:
    """Draw all groups; `scoring`, of those at `places`, begins with each as soon as it is whole."""

    def arrived(place: int) -> None:
        if scoring_step is not None and place in group_indices:
            scoring_step.submit_group(place - group_indices.start)

    try:
        sample_groups(range(num_groups), arrived=arrived)
    except BaseException:
        if scoring_step is not None:
            scoring_step.abandon()
        raise


def merge_scores(scores_by_rank: Sequence[Scores]) -> Scores:
    """What several ranks' rewards said of their groups, as of one. Means are over groups."""
    if len(scores_by_rank) == 1:
        return scores_by_rank[0]
    rows = [p.raw.shape[1] for p in scores_by_rank]
    names = scores_by_rank[0].names
    columns = dict.fromkeys(n for p in scores_by_rank for n in p.extras)
    counts = [p.raw.shape[1] * p.raw.shape[2] for p in scores_by_rank]
    return Scores(
        raw=torch.cat([p.raw for p in scores_by_rank], dim=1),
        names=names,
        weights=scores_by_rank[0].weights,
        error_rate={
            n: _weighted_mean((p.error_rate[n] for p in scores_by_rank), rows) for n in names
        },
        seconds={n: max(p.seconds[n] for p in scores_by_rank) for n in names},
        extras={
            c: [
                v
                for p, n in zip(scores_by_rank, counts, strict=True)
                for v in p.extras.get(c, [None] * n)
            ]
            for c in columns
        },
        metrics={
            m: _weighted_mean(
                (p.metrics[m] for p in scores_by_rank if m in p.metrics),
                [n for p, n in zip(scores_by_rank, rows, strict=True) if m in p.metrics],
            )
            for m in dict.fromkeys(m for p in scores_by_rank for m in p.metrics)
        },
        warnings=list(dict.fromkeys(w for p in scores_by_rank for w in p.warnings)),
    )


def _weighted_mean(values: Iterable[float], weights: Sequence[int]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)

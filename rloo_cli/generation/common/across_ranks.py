"""A step's sampling and scoring, divided among the ranks; every rank ends with all results.

A sampler on each rank samples that rank's share; one that only rank 0 talks to (`rank0_proxy`)
samples everything there. Rewards always score a rank's share of whole groups: for a reward of
scope batch, one call has the groups of one rank.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from rloo_cli.data.batch import Group, Rollout
from rloo_cli.distributed.world import World
from rloo_cli.generation import Generator
from rloo_cli.rewards.engine.failures import check_failures_of_ranks
from rloo_cli.rewards.engine.scoring import Scores, ScoringStep
from rloo_cli.utils.timers import StepTimer

SampleGroups = Callable[..., None]  # (indices, arrived=...): samples for the groups at `indices`


def sample_and_score(
    world: World,
    generator: Generator,
    groups: Sequence[Group],
    sample_groups: SampleGroups,
    make_scoring_step: Callable[[Sequence[Group]], ScoringStep],
    clock: StepTimer,
) -> Scores:
    """Fill every group's rollouts, on every rank, and return the scores of all of them.

    `make_scoring_step` makes the scoring of some of the groups. RewardError and GenerationError of
    one rank are raised on all.
    """
    indices = world.rank_shard(len(groups))
    share = [groups[i] for i in indices]

    def make_for_all_ranks(share: Sequence[Group]) -> ScoringStep:
        scoring = make_scoring_step(share)
        scoring.count_all_ranks(len(groups) * scoring.table.k)
        return scoring

    if generator.samples_on_rank0 and world.size > 1:
        scoring = make_for_all_ranks(share) if share else None
        with clock.phase("generation"):
            _sample_for_all_ranks(len(groups), indices, sample_groups, scoring)
        with clock.phase("reward"):
            parts = world.run_on_all_ranks(
                lambda: None if scoring is None else scoring.wait_for_scores()
            )
        return _merge_and_check(world, [p for p in parts if p is not None])

    def sample_share() -> tuple[list[list[Rollout]], Scores | None]:
        return _sample_and_score_share(share, indices, sample_groups, make_for_all_ranks, clock)

    if world.size == 1:
        _, scores = sample_share()
        return merge_scores([scores] if scores is not None else [])
    with clock.phase("waiting"):
        shares = world.run_on_all_ranks(sample_share)
    all_rollouts = [rollouts for of_rank, _ in shares for rollouts in of_rank]
    for group, rollouts in zip(groups, all_rollouts, strict=True):
        group.take_rollouts(rollouts)
    return _merge_and_check(world, [scores for _, scores in shares if scores is not None])


def _merge_and_check(world: World, scores_by_rank: Sequence[Scores]) -> Scores:
    """The scores of all ranks as one. Raises RewardError, on all ranks, if too many rows failed."""
    scores = merge_scores(scores_by_rank)
    if scores.tolerated:  # the same on all ranks: one logs it, all of them stop
        world.run_on_rank0(lambda: check_failures_of_ranks(scores.tolerated, scores.raw[0].numel()))
    return scores


def sample_only(
    world: World,
    generator: Generator,
    groups: Sequence[Group],
    sample_groups: Callable[[Sequence[int]], None],
) -> None:
    """Fill every group's rollouts, on every rank, when nothing is scored."""
    if world.size == 1 or generator.samples_on_rank0:
        sample_groups(range(len(groups)))
        return

    def sample_share() -> list[list[Rollout]]:
        share = world.rank_shard(len(groups))
        if share:
            sample_groups(share)
        return [groups[i].rollouts for i in share]

    shares = world.run_on_all_ranks(sample_share)
    for group, rollouts in zip(groups, (r for of in shares for r in of), strict=True):
        group.take_rollouts(rollouts)


def _sample_and_score_share(
    groups: Sequence[Group],
    group_indices: range,
    sample_groups: SampleGroups,
    make_scoring_step: Callable[..., ScoringStep],
    clock: StepTimer,
) -> tuple[list[list[Rollout]], Scores | None]:
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
    """Sample all groups; those at `group_indices` are scored here, each once it is complete."""

    def arrived(index: int) -> None:
        if scoring_step is not None and index in group_indices:
            scoring_step.submit_group(index - group_indices.start)

    try:
        sample_groups(range(num_groups), arrived=arrived)
    except BaseException:
        if scoring_step is not None:
            scoring_step.abandon()
        raise


def merge_scores(scores_by_rank: Sequence[Scores]) -> Scores:
    """Merge the scores of several ranks' groups. Means are weighted by their counts."""
    parts = scores_by_rank
    if len(parts) == 1:
        return parts[0]
    names, num_groups = parts[0].names, [p.raw.shape[1] for p in parts]
    extras = {
        column: [v for p in parts for v in p.extras.get(column, [None] * p.raw.shape[1:].numel())]
        for column in dict.fromkeys(column for p in parts for column in p.extras)
    }
    metrics, metric_counts = {}, {}
    for name in dict.fromkeys(name for p in parts for name in p.metrics):
        calls = [p.metric_counts[name] for p in parts if name in p.metrics]
        metrics[name] = _weighted_mean((p.metrics[name] for p in parts if name in p.metrics), calls)
        metric_counts[name] = sum(calls)
    return Scores(
        raw=torch.cat([p.raw for p in parts], dim=1),
        names=names,
        weights=parts[0].weights,
        error_rate={n: _weighted_mean((p.error_rate[n] for p in parts), num_groups) for n in names},
        seconds={n: max(p.seconds[n] for p in parts) for n in names},
        extras=extras,
        metrics=metrics,
        metric_counts=metric_counts,
        warnings=list(dict.fromkeys(w for p in parts for w in p.warnings)),
        tolerated=[failure for p in parts for failure in p.tolerated],
    )


def _weighted_mean(values: Iterable[float], weights: Sequence[int]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)

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
from rloo_cli.rewards.engine.scoring import Scores, Stage
from rloo_cli.utils.timers import Clock

Sample = Callable[..., None]  # (places, arrived=...): draws for the groups at these places


def answer(
    world: World,
    generator: Generator,
    groups: Sequence[Group],
    sample: Sample,
    stage: Callable[[Sequence[Group]], Stage],
    clock: Clock,
) -> Scores:
    """Fill every group's rollouts, on every rank, and say what the rewards say of all of them.

    `stage` makes the scoring of some of the groups. Raises RewardError and GenerationError on all
    ranks where it arises on one.
    """
    places = world.part(len(groups))
    mine = [groups[i] for i in places]
    if getattr(generator, "led", False) and world.size > 1:
        scoring = stage(mine) if mine else None
        with clock.phase("generation"):
            _sample_for_all(len(groups), places, sample, scoring)
        with clock.phase("reward"):
            parts = world.each(lambda: None if scoring is None else scoring.finish())
        return joined([p for p in parts if p is not None])
    if world.size == 1:
        _, scores = _drawn_and_scored(mine, places, sample, stage, clock)
        return joined([scores] if scores is not None else [])
    with clock.phase("waiting"):
        told = world.each(lambda: _drawn_and_scored(mine, places, sample, stage, clock))
    rollouts = [r for own, _ in told for r in own]
    for group, own in zip(groups, rollouts, strict=True):
        group.rollouts = own
    return joined([scores for _, scores in told if scores is not None])


def _drawn_and_scored(
    mine: Sequence[Group], places: range, sample: Sample, stage: Callable[..., Stage], clock: Clock
) -> tuple[list[Any], Scores | None]:
    if not mine:
        return [], None
    scoring = stage(mine)
    try:
        with clock.phase("generation"):
            sample(places, arrived=scoring.arrived)
    except BaseException:
        scoring.abandon()
        raise
    with clock.phase("reward"):
        return [g.rollouts for g in mine], scoring.finish()


def _sample_for_all(count: int, places: range, sample: Sample, scoring: Stage | None) -> None:
    """Draw all groups; `scoring`, of those at `places`, begins with each as soon as it is whole."""

    def arrived(place: int) -> None:
        if scoring is not None and place in places:
            scoring.arrived(place - places.start)

    try:
        sample(range(count), arrived=arrived)
    except BaseException:
        if scoring is not None:
            scoring.abandon()
        raise


def joined(parts: Sequence[Scores]) -> Scores:
    """What several ranks' rewards said of their groups, as of one. Means are over groups."""
    if len(parts) == 1:
        return parts[0]
    rows = [p.raw.shape[1] for p in parts]
    names = parts[0].names
    columns = dict.fromkeys(n for p in parts for n in p.extras)
    counts = [p.raw.shape[1] * p.raw.shape[2] for p in parts]
    return Scores(
        raw=torch.cat([p.raw for p in parts], dim=1),
        names=names,
        weights=parts[0].weights,
        error_rate={n: _mean((p.error_rate[n] for p in parts), rows) for n in names},
        seconds={n: max(p.seconds[n] for p in parts) for n in names},
        extras={
            c: [v for p, n in zip(parts, counts, strict=True) for v in p.extras.get(c, [None] * n)]
            for c in columns
        },
        metrics={
            m: _mean(
                (p.metrics[m] for p in parts if m in p.metrics),
                [n for p, n in zip(parts, rows, strict=True) if m in p.metrics],
            )
            for m in dict.fromkeys(m for p in parts for m in p.metrics)
        },
        warnings=list(dict.fromkeys(w for p in parts for w in p.warnings)),
    )


def _mean(values: Iterable[float], weights: Sequence[int]) -> float:
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)

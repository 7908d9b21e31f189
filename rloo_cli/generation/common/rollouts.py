"""Prompts -> K completions each -> scores: one step's `Batch`.

What a row is worth before any KL is settled here, in the order of docs/OBJECTIVES.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rloo_cli.algorithms.common.base import Algorithm
from rloo_cli.algorithms.common.config import Switches
from rloo_cli.algorithms.common.score import mask_truncated
from rloo_cli.config.schema import RunConfig
from rloo_cli.data.batch import Batch, Group
from rloo_cli.data.prompts import Prompts
from rloo_cli.distributed.world import World
from rloo_cli.generation import Generator, ignore_arrival
from rloo_cli.generation.common import across_ranks
from rloo_cli.rewards.engine.arguments import RewardContext, TrainerState
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.scoring import Scores, ScoringStep
from rloo_cli.utils import signals
from rloo_cli.utils.errors import NumbersError, Problem
from rloo_cli.utils.fault_injection import poison_tensor
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.rng import sampling_seed
from rloo_cli.utils.timers import StepTimer


@dataclass
class Rollouts:
    """Everything that makes a step's batch."""

    config: RunConfig
    algorithm: Algorithm[Switches]
    prompts: Prompts
    generator: Generator
    rewards: list[Reward]
    clock: StepTimer
    world: World

    def next_batch(self, step: int, prompt_offset: int, state: TrainerState) -> Batch:
        """Draw prompts from `place` on, sample, score; redraw flat groups where asked to.

        Raises RewardError, GenerationError, and NumbersError when resampling finds nothing to
        learn from.
        """
        settings = self.algorithm.config
        wanted = self.config.train.prompts_per_step
        kept: list[Batch] = []
        drawn = rounds = 0
        while wanted:
            batch = self._sample_round(step, prompt_offset + drawn, drawn, wanted, state)
            drawn += wanted
            rounds += 1
            if settings.zero_std_groups != "resample" or rounds > settings.max_resample:
                kept.append(batch)
                break
            spread = [i for i in range(wanted) if _has_different_scores(batch, i)]
            kept.append(_select_groups(batch, spread))
            wanted -= len(spread)
        whole = _concatenate_batches(kept, drawn)
        self._finalize_batch(whole, drawn)
        return whole

    def _sample_round(
        self,
        step: int,
        prompt_offset: int,
        offset_in_step: int,
        num_prompts: int,
        state: TrainerState,
    ) -> Batch:
        with self.clock.phase("data"):
            groups = self.prompts.groups_at(prompt_offset, num_prompts)
        k = self.config.algorithm.num_generations
        seeds = [
            [
                sampling_seed(self.config.seed, "train", step, offset_in_step + i, j)
                for j in range(k)
            ]
            for i in range(num_prompts)
        ]
        context = RewardContext(self.prompts.conversational, state, signals.raise_if_stopped)

        def sample(places: range, arrived: Callable[[int], None] = ignore_arrival) -> None:
            mine = [groups[i] for i in places]
            self.generator.generate(mine, [seeds[i] for i in places], arrived=arrived)

        scores = across_ranks.sample_and_score(
            self.world, self.generator, groups, sample,
            lambda own: ScoringStep(self.rewards, own, context, k), self.clock,
        )  # fmt: skip
        scores.raw = poison_tensor("reward", scores.raw)
        batch = self._build_batch(step, groups, scores)
        if self.config.algorithm.needs_greedy:
            self._add_greedy(batch, seeds, context)
        return batch

    def _add_greedy(self, batch: Batch, seeds: list[list[int]], context: RewardContext) -> None:
        """Answer each prompt once more, greedily; a group whose answer has no score has none."""
        others = [replace(group, rollouts=[]) for group in batch.groups]

        def sample(places: range, arrived: Callable[[int], None] = ignore_arrival) -> None:
            mine = [others[i] for i in places]
            own = [seeds[i][:1] for i in places]
            self.generator.generate(mine, own, greedy=True, arrived=arrived)

        scores = across_ranks.sample_and_score(
            self.world, self.generator, others, sample,
            lambda own: ScoringStep(self.rewards, own, context, 1), self.clock,
        )  # fmt: skip
        found = self._build_batch(batch.step, others, scores)
        batch.greedy = found.shaped.masked_fill(~found.scorable, float("nan")).squeeze(1)
        batch.scorable = batch.scorable & found.scorable
        if found.scorable.any():
            batch.facts["objective/greedy_scores"] = float(found.shaped[found.scorable].mean())

    def _build_batch(self, step: int, groups: list[Group], scores: Scores) -> Batch:
        settings = self.algorithm.config
        weights = scores.weights.tolist()
        weighted, scorable = self.algorithm.combine_rewards(scores.raw, weights)
        facts = {f"reward/{n}/error_rate": r for n, r in scores.error_rate.items()}
        facts |= {f"reward/{n}/time": s for n, s in scores.seconds.items()}
        facts |= self.generator.metrics
        batch = Batch(
            step=step,
            groups=groups,
            names=list(scores.names),
            raw=scores.raw,
            score=weighted,
            shaped=weighted,
            scorable=scorable,
            masked=torch.zeros_like(scorable),
            active=[],
            draws=len(groups),
            facts=facts | scores.metrics,
            extras=dict(scores.extras),
            notes=list(scores.warnings),
            reward_weights=scores.weights,
            plain=unnormalized_scores(scores.raw, scores.weights, settings),
        )
        ended = batch.rollout_values("terminated")
        batch.scorable, batch.masked = mask_truncated(scorable, ended, settings)
        batch.shaped = self.algorithm.shape_scores(
            weighted, batch.scorable, batch.rollout_values("length"), ended
        )
        return batch

    def _finalize_batch(self, batch: Batch, num_sampled: int) -> None:
        """Combine and shape once more over the whole step, and decide which groups are trained on.

        What is normalised over the step was normalised over one round of draws until now.
        """
        settings = self.algorithm.config
        if batch.plain is not None and batch.reward_weights is not None:
            batch.score, _ = self.algorithm.combine_rewards(
                batch.raw, batch.reward_weights.tolist()
            )
        batch.shaped = self.algorithm.shape_scores(
            batch.score,
            batch.scorable,
            batch.rollout_values("length"),
            batch.rollout_values("terminated"),
        )
        flat = [i for i in range(len(batch.groups)) if not _has_different_scores(batch, i)]
        dropped = flat if settings.zero_std_groups != "keep" else []
        if len(dropped) == len(batch.groups) and settings.zero_std_groups == "resample":
            raise NumbersError(
                Problem(
                    f"no group of {num_sampled} drawn has two different scores",
                    f"step {batch.step + 1}, algorithm.zero_std_groups=resample",
                    _flat_groups_text(batch),
                    "easier or harder prompts, or algorithm.zero_std_groups=keep",
                )
            )
        batch.active = [i for i in range(len(batch.groups)) if i not in dropped]
        batch.facts["groups/dropped"] = len(dropped)
        batch.facts["groups/resampled"] = num_sampled - len(batch.groups)


def unnormalized_scores(raw: Tensor, weights: Tensor, settings: Switches) -> Tensor | None:
    """The rewards' weighted sum, where what is trained on is not that sum but a normalised one.

    (F, P, K), (F,) -> (P, K), 0 for what a reward said nothing of
    """
    if settings.multi_reward == "sum":
        return None
    return (raw.nan_to_num(0.0) * weights[:, None, None]).sum(0)


def _flat_groups_text(batch: Batch) -> str:
    """How many of these groups, each flat, score highest and lowest."""
    values = [float(s[r][0]) for s, r in zip(batch.score, batch.scorable, strict=True) if r.any()]
    if not values:
        return "none of their completions has a score"
    top, low = max(values), min(values)
    return (
        f"of the last {len(batch.groups)} groups {values.count(top) / len(batch.groups):.0%} score"
        f" {top:.3g}, the highest, and {values.count(low) / len(batch.groups):.0%} {low:.3g}, the"
        " lowest"
    )


def _has_different_scores(batch: Batch, group_index: int) -> bool:
    """Whether two scorable rows of group i differ."""
    values = batch.shaped[group_index][batch.scorable[group_index]]
    return values.numel() > 1 and bool(values.max() != values.min())


def _select_groups(batch: Batch, group_indices: list[int]) -> Batch:
    rows: JsonObject = {"raw": batch.raw[:, group_indices]}
    rows |= {n: getattr(batch, n)[group_indices] for n in ("score", "shaped", "scorable", "masked")}
    for name in ("greedy", "plain"):
        column = getattr(batch, name)
        rows[name] = None if column is None else column[group_indices]
    k = batch.score.shape[1]
    places = [i * k + j for i in group_indices for j in range(k)]
    extras = {name: [column[p] for p in places] for name, column in batch.extras.items()}
    groups = [batch.groups[i] for i in group_indices]
    return Batch(
        batch.step, groups, batch.names, active=[], draws=batch.draws, facts=batch.facts,
        extras=extras, notes=batch.notes, reward_weights=batch.reward_weights, **rows,
    )  # fmt: skip


def _concatenate_batches(batches: list[Batch], num_sampled: int) -> Batch:
    if len(batches) == 1:
        return batches[0]
    columns: JsonObject = {"raw": torch.cat([p.raw for p in batches], dim=1)}
    for name in ("score", "shaped", "scorable", "masked"):
        columns[name] = torch.cat([getattr(p, name) for p in batches])
    for name in ("greedy", "plain"):
        found = [own for p in batches if (own := getattr(p, name)) is not None]
        columns[name] = torch.cat(found) if found else None
    facts: dict[str, float] = {}
    for name in {n for p in batches for n in p.facts}:  # the mean over the rounds of drawing
        said = [p.facts[name] for p in batches if name in p.facts]
        facts[name] = sum(said) / (1 if name.endswith("/time") else len(said))
    names = {n for p in batches for n in p.extras}
    extras = {
        n: [v for p in batches for v in p.extras.get(n, [None] * p.score.numel())] for n in names
    }
    return Batch(
        batches[0].step,
        [g for p in batches for g in p.groups],
        batches[0].names,
        active=[],
        draws=num_sampled,
        facts=facts,
        extras=extras,
        notes=[n for p in batches for n in p.notes],
        reward_weights=batches[0].reward_weights,
        **columns,
    )

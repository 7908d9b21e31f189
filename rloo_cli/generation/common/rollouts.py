"""Prompts -> K completions each -> scores: one step's `Batch`.

Scores are combined and shaped here, before any KL, in the order of docs/algorithms.md.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rloo_cli.algorithms.common.base import Algorithm
from rloo_cli.algorithms.common.config import Switches
from rloo_cli.algorithms.common.score import mask_truncated
from rloo_cli.config.schema import RunConfig
from rloo_cli.data.batch import Batch, Group
from rloo_cli.data.prompts import Prompts
from rloo_cli.data.sampling_mask import mask_metrics
from rloo_cli.distributed.world import World
from rloo_cli.generation import Generator, ignore_arrival
from rloo_cli.generation.common import across_ranks
from rloo_cli.generation.common.batch_source import BatchSource, SourceState
from rloo_cli.rewards.engine.arguments import RewardContext, TrainerState
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.scoring import Scores, ScoringStep
from rloo_cli.utils import signals
from rloo_cli.utils.errors import NumbersError, refuse
from rloo_cli.utils.fault_injection import poison_tensor
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.metrics import merge_steps
from rloo_cli.utils.rng import sampling_seed
from rloo_cli.utils.timers import StepTimer

METRICS = {"Scores, rewards and advantages": [  # read by utils.metrics
    ("sampled_reward", "score", "mean:drawn_scored",
     "`reward` over every sampled completion, including groups that zero_std_groups=resample "
     "threw away"),
    ("reward/<reward>/error_rate", "share", "mean:drawn", "completions whose call failed"),
    ("reward/<reward>/time", "s", "mean", "seconds its calls took"),
    ("sampled_frac_reward_zero_std", "share", "mean:drawn_groups",
     "`frac_reward_zero_std` over every sampled group, including those that "
     "zero_std_groups=resample threw away"),
    ("sampled_kept_frac", "share", "mean:drawn",
     "sampled completions that are in the step's batch; zero_std_groups=resample threw the "
     "others away"),
    ("groups/dropped", "count", "mean", "groups left out by algorithm.zero_std_groups"),
    ("groups/resampled", "count", "mean", "prompts drawn in place of dropped groups"),
]}  # fmt: skip


@dataclass
class Rollouts(BatchSource):
    """Makes a step's batch: takes prompts, samples completions, scores them."""

    config: RunConfig
    algorithm: Algorithm[Switches]
    prompts: Prompts
    generator: Generator
    rewards: list[Reward]
    clock: StepTimer
    world: World

    def next_batch(self, step: int, prompt_offset: int, state: TrainerState) -> Batch:
        """Take prompts from `prompt_offset` on, sample and score their completions.

        With zero_std_groups=resample, groups of equal scores are replaced by new prompts. Raises
        RewardError, GenerationError, and NumbersError if resampling finds no usable group.
        """

        def sample_round(num_sampled: int, missing: int) -> Batch:
            offset = prompt_offset + num_sampled
            return self._sample_round(step, offset, num_sampled, missing, state)

        return self._collect_rounds(sample_round)

    def restore(self, state: SourceState, step: int) -> None:
        """Ignore unfinished groups: `rloo replay` does not sample."""
        if self.config.generation.overlap != "carry":
            super().restore(state, step)

    def carried_batch(
        self, step: int, take_groups: Callable[[int], list[Group]], state: TrainerState
    ) -> Batch:
        """A step's batch of groups that are sampled already; `take_groups(n)` returns n of them.

        They are sorted by their prompts' offsets. Raises as `next_batch`.
        """
        context = self._reward_context(state)

        def score_round(num_taken: int, missing: int) -> Batch:
            return self._score_sampled(step, take_groups(missing), context)

        return self._collect_rounds(score_round, sort=True)

    def recorded_batch(self, recorded: Batch, groups: list[Group], state: TrainerState) -> Batch:
        """The batch of a recorded step, scored again; `groups` have its completions.

        No further prompts and no greedy completions are sampled: the record has their results.
        """
        batch = self._score_sampled(recorded.step, groups, self._reward_context(state))
        batch.draws, batch.pending = recorded.draws, recorded.pending
        batch.left_out = recorded.left_out
        if self.algorithm.config.needs_greedy and recorded.greedy is not None:
            batch.greedy = recorded.greedy
            batch.scorable = batch.scorable & ~batch.greedy.isnan()[:, None]
        self._finalize_batch(batch, recorded.draws)
        return batch

    def _score_sampled(self, step: int, groups: list[Group], context: RewardContext) -> Batch:
        """The batch of groups that have their completions."""

        def report_arrivals(
            groups: list[Group], seeds: list[list[int]], arrived: Callable[[int], None]
        ) -> None:
            for index in range(len(groups)):
                arrived(index)

        seeds = [[r.seed for r in group.rollouts] for group in groups]
        scores = self._sample_and_score(groups, seeds, context, report_arrivals)
        scores.raw = poison_tensor("reward", scores.raw)
        return self._build_batch(step, groups, scores)

    def _collect_rounds(self, make_round: Callable[[int, int], Batch], sort: bool = False) -> Batch:
        """A whole step of `make_round(prompts so far, prompts missing)`, until none is missing."""
        settings = self.algorithm.config
        missing = self.config.train.prompts_per_step
        rounds: list[Batch] = []
        drawn: list[Batch] = []  # including groups that are thrown away
        num_sampled = 0
        while missing:
            batch = make_round(num_sampled, missing)
            drawn.append(batch)
            num_sampled += missing
            if settings.zero_std_groups != "resample" or len(rounds) >= settings.max_resample:
                rounds.append(batch)
                break
            spread = [i for i in range(missing) if _has_different_scores(batch, i)]
            rounds.append(_select_groups(batch, spread))
            missing -= len(spread)
        whole = _concatenate_batches(rounds, num_sampled)
        if settings.zero_std_groups == "resample":
            _add_sampled_facts(whole, drawn)
        if sort:
            offsets = [group.prompt_offset for group in whole.groups]
            whole = _select_groups(whole, sorted(range(len(offsets)), key=offsets.__getitem__))
        self._finalize_batch(whole, num_sampled)
        return whole

    def _reward_context(self, state: TrainerState) -> RewardContext:
        return RewardContext(self.prompts.conversational, state, signals.raise_if_stopped)

    def _sampling_seeds(self, step: int, indices: Iterable[int]) -> list[list[int]]:
        """The seeds of a step's prompts, given by their index in the step. -> K for each"""
        k, run_seed = self.config.algorithm.num_generations, self.config.seed
        return [
            [sampling_seed(run_seed, "train", step, prompt, j) for j in range(k)]
            for prompt in indices
        ]

    def offset_seeds(self, prompt_offset: int) -> list[int]:
        """The seeds of a prompt that is started before its step is known (overlap=carry). -> K"""
        k, run_seed = self.config.algorithm.num_generations, self.config.seed
        return [sampling_seed(run_seed, "carry", 0, prompt_offset, j) for j in range(k)]

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
        seeds = self._sampling_seeds(step, range(offset_in_step, offset_in_step + num_prompts))
        context = self._reward_context(state)
        scores = self._sample_and_score(groups, seeds, context, self.generator.generate)
        scores.raw = poison_tensor("reward", scores.raw)
        batch = self._build_batch(step, groups, scores)
        if self.config.algorithm.needs_greedy:
            self._add_greedy(batch, seeds, context)
        return batch

    def _sample_and_score(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        context: RewardContext,
        generate: Callable[..., None],
    ) -> Scores:
        def sample(indices: range, arrived: Callable[[int], None] = ignore_arrival) -> None:
            generate([groups[i] for i in indices], [seeds[i] for i in indices], arrived=arrived)

        def make_scoring_step(share: Sequence[Group]) -> ScoringStep:
            return ScoringStep(self.rewards, share, context, len(seeds[0]))

        return across_ranks.sample_and_score(
            self.world, self.generator, groups, sample, make_scoring_step, self.clock
        )

    def _add_greedy(self, batch: Batch, seeds: list[list[int]], context: RewardContext) -> None:
        """Answer each prompt once more, greedily; without a greedy score the group has none."""
        groups = [replace(group, rollouts=[]) for group in batch.groups]
        generate = partial(self.generator.generate, greedy=True)
        scores = self._sample_and_score(groups, [s[:1] for s in seeds], context, generate)
        found = self._build_batch(batch.step, groups, scores)
        batch.greedy = found.shaped.masked_fill(~found.scorable, float("nan")).squeeze(1)
        batch.scorable = batch.scorable & found.scorable

    def _build_batch(self, step: int, groups: list[Group], scores: Scores) -> Batch:
        settings = self.algorithm.config
        weights = scores.weights.tolist()
        weighted, scorable = self.algorithm.combine_rewards(scores.raw, weights)
        metrics = {f"reward/{n}/error_rate": r for n, r in scores.error_rate.items()}
        metrics |= {f"reward/{n}/time": s for n, s in scores.seconds.items()}
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
            facts=metrics | scores.metrics,
            fact_counts=dict(scores.metric_counts),
            extras=dict(scores.extras),
            notes=list(scores.warnings),
            reward_weights=scores.weights,
            plain=unnormalized_scores(scores.raw, scores.weights, settings),
        )
        ended = batch.rollout_values("terminated")
        batch.scorable, batch.masked = mask_truncated(scorable, ended, settings)
        _leave_out_failed(batch)
        batch.shaped = self._shape_scores(batch)
        return batch

    def _shape_scores(self, batch: Batch) -> Tensor:
        length, ended = batch.rollout_values("length"), batch.rollout_values("terminated")
        return self.algorithm.shape_scores(batch.score, batch.scorable, length, ended)

    def _finalize_batch(self, batch: Batch, num_sampled: int) -> None:
        """Combine and shape the scores over the whole step, and decide which groups are trained on.

        A step that samples prompts again has several rounds, and each round's scores were
        normalized among themselves so far.
        """
        settings = self.algorithm.config
        if batch.plain is not None and batch.reward_weights is not None:
            weights = batch.reward_weights.tolist()
            batch.score, _ = self.algorithm.combine_rewards(batch.raw, weights)
        batch.shaped = self._shape_scores(batch)
        flat = [i for i in range(len(batch.groups)) if not _has_different_scores(batch, i)]
        dropped = flat if settings.zero_std_groups != "keep" else []
        if len(dropped) == len(batch.groups) and settings.zero_std_groups == "resample":
            what = f"none of {num_sampled} sampled groups has two different scores"
            where = f"step {batch.step + 1}, algorithm.zero_std_groups=resample"
            fix = "easier or harder prompts, or algorithm.zero_std_groups=keep"
            refuse(where, what, fix, _flat_groups_text(batch), error=NumbersError)
        batch.active = [i for i in range(len(batch.groups)) if i not in dropped]
        masks = [r.sampling_mask for g in batch.groups for r in g.rollouts]
        batch.facts |= self.generator.metrics | mask_metrics(masks)
        batch.fact_counts["mask_tokens"] = sum(len(mask) for mask in masks if mask is not None)
        batch.facts["groups/dropped"] = len(dropped)
        batch.facts["groups/resampled"] = num_sampled - len(batch.groups)


def _leave_out_failed(batch: Batch) -> None:
    """Exclude episodes whose environment failed from baseline and loss: they never score 0."""
    failed = batch.rollout_values("failed_in_environment")
    batch.scorable, batch.masked = batch.scorable & ~failed, batch.masked | failed


def unnormalized_scores(raw: Tensor, weights: Tensor, settings: Switches) -> Tensor | None:
    """The rewards' weighted sum if training uses a normalized one; None if it uses the sum.

    (F, P, K), (F,) -> (P, K); a missing score counts as 0
    """
    if settings.multi_reward == "sum":
        return None
    return (raw.nan_to_num(0.0) * weights[:, None, None]).sum(0)


def _flat_groups_text(batch: Batch) -> str:
    """How many of these groups, each of equal scores, have the highest and the lowest score."""
    values = [float(s[r][0]) for s, r in zip(batch.score, batch.scorable, strict=True) if r.any()]
    if not values:
        return "none of their completions has a score"
    top, low, count = max(values), min(values), len(batch.groups)
    return (
        f"of the last {count} groups {values.count(top) / count:.0%} score {top:.3g}, the highest,"
        f" and {values.count(low) / count:.0%} {low:.3g}, the lowest"
    )


def _has_different_scores(batch: Batch, group_index: int) -> bool:
    values = batch.shaped[group_index][batch.scorable[group_index]]
    return values.numel() > 1 and bool(values.max() != values.min())


def _add_sampled_facts(batch: Batch, drawn: list[Batch]) -> None:
    """Add the metrics of every group that was sampled for a batch, including discarded ones.

    `drawn`: the rounds before any selection. Completions without a score do not count, nor do
    groups with fewer than two scores.
    """
    scores = [(d.score if d.plain is None else d.plain)[d.scorable] for d in drawn]
    flat = [
        not _has_different_scores(d, i)
        for d in drawn
        for i in range(len(d.groups))
        if int(d.scorable[i].sum()) >= 2
    ]
    whole = torch.cat(scores)
    batch.facts["sampled_kept_frac"] = len(batch.groups) / batch.draws
    if whole.numel():
        batch.facts["sampled_reward"] = float(whole.mean())
    if flat:
        batch.facts["sampled_frac_reward_zero_std"] = sum(flat) / len(flat)
    batch.fact_counts |= {"drawn_scored": whole.numel(), "drawn_groups": len(flat)}


def _select_groups(batch: Batch, group_indices: list[int]) -> Batch:
    columns: JsonObject = {"raw": batch.raw[:, group_indices]}
    for name, column in batch.group_columns.items():
        columns[name] = None if column is None else column[group_indices]
    k = batch.score.shape[1]
    indices = [i * k + j for i in group_indices for j in range(k)]
    extras = {name: [column[i] for i in indices] for name, column in batch.extras.items()}
    return replace(batch, groups=[batch.groups[i] for i in group_indices], extras=extras, **columns)


def _concatenate_batches(batches: list[Batch], num_sampled: int) -> Batch:
    if len(batches) == 1:
        return batches[0]
    columns: JsonObject = {"raw": torch.cat([p.raw for p in batches], dim=1)}
    for name in batches[0].group_columns:
        parts = [part for p in batches if (part := p.group_columns[name]) is not None]
        columns[name] = torch.cat(parts) if parts else None
    drawn = [p.fact_counts | {"drawn": p.draws} for p in batches]
    facts = merge_steps([p.facts for p in batches], drawn)
    for name in (n for n in facts if n.endswith("/time")):  # the seconds of all rounds
        facts[name] = sum(p.facts.get(name, 0.0) for p in batches)
    counted = {n for p in batches for n in p.fact_counts}
    names = {n for p in batches for n in p.extras}
    extras = {
        n: [v for p in batches for v in p.extras.get(n, [None] * p.score.numel())] for n in names
    }
    return replace(
        batches[0],
        groups=[g for p in batches for g in p.groups],
        draws=num_sampled,
        facts=facts,
        fact_counts={n: sum(p.fact_counts.get(n, 0) for p in batches) for n in counted},
        extras=extras,
        notes=[n for p in batches for n in p.notes],
        **columns,
    )

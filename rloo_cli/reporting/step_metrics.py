"""The metrics of a step (docs/metrics.md), from sums and counts.

A metric without data is absent, never NaN. Means are sums over counts; extremes are true extremes.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rloo_cli.data.batch import Batch
from rloo_cli.data.packing import LAYOUTS
from rloo_cli.distributed.device_peaks import find_peak_flops
from rloo_cli.reporting.episode_metrics import episode_metrics
from rloo_cli.reporting.update_metrics import UpdateMetrics, fetch_scalars
from rloo_cli.utils.metrics import MetricValues

if TYPE_CHECKING:
    from rloo_cli.distributed.world import World

METRICS = {"Scores, rewards and advantages": [  # read by utils.metrics
    ("reward", "score", "mean:scored",
     "mean score of the completions that have one: the weighted sum of the rewards' values, "
     "before the KL penalty and before any shaping"),
    ("reward_std", "score", "mean:groups",
     "standard deviation of the scores inside a group (n - 1), mean over groups; with "
     "advantage_scale=batch that of the step"),
    ("reward_std_batch", "score", "mean:scored",
     "standard deviation of all scores of the step (n - 1)"),
    ("reward/<reward>/mean", "score", "mean:reward/<reward>",
     "mean of one reward over the completions it scored"),
    ("reward/<reward>/std", "score", "mean:reward/<reward>", "its standard deviation (n - 1)"),
    ("reward/<reward>/none_frac", "share", "mean:completions",
     "completions without a score from it: None, or a failure with on_error=none"),
    ("reward/valid_frac", "share", "mean:completions",
     "completions with a score from at least one reward"),
    ("frac_reward_zero_std", "share", "mean:groups",
     "groups whose scores are all equal after shaping (penalties, normalizing, clips): their "
     "advantages are 0 without a KL penalty. Absent if a score "
     "is not compared with its siblings' (another baseline, turn_rewards=credit)"),
    ("groups/unscorable", "count", "mean", "groups with fewer than two scored completions"),
    ("groups/duplicates", "count", "mean", "completions that repeat a sibling token by token"),
    ("objective/scores", "score", "mean:trained_scored",
     "mean score after shaping (clips, penalties), over the completions trained on: "
     "those with an advantage, not masked, in groups that were not dropped"),
    ("objective/kl", "nats", "mean:trained",
     "KL to the reference summed over a completion, mean over the completions whose KL is "
     "trained on: those of objective/scores; with kl_in=loss and opd also those without a "
     "score"),
    ("objective/non_score_reward", "score", "mean:trained", "-beta times objective/kl"),
    ("objective/rlhf_reward", "score", "mean:trained", "objective/scores - beta * objective/kl"),
    ("objective/entropy", "nats", "mean:unmasked",
     "mean -log-probability of a whole completion: the entropy of completions, estimated from "
     "the samples. Uses the sampler's log-probabilities of all unmasked completions, or "
     "the trainer's of the forwarded ones if the sampler gives none"),
    ("objective/greedy_scores", "score", "mean:greedy", "mean score of ReMax's greedy completions"),
    ("advantages/mean", "score", "mean:usable",
     "mean advantage of the completions that can have one, including masked ones"),
    ("advantages/std", "score", "mean:usable", "standard deviation of the advantages"),
    ("advantages/abs_max", "score", "max", "largest advantage by size"),
    ("advantages/zero_frac", "share", "mean:usable", "completions with an advantage of exactly 0"),
    ("advantages/norm_skipped", "count", "mean",
     "1 if advantages were not normalized because their deviation is 0"),
], "Prompts and completions": [
    ("completions/mean_length", "tokens", "mean:completions",
     "mean length of completions; also min_ and max_"),
    ("completions/min_length", "tokens", "min", "shortest completion"),
    ("completions/max_length", "tokens", "max", "longest completion"),
    ("completions/mean_terminated_length", "tokens", "mean:ended",
     "mean length of those that ended on their own"),
    ("completions/min_terminated_length", "tokens", "min", "shortest of these"),
    ("completions/max_terminated_length", "tokens", "max", "longest of these"),
    ("completions/clipped_ratio", "share", "mean:completions",
     "completions cut at max_completion_length"),
    ("completions/answer_forced_share", "share", "mean:completions",
     "completions that had not ended at generation.answer_budget.at, and got its text"),
    ("completions/unique_ratio", "share", "mean:completions",
     "distinct completions in the step"),
    ("completions/most_common_frac", "share", "mean:completions",
     "completions of the step equal to the most common one, if its prompts differ"),
    ("val/num_eos_tokens", "count", "mean", "completions that ended on their own"),
], "Sampler against trainer": [
    ("sampling/entropy", "nats", "mean:unmasked_tokens",
     "minus the sampler's log-probability of a token, mean over the tokens of all unmasked "
     "completions, forwarded or not"),
    ("sampling/missing_frac", "share", "mean:unmasked_tokens",
     "tokens for which the sampler gave no log-probability"),
], "Speed and memory": [
    ("perf/completions_per_s", "1/s", "mean:step_time", "completions per second of the step"),
    ("perf/tokens_per_s", "tokens/s", "mean:step_time",
     "tokens of prompts and completions per second of the step"),
    ("perf/tokens_per_s_per_gpu", "tokens/s", "mean:step_time", "the same per GPU"),
    ("perf/rollout_wait_frac", "share", "mean:step_time",
     "share of the step spent on data, generation and rewards"),
    ("perf/level", "0, 1, 2", "last",
     "layout of a forward pass: 0 shared prompts, 1 packed, 2 padded"),
    ("perf/rows", "tokens", "mean", "token positions of the training forwards, padding included"),
    ("perf/padding_frac", "share", "mean:rows", "share of padding in these"),
    ("perf/forwarded_frac", "share", "mean:completions",
     "completions that were forwarded; the others have no gradient"),
    ("perf/mfu", "share", "mean:training_s",
     "model FLOP/s of the train phase over the dense bfloat16 peak of the data sheet (H100: 989 "
     "TFLOP/s), without padding and recomputation (GPU)"),
    ("memory/peak_gb", "GB", "max", "largest memory allocated on the GPU"),
    ("memory/reserved_gb", "GB", "max", "memory reserved on the GPU"),
]}  # fmt: skip


def rollout_metrics(
    batch: Batch,
    std_over_step: bool = False,
    by_group: bool = True,
    has_answer_budget: bool = False,
) -> MetricValues:
    """Metrics of lengths, scores and groups of a step's batch, before any update.

    `std_over_step`: the algorithm divides by the step's std (advantage_scale=batch). `by_group`: it
    compares a score with its siblings', so that a group of equal scores has no gradient.
    `has_answer_budget`: generation.answer_budget is set.
    """
    metrics = _completion_metrics(batch) | _score_metrics(batch, by_group) | batch.facts
    if std_over_step and "reward_std_batch" in metrics:
        metrics["reward_std"] = metrics["reward_std_batch"]
    if has_answer_budget:
        forced = batch.rollout_values("has_forced_answer").double()
        metrics["completions/answer_forced_share"] = float(forced.mean())
    return metrics


def _completion_metrics(batch: Batch) -> MetricValues:
    length, ended = batch.rollout_values("length").double(), batch.rollout_values("terminated")
    texts = [[tuple(r.completion_ids) for r in g.rollouts] for g in batch.groups]
    copies = sum(len(t) - len(set(t)) for t in texts)
    counts = Counter(x for t in texts for x in t)
    facts = [r.episode_facts for g in batch.groups for r in g.rollouts if r.episode_facts]
    metrics = {
        **episode_metrics(facts),
        **_length_metrics("length", length.reshape(-1)),
        **_length_metrics("terminated_length", length[ended]),
        "completions/clipped_ratio": float((~ended).double().mean()),
        "completions/unique_ratio": len(counts) / length.numel(),
        "groups/duplicates": copies,
        "val/num_eos_tokens": int(ended.sum()),
    }
    if len({tuple(group.prompt_ids) for group in batch.groups}) > 1:
        metrics["completions/most_common_frac"] = max(counts.values()) / length.numel()
    return metrics


def _length_metrics(name: str, values: Tensor) -> MetricValues:
    if not values.numel():
        return {}
    extremes = {"mean": values.mean(), "min": values.min(), "max": values.max()}
    return {f"completions/{kind}_{name}": float(v) for kind, v in extremes.items()}


def _score_metrics(batch: Batch, by_group: bool) -> MetricValues:
    metrics: MetricValues = {"reward/valid_frac": float(batch.scorable.double().mean())}
    for name, values in zip(batch.names, batch.raw, strict=True):
        scores = values[~values.isnan()]
        metrics[f"reward/{name}/none_frac"] = 1 - scores.numel() / values.numel()
        metrics |= {f"reward/{name}/{k}": v for k, v in _mean_std(scores).items()}
    # With normalize_then_sum the trained scores have mean 0 in every step, but `reward` does not.
    scorable = batch.scorable
    score = batch.score if batch.plain is None else batch.plain
    if scorable.any():
        metrics["reward"] = float(score[scorable].mean())
    if scorable.sum() > 1:
        metrics["reward_std_batch"] = float(score[scorable].std())
    groups = [i for i in range(len(score)) if scorable[i].sum() >= 2]
    metrics["groups/unscorable"] = len(score) - len(groups)
    if groups:
        stds = [score[i][scorable[i]].std() for i in groups]
        metrics["reward_std"] = float(torch.stack(stds).mean())
    if groups and by_group:
        shaped = [batch.shaped[i][scorable[i]] for i in groups]
        flat = [bool(values.max() == values.min()) for values in shaped]
        metrics["frac_reward_zero_std"] = sum(flat) / len(flat)
    if batch.greedy is not None and (greedy := batch.greedy[~batch.greedy.isnan()]).numel():
        metrics["objective/greedy_scores"] = float(greedy.mean())
    return metrics


def _mean_std(values: Tensor) -> MetricValues:
    metrics = {"mean": float(values.mean())} if values.numel() else {}
    return metrics | ({"std": float(values.std())} if values.numel() > 1 else {})


def advantage_metrics(batch: Batch, beta: float, every_kl: bool = False) -> MetricValues:
    """Metrics of usable advantages, and of the scores and KLs of the completions trained on.

    `objective/rlhf_reward` is score - beta * KL, whether the KL is in the reward or in the loss.
    With normalize_then_sum the scores are the rewards' weighted sum, before any normalizing.
    `every_kl`: the KL of completions without an advantage is trained on, too.
    """
    metrics: MetricValues = {}
    if batch.advantage is not None and batch.usable is not None and batch.usable.any():
        values = batch.advantage[batch.usable]
        metrics |= {f"advantages/{k}": v for k, v in _mean_std(values).items()}
        metrics["advantages/abs_max"] = float(values.abs().max())
        metrics["advantages/zero_frac"] = float((values == 0).double().mean())
        metrics["advantages/norm_skipped"] = float(batch.norm_skipped)
    mask, kl_mask = _trained_mask(batch), _trained_mask(batch, every_kl)
    if mask.any():
        score = batch.shaped if batch.plain is None else batch.plain
        metrics["objective/scores"] = metrics["objective/rlhf_reward"] = float(score[mask].mean())
    if kl_mask.any() and batch.kl is not None:
        kl = float(batch.kl[kl_mask].mean())
        metrics["objective/kl"] = kl
        metrics["objective/non_score_reward"] = -beta * kl
        if "objective/scores" in metrics:
            metrics["objective/rlhf_reward"] -= beta * kl
    return metrics


def _trained_mask(batch: Batch, without_advantage: bool = False) -> Tensor:
    """Completions of active groups that the loss sees: unmasked, with an advantage. (P, K) bool

    `without_advantage`: includes those without one.
    """
    mask = torch.zeros_like(batch.scorable)
    usable = batch.scorable if batch.usable is None else batch.usable
    mask[batch.active] = (usable | without_advantage)[batch.active]
    return mask & ~batch.masked


def sampler_metrics(batch: Batch) -> MetricValues:
    """Metrics from the sampler's own log-probabilities of all unmasked completions.

    They need no forward pass, so they do not depend on which completions an update skips.
    """
    rollouts = [
        rollout
        for group, masked in zip(batch.groups, batch.masked.tolist(), strict=True)
        for rollout, left_out in zip(group.rollouts, masked, strict=True)
        if not left_out
    ]
    logps = [rollout.sampled_logp for rollout in rollouts]
    if all(logp is None for logp in logps):
        return {}
    known = torch.tensor([x for logp in logps for x in logp or []], dtype=torch.float64)
    known, tokens = known[~known.isnan()], sum(rollout.length for rollout in rollouts)
    metrics = {"sampling/missing_frac": 1 - known.numel() / tokens}
    if known.numel() == tokens:
        metrics["sampling/entropy"] = -float(known.sum()) / tokens
        metrics["objective/entropy"] = -float(known.sum()) / len(logps)
    return metrics


def mean_counts(
    batch: Batch, updates: UpdateMetrics, metrics: MetricValues, every_kl: bool = False
) -> MetricValues:
    """The counts behind a step's means (`metrics.merge_steps`)."""
    lengths = batch.rollout_values("length")
    episodes = [f for g in batch.groups for r in g.rollouts if (f := r.episode_facts)]
    scored = zip(batch.names, (~batch.raw.isnan()).sum((1, 2)), strict=True)
    counts: dict[str, Tensor | float] = {f"reward/{name}": count for name, count in scored}
    counts |= {
        "ended": batch.rollout_values("terminated").sum(),
        "scored": batch.scorable.sum(),
        "groups": (batch.scorable.sum(1) >= 2).sum(),
        "usable": 0 if batch.usable is None else batch.usable.sum(),
        "trained": _trained_mask(batch, every_kl).sum(),
        "trained_scored": _trained_mask(batch).sum(),
        "sampled_tokens": lengths.sum(),
        "unmasked_tokens": lengths[~batch.masked].sum(),
        "completions": batch.score.numel(),
        "drawn": batch.draws * batch.score.shape[1],
        "updates": updates.num_updates,
        "rows": updates.work.get("rows", 0.0),
        "episodes": len(episodes),
        "calls": sum(facts["calls"] for facts in episodes),
        "step_time": metrics["step_time"],
        "training_s": _training_seconds(metrics),
        **batch.fact_counts,
    }
    sums = fetch_scalars(updates.sums)
    by_sampler = "sampling/entropy" in metrics  # over all completions, like those below
    unmasked = int((~batch.masked).sum()) if by_sampler else sums.get("sequences", 0.0)
    return {name: float(count) for name, count in counts.items()} | sums | {"unmasked": unmasked}


TRAINING_PHASES = ("update", "reference", "old_logp", "value")  # those in `count_forward`


def speed_metrics(
    batch: Batch,
    updates: UpdateMetrics,
    metrics: MetricValues,
    layout: str,
    num_iterations: int,
    world: World,
) -> MetricValues:
    """The metrics perf/* and memory/* of a step; `metrics` has the seconds of its phases.

    `layout` is that of the policy's forward pass. perf/mfu: the FLOP of tokens really computed,
    without padding and recomputation, over the FLOP that the device could have done by its data
    sheet in the seconds of the training phases.
    """
    seconds = metrics["step_time"]
    completions, tokens = batch.score.numel(), batch.num_tokens
    waited = sum(metrics.get(f"time/{phase}", 0.0) for phase in ("data", "generation", "reward"))
    speed = {
        "perf/completions_per_s": completions / seconds,
        "perf/tokens_per_s": tokens / seconds,
        "perf/rollout_wait_frac": waited / seconds,
        "perf/level": float(LAYOUTS.index(layout)),
    }
    work = updates.work
    if "rows" in work:
        speed["perf/rows"] = work["rows"]
        speed["perf/padding_frac"] = work["padding"] / work["rows"]
    speed["perf/forwarded_frac"] = work.get("completions", 0.0) / (completions * num_iterations)
    if world.device.type == "cuda":
        speed["perf/tokens_per_s_per_gpu"] = tokens / seconds / world.size
        speed["memory/peak_gb"] = torch.cuda.max_memory_allocated(world.device) / 1e9
        speed["memory/reserved_gb"] = torch.cuda.memory_reserved(world.device) / 1e9
        busy = _training_seconds(metrics)
        if (most := find_peak_flops(torch.cuda.get_device_name(world.device))) and busy:
            speed["perf/mfu"] = work.get("flop", 0.0) / busy / most / world.size
    return speed


def _training_seconds(metrics: MetricValues) -> float:
    return sum(metrics.get(f"time/{phase}", 0.0) for phase in TRAINING_PHASES)

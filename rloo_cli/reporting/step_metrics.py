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

if TYPE_CHECKING:
    from rloo_cli.distributed.world import World

MetricValues = dict[str, float]


def rollout_metrics(batch: Batch, std_over_step: bool = False) -> MetricValues:
    """Metrics of lengths, scores and groups of a step's batch, before any update.

    `std_over_step`: the algorithm divides by the step's std (advantage_scale=batch).
    """
    metrics = _completion_metrics(batch) | _score_metrics(batch) | batch.facts
    if std_over_step and "reward_std_batch" in metrics:
        metrics["reward_std"] = metrics["reward_std_batch"]
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


def _score_metrics(batch: Batch) -> MetricValues:
    metrics: MetricValues = {"reward/valid_frac": float(batch.scorable.double().mean())}
    for name, values in zip(batch.names, batch.raw, strict=True):
        scores = values[~values.isnan()]
        metrics[f"reward/{name}/none_frac"] = 1 - scores.numel() / values.numel()
        metrics |= {f"reward/{name}/{k}": v for k, v in _mean_std(scores).items()}
    # With normalize_then_sum, what is trained on has the mean 0 in every step: `reward` does not.
    trained, scorable = batch.score, batch.scorable
    score = trained if batch.plain is None else batch.plain
    if scorable.any():
        metrics["reward"] = float(score[scorable].mean())
    if scorable.sum() > 1:
        metrics["reward_std_batch"] = float(score[scorable].std())
    groups = [i for i in range(len(score)) if scorable[i].sum() >= 2]
    metrics["groups/unscorable"] = len(score) - len(groups)
    if groups:
        stds = [score[i][scorable[i]].std() for i in groups]
        metrics["reward_std"] = float(torch.stack(stds).mean())
        trained_groups = [trained[i][scorable[i]] for i in groups]
        flat = [bool(g.max() == g.min()) for g in trained_groups]
        metrics["frac_reward_zero_std"] = sum(flat) / len(flat)
    return metrics


def _mean_std(values: Tensor) -> MetricValues:
    metrics = {"mean": float(values.mean())} if values.numel() else {}
    return metrics | ({"std": float(values.std())} if values.numel() > 1 else {})


def advantage_metrics(batch: Batch, beta: float) -> MetricValues:
    """Metrics of usable advantages, and of the scores and KLs of the completions trained on.

    `objective/rlhf_reward` is score - beta * KL, whether the KL is in the reward or in the loss.
    With normalize_then_sum the scores are the rewards' weighted sum, before any normalising.
    """
    metrics: MetricValues = {}
    if batch.advantage is not None and batch.usable is not None and batch.usable.any():
        values = batch.advantage[batch.usable]
        metrics |= {f"advantages/{k}": v for k, v in _mean_std(values).items()}
        metrics["advantages/abs_max"] = float(values.abs().max())
        metrics["advantages/zero_frac"] = float((values == 0).double().mean())
        metrics["advantages/norm_skipped"] = float(batch.norm_skipped)
    mask = _trained_mask(batch)
    if mask.any():
        score = batch.shaped if batch.plain is None else batch.plain
        metrics["objective/scores"] = metrics["objective/rlhf_reward"] = float(score[mask].mean())
    if mask.any() and batch.kl is not None:
        kl = float(batch.kl[mask].mean())
        metrics["objective/kl"] = kl
        metrics["objective/non_score_reward"] = -beta * kl
        metrics["objective/rlhf_reward"] -= beta * kl
    return metrics


def _trained_mask(batch: Batch) -> Tensor:
    """Completions of active groups that have an advantage; others need no forward. (P, K) bool"""
    mask = torch.zeros_like(batch.scorable)
    mask[batch.active] = (batch.scorable if batch.usable is None else batch.usable)[batch.active]
    return mask


def mean_counts(batch: Batch, updates: UpdateMetrics) -> MetricValues:
    """The counts that the means of a step were taken over, by the names of `log.MEANS_BY_COUNT`."""
    scored = zip(batch.names, (~batch.raw.isnan()).sum((1, 2)), strict=True)
    counts = {f"reward/{name}": count for name, count in scored}
    counts |= {
        "ended": batch.rollout_values("terminated").sum(),
        "scored": batch.scorable.sum(),
        "groups": (batch.scorable.sum(1) >= 2).sum(),
        "usable": torch.tensor(0) if batch.usable is None else batch.usable.sum(),
        "trained": _trained_mask(batch).sum(),
        "updates": torch.tensor(updates.num_updates),
    }
    return fetch_scalars(counts) | fetch_scalars(updates.sums)


TRAINING_PHASES = ("update", "reference", "old_logp", "value")  # those of `count_forward`


def speed_metrics(
    batch: Batch,
    updates: UpdateMetrics,
    metrics: MetricValues,
    layout: str,
    num_iterations: int,
    world: World,
) -> MetricValues:
    """The metrics perf/* and memory/* of a step; `metrics` has the seconds of its phases.

    `layout` is that of the policy's forward pass. perf/mfu: the FLOP of tokens that were really
    computed, without padding and recomputation, over what the device could have done by its data
    sheet in the seconds of the training phases.
    """
    seconds = metrics["step_time"]
    rollouts = [(g, r) for g in batch.groups for r in g.rollouts]
    tokens = sum(len(g.prompt_ids) + r.length for g, r in rollouts)
    waited = sum(metrics.get(f"time/{phase}", 0.0) for phase in ("data", "generation", "reward"))
    speed = {
        "perf/completions_per_s": len(rollouts) / seconds,
        "perf/tokens_per_s": tokens / seconds,
        "perf/rollout_wait_frac": waited / seconds,
        "perf/level": float(LAYOUTS.index(layout)),
    }
    work = updates.work
    if "rows" in work:
        speed["perf/rows"] = work["rows"]
        speed["perf/padding_frac"] = work["padding"] / work["rows"]
    speed["perf/forwarded_frac"] = work.get("completions", 0.0) / (len(rollouts) * num_iterations)
    if world.device.type == "cuda":
        speed["perf/tokens_per_s_per_gpu"] = tokens / seconds / world.size
        speed["memory/peak_gb"] = torch.cuda.max_memory_allocated(world.device) / 1e9
        speed["memory/reserved_gb"] = torch.cuda.memory_reserved(world.device) / 1e9
        busy = sum(metrics.get(f"time/{phase}", 0.0) for phase in TRAINING_PHASES)
        if (most := find_peak_flops(torch.cuda.get_device_name(world.device))) and busy:
            speed["perf/mfu"] = work.get("flop", 0.0) / busy / most / world.size
    return speed

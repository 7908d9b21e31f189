"""Every number of a step that docs/metrics.md names, from sums and counts.

Nothing is reported for which there was no data: the key is absent, never NaN. Means are sums over
counts; extremes are true extremes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rloo_cli.data.batch import Batch
from rloo_cli.data.packing import LAYOUTS
from rloo_cli.reporting.update_metrics import UpdateMetrics, fetch_scalars

if TYPE_CHECKING:
    from rloo_cli.distributed.world import World
    from rloo_cli.reporting.update_metrics import UpdateMetrics

MetricValues = dict[str, float]


def rollout_metrics(batch: Batch, std_over_step: bool = False) -> MetricValues:
    """Lengths, scores and groups of a step's batch, known before any update.

    `std_over_step`: the algorithm divides by the step's std (advantage_scale=batch).
    """
    row = _completion_metrics(batch) | _score_metrics(batch) | batch.facts
    if std_over_step and "reward_std_batch" in row:
        row["reward_std"] = row["reward_std_batch"]
    return row


def _completion_metrics(batch: Batch) -> MetricValues:
    length, ended = batch.rollout_values("length").double(), batch.rollout_values("terminated")
    texts = [[tuple(r.completion_ids) for r in g.rollouts] for g in batch.groups]
    copies = sum(len(t) - len(set(t)) for t in texts)
    row = _length_metrics("length", length.reshape(-1)) | _length_metrics(
        "terminated_length", length[ended]
    )
    return {
        **row,
        "completions/clipped_ratio": float((~ended).double().mean()),
        "completions/unique_ratio": len({x for t in texts for x in t}) / length.numel(),
        "groups/duplicates": copies,
        "val/num_eos_tokens": int(ended.sum()),
    }


def _length_metrics(name: str, values: Tensor) -> MetricValues:
    if not values.numel():
        return {}
    found = {"mean": values.mean(), "min": values.min(), "max": values.max()}
    return {f"completions/{how}_{name}": float(v) for how, v in found.items()}


def _score_metrics(batch: Batch) -> MetricValues:
    row: MetricValues = {"reward/valid_frac": float(batch.scorable.double().mean())}
    for name, values in zip(batch.names, batch.raw, strict=True):
        said = values[~values.isnan()]
        row[f"reward/{name}/none_frac"] = 1 - said.numel() / values.numel()
        row |= {f"reward/{name}/{k}": v for k, v in _mean_std(said).items()}
    # With normalize_then_sum, what is trained on has the mean 0 in every step: `reward` does not.
    trained, rows = batch.score, batch.scorable
    score = trained if batch.plain is None else batch.plain
    if rows.any():
        row["reward"] = float(score[rows].mean())
    if rows.sum() > 1:
        row["reward_std_batch"] = float(score[rows].std())
    groups = [score[i][rows[i]] for i in range(len(score)) if rows[i].sum() >= 2]
    row["groups/unscorable"] = len(score) - len(groups)
    if groups:
        row["reward_std"] = float(torch.stack([g.std() for g in groups]).mean())
        alike = [trained[i][rows[i]] for i in range(len(score)) if rows[i].sum() >= 2]
        flat = [bool(g.max() == g.min()) for g in alike]
        row["frac_reward_zero_std"] = sum(flat) / len(flat)
    return row


def _mean_std(values: Tensor) -> MetricValues:
    row = {"mean": float(values.mean())} if values.numel() else {}
    return row | ({"std": float(values.std())} if values.numel() > 1 else {})


def advantage_metrics(batch: Batch, beta: float) -> MetricValues:
    """Advantages over valid rows; scores and KL per sequence over the rows that were trained on.

    `objective/rlhf_reward` is their sum wherever the KL goes, reward or loss. With
    normalize_then_sum the scores are the rewards' weighted sum, before anything is normalised.
    """
    row: MetricValues = {}
    if batch.advantage is not None and batch.usable is not None and batch.usable.any():
        values = batch.advantage[batch.usable]
        row |= {f"advantages/{k}": v for k, v in _mean_std(values).items()}
        row["advantages/abs_max"] = float(values.abs().max())
        row["advantages/zero_frac"] = float((values == 0).double().mean())
        row["advantages/norm_skipped"] = float(batch.norm_skipped)
    rows = _trained_mask(batch)
    if rows.any():
        score = batch.shaped if batch.plain is None else batch.plain
        row["objective/scores"] = row["objective/rlhf_reward"] = float(score[rows].mean())
    if rows.any() and batch.kl is not None:
        kl = float(batch.kl[rows].mean())
        row["objective/kl"] = kl
        row["objective/non_score_reward"] = -beta * kl
        row["objective/rlhf_reward"] -= beta * kl
    return row


def _trained_mask(batch: Batch) -> Tensor:
    """Rows of active groups that have an advantage; others need not be forwarded. (P, K) bool"""
    rows = torch.zeros_like(batch.scorable)
    rows[batch.active] = (batch.scorable if batch.usable is None else batch.usable)[batch.active]
    return rows


def mean_counts(batch: Batch, updates: UpdateMetrics) -> MetricValues:
    """What the means of a step were taken over, by the names of `log.OVER`."""
    said = {f"reward/{n}": (~v.isnan()).sum() for n, v in zip(batch.names, batch.raw, strict=True)}
    found = {
        "ended": batch.rollout_values("terminated").sum(),
        "scored": batch.scorable.sum(),
        "groups": (batch.scorable.sum(1) >= 2).sum(),
        "usable": torch.tensor(0) if batch.usable is None else batch.usable.sum(),
        "trained": _trained_mask(batch).sum(),
        "updates": torch.tensor(updates.num_updates),
    }
    return fetch_scalars(said | found) | fetch_scalars(updates.sums)


# Dense bfloat16 FLOP/s by the makers' data sheets; of another device nothing is said.
PEAK_FLOPS = {
    "B200": 2250e12, "H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12,
    "A800": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12, "RTX 4090": 165e12,
}  # fmt: skip
TRAINING_PHASES = (
    "update",
    "reference",
    "old_logp",
    "value",
)  # phases whose FLOP `Updates.did` counts


def speed_metrics(
    batch: Batch,
    updates: UpdateMetrics,
    metrics: MetricValues,
    layout: str,
    num_iterations: int,
    world: World,
) -> MetricValues:
    """Metrics perf/* and memory/* of a step whose seconds `row` has.

    layout: of the policy's forward pass. passes: over the batch (num_iterations).

    perf/mfu: FLOP of rows that were really computed, padding and recomputation left out, over
    what the device could have done in the seconds of the train phase.
    """
    seconds = metrics["step_time"]
    rollouts = [(g, r) for g in batch.groups for r in g.rollouts]
    tokens = sum(len(g.prompt_ids) + r.length for g, r in rollouts)
    waited = sum(metrics.get(f"time/{phase}", 0.0) for phase in ("data", "generation", "reward"))
    found = {
        "perf/completions_per_s": len(rollouts) / seconds,
        "perf/tokens_per_s": tokens / seconds,
        "perf/rollout_wait_frac": waited / seconds,
        "perf/level": float(LAYOUTS.index(layout)),
    }
    work = updates.work
    if "rows" in work:
        found["perf/rows"] = work["rows"]
        found["perf/padding_frac"] = work["padding"] / work["rows"]
    found["perf/forwarded_frac"] = work.get("completions", 0.0) / (len(rollouts) * num_iterations)
    if world.device.type == "cuda":
        found["perf/tokens_per_s_per_gpu"] = tokens / seconds / world.size
        found["memory/peak_gb"] = torch.cuda.max_memory_allocated(world.device) / 1e9
        found["memory/reserved_gb"] = torch.cuda.memory_reserved(world.device) / 1e9
        busy = sum(metrics.get(f"time/{phase}", 0.0) for phase in TRAINING_PHASES)
        if (most := peak_flops(torch.cuda.get_device_name(world.device))) and busy:
            found["perf/mfu"] = work.get("flop", 0.0) / busy / most / world.size
    return found


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of a device by its name."""
    return next((flops for key, flops in PEAK_FLOPS.items() if key in device_name), None)

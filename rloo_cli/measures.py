"""Every number of a step that OBJECTIVE 8 names, from sums and counts.

Nothing is reported for which there was no data: the key is absent, never NaN. Means are sums over
counts; extremes are true extremes.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from rloo_cli.rollout import Batch, Micro
from rloo_cli.tensors import row_sum

Row = dict[str, float]


def of_rollouts(batch: Batch, std_over_step: bool = False) -> Row:
    """Lengths, scores and groups of a step's batch, known before any update.

    `std_over_step`: the algorithm divides by the step's std (advantage_scale=batch).
    """
    row = _completions(batch) | _scores(batch) | batch.facts
    if std_over_step and "reward_std_batch" in row:
        row["reward_std"] = row["reward_std_batch"]
    return row


def _completions(batch: Batch) -> Row:
    length, ended = batch.table("length").double(), batch.table("terminated")
    texts = [[tuple(r.completion_ids) for r in g.rollouts] for g in batch.groups]
    copies = sum(len(t) - len(set(t)) for t in texts)
    row = _spans("length", length.reshape(-1)) | _spans("terminated_length", length[ended])
    return {
        **row,
        "completions/clipped_ratio": float((~ended).double().mean()),
        "completions/unique_ratio": len({x for t in texts for x in t}) / length.numel(),
        "groups/duplicates": copies,
        "val/num_eos_tokens": int(ended.sum()),
    }


def _spans(name: str, values: Tensor) -> Row:
    if not values.numel():
        return {}
    found = {"mean": values.mean(), "min": values.min(), "max": values.max()}
    return {f"completions/{how}_{name}": float(v) for how, v in found.items()}


def _scores(batch: Batch) -> Row:
    row: Row = {"reward/valid_frac": float(batch.scorable.double().mean())}
    for name, values in zip(batch.names, batch.raw, strict=True):
        said = values[~values.isnan()]
        row[f"reward/{name}/none_frac"] = 1 - said.numel() / values.numel()
        row |= {f"reward/{name}/{k}": v for k, v in _mean_std(said).items()}
    score, rows = batch.score, batch.scorable
    if rows.any():
        row["reward"] = float(score[rows].mean())
    if rows.sum() > 1:
        row["reward_std_batch"] = float(score[rows].std())
    groups = [score[i][rows[i]] for i in range(len(score)) if rows[i].sum() >= 2]
    row["groups/unscorable"] = len(score) - len(groups)
    if groups:
        row["reward_std"] = float(torch.stack([g.std() for g in groups]).mean())
        flat = [bool(g.max() == g.min()) for g in groups]
        row["frac_reward_zero_std"] = sum(flat) / len(flat)
    return row


def _mean_std(values: Tensor) -> Row:
    row = {"mean": float(values.mean())} if values.numel() else {}
    return row | ({"std": float(values.std())} if values.numel() > 1 else {})


def of_advantages(batch: Batch, beta: float) -> Row:
    """Advantages over valid rows; scores and KL per sequence over the rows that were trained on.

    `objective/rlhf_reward` is their sum wherever the KL goes, reward or loss.
    """
    row: Row = {}
    if batch.advantage is not None and batch.usable is not None and batch.usable.any():
        values = batch.advantage[batch.usable]
        row |= {f"advantages/{k}": v for k, v in _mean_std(values).items()}
        row["advantages/abs_max"] = float(values.abs().max())
        row["advantages/zero_frac"] = float((values == 0).double().mean())
        row["advantages/norm_skipped"] = float(batch.norm_skipped)
    rows = _trained(batch)
    if rows.any():
        row["objective/scores"] = row["objective/rlhf_reward"] = float(batch.shaped[rows].mean())
    if rows.any() and batch.kl is not None:
        kl = float(batch.kl[rows].mean())
        row["objective/kl"] = kl
        row["objective/non_score_reward"] = -beta * kl
        row["objective/rlhf_reward"] -= beta * kl
    return row


def _trained(batch: Batch) -> Tensor:
    """Scorable rows of active groups. -> (P, K) bool"""
    rows = torch.zeros_like(batch.scorable)
    rows[batch.active] = batch.scorable[batch.active]
    return rows


def counts(batch: Batch, updates: "Updates") -> Row:
    """What the means of a step were taken over, by the names of `log.OVER`."""
    said = {f"reward/{n}": (~v.isnan()).sum() for n, v in zip(batch.names, batch.raw, strict=True)}
    found = {
        "ended": batch.table("terminated").sum(),
        "scored": batch.scorable.sum(),
        "groups": (batch.scorable.sum(1) >= 2).sum(),
        "usable": torch.tensor(0) if batch.usable is None else batch.usable.sum(),
        "trained": _trained(batch).sum(),
        "updates": torch.tensor(updates.made),
    }
    return _fetch(said | found) | _fetch(updates.sums)


class Updates:
    """Sums over the micro-batches of a step's updates, on the device until the step ends."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.largest: dict[str, Tensor] = {}
        self.scalars: dict[str, list[float]] = defaultdict(list)  # one per update
        self.tokens = 0

    def add(self, **sums: Tensor | float) -> None:
        """Add to named sums."""
        for name, value in sums.items():
            value = torch.as_tensor(value).detach().double()
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def extreme(self, **values: Tensor) -> None:
        """Keep the largest of each; give a smallest as its negative."""
        for name, value in values.items():
            if value.numel():
                value = value.detach().double().max()
                old = self.largest.get(name)
                self.largest[name] = value if old is None else torch.maximum(old, value)

    @property
    def made(self) -> int:
        """Optimizer updates so far."""
        return len(self.scalars.get("loss", []))

    def micro(self, loss: Any, micro: Micro, entropy: Tensor | None) -> None:
        """Take in one micro-batch of one update; `loss` is the algorithm's Loss."""
        units = loss.unit_mask
        count = units.sum()
        self.add(
            units=count,
            low=(loss.low & units).sum(),
            high=(loss.high & units).sum(),
            delta=(loss.delta & units).sum(),
            ratio=(loss.ratio * units).sum(),
            ratio_sq=(loss.ratio.square() * units).sum(),
            approx_kl=(0.5 * loss.log_ratio_sq * units).sum(),
        )
        used = loss.ratio[units]
        rows = _rows(micro)
        self.extreme(ratio=used, ratio_min=-used)
        self.extreme(low=-loss.row_low[rows], high=loss.row_high[rows])
        self.add(policy_loss=loss.policy, kl_loss=loss.kl)
        if entropy is not None:
            self.add(entropy=(entropy * micro.mask).sum(), entropy_tokens=micro.mask.sum())
        if loss.weight is not None:
            self._weights(loss, micro)

    def sampled(self, micro: Micro, kl: Tensor | None) -> None:
        """Take in a micro-batch's log-probabilities of the step's first pass. `kl` is (S,)."""
        old = micro.old_logp
        assert old is not None
        tokens = micro.mask.sum()
        self.add(old=-(old * micro.mask).sum(), tokens=tokens, sequences=_rows(micro).sum())
        if kl is not None:
            self.add(kl=kl.sum())
        if micro.behaviour_logp is not None:
            said = micro.mask.bool() & ~micro.behaviour_logp.isnan()
            gap = (old - micro.behaviour_logp)[said].abs()
            self.add(gap=gap.sum(), gap_sq=gap.square().sum(), gap_tokens=said.sum())
            self.extreme(gap=gap)
            below = torch.where(said, micro.behaviour_logp - old, torch.zeros_like(old))
            self.add(sampling_kl=below.sum())

    def _weights(self, loss: Any, micro: Micro) -> None:
        counted = micro.mask.bool()
        if loss.weight.shape != micro.mask.shape:
            counted = _rows(micro)
        weight, raw = loss.weight[counted].double(), loss.raw_weight[counted].double()
        self.add(
            weights=weight.numel(), weight=weight.sum(), raw=raw.sum(), raw_sq=raw.square().sum(),
            masked=(weight == 0).sum(), capped=((weight != raw) & (weight != 0)).sum(),
        )  # fmt: skip
        self.extreme(weight=weight, weight_min=-weight)

    def update(self, optimizer: Any, loss: float, norm: float) -> None:
        """Numbers of one optimizer update, before it is made."""
        clip = optimizer.max_grad_norm
        numbers = {
            "loss": loss,
            "grad_norm": norm,
            "grad_clip_fraction": float(clip is not None and norm > clip),
            "learning_rate": optimizer.learning_rate,
        }
        for name, value in numbers.items():
            self.scalars[name].append(value)

    def row(self) -> Row:
        """All of it as metrics, with one transfer from the device."""
        s = _fetch(self.sums)
        top = _fetch(self.largest)
        row = {name: sum(v) / len(v) for name, v in self.scalars.items()}
        if row:
            row["policy_loss"] = row["loss/policy_avg"] = s["policy_loss"] / self.made
            row["kl_loss"] = s["kl_loss"] / self.made
            row["lr"] = row["learning_rate"]
        if s.get("units"):
            row |= _clips(s, top)
        if s.get("entropy_tokens"):
            row["entropy"] = row["policy/entropy_avg"] = s["entropy"] / s["entropy_tokens"]
        if s.get("tokens") and "kl" in s:
            row["kl"] = s["kl"] / s["tokens"]
        if s.get("sequences"):
            row["objective/entropy"] = s["old"] / s["sequences"]
        if s.get("tokens") and "gap_tokens" in s:
            row |= _gaps(s, top)
        if s.get("weights"):
            row |= _corrections(s, top)
        return row


def _rows(micro: Micro) -> Tensor:
    """Sequences with a token that is trained on. -> (S,) bool"""
    return row_sum(micro.mask, micro.sequence, micro.sequences) > 0


def _fetch(values: dict[str, Tensor]) -> Row:
    if not values:
        return {}
    device = next((v.device for v in values.values() if v.device.type != "cpu"), None)
    stacked = torch.stack([v.reshape(()).double().to(device) for v in values.values()]).tolist()
    return dict(zip(values, stacked, strict=True))


def _clips(s: Row, top: Row) -> Row:
    n = s["units"]
    mean = s["ratio"] / n
    return {
        "clip_ratio/low_mean": s["low"] / n,
        "clip_ratio/high_mean": s["high"] / n,
        "clip_ratio/region_mean": (s["low"] + s["high"]) / n,
        "clip_ratio/low_min": -top["low"],
        "clip_ratio/high_max": top["high"],
        "delta_ratio": s["delta"] / n,
        "policy/approxkl_avg": s["approx_kl"] / n,
        "policy/clipfrac_avg": (s["low"] + s["high"]) / n,
        "val/ratio": mean,
        "val/ratio_var": max(s["ratio_sq"] / n - mean**2, 0.0),
        "ratio/min": -top["ratio_min"],
        "ratio/max": top["ratio"],
    }


def _gaps(s: Row, top: Row) -> Row:
    row = {
        "sampling/missing_frac": 1 - s["gap_tokens"] / s["tokens"],
        "sampling/kl": s["sampling_kl"] / s["sequences"],
    }
    if s["gap_tokens"]:
        row["sampling/logp_diff_mean"] = s["gap"] / s["gap_tokens"]
        row["sampling/logp_diff_rms"] = (s["gap_sq"] / s["gap_tokens"]) ** 0.5
        row["sampling/logp_diff_max"] = top["gap"]
    return row


def _corrections(s: Row, top: Row) -> Row:
    name = "sampling/importance_sampling_ratio"
    return {
        f"{name}/mean": s["weight"] / s["weights"],
        f"{name}/min": -top["weight_min"],
        f"{name}/max": top["weight"],
        "sampling/ess": s["raw"] ** 2 / (s["weights"] * s["raw_sq"]) if s["raw_sq"] else 0.0,
        "sampling/capped_frac": s["capped"] / s["weights"],
        "sampling/masked_frac": s["masked"] / s["weights"],
    }

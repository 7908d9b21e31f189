"""Sums over the micro-batches of a step's optimizer updates, and the metrics they give."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from rloo_cli.data.bin_packing import ForwardCost
from rloo_cli.data.packing import MicroBatch
from rloo_cli.data.segments import segment_sum
from rloo_cli.distributed.world import World

MetricValues = dict[str, float]


class UpdateMetrics:
    """Sums over the micro-batches of a step's updates, on the device until the step ends."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.largest: dict[str, Tensor] = {}
        self.scalars: dict[str, list[float]] = defaultdict(list)  # one per update
        self.work: dict[str, float] = defaultdict(float)  # what forward passes computed

    def add(self, **sums: Tensor | float) -> None:
        """Add to named sums."""
        for name, value in sums.items():
            value = torch.as_tensor(value).detach().double()
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def add_maxima(self, mask: Tensor, **values: Tensor) -> None:
        """Keep the largest of each among some, -inf where none is; give a smallest as its negative.

        Nothing here asks the device for a number: that would wait for it in every micro-batch.
        """
        for name, value in values.items():
            if value.numel():
                value = value.detach().double().masked_fill(~mask, -torch.inf).max()
                old = self.largest.get(name)
                self.largest[name] = value if old is None else torch.maximum(old, value)

    def scale_policy_loss(self, factor: float) -> None:
        """Multiply the policy's loss so far: what was summed was not normalised yet."""
        if factor != 1.0 and "policy_loss" in self.sums:
            self.sums["policy_loss"] = self.sums["policy_loss"] * factor

    @property
    def num_updates(self) -> int:
        """Optimizer updates so far."""
        return len(self.scalars.get("loss", []))

    def copy(self) -> "UpdateMetrics":
        """What is known now, apart from what is added later. (No tensor is ever changed.)"""
        return UpdateMetrics.from_tensors(self.dump(), self.work)

    def dump(self) -> dict[str, Tensor]:
        """All of it as tensors: sum/, largest/ and scalar/ before each name."""
        scalars = {n: torch.tensor(v, dtype=torch.float64) for n, v in self.scalars.items()}
        parts = {"sum": self.sums, "largest": self.largest, "scalar": scalars}
        return {f"{kind}/{n}": t for kind, found in parts.items() for n, t in found.items()}

    @staticmethod
    def from_tensors(tensors: dict[str, Tensor], work: dict[str, float]) -> "UpdateMetrics":
        """What `dump` gave."""
        updates = UpdateMetrics()
        updates.work.update(work)
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            if kind == "scalar":
                updates.scalars[name] = value.tolist()
            else:
                (updates.sums if kind == "sum" else updates.largest)[name] = value
        return updates

    def count_forward(
        self,
        micro_batch: MicroBatch,
        cost: ForwardCost,
        num_forwards: int = 1,
        training: bool = False,
    ) -> None:
        """Note a pass over a micro-batch; `units`: forwards it was worth, a backward being two."""
        alone = (
            micro_batch.shared_layout is None
        )  # then a prompt is computed for each of its completions
        for prompt, own in micro_batch.group_lengths:
            for cut in [[c] for c in own] if alone else [own]:
                self.work["flop"] += num_forwards * cost.group_flops(prompt, cut)
        if training:
            self.work["rows"] += micro_batch.input_ids.numel()
            self.work["padding"] += micro_batch.padding_tokens
            self.work["completions"] += micro_batch.num_sequences

    def add_micro_batch(self, loss: Any, micro_batch: MicroBatch, entropy: Tensor | None) -> None:
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
        self.add_maxima(units, ratio=loss.ratio, ratio_min=-loss.ratio)
        self.add_maxima(_trained_sequences(micro_batch), low=-loss.row_low, high=loss.row_high)
        self.add(policy_loss=loss.policy, kl_loss=loss.kl)
        if loss.capped is not None:
            self.add(capped=(loss.capped & units).sum())
        if entropy is not None:
            self.add(
                entropy=(entropy * micro_batch.mask).sum(), entropy_tokens=micro_batch.mask.sum()
            )
        if loss.weight is not None:
            _add_correction_weights(self, loss, micro_batch)

    def add_old_logprobs(self, micro_batch: MicroBatch, kl: Tensor | None) -> None:
        """Take in a micro-batch's log-probabilities of the step's first pass. `kl` is (S,)."""
        old = micro_batch.old_logp
        assert old is not None
        tokens = micro_batch.mask.sum()
        self.add(
            old=-(old * micro_batch.mask).sum(),
            tokens=tokens,
            sequences=_trained_sequences(micro_batch).sum(),
        )
        if kl is not None:
            self.add(kl=kl.sum())
        if micro_batch.behaviour_logp is not None:
            said = micro_batch.mask.bool() & ~micro_batch.behaviour_logp.isnan()
            gap = (old - micro_batch.behaviour_logp).abs().where(said, 0.0)
            self.add(gap=gap.sum(), gap_sq=gap.square().sum(), gap_tokens=said.sum())
            self.add_maxima(said, gap=gap)
            below = torch.where(said, micro_batch.behaviour_logp - old, torch.zeros_like(old))
            self.add(sampling_kl=below.sum())

    def add_update(self, optimizer: Any, loss: float, grad_norm: float) -> None:
        """Numbers of one optimizer update, before it is made."""
        clip = optimizer.max_grad_norm
        numbers = {
            "loss": loss,
            "grad_norm": grad_norm,
            "grad_clip_fraction": float(clip is not None and grad_norm > clip),
            "learning_rate": optimizer.learning_rate,
        }
        for name, value in numbers.items():
            self.scalars[name].append(value)

    def to_metrics(self) -> MetricValues:
        """All of it as metrics, with one transfer from the device."""
        s = fetch_scalars(self.sums)
        top = fetch_scalars(self.largest)
        row = {name: sum(v) / len(v) for name, v in self.scalars.items()}
        if row:
            # Of an update in which no completion needed a forward, both are 0.
            row["policy_loss"] = row["loss/policy_avg"] = (
                s.get("policy_loss", 0.0) / self.num_updates
            )
            row["kl_loss"] = s.get("kl_loss", 0.0) / self.num_updates
            row["lr"] = row["learning_rate"]
        if s.get("units"):
            row |= _clip_metrics(s, top)
        if s.get("value_tokens"):
            row |= {"loss/value_avg": s["value_loss"] / max(self.num_updates, 1)} | _value_metrics(
                s, top
            )
        if s.get("entropy_tokens"):
            row["entropy"] = row["policy/entropy_avg"] = s["entropy"] / s["entropy_tokens"]
        if s.get("tokens") and "kl" in s:
            row["kl"] = s["kl"] / s["tokens"]
        if s.get("sequences"):
            row["objective/entropy"] = s["old"] / s["sequences"]
        if s.get("tokens") and "gap_tokens" in s:
            row |= _sampler_metrics(s, top)
        if s.get("weights"):
            row |= _correction_metrics(s, top)
        return row


def sum_over_ranks(updates: UpdateMetrics, world: World) -> UpdateMetrics:
    """Those of all ranks, whose updates are the same ones. All ranks ask."""
    if world.size == 1:
        return updates
    mine = ({n: t.cpu() for n, t in updates.dump().items()}, dict(updates.work))
    whole = UpdateMetrics()
    for tensors, work in world.gather(mine):
        other = UpdateMetrics.from_tensors(tensors, work)
        whole.add(**other.sums)
        for name, value in other.largest.items():
            old = whole.largest.get(name)
            whole.largest[name] = value if old is None else torch.maximum(old, value)
        for name, amount in work.items():
            whole.work[name] += amount
        whole.scalars = other.scalars
    return whole


def add_value_loss(updates: UpdateMetrics, value_loss: Any, micro_batch: MicroBatch) -> None:
    """Take in one micro-batch's value loss (`ppo.ValueLoss`), of one update."""
    assert micro_batch.returns is not None and micro_batch.value is not None
    among = value_loss.counted
    wanted = micro_batch.returns.double().where(among, 0.0)
    missed = (wanted - micro_batch.value.double()).where(among, 0.0)
    updates.add(
        value_loss=value_loss.value,
        value_tokens=among.sum(),
        value_clipped=value_loss.clipped.sum(),
        returns=wanted.sum(),
        returns_sq=wanted.square().sum(),
        missed=missed.sum(),
        missed_sq=missed.square().sum(),
    )
    updates.add_maxima(among, returns=wanted, returns_min=-wanted)


def without_sums(updates: UpdateMetrics) -> UpdateMetrics:
    """Without the sums, which another rank has."""
    found = UpdateMetrics()
    found.scalars = updates.copy().scalars
    return found


def _add_correction_weights(updates: UpdateMetrics, loss: Any, micro_batch: MicroBatch) -> None:
    counted = micro_batch.mask.bool()
    if loss.weight.shape != micro_batch.mask.shape:
        counted = _trained_sequences(micro_batch)
    weight, raw = loss.weight.double(), loss.raw_weight.double()
    used = raw.where(counted, 0.0)
    updates.add(
        weights=counted.sum(), weight=weight.where(counted, 0.0).sum(),
        raw=used.sum(), raw_sq=used.square().sum(), masked=((weight == 0) & counted).sum(),
        capped=((weight != raw) & (weight != 0) & counted).sum(),
    )  # fmt: skip
    updates.add_maxima(counted, weight=weight, weight_min=-weight)


def _trained_sequences(micro_batch: MicroBatch) -> Tensor:
    """Sequences with a token that is trained on. -> (S,) bool"""
    return segment_sum(micro_batch.mask, micro_batch.sequence_ids, micro_batch.num_sequences) > 0


def fetch_scalars(values: dict[str, Tensor]) -> MetricValues:
    """Scalars of a device -> numbers, with one transfer."""
    if not values:
        return {}
    device = next((v.device for v in values.values() if v.device.type != "cpu"), None)
    stacked = torch.stack([v.reshape(()).double().to(device) for v in values.values()]).tolist()
    return dict(zip(values, stacked, strict=True))


def _clip_metrics(sums: MetricValues, maxima: MetricValues) -> MetricValues:
    """Over the completions (or tokens) that were forwarded, so `train.forward_all` changes them: it
    adds those on which no update depends, whose ratio is 1 on-policy and which never clip.
    """
    n = sums["units"]
    mean = sums["ratio"] / n
    return {
        "clip_ratio/low_mean": sums["low"] / n,
        "clip_ratio/high_mean": sums["high"] / n,
        "clip_ratio/region_mean": (sums["low"] + sums["high"]) / n,
        "clip_ratio/low_min": -maxima["low"],
        "clip_ratio/high_max": maxima["high"],
        "delta_ratio": sums["delta"] / n,
        **({"cispo_clip_ratio": sums["capped"] / n} if "capped" in sums else {}),
        "policy/approxkl_avg": sums["approx_kl"] / n,
        "policy/clipfrac_avg": (sums["low"] + sums["high"]) / n,
        "val/ratio": mean,
        "val/ratio_var": max(sums["ratio_sq"] / n - mean**2, 0.0),
        "ratio/min": -maxima["ratio_min"],
        "ratio/max": maxima["ratio"],
    }


def _value_metrics(sums: MetricValues, maxima: MetricValues) -> MetricValues:
    """Explained variance: of the returns, by the values that the step began with."""
    n = sums["value_tokens"]
    row = {"val/clipfrac_avg": sums["value_clipped"] / n}
    if maxima["returns"] > -maxima["returns_min"]:  # else there is no variance to explain
        left = sums["missed_sq"] / n - (sums["missed"] / n) ** 2
        there = sums["returns_sq"] / n - (sums["returns"] / n) ** 2
        row["value/explained_variance"] = 1 - left / there
    return row


def _sampler_metrics(sums: MetricValues, maxima: MetricValues) -> MetricValues:
    row = {
        "sampling/missing_frac": 1 - sums["gap_tokens"] / sums["tokens"],
        "sampling/kl": sums["sampling_kl"] / sums["sequences"],
    }
    if sums["gap_tokens"]:
        row["sampling/logp_diff_mean"] = sums["gap"] / sums["gap_tokens"]
        row["sampling/logp_diff_rms"] = (sums["gap_sq"] / sums["gap_tokens"]) ** 0.5
        row["sampling/logp_diff_max"] = maxima["gap"]
    return row


def _correction_metrics(sums: MetricValues, maxima: MetricValues) -> MetricValues:
    name = "sampling/importance_sampling_ratio"
    return {
        f"{name}/mean": sums["weight"] / sums["weights"],
        f"{name}/min": -maxima["weight_min"],
        f"{name}/max": maxima["weight"],
        "sampling/ess": sums["raw"] ** 2 / (sums["weights"] * sums["raw_sq"])
        if sums["raw_sq"]
        else 0.0,
        "sampling/capped_frac": sums["capped"] / sums["weights"],
        "sampling/masked_frac": sums["masked"] / sums["weights"],
    }

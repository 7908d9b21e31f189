"""Sums over the micro-batches of a step's optimizer updates, and the metrics they give."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from rloo_cli.data.bin_packing import Shape
from rloo_cli.data.packing import Micro
from rloo_cli.data.segments import row_sum
from rloo_cli.distributed.world import World

Row = dict[str, float]


class Updates:
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

    def extreme(self, among: Tensor, **values: Tensor) -> None:
        """Keep the largest of each among some, -inf where none is; give a smallest as its negative.

        Nothing here asks the device for a number: that would wait for it in every micro-batch.
        """
        for name, value in values.items():
            if value.numel():
                value = value.detach().double().masked_fill(~among, -torch.inf).max()
                old = self.largest.get(name)
                self.largest[name] = value if old is None else torch.maximum(old, value)

    def scale(self, factor: float) -> None:
        """Multiply the policy's loss so far: what was summed was not normalised yet."""
        if factor != 1.0 and "policy_loss" in self.sums:
            self.sums["policy_loss"] = self.sums["policy_loss"] * factor

    @property
    def made(self) -> int:
        """Optimizer updates so far."""
        return len(self.scalars.get("loss", []))

    def copy(self) -> "Updates":
        """What is known now, apart from what is added later. (No tensor is ever changed.)"""
        return Updates.of(self.dump(), self.work)

    def dump(self) -> dict[str, Tensor]:
        """All of it as tensors: sum/, largest/ and scalar/ before each name."""
        scalars = {n: torch.tensor(v, dtype=torch.float64) for n, v in self.scalars.items()}
        parts = {"sum": self.sums, "largest": self.largest, "scalar": scalars}
        return {f"{kind}/{n}": t for kind, found in parts.items() for n, t in found.items()}

    @staticmethod
    def of(tensors: dict[str, Tensor], work: dict[str, float]) -> "Updates":
        """What `dump` gave."""
        updates = Updates()
        updates.work.update(work)
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            if kind == "scalar":
                updates.scalars[name] = value.tolist()
            else:
                (updates.sums if kind == "sum" else updates.largest)[name] = value
        return updates

    def did(self, micro: Micro, shape: Shape, units: int = 1, training: bool = False) -> None:
        """Note a pass over a micro-batch; `units`: forwards it was worth, a backward being two."""
        alone = micro.shared is None  # then a prompt is computed for each of its completions
        for prompt, own in micro.sizes:
            for cut in [[c] for c in own] if alone else [own]:
                self.work["flop"] += units * shape.group(prompt, cut)
        if training:
            self.work["rows"] += micro.input_ids.numel()
            self.work["padding"] += micro.padding
            self.work["completions"] += micro.sequences

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
        self.extreme(units, ratio=loss.ratio, ratio_min=-loss.ratio)
        self.extreme(_rows(micro), low=-loss.row_low, high=loss.row_high)
        self.add(policy_loss=loss.policy, kl_loss=loss.kl)
        if loss.capped is not None:
            self.add(capped=(loss.capped & units).sum())
        if entropy is not None:
            self.add(entropy=(entropy * micro.mask).sum(), entropy_tokens=micro.mask.sum())
        if loss.weight is not None:
            _weights(self, loss, micro)

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
            gap = (old - micro.behaviour_logp).abs().where(said, 0.0)
            self.add(gap=gap.sum(), gap_sq=gap.square().sum(), gap_tokens=said.sum())
            self.extreme(said, gap=gap)
            below = torch.where(said, micro.behaviour_logp - old, torch.zeros_like(old))
            self.add(sampling_kl=below.sum())

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
        s = fetch(self.sums)
        top = fetch(self.largest)
        row = {name: sum(v) / len(v) for name, v in self.scalars.items()}
        if row:
            # Of an update in which no completion needed a forward, both are 0.
            row["policy_loss"] = row["loss/policy_avg"] = s.get("policy_loss", 0.0) / self.made
            row["kl_loss"] = s.get("kl_loss", 0.0) / self.made
            row["lr"] = row["learning_rate"]
        if s.get("units"):
            row |= _clips(s, top)
        if s.get("value_tokens"):
            row |= {"loss/value_avg": s["value_loss"] / max(self.made, 1)} | _values(s, top)
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


def together(updates: Updates, world: World) -> Updates:
    """Those of all ranks, whose updates are the same ones. All ranks ask."""
    if world.size == 1:
        return updates
    mine = ({n: t.cpu() for n, t in updates.dump().items()}, dict(updates.work))
    whole = Updates()
    for tensors, work in world.gather(mine):
        other = Updates.of(tensors, work)
        whole.add(**other.sums)
        for name, value in other.largest.items():
            old = whole.largest.get(name)
            whole.largest[name] = value if old is None else torch.maximum(old, value)
        for name, amount in work.items():
            whole.work[name] += amount
        whole.scalars = other.scalars
    return whole


def valued(updates: Updates, told: Any, micro: Micro) -> None:
    """Take in one micro-batch's value loss (`ppo.ValueLoss`), of one update."""
    assert micro.returns is not None and micro.value is not None
    among = told.counted
    wanted = micro.returns.double().where(among, 0.0)
    missed = (wanted - micro.value.double()).where(among, 0.0)
    updates.add(
        value_loss=told.value, value_tokens=among.sum(), value_clipped=told.clipped.sum(),
        returns=wanted.sum(), returns_sq=wanted.square().sum(),
        missed=missed.sum(), missed_sq=missed.square().sum(),
    )  # fmt: skip
    updates.extreme(among, returns=wanted, returns_min=-wanted)


def scalars_alone(updates: Updates) -> Updates:
    """Without the sums, which another rank has."""
    found = Updates()
    found.scalars = updates.copy().scalars
    return found


def _weights(updates: Updates, loss: Any, micro: Micro) -> None:
    counted = micro.mask.bool()
    if loss.weight.shape != micro.mask.shape:
        counted = _rows(micro)
    weight, raw = loss.weight.double(), loss.raw_weight.double()
    used = raw.where(counted, 0.0)
    updates.add(
        weights=counted.sum(), weight=weight.where(counted, 0.0).sum(),
        raw=used.sum(), raw_sq=used.square().sum(), masked=((weight == 0) & counted).sum(),
        capped=((weight != raw) & (weight != 0) & counted).sum(),
    )  # fmt: skip
    updates.extreme(counted, weight=weight, weight_min=-weight)


def _rows(micro: Micro) -> Tensor:
    """Sequences with a token that is trained on. -> (S,) bool"""
    return row_sum(micro.mask, micro.sequence, micro.sequences) > 0


def fetch(values: dict[str, Tensor]) -> Row:
    """Scalars of a device -> numbers, with one transfer."""
    if not values:
        return {}
    device = next((v.device for v in values.values() if v.device.type != "cpu"), None)
    stacked = torch.stack([v.reshape(()).double().to(device) for v in values.values()]).tolist()
    return dict(zip(values, stacked, strict=True))


def _clips(s: Row, top: Row) -> Row:
    """Over the completions (or tokens) that were forwarded, so `train.forward_all` changes them: it
    adds those on which no update depends, whose ratio is 1 on-policy and which never clip.
    """
    n = s["units"]
    mean = s["ratio"] / n
    return {
        "clip_ratio/low_mean": s["low"] / n,
        "clip_ratio/high_mean": s["high"] / n,
        "clip_ratio/region_mean": (s["low"] + s["high"]) / n,
        "clip_ratio/low_min": -top["low"],
        "clip_ratio/high_max": top["high"],
        "delta_ratio": s["delta"] / n,
        **({"cispo_clip_ratio": s["capped"] / n} if "capped" in s else {}),
        "policy/approxkl_avg": s["approx_kl"] / n,
        "policy/clipfrac_avg": (s["low"] + s["high"]) / n,
        "val/ratio": mean,
        "val/ratio_var": max(s["ratio_sq"] / n - mean**2, 0.0),
        "ratio/min": -top["ratio_min"],
        "ratio/max": top["ratio"],
    }


def _values(s: Row, top: Row) -> Row:
    """Explained variance: of the returns, by the values that the step began with."""
    n = s["value_tokens"]
    row = {"val/clipfrac_avg": s["value_clipped"] / n}
    if top["returns"] > -top["returns_min"]:  # else there is no variance to explain
        left = s["missed_sq"] / n - (s["missed"] / n) ** 2
        there = s["returns_sq"] / n - (s["returns"] / n) ** 2
        row["value/explained_variance"] = 1 - left / there
    return row


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

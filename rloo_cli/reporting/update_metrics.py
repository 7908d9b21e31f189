"""Sums over the micro-batches of a step's optimizer updates, and the metrics made from them."""

import math
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rloo_cli.algorithms.common.hooks import Loss, ValueLoss
from rloo_cli.data.bin_packing import ForwardCost
from rloo_cli.data.packing import MicroBatch
from rloo_cli.data.segments import segment_positions, segment_sum
from rloo_cli.distributed.world import World
from rloo_cli.reporting.health.metric_rules import DEPTHS
from rloo_cli.utils.metrics import MetricValues, merge_rule

if TYPE_CHECKING:
    from rloo_cli.distributed.optimizer import TrainingOptimizer

OWN_SUM, OWN_COUNT = "algorithm/", "algorithm_count/"  # before the name of one of Loss.metrics

METRICS = {"Progress and time": [  # read by utils.metrics
    ("learning_rate", "", "last", "learning rate of the step's updates, their mean"),
    ("lr", "", "last", "the same, as TRL names it"),
], "The update": [
    ("loss", "", "mean:updates", "loss of an update, mean over the step's updates"),
    ("policy_loss", "", "mean:updates", "the policy's part of it"),
    ("loss/policy_avg", "", "mean:updates", "the same, as PPO's papers name it"),
    ("loss/value_avg", "", "mean:updates", "the value model's loss (ppo)"),
    ("kl_loss", "", "mean:updates", "the KL term of the loss (algorithm.kl_in=loss)"),
    ("grad_norm", "", "mean:updates", "norm of the gradient before clipping"),
    ("grad_clip_fraction", "share", "mean:updates", "updates whose gradient was clipped"),
    ("update/changed_frac", "share", "mean:sampled_weights",
     "weights that an update changed, in the compute dtype: near 0 if the dtype rounds "
     "updates away. Measured on at most 4096 sampled weights, with fsdp2 on each rank's "
     "shards. Absent with zero1, zero2, zero3, and with fsdp2's float32 masters"),
    ("kl", "nats", "mean:tokens", "KL to the reference per token"),
    ("entropy", "nats", "mean:entropy_tokens",
     "entropy of the next token, mean over the forwarded tokens. With beta 0 groups of "
     "equal scores are not forwarded: sampling/entropy covers all"),
    ("policy/entropy_avg", "nats", "mean:entropy_tokens", "the same, as TRL's RLOO named it"),
    ("entropy_coef", "", "last",
     "weight of the entropy bonus after the step's updates, their mean; it acts where the last "
     "update's entropy was at its target or below (algorithm.adaptive_entropy)"),
    ("trust_region/masked_share", "share", "mean:region_units",
     "tokens (or completions, by its level) that algorithm.trust_region left out of the policy "
     "term"),
    ("clip_ratio/low_mean", "share", "mean:units",
     "ratios clipped from below, among forwarded completions (or tokens, by ratio_level)"),
    ("clip_ratio/high_mean", "share", "mean:units", "ratios clipped from above"),
    ("clip_ratio/region_mean", "share", "mean:units", "ratios clipped at all"),
    ("clip_ratio/low_min", "share", "min", "smallest share of a completion clipped from below"),
    ("clip_ratio/high_max", "share", "max", "largest share of a completion clipped from above"),
    ("cispo_clip_ratio", "share", "mean:units",
     "tokens with a ratio above the cap and a positive advantage (policy_loss=cispo)"),
    ("delta_ratio", "share", "mean:units",
     "ratios above algorithm.delta with a negative advantage"),
    ("policy/approxkl_avg", "nats", "mean:units",
     "half the mean squared log-ratio of new to old policy"),
    ("policy/clipfrac_avg", "share", "mean:units", "ratios clipped, as TRL's RLOO named it"),
    ("val/ratio", "", "mean:units", "mean ratio of new to old probabilities"),
    ("val/ratio_var", "", "mean:units", "its variance"),
    ("ratio/min", "", "min", "smallest ratio"),
    ("ratio/max", "", "max", "largest ratio"),
    ("val/clipfrac_avg", "share", "mean:value_tokens",
     "value predictions more than epsilon_value away from those at the step's start (ppo)"),
    ("value/explained_variance", "share", "mean:value_tokens",
     "share of the returns' variance that the values explain (ppo)"),
], "Sampler against trainer": [
    ("sampling/logp_diff_mean", "nats", "mean:gap_tokens",
     "mean absolute difference between the sampler's and the trainer's log-probability of a "
     "token"),
    ("sampling/logp_diff_rms", "nats", "rms:gap_tokens", "its root mean square"),
    ("sampling/logp_diff_max", "nats", "max", "its largest value"),
    ("sampling/logp_diff_from<k>", "nats", "rms:gap_from<k>",
     "root mean square over the sampled tokens of completions from the k-th on, up to the next of "
     "0, 64, 512 and 4096"),
    ("sampling/kl", "nats", "mean:sequences", "KL of the sampler to the trainer, per completion"),
    ("sampling/importance_sampling_ratio/mean", "", "mean:weights",
     "mean importance weight of the sampler's correction"),
    ("sampling/importance_sampling_ratio/min", "", "min", "smallest weight"),
    ("sampling/importance_sampling_ratio/max", "", "max", "largest weight"),
    ("sampling/ess", "share", "mean:weights",
     "effective sample size of the weights before any cap"),
    ("sampling/capped_frac", "share", "mean:weights", "weights that were capped"),
    ("sampling/masked_frac", "share", "mean:weights", "weights that were set to 0"),
], "Your own algorithm": [
    ("algorithm/<name>", "", "mean:algorithm_count/<name>",
     "a number in `Loss.metrics` of your own algorithm, mean over the "
     "tokens, or completions, trained on"),
]}  # fmt: skip
# Metric -> the sum or maximum behind it; a minimum is stored as the largest negative value.
# Counts cover forwarded completions: `train.forward_all` adds completions on which no update
# depends, whose ratio is 1 on-policy and which never clip.
SOURCES = {
    "update/changed_frac": "changed_weights", "kl": "kl",
    "entropy": "entropy", "policy/entropy_avg": "entropy",
    "clip_ratio/low_mean": "low", "clip_ratio/high_mean": "high",
    "clip_ratio/low_min": "low", "clip_ratio/high_max": "high",
    "cispo_clip_ratio": "cispo_capped", "delta_ratio": "delta",
    "trust_region/masked_share": "region_masked",
    "policy/approxkl_avg": "approx_kl", "val/clipfrac_avg": "value_clipped",
    "val/ratio": "ratio", "ratio/min": "ratio_min", "ratio/max": "ratio",
    "sampling/kl": "sampling_kl", "sampling/logp_diff_mean": "gap",
    "sampling/logp_diff_rms": "gap_sq", "sampling/logp_diff_max": "gap",
    "sampling/importance_sampling_ratio/mean": "weight",
    "sampling/importance_sampling_ratio/min": "weight_min",
    "sampling/importance_sampling_ratio/max": "weight",
    "sampling/capped_frac": "capped", "sampling/masked_frac": "masked",
    **{f"sampling/logp_diff_from{first}": f"gap_sq_from{first}" for first in DEPTHS},
}  # fmt: skip


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
        """Keep the largest of each value where `mask` is set, -inf where it never is.

        A minimum is kept as the maximum of the negative values. Nothing here reads a number from
        the device: that would wait for it in every micro-batch.
        """
        for name, value in values.items():
            if value.numel():
                self._keep_largest(
                    name, value.detach().double().masked_fill(~mask, -torch.inf).max()
                )

    def _keep_largest(self, name: str, value: Tensor) -> None:
        old = self.largest.get(name)
        self.largest[name] = value if old is None else torch.maximum(old, value)

    def scale_policy_loss(self, factor: float) -> None:
        """Multiply the policy loss so far, which was summed before it was normalized."""
        if factor != 1.0 and "policy_loss" in self.sums:
            self.sums["policy_loss"] = self.sums["policy_loss"] * factor

    def take_entropy(self) -> Tensor | None:
        """This rank's share of the mean entropy of the update that is under way; it is removed."""
        return self.sums.pop("update_entropy", None)

    @property
    def num_updates(self) -> int:
        """Optimizer updates so far."""
        return len(self.scalars.get("loss", []))

    def copy(self) -> "UpdateMetrics":
        """A copy that later additions do not change. (No tensor is ever changed in place.)"""
        return UpdateMetrics.from_tensors(self.dump(), self.work)

    def dump(self) -> dict[str, Tensor]:
        """Everything but `work` as tensors: sum/, largest/ and scalar/ stand before each name."""
        scalars = {n: torch.tensor(v, dtype=torch.float64) for n, v in self.scalars.items()}
        parts = {"sum": self.sums, "largest": self.largest, "scalar": scalars}
        return {f"{kind}/{n}": t for kind, tensors in parts.items() for n, t in tensors.items()}

    @staticmethod
    def from_tensors(tensors: dict[str, Tensor], work: dict[str, float]) -> "UpdateMetrics":
        """Rebuild the metrics from the tensors of `dump`."""
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
        """Count the work of a pass that costs `num_forwards` forwards (a backward costs two)."""
        # Without the shared layout a prompt is computed for each of its completions.
        alone = micro_batch.shared_layout is None
        for prompt, lengths in micro_batch.group_lengths:
            for part in [[length] for length in lengths] if alone else [lengths]:
                self.work["flop"] += num_forwards * cost.group_flops(prompt, part)
        if training:
            self.work["rows"] += micro_batch.input_ids.numel()
            self.work["padding"] += micro_batch.padding_tokens
            self.work["completions"] += micro_batch.num_sequences

    def add_micro_batch(self, loss: Loss, micro_batch: MicroBatch, entropy: Tensor | None) -> None:
        """Add one micro-batch of one update. `entropy` is (N,)."""
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
            self.add(cispo_capped=(loss.capped & units).sum())
        if loss.entropy is not None:
            self.add(update_entropy=loss.entropy)
        if loss.kept is not None:
            counted = _counted_units(loss.kept, micro_batch)
            self.add(region_masked=(~loss.kept & counted).sum(), region_units=counted.sum())
        if entropy is not None:
            mask = micro_batch.mask
            self.add(entropy=(entropy * mask).sum(), entropy_tokens=mask.sum())
        if loss.weight is not None:
            _add_correction_weights(self, loss, micro_batch)
        for name, values in loss.metrics.items():
            counted = _counted_units(values, micro_batch)
            total = values.detach().double().where(counted, 0.0).sum()
            self.add(**{OWN_SUM + name: total, OWN_COUNT + name: counted.sum()})

    def add_old_logprobs(self, micro_batch: MicroBatch, kl: Tensor | None) -> None:
        """Add a micro-batch's log-probabilities of the step's first pass. `kl` is (S,)."""
        old, mask, behaviour = micro_batch.old_logp, micro_batch.mask, micro_batch.behaviour_logp
        assert old is not None
        sequences = _trained_sequences(micro_batch).sum()
        self.add(old=-(old * mask).sum(), tokens=mask.sum(), sequences=sequences)
        if kl is not None:
            self.add(kl=kl.sum())
        if behaviour is not None:
            present = mask.bool() & ~behaviour.isnan()
            gap = (old - behaviour).abs().where(present, 0.0)
            self.add(gap=gap.sum(), gap_sq=gap.square().sum(), gap_tokens=present.sum())
            self.add_maxima(present, gap=gap)
            self.add(**_gap_by_depth(gap.square(), present, micro_batch))
            below = torch.where(present, behaviour - old, torch.zeros_like(old))
            self.add(sampling_kl=below.sum())

    def add_update(
        self,
        optimizer: "TrainingOptimizer",
        loss: float,
        grad_norm: float,
        control: MetricValues | None = None,
    ) -> None:
        """Add the numbers of one optimizer update, before it is made. `control`: of the entropy."""
        clip = optimizer.max_grad_norm
        numbers = {
            "loss": loss,
            "grad_norm": grad_norm,
            "grad_clip_fraction": float(clip is not None and grad_norm > clip),
            "learning_rate": optimizer.learning_rate,
        }
        if control:
            numbers["entropy_coef"] = control["coef"]
        for name, value in numbers.items():
            self.scalars[name].append(value)

    def to_metrics(self) -> MetricValues:
        """The means and extremes as metrics, with one transfer from the device for each kind."""
        sums, maxima = fetch_scalars(self.sums), fetch_scalars(self.largest)
        metrics = {name: sum(v) / len(v) for name, v in self.scalars.items()}
        if metrics:
            # If no completion of an update needed a forward, both losses are 0.
            policy_loss = sums.get("policy_loss", 0.0) / self.num_updates
            metrics["policy_loss"] = metrics["loss/policy_avg"] = policy_loss
            metrics["kl_loss"] = sums.get("kl_loss", 0.0) / self.num_updates
            metrics["lr"] = metrics["learning_rate"]
        metrics |= _summed_metrics(sums, maxima)
        if n := sums.get("units"):
            clipped = (sums["low"] + sums["high"]) / n
            metrics["clip_ratio/region_mean"] = metrics["policy/clipfrac_avg"] = clipped
            variance = sums["ratio_sq"] / n - metrics["val/ratio"] ** 2
            metrics["val/ratio_var"] = max(variance, 0.0)
        if sums.get("value_tokens"):
            metrics["loss/value_avg"] = sums["value_loss"] / max(self.num_updates, 1)
            metrics |= _value_metrics(sums, maxima)
        if sums.get("sequences"):
            metrics["objective/entropy"] = sums["old"] / sums["sequences"]
        if sums.get("tokens") and "gap_tokens" in sums:
            metrics["sampling/missing_frac"] = 1 - sums["gap_tokens"] / sums["tokens"]
        if n := sums.get("weights"):
            raw_sq = sums["raw_sq"]
            metrics["sampling/ess"] = sums["raw"] ** 2 / (n * raw_sq) if raw_sq else 0.0
        return metrics


def sum_over_ranks(updates: UpdateMetrics, world: World) -> UpdateMetrics:
    """The metrics of all ranks, which make the same updates. All ranks must call this."""
    if world.size == 1:
        return updates
    mine = ({n: t.cpu() for n, t in updates.dump().items()}, dict(updates.work))
    whole = UpdateMetrics()
    for tensors, work in world.gather(mine):
        other = UpdateMetrics.from_tensors(tensors, work)
        whole.add(**other.sums)
        for name, value in other.largest.items():
            whole._keep_largest(name, value)
        for name, amount in work.items():
            whole.work[name] += amount
        whole.scalars = other.scalars
    return whole


def add_value_loss(updates: UpdateMetrics, value_loss: ValueLoss, micro_batch: MicroBatch) -> None:
    """Add one micro-batch's value loss, of one update."""
    assert micro_batch.returns is not None and micro_batch.value is not None
    counted = value_loss.counted
    returns = micro_batch.returns.double().where(counted, 0.0)
    missed = (returns - micro_batch.value.double()).where(counted, 0.0)
    updates.add(
        value_loss=value_loss.value, value_clipped=value_loss.clipped.sum(),
        value_tokens=counted.sum(), returns=returns.sum(), returns_sq=returns.square().sum(),
        missed=missed.sum(), missed_sq=missed.square().sum(),
    )  # fmt: skip
    updates.add_maxima(counted, returns=returns, returns_min=-returns)


def without_sums(updates: UpdateMetrics) -> UpdateMetrics:
    """A copy with only the numbers of each update, without the sums, which another rank has."""
    copy = UpdateMetrics()
    copy.scalars = updates.copy().scalars
    return copy


def _add_correction_weights(updates: UpdateMetrics, loss: Loss, micro_batch: MicroBatch) -> None:
    assert loss.weight is not None and loss.raw_weight is not None
    counted = _counted_units(loss.weight, micro_batch)
    weight, raw = loss.weight.double(), loss.raw_weight.double()
    used = raw.where(counted, 0.0)
    updates.add(
        weights=counted.sum(), weight=weight.where(counted, 0.0).sum(),
        raw=used.sum(), raw_sq=used.square().sum(), masked=((weight == 0) & counted).sum(),
        capped=((weight != raw) & (weight != 0) & counted).sum(),
    )  # fmt: skip
    updates.add_maxima(counted, weight=weight, weight_min=-weight)


def _gap_by_depth(gap_sq: Tensor, present: Tensor, micro_batch: MicroBatch) -> dict[str, Tensor]:
    """Sums and counts of the squared gaps, by the token's position in its completion."""
    position = segment_positions(micro_batch.sequence_ids, micro_batch.num_sequences)
    bounds = torch.tensor(DEPTHS[1:], device=position.device)
    depth = torch.bucketize(position, bounds, right=True)
    sums = segment_sum(gap_sq, depth, len(DEPTHS))
    counts = segment_sum(present.to(gap_sq.dtype), depth, len(DEPTHS))
    return {f"gap_sq_from{first}": sums[i] for i, first in enumerate(DEPTHS)} | {
        f"gap_from{first}": counts[i] for i, first in enumerate(DEPTHS)
    }


def _counted_units(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Tokens, or sequences, that are trained on, as many as there are values. -> (U,) bool"""
    per_token = values.shape == micro_batch.mask.shape
    return micro_batch.mask.bool() if per_token else _trained_sequences(micro_batch)


def _trained_sequences(micro_batch: MicroBatch) -> Tensor:
    """Sequences with a token that is trained on. -> (S,) bool"""
    return segment_sum(micro_batch.mask, micro_batch.sequence_ids, micro_batch.num_sequences) > 0


def fetch_scalars(values: dict[str, Tensor]) -> MetricValues:
    """Convert tensors of one element to numbers, with one transfer from the device."""
    if not values:
        return {}
    device = next((v.device for v in values.values() if v.device.type != "cpu"), None)
    stacked = torch.stack([v.reshape(()).double().to(device) for v in values.values()]).tolist()
    return dict(zip(values, stacked, strict=True))


def _summed_metrics(sums: MetricValues, maxima: MetricValues) -> MetricValues:
    """The metrics in `SOURCES`, means over the counts by which they merge, and extremes."""
    metrics = {}
    own = {name: name for name in sums if name.startswith(OWN_SUM)}
    for name, source in (SOURCES | own).items():
        kind, count = merge_rule(name)
        if kind in ("min", "max"):
            if math.isfinite(value := maxima.get(source, -math.inf)):
                metrics[name] = -value if kind == "min" else value
        elif source in sums and sums.get(count):
            mean = sums[source] / sums[count]
            metrics[name] = mean**0.5 if kind == "rms" else mean
    return metrics


def _value_metrics(sums: MetricValues, maxima: MetricValues) -> MetricValues:
    """How well the values at the step's start explain the variance of the returns."""
    n = sums["value_tokens"]
    if maxima["returns"] <= -maxima["returns_min"]:
        return {}  # no variance to explain
    unexplained = sums["missed_sq"] / n - (sums["missed"] / n) ** 2
    variance = sums["returns_sq"] / n - (sums["returns"] / n) ** 2
    return {"value/explained_variance": 1 - unexplained / variance}

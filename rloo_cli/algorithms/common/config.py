"""Every switch that algorithms share, in one class, and how those of a run are resolved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

from rloo_cli.algorithms.common import advantage, aggregate, kl, policy_loss, score, turn_credit
from rloo_cli.algorithms.common import importance_weights as weights
from rloo_cli.config.schema import AlgorithmConfig, RunConfig, key
from rloo_cli.utils.files import JsonObject


class Switches(
    score.Config,
    kl.Config,
    advantage.Config,
    policy_loss.Config,
    aggregate.Config,
    weights.Config,
    turn_credit.Config,
    AlgorithmConfig,
):
    """Every switch that algorithms share (docs/OBJECTIVES.md)."""

    loss_type: (
        Literal["grpo", "dr_grpo", "bnpo", "dapo", "gspo", "cispo", "sapo", "luspo", "vespo"] | None
    ) = key("Sets policy_loss, ratio_level and loss_agg where they are null; null = sets nothing")

    @property
    def compares_siblings(self) -> bool:
        """Whether a group of equal scores has advantages of 0, but for a KL in the rewards."""
        return self.baseline in ("loo", "group_mean") and self.turn_rewards != "credit"

    @property
    def scales_by_batch(self) -> bool:
        """Whether advantages are divided by the standard deviation of the whole batch."""
        return self.advantage_scale == "batch"

    @property
    def kl_weight(self) -> float:
        """The factor of the KL to the reference; 0 = no KL is in the objective."""
        return 0.0 if self.kl_in == "none" else self.beta

    @property
    def turn_reward_kind(self) -> str:
        """What the rewards of an episode's turns become."""
        return self.turn_rewards

    @property
    def trains_kl_of_unscored(self) -> bool:
        """Whether the loss has the KL of completions without an advantage, too."""
        return self.kl_in == "loss" and self.beta > 0


S = TypeVar("S", bound=Switches)
# A loss type is three switches: policy_loss, ratio_level and loss_agg. GSPO: arXiv 2507.18071;
# DAPO: arXiv 2503.14476; Dr. GRPO: arXiv 2503.20783; CISPO, SAPO: loss_types.py; LUSPO: TRL 1.16.
TRIPLES = {
    "grpo": ("clip", "token", "sequence_mean"),
    "dr_grpo": ("clip", "token", "constant"),
    "bnpo": ("clip", "token", "token_mean_local"),
    "dapo": ("clip", "token", "token_mean"),
    "gspo": ("clip", "geometric", "sequence_mean"),
    "cispo": ("cispo", "token", "token_mean"),
    "sapo": ("sapo", "token", "sequence_mean"),
    "luspo": ("luspo", "geometric", "sequence_sum"),
    "vespo": ("vespo", "token", "token_mean"),
}
PARTS = ("policy_loss", "ratio_level", "loss_agg")


def resolve_loss_type(config: S) -> S:
    """The config in which `loss_type` fills those of its three switches that are null."""
    if config.loss_type is None:
        return config
    missing = _missing_loss_values(config.loss_type, config.model_dump(include=set(PARTS)))
    return config.model_copy(update=missing) if missing else config


def _missing_loss_values(loss_type: str, values: Mapping[str, object]) -> dict[str, str]:
    """The values of a loss type for those of its three switches that are null."""
    triple = zip(PARTS, TRIPLES[loss_type], strict=True)
    return {part: value for part, value in triple if values.get(part) is None}


def resolved_values(algorithm: JsonObject, backend: str, overlap: str = "none") -> JsonObject:
    """The values of keys of the algorithm section that stand for other values, to merge into it:
    the three switches of `loss_type`, and those of `correction` where its mode is auto.

    `backend`, `overlap`: of the generation that samples.
    """
    resolved: JsonObject = {}
    if algorithm.get("loss_type") is not None:
        resolved |= _missing_loss_values(algorithm["loss_type"], algorithm)
    correction = algorithm.get("correction")
    if isinstance(correction, Mapping) and correction.get("mode") == "auto":
        resolved["correction"] = {**correction, **weights.auto_correction(backend, overlap)}
    return resolved


def shared_switches(run: RunConfig) -> Switches:
    """The run's algorithm section, which has every shared switch, with loss_type resolved."""
    if not isinstance(run.algorithm, Switches):
        raise TypeError(f"{type(run.algorithm).__name__} is not made of the shared switches")
    return resolve_loss_type(run.algorithm)


def num_updates_per_step(config: AlgorithmConfig) -> int:
    """Optimizer steps per rollout batch."""
    return config.num_iterations * config.num_minibatches

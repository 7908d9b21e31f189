"""Every switch that algorithms share, in one class, and how a run's values are resolved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import Field

from rloo_cli.algorithms.common.dialect import CLIPS_ADVANTAGES, DialectName
from rloo_cli.config.schema import AlgorithmConfig, Frozen, Positive, RunConfig, key
from rloo_cli.utils.files import JsonObject

GeometricRange = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=2, max_length=2)]
# The values of correction.mode=auto if completions are sampled with older weights: truncated
# token weights, and a trust region by the mean of a completion's tokens.
OVERLAP_CORRECTION = {
    "mode": "truncate", "level": "token", "cap": 2.0, "floor": 0.0, "geometric_range": [0.8, 1.25],
}  # fmt: skip


CLIP_KEYS = ("epsilon", "epsilon_high", "epsilon_tokens", "delta", "log_ratio_clamp")


class CorrectionConfig(Frozen):
    only_with: ClassVar = {
        ".mode!=none": ("level", "cap", "floor"),
        ".mode!=auto or generation.backend!=transformers": ("level", "cap", "floor"),
    }
    mode: Literal["auto", "none", "truncate", "mask", "filter", "bypass"] = key(
        "auto = truncate with vLLM, none with transformers, with generation.overlap as"
        " docs/generation.md says; bypass = old_logp is the sampler's"
    )
    level: Literal["token", "sequence", "geometric"] = key(
        "What gets a weight: tokens, completions, or completions by their mean; filter: see floor"
    )
    cap: float = key("Largest weight", gt=0)
    floor: float = key(
        "Smallest weight; filter drops completions whose geometric weight is not in [floor, cap]",
        ge=0,
    )
    geometric_range: GeometricRange | None = key(
        "Leave out of the policy term completions whose geometric weight is outside this range,"
        " such as [0.99, 1.01]; null = none"
    )


class EosPenalty(Frozen):
    only_with: ClassVar = {".mode!=none": ("value",)}
    mode: Literal["none", "subtract", "replace"] = key(
        "Score of a truncated completion: unchanged, minus value, or value"
    )
    value: float = key("Score units: above 0 to subtract; the new score to replace with")


class OverlongPenalty(Frozen):
    max_length: Positive = key("Tokens from which the whole penalty of -weight is added")
    cache: Positive = key("Tokens below max_length over which the penalty grows linearly from 0")
    weight: float = key("Score units, the size of the whole penalty", ge=0)


class TrustRegion(Frozen):
    kind: Literal["tv", "kl"] = key(
        "How far a sampled token's probability p moved from the sampler's q: |p - q|, or the KL of"
        " the two distributions 'this token, or another'"
    )
    level: Literal["token", "sequence"] = key(
        "Leave out tokens, or completions by the mean over their tokens"
    )
    low: float = key("Farthest that a probability may fall where A <= 0", gt=0)
    high: float = key("Farthest that a probability may rise where A > 0", gt=0)


class AdaptiveEntropy(Frozen):
    target: float = key(
        "Nats per token: the bonus acts after an update whose mean entropy was this or less", ge=0
    )
    delta: float = key("Added to the weight after such an update, subtracted after others", gt=0)
    min: float = key("Smallest weight", ge=0)
    max: float = key("Largest weight", ge=0)


class Switches(AlgorithmConfig):
    """Every switch that algorithms share (docs/algorithms.md)."""

    only_with: ClassVar = {
        # The loss
        ".policy_loss!=reinforce": (*CLIP_KEYS, "ratio_level"),
        ".num_iterations>1 or .num_minibatches>1": CLIP_KEYS,  # else the ratio is exactly 1
        # Else the policy is the sampler, to the last bit
        ".num_iterations>1 or .num_minibatches>1 or generation.backend!=transformers"
        " or generation.overlap!=none": ("trust_region",),
        ".policy_loss=sapo|null": ("sapo_temperature_pos", "sapo_temperature_neg"),
        ".policy_loss=sapo or .loss_type=sapo": ("sapo_temperature_pos", "sapo_temperature_neg"),
        ".policy_loss=reinforce": ("allow_stale",),
        ".loss_agg!=token_mean_local": ("loss_denominator",),
        ".loss_type=null or .policy_loss=null or .ratio_level=null or .loss_agg=null": (
            "loss_type",
        ),
        # Advantages and the KL
        ".zero_std_groups=resample": ("max_resample",),
        # ppo's tokens have rewards of their own, and it whitens over the step
        ".name!=ppo": ("kl_in_baseline", "advantage_scale", "normalize_advantages"),
        ".beta>0 or .kl_in=none": (  # else no reference is loaded
            "kl_in", "kl_estimator", "kl_in_baseline", "kl_credit", "kl_temperature",
            "kl_ratio_weighted",
        ),
        ".kl_in!=none": ("beta",),
        ".kl_in=reward": ("kl_in_baseline", "kl_credit"),
        ".kl_in=loss": ("kl_ratio_weighted",),
        "generation.temperature!=1": ("kl_temperature",),
    }  # fmt: skip
    dialect: DialectName | None = key(
        "Compute RLOO as another framework does: algorithm.dialect=NAME loads its keys"
    )
    turn_rewards: Literal["sum", "last", "credit"] = key(
        "Rewards of an episode's turns: their sum, or the last one, is added to its score; credit ="
        " a turn's tokens get the rewards from that turn on"
    )

    # The loss: family.py, importance_weights.py
    correction: CorrectionConfig = key("Correction for a sampler whose log-probabilities differ")
    loss_agg: (
        Literal["sequence_sum", "sequence_mean", "token_mean", "constant", "token_mean_local"]
        | None
    ) = key(
        "Mean over completions of token sums or of token means; mean over tokens; token sum over"
        " N * max_completion_length; mean over micro-batches of token means (to compare only);"
        " null = by loss_type"
    )
    trust_region: TrustRegion | None = key(
        "DPPO's {kind, level, low, high}: leave what moved too far from the sampler, in the"
        " direction of its advantage, out of the policy term; null = nothing"
    )
    entropy_coef: float = key("Weight of the tokens' mean entropy, subtracted from the loss", ge=0)
    adaptive_entropy: AdaptiveEntropy | None = key(
        "Change that weight after each update, {target, delta, min, max}: entropy_coef is its"
        " first; null = it stays"
    )
    top_entropy_quantile: float = key(
        "Share of an update's tokens in the policy term and the bonus: those of the highest"
        " entropy when they were sampled; 1 = all",
        ge=0,
        le=1,
    )
    loss_denominator: Literal["all", "valid"] = key(
        "Completions counted in N: every one, or those in the loss: not masked, in scorable"
        " groups (with kl_in=loss and opd also those without a score)"
    )
    policy_loss: Literal["clip", "reinforce", "cispo", "sapo", "luspo", "vespo"] | None = key(
        "PPO's clipped ratio; log-probability times advantage (equal gradients on-policy); CISPO's"
        " capped weight, SAPO's soft gate, LUSPO's clip times length, VESPO's; null = by loss_type"
    )
    ratio_level: Literal["sequence", "token", "geometric"] | None = key(
        "One ratio per completion, per token, or per completion to the power 1/length; null = by"
        " loss_type"
    )
    epsilon: float = key("Clip the ratio below 1 - epsilon", ge=0)
    epsilon_high: float | None = key(
        "Clip the ratio above 1 + epsilon_high; null = epsilon. With cispo the cap of weights",
        ge=0,
    )
    epsilon_tokens: int | None = key(
        "Widen the clip range of a completion with T tokens, T above this, to the power"
        " sqrt(T / epsilon_tokens): (1 - epsilon)^s to (1 + epsilon_high)^s; null = one range",
        ge=1,
    )
    delta: float | None = key("Bounds the ratio for A<0, above 1 + epsilon_high; null = off", gt=1)
    log_ratio_clamp: float = key("Log-ratios are clamped to +- this, so exp is finite", gt=0)
    sapo_temperature_pos: float = key("policy_loss=sapo: steepness of the gate where A > 0", gt=0)
    sapo_temperature_neg: float = key("policy_loss=sapo: steepness of the gate where A <= 0", gt=0)
    allow_stale: bool = key("Let policy_loss=reinforce make several updates per step")
    off_policy_threshold: float | None = key(
        "Leave out of the policy term completions with A<0 whose log-probabilities per token fell"
        " by more than this since they were sampled, on average; null = never",
        gt=0,
    )

    # Advantages and the KL: family.py
    baseline: Literal["loo", "group_mean", "batch_mean", "ema", "greedy", "value", "none"] = key(
        "Subtracted from a reward: mean of its siblings, of its group, of the step; moving average"
        " of earlier steps; score of the greedy completion (remax); value model (ppo); 0"
    )
    advantage_scale: Literal["none", "group", "batch", "loo_std", "mean"] = key(
        "Divide advantages by the std of scores: of the group, the step, or the siblings; mean ="
        " by the group's mean score (MaxRL), and a group whose mean is not above 0 has none"
    )
    pass_at_k: int | None = key(
        "Learn for the best of so many completions: the gradient is that of pass@k, or of the"
        " largest reward; null = for each alone",
        ge=2,
    )
    normalize_advantages: bool = key("Centre the step's advantages and divide them by their std")
    zero_std_groups: Literal["keep", "drop", "resample"] = key(
        "Groups whose scores are all equal: train on them, leave them out, or take new prompts"
    )
    max_resample: Positive = key(
        "Most rounds of new prompts per step with zero_std_groups=resample"
    )
    beta: float = key("Weight of KL(policy || reference); 0 = no reference is loaded", ge=0)
    kl_in: Literal["reward", "loss", "none"] = key(
        "Subtracted from the score, added to the loss, or only logged"
    )
    kl_estimator: Literal["k1", "k2", "k3"] = key(
        "Per token, d = old_logp - ref_logp: d, d^2/2, or exp(-d) - 1 + d"
    )
    kl_in_baseline: bool = key(
        "The baseline is of score - beta*KL (a masked sibling has the KL 0); false = of the score"
        " only"
    )
    kl_credit: Literal["sequence", "to_go"] = key(
        "Charge each token for its whole completion's KL, or only for the KL from it onwards"
    )
    kl_temperature: Literal["sampling", "one"] = key(
        "KL of the policies at the sampling temperature, or at temperature 1"
    )
    kl_ratio_weighted: bool = key("kl_in=loss: multiply each token's KL by its ratio")

    # From rewards to scores: score.py
    multi_reward: Literal["sum", "normalize_then_sum"] = key(
        "Weighted sum, or GDPO: each reward normalized in its group, then the sum over the step"
    )
    normalize_rewards: bool = key("Centre the step's scores and divide them by their std")
    reward_clip_range: Annotated[list[float], Field(min_length=2, max_length=2)] | None = key(
        "Clip shaped scores, before KL, to [lo, hi]; null = no clip"
    )
    missing_eos_penalty: EosPenalty | float = key(
        "Truncated completions: {mode, value}; a bare number is subtracted from their score"
    )
    overlong_penalty: OverlongPenalty | None = key(
        "DAPO's length penalty {max_length, cache, weight}; null = none"
    )
    mask_truncated_completions: bool | Literal["drop"] = key(
        "Truncated completions: true = out of the loss only, drop = out of the baseline too"
    )

    loss_type: (
        Literal["grpo", "dr_grpo", "bnpo", "dapo", "gspo", "cispo", "sapo", "luspo", "vespo"] | None
    ) = key("Sets policy_loss, ratio_level and loss_agg where they are null; null = sets nothing")

    @property
    def by_token(self) -> bool:
        """Whether each token has its own advantage, which needs the whole step's completions."""
        return self.turn_rewards == "credit"

    @property
    def compares_in_groups(self) -> bool:
        """Whether the baseline is a mean over the group, so that a completion needs a sibling."""
        return self.baseline in ("loo", "group_mean")

    @property
    def compares_siblings(self) -> bool:
        """Whether a group of equal scores has advantages of 0, apart from a KL in the rewards."""
        return self.compares_in_groups and self.turn_rewards != "credit"

    @property
    def scales_by_batch(self) -> bool:
        """Whether advantages are divided by the standard deviation of the whole batch."""
        return self.advantage_scale == "batch"

    @property
    def has_entropy_bonus(self) -> bool:
        """Whether the loss may have an entropy bonus, so that the entropy needs a gradient."""
        return self.entropy_coef > 0 or self.adaptive_entropy is not None

    @property
    def kl_weight(self) -> float:
        """The factor of the KL to the reference; 0 = no KL in the objective."""
        return 0.0 if self.kl_in == "none" else self.beta

    @property
    def turn_reward_kind(self) -> str:
        """How the rewards of an episode's turns are used."""
        return self.turn_rewards

    @property
    def trains_kl_of_unscored(self) -> bool:
        """Whether the loss also has the KL of completions without an advantage."""
        return self.kl_in == "loss" and self.beta > 0

    @property
    def needs_reference(self) -> bool:
        """Whether a KL is measured, and so a reference model is needed."""
        return self.beta > 0 or self.kl_in == "none"

    @property
    def charges_kl_to_go(self) -> bool:
        """Whether the loss charges each token for the KL that comes after it."""
        # If every token has its own advantage, `token_advantages` has already subtracted it.
        return in_reward(self) and self.kl_credit == "to_go" and not self.by_token

    @property
    def clips_advantages(self) -> bool:
        """Whether reward_clip_range clips advantages: then their mean over a group is not 0."""
        return self.reward_clip_range is not None and self.dialect in CLIPS_ADVANTAGES

    @property
    def upper(self) -> float:
        """1 + epsilon_high, epsilon where it is null."""
        return 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    @property
    def cap(self) -> float:
        """CISPO's largest weight, epsilon_high itself; infinite where it is null."""
        return float("inf") if self.epsilon_high is None else self.epsilon_high

    @property
    def has_token_terms(self) -> bool:
        """Whether the loss has a term per token, so that each token may have its own advantage."""
        by_token = self.policy_loss in ("reinforce", "cispo", "vespo")  # whatever ratio_level is
        return by_token or self.ratio_level == "token"

    @property
    def eos_penalty(self) -> EosPenalty:
        """missing_eos_penalty, with a bare number as an `EosPenalty`."""
        eos = self.missing_eos_penalty
        return eos if isinstance(eos, EosPenalty) else EosPenalty(mode="subtract", value=eos)


def in_reward(config: Switches) -> bool:
    """Whether rewards depend on the reference at all."""
    return config.kl_in == "reward" and config.beta > 0


S = TypeVar("S", bound=Switches)
# A loss type is three switches: policy_loss, ratio_level and loss_agg. GSPO: arXiv 2507.18071;
# DAPO: arXiv 2503.14476; Dr. GRPO: arXiv 2503.20783; CISPO, SAPO: family.py; LUSPO: TRL 1.16.
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
    """The config with the values of `loss_type` in those of its three switches that are null."""
    if config.loss_type is None:
        return config
    missing = _missing_loss_values(config.loss_type, config.model_dump(include=set(PARTS)))
    return config.model_copy(update=missing) if missing else config


def _missing_loss_values(loss_type: str, values: Mapping[str, object]) -> dict[str, str]:
    """The values of `loss_type` for those of its three switches that are null."""
    triple = zip(PARTS, TRIPLES[loss_type], strict=True)
    return {part: value for part, value in triple if values.get(part) is None}


def correction_mode(config: Switches, backend: str, overlap: str = "none") -> str:
    """`correction.mode`, with auto resolved for a generation backend and its overlap."""
    mode = config.correction.mode
    return str(auto_correction(backend, overlap)["mode"]) if mode == "auto" else mode


def auto_correction(backend: str, overlap: str = "none") -> JsonObject:
    """The keys of `correction` that its mode auto sets."""
    if overlap != "none":
        return dict(OVERLAP_CORRECTION)
    return {"mode": "none" if backend == "transformers" else "truncate"}


def resolved_values(algorithm: JsonObject, backend: str, overlap: str = "none") -> JsonObject:
    """Resolved values of the algorithm section, to merge into it: the three switches
    of `loss_type`, and those of `correction` if its mode is auto.

    `backend`, `overlap`: of the generation that samples.
    """
    resolved: JsonObject = {}
    if algorithm.get("loss_type") is not None:
        resolved |= _missing_loss_values(algorithm["loss_type"], algorithm)
    correction = algorithm.get("correction")
    if isinstance(correction, Mapping) and correction.get("mode") == "auto":
        resolved["correction"] = {**correction, **auto_correction(backend, overlap)}
    return resolved


def shared_switches(run: RunConfig) -> Switches:
    """The run's algorithm section with the shared switches, and loss_type resolved."""
    if not isinstance(run.algorithm, Switches):
        raise TypeError(f"{type(run.algorithm).__name__} does not have the shared switches")
    return resolve_loss_type(run.algorithm)


def num_updates_per_step(config: AlgorithmConfig) -> int:
    """Optimizer steps per rollout batch."""
    return config.num_iterations * config.num_minibatches

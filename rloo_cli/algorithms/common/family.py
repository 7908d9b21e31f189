"""RLOO with the switches of its relatives: KL, baseline, scale, ratio, loss (docs/algorithms.md).

`algorithms/rloo.py` has the formula without them, in the same order: the KL to the
reference, rewards and advantages, the policy term, and the loss that combines them.

Advantages are (P, K) and float64. Before every division by a std the raw values are compared with
each other: equal floats can have a std of about 1e-9 instead of 0, and dividing by it would turn
rounding into a gradient (test vectors EQ and LOO-STD).

The KL uses d = old_logp - ref_logp per sampled token: never the current logp, so that with
several updates per step the penalty stays KL[pi_old || pi_ref]. Estimators: J. Schulman,
"Approximating KL divergence", 2020. In the reward only k1 has the gradient of KL(policy ||
reference); in the loss k1 has none at all, k2 has that gradient and k3 that of KL(reference ||
policy).

A unit has one ratio: it is a completion (ratio_level sequence or geometric) or a token. The
clipped surrogate is PPO's (arXiv 1707.06347, eq. 7), `delta` dual-clip PPO's (arXiv 1912.09729),
`geometric` GSPO's ratio (arXiv 2507.18071). CISPO: MiniMax-M1 (arXiv 2506.13585); SAPO: arXiv
2511.20347; VESPO as in TRL 1.16.

A mean over an update is a sum over its micro-batches divided once by a number known beforehand,
never a mean of means: so the loss and its gradient do not depend on how the update was split.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Any, cast

from rloo_cli.algorithms.common import dialect
from rloo_cli.algorithms.common.config import Switches, in_reward
from rloo_cli.algorithms.common.hooks import AdvantageInputs, Advantages, Loss, LossInputs
from rloo_cli.algorithms.common.importance_weights import (
    LARGEST,
    Weights,
    correction_weights,
    reduce_to_level,
    sampler_logprobs,
)
from rloo_cli.data.segments import segment_sum

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from rloo_cli.data.packing import MicroBatch

SCALE_EPS = 1e-4  # TRL's, for group and batch std and for normalize_advantages
LOO_STD_EPS = 1e-6  # NeMo RL's
VESPO = {"positive": (2.0, 3.0), "negative": (3.0, 2.0)}  # k and lambda
LEAST = log(1e-8)  # the smallest log weight of VESPO
BERNOULLI_EPS = 1e-8  # verl's, in the trust region's KL


def estimate_kl(log_ratio: Tensor, config: Switches) -> Tensor:
    """k1, k2 or k3 of d = log p - log q at samples of p, in nats. (N,) -> (N,)"""
    if config.dialect in dialect.SCORE_FUNCTION_KL:
        log_ratio = log_ratio.clamp(-LARGEST, LARGEST)
    k = log_ratio
    if config.kl_estimator == "k2":
        k = log_ratio.square() / 2
    elif config.kl_estimator == "k3":
        k = (-log_ratio).clamp(-LARGEST, LARGEST).expm1() + log_ratio
    limit = dialect.TOKEN_KL_LIMIT.get(str(config.dialect))
    return k if limit is None else k.clamp(-limit, limit)


def charge_tokens(
    advantage: Tensor,
    usable: Tensor,
    old_logp: Tensor,
    ref_logp: Tensor | None,
    micro_batch: MicroBatch,
    config: Switches,
) -> Tensor:
    """With kl_credit=to_go, A_i - beta * sum_{u>=t} m*k per token; else A_i unchanged.

    `usable` (S,): completions that have an advantage; tokens of the others stay at 0. The
    tokens of a completion are neighbours and in order, as in a `MicroBatch`.
    (S,), (S,), (N,), (N,) -> (N,) or (S,)
    """
    if ref_logp is None or not config.charges_kl_to_go:
        return advantage
    k = micro_batch.mask * estimate_kl(old_logp.double() - ref_logp.double(), config)
    ends = segment_sum(k, micro_batch.sequence_ids, micro_batch.num_sequences).cumsum(0)
    rest = ends[micro_batch.sequence_ids] - k.cumsum(0) + k  # from this token on
    spread = advantage[micro_batch.sequence_ids] - config.beta * rest
    return spread.masked_fill(~usable[micro_batch.sequence_ids], 0.0)


def values_differ(values: Tensor, mask: Tensor) -> Tensor:
    """Whether any two of the masked values of a row are unequal. (G, K), (G, K) -> (G, 1) bool"""
    largest = values.masked_fill(~mask, -float("inf")).amax(-1, keepdim=True)
    return largest > values.masked_fill(~mask, float("inf")).amin(-1, keepdim=True)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the masked values of each row; 0 when there are none. (G, K), (G, K) -> (G, 1)"""
    return (values * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def masked_std(values: Tensor, mask: Tensor) -> Tensor:
    """Std of the masked values, Bessel-corrected; 0 below two of them. (G, K), (G, K) -> (G, 1)"""
    square = ((values - masked_mean(values, mask)) * mask).square().sum(-1, keepdim=True)
    return (square / (mask.sum(-1, keepdim=True) - 1).clamp(min=1)).sqrt()


def usable_completions(scorable: Tensor, config: Switches) -> Tensor:
    """Completions that can have an advantage: some need a sibling. (P, K) -> (P, K) bool"""
    if config.compares_in_groups:
        return scorable & (scorable.sum(-1, keepdim=True) > (config.pass_at_k or 1))
    return scorable


def family_advantages(inputs: AdvantageInputs, config: Switches) -> Advantages:
    """Rewards and advantages of whole groups, with every switch. (P, K) each -> (P, K) each"""
    score, kl, scorable = inputs.score, inputs.kl, inputs.scorable
    penalty = config.beta * kl if kl is not None and in_reward(config) else score * 0.0
    reward = (score - penalty).masked_fill(~scorable, 0.0)
    usable = usable_completions(scorable, config)
    a = _subtract_baseline(reward if config.kl_in_baseline else score, usable, inputs, config)
    if config.advantage_scale != "none":
        a = a / _scale_divisor(score, scorable, config)
    if config.clips_advantages:  # exactly 0 where not usable, even if the range excludes 0
        assert config.reward_clip_range is not None
        low, high = config.reward_clip_range
        a = a.clamp(low, high).masked_fill(~usable, 0.0)
    # With kl_credit=to_go the KL is subtracted token by token.
    if not config.kl_in_baseline and not config.charges_kl_to_go:
        a = (a - penalty).masked_fill(~usable, 0.0)
    return _normalize_over_step(reward, a, usable, inputs, config)


def _subtract_baseline(
    values: Tensor, usable: Tensor, inputs: AdvantageInputs, config: Switches
) -> Tensor:
    """Values minus their baseline, 0 outside `usable`. (P, K), (P, K) -> (P, K)

    loo: A_i = r_i - mean of the n-1 others = n/(n-1) * (r_i - group mean), in the second form
    (RLOO, arXiv 2402.14740; Kool et al. 2019). group_mean is (n-1)/n of it.
    """
    if config.baseline in ("none", "value"):
        return values.masked_fill(~usable, 0.0)
    if config.baseline == "ema":  # of earlier steps, so it does not depend on the step's rewards
        weight = inputs.state.get("ema_weight", 0.0)
        b = inputs.state["ema"] / weight if weight else 0.0
        return (values - b).masked_fill(~usable, 0.0)
    if config.baseline == "greedy":
        assert inputs.greedy_score is not None
        return (values - inputs.greedy_score[:, None]).masked_fill(~usable, 0.0)
    pool, mask = _comparison_pool(values, usable, config)
    differ, k = values_differ(pool, mask), config.pass_at_k or 1
    if k > 1:
        pool = values = k * best_of_k(values, usable, k)
    out = values - masked_mean(pool, mask)
    if config.baseline == "loo":
        n = usable.sum(-1, keepdim=True).to(values.dtype)
        out = out * n / (n - k).clamp(min=1)
    return out.masked_fill(~(usable & differ), 0.0)


def best_of_k(values: Tensor, usable: Tensor, k: int) -> Tensor:
    """s_i: the largest value of i and k - 1 siblings, mean over all choices of these; 0 elsewhere.

    s_i less the mean of the largest over the sets of k siblings without i, times k, is an unbiased
    estimate of the gradient of the expected largest of k, which is pass@k for scores of 0 and 1
    (arXiv 2505.15201; the advantages of 2508.10751 before their division). It equals
    k n/(n - k) (s_i - mean of s): leave-one-out for k = 1. (P, K), (P, K) -> (P, K)
    """
    n = usable.sum(-1, keepdim=True)
    order = values.masked_fill(~usable, -float("inf")).argsort(dim=-1, stable=True)
    ranked = values.masked_fill(~usable, 0.0).gather(-1, order)
    below = (order.new_ones(order.shape).cumsum(-1) - 1 - order.shape[-1] + n).clamp(min=0)
    itself = _all_from(below, n - 1, k - 1, values)  # the k - 1 siblings are among those below i
    above = ranked * _all_from(below - 1, n - 2, k - 2, values) * (k - 1) / (n - 1)
    later = above.flip(-1).cumsum(-1).flip(-1) - above
    best = values.new_zeros(values.shape).scatter(-1, order, itself * ranked + later)
    return best.masked_fill(~usable, 0.0)


def _all_from(count: Tensor, total: Tensor, size: int, like: Tensor) -> Tensor:
    """The probability that `size` of `total` things are all among `count` of them."""
    share = like.new_ones(count.shape)
    for i in range(size):
        share = share * (count - i) / (total - i)
    return share


def _scale_divisor(score: Tensor, mask: Tensor, config: Switches) -> Tensor:
    """The std of scores that advantages are divided by; 1 if those scores are all equal.

    group, batch: GRPO, arXiv 2402.03300, with Bessel's correction. loo_std: NeMo RL, the std of
    the siblings' scores; with fewer than two siblings an advantage is not divided. mean: MaxRL's,
    r / mean - 1 with the group's own mean as the baseline (arXiv 2602.02710).
    (P, K), (P, K) -> (P, K), (P, 1) or (1, 1)
    """
    eps = SCALE_EPS
    if config.advantage_scale == "mean":
        mean = masked_mean(score, mask)
        return mean.masked_fill(mean <= 0, float("inf"))
    if config.advantage_scale == "batch":
        score, mask = score.reshape(1, -1), mask.reshape(1, -1)
    elif config.advantage_scale == "loo_std":
        eps = LOO_STD_EPS
        itself = score.new_ones(score.shape[-1]).diag().bool()
        score, mask = score[:, None, :].expand(-1, len(itself), -1), mask[:, None, :] & ~itself
    divisor = (masked_std(score, mask) + eps).masked_fill(~values_differ(score, mask), 1.0)
    return divisor.squeeze(-1) if config.advantage_scale == "loo_std" else divisor


def _normalize_over_step(
    reward: Tensor, advantage: Tensor, mask: Tensor, inputs: AdvantageInputs, config: Switches
) -> Advantages:
    """(A - mean) / (std + 1e-4) over the step's usable completions, with normalize_advantages.

    Guard: if only the KL differs between siblings, and no score does, dividing would enlarge
    beta * KL a thousandfold (NORM-KL). (P, K) each
    """
    if not (config.normalize_advantages and inputs.normalize):
        return Advantages(reward, advantage, mask, False, 1.0)
    flat, flat_mask = advantage.reshape(1, -1), mask.reshape(1, -1)
    telling = bool(values_differ(*_comparison_pool(inputs.score, mask, config)).any())
    guarded = config.dialect not in dialect.UNGUARDED and not telling
    if guarded or not bool(values_differ(flat, flat_mask)):
        return Advantages(reward, advantage, mask, True, 1.0)
    divisor = masked_std(flat, flat_mask) + dialect.NORM_EPS.get(str(config.dialect), SCALE_EPS)
    scaled = ((flat - masked_mean(flat, flat_mask)) / divisor).masked_fill(~flat_mask, 0.0)
    return Advantages(reward, scaled.view_as(advantage), mask, False, 1 / float(divisor))


def _comparison_pool(values: Tensor, mask: Tensor, config: Switches) -> tuple[Tensor, Tensor]:
    """The rows within which rewards are compared: groups, or the whole step as one row."""
    if config.compares_in_groups:
        return values, mask
    return values.reshape(1, -1), mask.reshape(1, -1)


def policy_ratios(
    logp: Tensor,
    old_logp: Tensor,
    micro_batch: MicroBatch,
    config: Switches,
    weights: Weights | None = None,
) -> Tensor:
    """exp(logp - old_logp) of each unit, with gradient. (N,), (N,) -> (U,)

    Token weights cannot multiply a completion's ratio, so there they weigh the gradient of its
    log: log rho = sg(sum of d) + sum_t w_t * (logp_t - sg(logp_t)), d = logp - old_logp.
    """
    d = micro_batch.mask * (logp - old_logp)
    if weights is not None and weights.by_token and config.ratio_level != "token":
        d = d.detach() + micro_batch.mask * weights.weight * (logp - logp.detach())
    d = reduce_to_level(d, micro_batch, config.ratio_level)
    return d.clamp(-config.log_ratio_clamp, config.log_ratio_clamp).exp()


def clip_range(config: Switches, micro_batch: MicroBatch) -> tuple[float | Tensor, float | Tensor]:
    """The ratios between which nothing is clipped; (S,) each with epsilon_tokens.

    The ratio of a completion is a product over its tokens: noise of sigma per token gives its log
    sigma * sqrt(T), and so do these bounds grow. If T <= epsilon_tokens they are unchanged.
    """
    low, high = 1 - config.epsilon, config.upper
    if config.epsilon_tokens is None:
        return low, high
    tokens = reduce_to_level(micro_batch.mask, micro_batch, "sequence")
    power = (tokens / config.epsilon_tokens).clamp(min=1).sqrt()
    return max(low, 0.0) ** power, high**power


def policy_term(
    logp: Tensor,
    ratio: Tensor,
    advantage: Tensor,
    micro_batch: MicroBatch,
    config: Switches,
    weights: Weights | None,
    log_ratio: Tensor | None = None,
) -> Tensor:
    """The policy's loss per unit, or per token if it is a factor times logp.

    `advantage` may be (N,) if terms are per token. Weights already applied by `policy_ratios` are
    not applied again. `log_ratio` (N,) is logp - old_logp, which only vespo needs.
    clip: -min(rho A, clip(rho, 1-epsilon, 1+epsilon_high) A), at most -delta A where A < 0.
    cispo: -sg(min(rho, cap)) A logp: the weight is capped and no token loses its gradient.
    sapo: -f(rho) A with f(x) = sigmoid(t (x - 1)) 4 / t: a soft gate, whose slope at 1 is 1.
    (N,), (U,), (S,) -> (U,) or (N,)
    """
    kind = config.policy_loss
    a = _to_tokens(advantage, micro_batch) if config.has_token_terms else advantage
    if kind == "vespo":  # its weight contains the correction
        d = logp if log_ratio is None else log_ratio
        return _vespo_term(logp, d, a, micro_batch, weights)
    if kind == "reinforce":
        term = -a * logp
    elif kind == "cispo":
        term = -_to_tokens(ratio, micro_batch).detach().clamp(max=config.cap) * a * logp
    elif kind == "sapo":
        up, down = a.new_tensor(config.sapo_temperature_pos), config.sapo_temperature_neg
        t = up.where(a > 0, a.new_tensor(down))
        term = -(t * (ratio - 1)).sigmoid() * 4 / t * a
    else:
        low, high = clip_range(config, micro_batch)  # both numbers or both tensors
        inside = ratio.clamp(cast("Tensor", low), cast("Tensor", high))
        gain = (ratio * a).minimum(inside * a)
        if config.delta is not None:
            gain = gain.where(a >= 0, gain.maximum(config.delta * a))
        term = -gain
    if kind == "luspo":  # counts once per token
        term = term * reduce_to_level(micro_batch.mask, micro_batch, "sequence")
    if weights is None:
        return term
    if config.has_token_terms:
        return term * _to_tokens(weights.weight, micro_batch)
    return term if weights.by_token else term * weights.weight


def _vespo_term(
    logp: Tensor,
    log_ratio: Tensor,
    advantage: Tensor,
    micro_batch: MicroBatch,
    weights: Weights | None,
) -> Tensor:
    """-sg(phi(w)) A logp with log phi = lambda + k log w - lambda w, phi(1) = 1, per token.

    w is the completion's ratio times its correction weight. (k, lambda) is (2, 3) where A >= 0,
    else (3, 2). (N,), (N,), (N,), weights (N,) or (S,) -> (N,)
    """
    d = (micro_batch.mask * log_ratio.detach()).clamp(-20.0, 20.0)
    log_w = reduce_to_level(d, micro_batch, "sequence")
    if weights is not None:
        correction = weights.weight.log().clamp(LEAST, 20.0).to(log_w.dtype)
        if weights.by_token or correction.shape != log_w.shape:
            correction = reduce_to_level(micro_batch.mask * correction, micro_batch, "sequence")
        log_w = log_w + correction
    log_w = log_w.clamp(LEAST, 20.0)[micro_batch.sequence_ids]
    gains = advantage >= 0
    (k_up, l_up), (k_down, l_down) = VESPO["positive"], VESPO["negative"]
    k = advantage.new_tensor(k_up).where(gains, advantage.new_tensor(k_down))
    scale = advantage.new_tensor(l_up).where(gains, advantage.new_tensor(l_down))
    phi = (scale + k * log_w - scale * log_w.exp()).exp()
    return -phi * advantage * logp


def _off_policy_mask(
    logp: Tensor, sampler_logp: Tensor, advantage: Tensor, micro_batch: MicroBatch, limit: float
) -> Tensor:
    """The completions or tokens that off_policy_threshold keeps: DeepSeek-V3.2's sequence mask.

    `sampler_logp` has the sampler's log-probabilities, or old_logp if missing. With an
    advantage per token, each token's own sign counts. (N,), (N,), (S,) or (N,) -> bool, as
    advantage
    """
    near = reduce_to_level((sampler_logp - logp).detach(), micro_batch, "geometric") <= limit
    near = near if near.shape == advantage.shape else near[micro_batch.sequence_ids]
    return near | (advantage >= 0)


def trust_region_mask(
    logp: Tensor, sampler_logp: Tensor, advantage: Tensor, micro_batch: MicroBatch, config: Switches
) -> Tensor | None:
    """What trust_region leaves in the policy term: DPPO's mask (arXiv 2602.04879), as in verl.

    p and q are a sampled token's probabilities, of the policy and of the sampler. What moved
    farther up than `high` is left out where A > 0, what fell farther than `low` elsewhere; what
    moves back never is. level=sequence: by the mean of the tokens' distances, and the direction of
    the completion's own probability. (N,), (N,), (S,) or (N,) -> (N,), or (S,), bool
    """
    if (rule := config.trust_region) is None:
        return None
    p, q = logp.detach().exp(), sampler_logp.exp()
    moved, distance = p - q, (p - q).abs()
    if rule.kind == "kl":
        others = ((1 - q + BERNOULLI_EPS) / (1 - p + BERNOULLI_EPS)).log()
        distance = q * (sampler_logp - logp.detach()) + (1 - q) * others
    if rule.level == "token":
        advantage = _to_tokens(advantage, micro_batch)
    else:
        moved = micro_batch.mask * (logp.detach() - sampler_logp)
        moved = reduce_to_level(moved, micro_batch, "sequence")
        distance = reduce_to_level(micro_batch.mask * distance, micro_batch, "geometric")
        if moved.shape != advantage.shape:  # each token's own advantage says its direction
            moved, distance = (x[micro_batch.sequence_ids] for x in (moved, distance))
    rose, fell = (distance > rule.high) & (moved > 0), (distance > rule.low) & (moved < 0)
    return ~rose.where(advantage > 0, fell)


def aggregate_loss(term: Tensor, micro_batch: MicroBatch, config: Switches) -> Tensor:
    """A micro-batch's share of the update's sum, before the division by `update_denominator`.

    A term per completion counts once under sequence_sum and sequence_mean, and otherwise once for
    each of its unmasked tokens; a completion without unmasked tokens never counts.
    (N,) or (S,) -> ()
    """
    count = reduce_to_level(micro_batch.mask, micro_batch, "sequence")
    by_token = term.shape == micro_batch.mask.shape
    if config.loss_agg == "sequence_sum" and not by_token:
        return (term * (count > 0)).sum()
    term = micro_batch.mask * (term if by_token else term[micro_batch.sequence_ids])
    if config.loss_agg == "sequence_mean":
        return (term / count.clamp(min=1)[micro_batch.sequence_ids]).sum()
    if config.loss_agg == "token_mean_local":
        return term.sum() / count.sum().clamp(min=1)
    return term.sum()


def update_denominator(
    config: Switches,
    num_sequences: int,
    num_tokens: int,
    num_micro_batches: int,
    max_completion_length: int,
) -> float:
    """The number that the update's sum is divided by; 1 instead of 0.

    Sequences and tokens are counted over the whole update, on all ranks (with
    loss_denominator=valid the caller counts only those in the loss).
    """
    by_agg = {
        "sequence_sum": num_sequences,
        "sequence_mean": num_sequences,
        "token_mean": num_tokens,
        "constant": num_sequences * max_completion_length,
        "token_mean_local": num_micro_batches,
    }
    return float(max(by_agg[str(config.loss_agg)], 1))


def _kl_loss_term(logp: Tensor, ref_logp: Tensor, log_ratio: Tensor, config: Switches) -> Tensor:
    """beta * k(logp - ref_logp) per token, with gradient, for kl_in=loss.

    kl_ratio_weighted multiplies by exp(log_ratio), with gradient, where `log_ratio` is the
    token's logp - old_logp: exact for k1 and k3, wrong for k2. (N,), (N,), (N,) -> (N,)
    """
    k = estimate_kl(logp - ref_logp, config)
    if config.dialect in dialect.SCORE_FUNCTION_KL:  # a factor of 1 with the gradient of logp,
        free = k.abs() < dialect.TOKEN_KL_LIMIT[str(config.dialect)]  # but where a clamp acted
        k = (k * (logp - logp.detach()).exp()).where(free, k)
    if config.kl_ratio_weighted:
        k = k * log_ratio.clamp(-LARGEST, LARGEST).exp()
    return config.beta * k


def family_loss(inputs: LossInputs, config: Switches) -> Loss:
    """A micro-batch's share of the update's loss: policy term, KL, entropy bonus.

    The `total`s of an update's micro-batches, and their gradients, add up to its loss.
    """
    logp, old, ref = inputs.logp, inputs.old_logp, inputs.ref_logp
    micro_batch, advantage, denominator = inputs.micro_batch, inputs.advantage, inputs.denominator
    weights = correction_weights(old, micro_batch, config)
    sampler_logp = sampler_logprobs(old, micro_batch)
    base = sampler_logp if config.correction.mode == "bypass" else old
    region = trust_region_mask(logp, sampler_logp, advantage, micro_batch, config)
    chosen = inputs.chosen
    if region is not None:
        near = _to_tokens(region, micro_batch)
        chosen = near if chosen is None else chosen & near
    # A token that is left out is in its completion's ratio, and has no gradient.
    moving = logp if chosen is None else logp.where(chosen, logp.detach())
    ratio = policy_ratios(moving, base, micro_batch, config, weights)
    term = policy_term(moving, ratio, advantage, micro_batch, config, weights, logp - base)
    if chosen is not None:
        term = term * _left_in(chosen, term, micro_batch)
    limit = config.off_policy_threshold
    if limit is not None:
        kept = _off_policy_mask(logp, sampler_logp, advantage, micro_batch, limit)
        term = term * (kept if kept.shape == term.shape else kept[micro_batch.sequence_ids])
    policy = aggregate_loss(term, micro_batch, config) / denominator
    penalty = bonus = policy.detach() * 0.0
    if ref is not None and config.kl_in == "loss":
        kl_logp = logp if inputs.kl_logp is None else inputs.kl_logp
        k = _kl_loss_term(kl_logp, ref, logp - base, config)
        penalty = aggregate_loss(k, micro_batch, config) / denominator
    entropy = None
    if config.has_entropy_bonus and inputs.entropy is not None:
        counted = micro_batch.mask if inputs.chosen is None else micro_batch.mask * inputs.chosen
        entropy = (inputs.entropy * counted).sum() / inputs.num_tokens
        coef = config.entropy_coef if inputs.entropy_coef is None else inputs.entropy_coef
        bonus = coef * entropy
    return Loss(
        total=policy + penalty - bonus,
        policy=policy.detach(),
        kl=penalty.detach(),
        bonus=bonus.detach(),
        entropy=None if entropy is None else entropy.detach(),
        kept=region,
        weight=None if weights is None else weights.weight,
        raw_weight=None if weights is None else weights.raw,
        **_ratio_columns(ratio.detach(), (logp - base).detach(), advantage, micro_batch, config),
    )


def _left_in(chosen: Tensor, term: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Which terms have a chosen token. (N,) bool, (U,) -> (U,) bool"""
    if _is_per_token(term, micro_batch):
        return chosen
    return reduce_to_level(micro_batch.mask * chosen, micro_batch, "sequence") > 0


def entropy_weight(config: Switches, control: Mapping[str, float]) -> float:
    """The factor of an update's entropy bonus. `control`: what `adapt_entropy` returned last."""
    rule = config.adaptive_entropy
    if rule is None:
        return config.entropy_coef
    low = control.get("entropy", float("inf")) <= rule.target
    return control["coef"] if low else 0.0


def adapt_entropy(
    config: Switches, control: Mapping[str, float], entropy: float
) -> dict[str, float]:
    """The weight of the entropy for the next update, and the mean entropy of this one.

    As Skywork-OR1 (arXiv 2505.22312) and TRL 1.16: the weight rises by delta after an update whose
    entropy was at its target or below, and falls otherwise.
    """
    rule, coef = config.adaptive_entropy, control.get("coef", config.entropy_coef)
    assert rule is not None
    low = entropy <= rule.target
    coef = min(coef + rule.delta, rule.max) if low else max(coef - rule.delta, rule.min)
    return {"coef": coef, "entropy": entropy}


def _ratio_columns(
    ratio: Tensor, log_ratio: Tensor, advantage: Tensor, micro_batch: MicroBatch, config: Switches
) -> dict[str, Any]:
    """The fields of `Loss` about ratios. (U,), (N,), (S,) or (N,) -> (U,) or (S,) each"""
    d, unit = micro_batch.mask * log_ratio, micro_batch.mask
    if config.ratio_level == "token":
        advantage = _to_tokens(advantage, micro_batch)
    else:
        d = reduce_to_level(d, micro_batch, "sequence")
        unit = reduce_to_level(unit, micro_batch, "sequence")
    counted = unit > 0
    if advantage.shape != unit.shape:  # kl_credit=to_go needs reinforce here: nothing clips
        advantage, counted = ratio.new_zeros(unit.shape), counted & False
    clips = counted & (config.policy_loss in ("clip", "luspo"))  # others clip no gradient
    lowest, highest = clip_range(config, micro_batch)
    low = clips & (ratio < lowest) & (advantage < 0)
    high = clips & (ratio > highest) & (advantage > 0)
    # A completion's share of flagged tokens is their mean; a flag of its own is its share.
    level = "geometric" if _is_per_token(low, micro_batch) else "token"
    capped = None
    if config.policy_loss == "cispo":
        capped = counted & (ratio > config.cap) & (advantage > 0)
    return {
        "ratio": ratio,
        "low": low,
        "high": high,
        "delta": clips & (ratio > (config.delta or float("inf"))) & (advantage < 0),
        "unit_mask": unit > 0,
        "row_low": reduce_to_level(low.to(unit.dtype), micro_batch, level),
        "row_high": reduce_to_level(high.to(unit.dtype), micro_batch, level),
        "log_ratio_sq": d.square(),
        "capped": capped,
    }


def _is_per_token(values: Tensor, micro_batch: MicroBatch) -> bool:
    # Every completion has a token, so S = N only if each has exactly one and both readings agree.
    return values.shape == micro_batch.sequence_ids.shape


def _to_tokens(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    return values if _is_per_token(values, micro_batch) else values[micro_batch.sequence_ids]

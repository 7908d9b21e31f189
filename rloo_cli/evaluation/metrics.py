"""What is said of held-out samples: the names of files and metrics, means, unbiased pass@k.

Every prompt of a set has one greedy completion and, with eval.num_generations = K > 1, K sampled
ones. Metrics begin with `eval_`, or `eval_<name>_` for a set of eval.sets:

    reward, reward/<name>/mean          over greedy completions that have a score
    completions/..., samples, unscored  of all greedy ones; those without a score
    avg@K                               mean over prompts of the mean score of their K
    pass@k                              mean over prompts of the unbiased estimate from their K

A completion without a score (every reward said None, or failed under on_error=none) is absent:
its prompt's n falls, it is no failure to pass. A prompt with n < k takes no part in pass@k; then
`pass@k/prompts` says how many did. Where nothing has a score, there is no metric.
"""

from collections.abc import Mapping, Sequence
from math import prod

from rloo_cli.config.schema import EvalConfig
from rloo_cli.reporting.eval_lines import eval_prefix
from rloo_cli.utils.files import JsonObject

ROUNDING_TOLERANCE = 1e-9  # weights such as 0.7 + 0.2 + 0.1 do not add up to 1 in binary


def eval_set_metrics(
    name: str,
    samples: Sequence[JsonObject],
    settings: EvalConfig,
    failure_rates: Mapping[str, float],
) -> JsonObject:
    """The metrics of one set from all its samples; `failed`: reward -> share of failed rows."""
    greedy = [s for s in samples if s["greedy"]]
    row: JsonObject = {}
    _add_mean(row, "reward", [s["score"] for s in greedy])
    for reward in greedy[0]["rewards"]:
        _add_mean(row, f"reward/{reward}/mean", [s["rewards"][reward] for s in greedy])
    row |= {
        f"reward/{reward}/error_rate": share for reward, share in failure_rates.items() if share
    }
    _add_mean(row, "completions/mean_length", [s["completion_length"] for s in greedy])
    _add_mean(row, "completions/clipped_ratio", [not s["terminated"] for s in greedy])
    row["samples"] = len(greedy)
    row["unscored"] = sum(s["score"] is None for s in greedy)
    row |= _sampled_metrics([s for s in samples if not s["greedy"]], settings)
    return {eval_prefix(name) + key: value for key, value in row.items()}


def _sampled_metrics(samples: Sequence[JsonObject], settings: EvalConfig) -> JsonObject:
    """avg@K and pass@k of the completions that were sampled."""
    prompts: dict[int, list[JsonObject]] = {}
    for sample in samples:
        prompts.setdefault(sample["draw"], []).append(sample)
    if not prompts:
        return {}
    row: JsonObject = {}
    scores = [[s["score"] for s in own if s["score"] is not None] for own in prompts.values()]
    means = [sum(own) / len(own) for own in scores if own]
    _add_mean(row, f"avg@{settings.num_generations}", means)
    row["sampled_unscored"] = len(samples) - sum(map(len, scores))
    values = [[_pass_value(s, settings) for s in own] for own in prompts.values()]
    told = [[v for v in own if v is not None] for own in values]
    least = settings.pass_threshold - ROUNDING_TOLERANCE
    counts = [(len(own), sum(v >= least for v in own)) for own in told]
    for k in pass_ks(settings):
        known = [pass_at_k(n, c, k) for n, c in counts if n >= k]
        _add_mean(row, f"pass@{k}", known)
        if 0 < len(known) < len(prompts):
            row[f"pass@{k}/prompts"] = len(known)
    return row


def _pass_value(sample: JsonObject, settings: EvalConfig) -> float | None:
    """What decides whether a completion passes."""
    if settings.pass_reward is None:
        score: float | None = sample["score"]
        return score
    said: float | None = sample["rewards"][settings.pass_reward]
    return said


def pass_ks(settings: EvalConfig) -> list[int]:
    """The k of pass@k: those asked for, else powers of two up to K, and K."""
    most = settings.num_generations
    if settings.pass_at is not None:
        return sorted(set(settings.pass_at))
    return sorted({2**i for i in range(most.bit_length())} | {most})


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of k drawn without replacement from n, of which c pass, passes.

    1 - C(n-c, k) / C(n, k), which is unbiased for 1 - (1 - p)^k (Chen et al. 2021, arXiv
    2107.03374, equation 1), as the product of its ratios: no binomial is ever formed.
    """
    if n - c < k:
        return 1.0
    return 1.0 - prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def _add_mean(means: JsonObject, name: str, values: Sequence[float | None]) -> None:
    """Add the mean of the values that are there, if any is."""
    known = [v for v in values if v is not None]
    if known:
        means[name] = sum(known) / len(known)

"""The metrics of held-out samples: means with their standard errors, and unbiased pass@k.

Every prompt of a set has one greedy completion and, with eval.num_generations = K > 1, K sampled
ones.

A completion without a score (every reward returned None, or failed under on_error=none) is left
out: it lowers its prompt's n, and does not count as a failure. A prompt with n < k is left out of
pass@k; then `pass@k/prompts` counts the others. Without any score, the metrics are omitted.

Every mean of scores has a standard error (`.../se`) and a 95 % interval (`.../low`, `.../high`),
clustered by prompt: equal rows of the data are one cluster (`reporting.statistics`).
"""

from collections.abc import Mapping, Sequence
from math import prod

from rloo_cli.config.schema import EvalConfig
from rloo_cli.reporting.episode_metrics import episode_metrics
from rloo_cli.reporting.eval_lines import eval_prefix
from rloo_cli.reporting.statistics import score_interval, score_metrics
from rloo_cli.utils.files import JsonObject

ROUNDING_TOLERANCE = 1e-9  # weights such as 0.7 + 0.2 + 0.1 do not add up to 1 in binary

METRICS = {"Evaluations": [  # read by utils.metrics
    ("reward", "score", "", "mean score of the greedy completions"),
    ("reward/<reward>/mean", "score", "", "mean of one reward over them"),
    ("reward/<reward>/error_rate", "share", "", "completions whose call failed"),
    ("completions/mean_length", "tokens", "", "mean length of the greedy completions"),
    ("completions/clipped_ratio", "share", "", "greedy completions cut at max_completion_length"),
    ("samples", "count", "", "greedy completions, one per prompt"),
    ("unscored", "count", "", "of these, without a score"),
    ("sampled_unscored", "count", "", "sampled completions without a score"),
    ("avg@<k>", "score", "", "mean over prompts of the mean score of K sampled completions"),
    ("pass@<k>", "share", "", "unbiased estimate of the chance that one of k completions passes"),
    ("pass@<k>/prompts", "count", "",
     "prompts with at least k scored completions, if not all have them"),
    ("reward/se", "score", "", "standard error of reward, clustered by prompt"),
    ("reward/<reward>/mean/se", "score", "",
     "standard error of reward/<reward>/mean, clustered by prompt"),
    ("avg@<k>/se", "score", "", "standard error of avg@<k>, clustered by prompt"),
    ("pass@<k>/se", "score", "", "standard error of pass@<k>, clustered by prompt"),
    ("reward/low", "score", "", "lower end of the 95 % interval of reward"),
    ("reward/<reward>/mean/low", "score", "",
     "lower end of the 95 % interval of reward/<reward>/mean"),
    ("avg@<k>/low", "score", "", "lower end of the 95 % interval of avg@<k>"),
    ("pass@<k>/low", "score", "", "lower end of the 95 % interval of pass@<k>"),
    ("reward/high", "score", "", "upper end of the 95 % interval of reward"),
    ("reward/<reward>/mean/high", "score", "",
     "upper end of the 95 % interval of reward/<reward>/mean"),
    ("avg@<k>/high", "score", "", "upper end of the 95 % interval of avg@<k>"),
    ("pass@<k>/high", "score", "", "upper end of the 95 % interval of pass@<k>"),
]}  # fmt: skip


def eval_set_metrics(
    name: str,
    samples: Sequence[JsonObject],
    settings: EvalConfig,
    failure_rates: Mapping[str, float],
) -> JsonObject:
    """The metrics of one set; `failure_rates`: reward -> share of the samples where it failed."""
    greedy = [s for s in samples if s["greedy"]]
    metrics: JsonObject = {}
    prompts = [_prompt_key(s) for s in greedy]
    metrics |= _mean_score("reward", [s["score"] for s in greedy], prompts)
    for reward in greedy[0]["rewards"]:
        scores = [s["rewards"][reward] for s in greedy]
        metrics |= _mean_score(f"reward/{reward}/mean", scores, prompts)
    metrics |= {f"reward/{r}/error_rate": share for r, share in failure_rates.items() if share}
    lengths = [s["completion_length"] for s in greedy]
    metrics["completions/mean_length"] = sum(lengths) / len(greedy)
    metrics["completions/clipped_ratio"] = sum(not s["terminated"] for s in greedy) / len(greedy)
    metrics["samples"] = len(greedy)
    metrics["unscored"] = sum(s["score"] is None for s in greedy)
    metrics |= episode_metrics([s["episode"] for s in greedy if "episode" in s])
    metrics |= _sampled_metrics([s for s in samples if not s["greedy"]], settings)
    return {eval_prefix(name) + key: value for key, value in metrics.items()}


def _sampled_metrics(samples: Sequence[JsonObject], settings: EvalConfig) -> JsonObject:
    """avg@K and pass@k of the sampled completions."""
    prompts: dict[int, list[JsonObject]] = {}
    for sample in samples:
        prompts.setdefault(sample["draw"], []).append(sample)
    if not prompts:
        return {}
    metrics: JsonObject = {}
    keys, num = [_prompt_key(p[0]) for p in prompts.values()], settings.num_generations
    scores = [[s["score"] for s in p if s["score"] is not None] for p in prompts.values()]
    means = [sum(values) / len(values) if values else None for values in scores]
    metrics |= _mean_score(f"avg@{num}", means, keys, num)
    metrics["sampled_unscored"] = len(samples) - sum(map(len, scores))
    least = settings.pass_threshold - ROUNDING_TOLERANCE
    counts = []  # (n, c) of each prompt
    for completions in prompts.values():
        values = [v for s in completions if (v := _pass_value(s, settings)) is not None]
        counts.append((len(values), sum(v >= least for v in values)))
    for k in settings.pass_ks:
        estimates = [pass_at_k(n, c, k) if n >= k else None for n, c in counts]
        metrics |= _mean_score(f"pass@{k}", estimates, keys, max(1, num // k))
        if 0 < (known := len(estimates) - estimates.count(None)) < len(prompts):
            metrics[f"pass@{k}/prompts"] = known
    return metrics


def _pass_value(sample: JsonObject, settings: EvalConfig) -> float | None:
    """The score that decides whether a completion passes."""
    reward = settings.pass_reward
    score: float | None = sample["score"] if reward is None else sample["rewards"][reward]
    return score


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of k, taken without replacement from n of which c pass, passes.

    1 - C(n-c, k) / C(n, k), which is unbiased for 1 - (1 - p)^k (Chen et al. 2021, arXiv
    2107.03374, equation 1), as the product of its ratios: no binomial is ever formed.
    """
    if n - c < k:
        return 1.0
    return 1.0 - prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def _prompt_key(sample: JsonObject) -> str:
    """The identity of a sample's prompt: its text, its images and the columns of its row."""
    return repr([sample.get(name) for name in ("prompt", "images", "row")])


def _mean_score(
    name: str, scores: Sequence[float | None], prompts: Sequence[str], completions: int = 1
) -> JsonObject:
    """The mean of the scores that are not None with its error, {} without any.

    Each belongs to one prompt, and is the mean of this many completions.
    """
    known = [(s, prompt) for s, prompt in zip(scores, prompts, strict=True) if s is not None]
    interval = score_interval([s for s, _ in known], [p for _, p in known], completions)
    return score_metrics(name, interval)

"""The age of the weights that sampled a step's tokens, in updates, and its effect.

Without `generation.overlap` every token has the lag 0. With `carry` a completion may have tokens of
several versions, and siblings of different ones.
"""

import torch
from torch import Tensor

from rloo_cli.data.batch import Batch
from rloo_cli.utils.metrics import MetricValues

METRICS = {"Prompts and completions": [  # read by utils.metrics
    ("staleness/mean", "updates", "mean:sampled_tokens",
     "updates between the weights that sampled a token and those being trained, mean over the "
     "tokens"),
    ("staleness/max", "updates", "max", "its largest value"),
    ("staleness/span_max", "count", "max",
     "most versions of the weights in one completion (generation.overlap=carry)"),
    ("staleness/frac_lag<k>", "share", "share:sampled_tokens",
     "tokens sampled by weights k updates old (generation.overlap=carry)"),
], "Sampler against trainer": [
    ("sampling/logp_diff_lag0", "nats", "rms:gap_lag0",
     "root mean square if sampler and trainer had the same weights: only numerics"),
    ("sampling/logp_diff_lag1", "nats", "rms:gap_lag1",
     "the same if the sampler's were one update older"),
    ("sampling/logp_diff_lag<k>", "nats", "rms:gap_lag<k>",
     "the same if they were k updates older (generation.overlap=carry)"),
]}  # fmt: skip


def staleness_metrics(batch: Batch, version: int) -> tuple[MetricValues, MetricValues]:
    """Mean and largest lag of the step's tokens; `version`: of the weights being trained.

    If groups are carried over steps, also the most versions in one completion, each lag's share
    of the tokens, and the sampler's difference from the trainer by lag.

    -> the metrics, and the counts behind the last ones, `gap_lag<k>`
    """
    lags = version - token_versions(batch)
    metrics = {"staleness/mean": float(lags.double().mean()), "staleness/max": float(lags.max())}
    counts: MetricValues = {}
    if batch.pending is None:
        return metrics, counts
    spans = [len(r.version_spans or [0]) for g in batch.groups for r in g.rollouts]
    metrics["staleness/span_max"] = float(max(spans))
    gap = _logp_gaps(batch)
    for lag in sorted(set(lags.tolist())):
        of_lag = lags == lag
        metrics[f"staleness/frac_lag{lag}"] = float(of_lag.double().mean())
        known = gap[of_lag & ~gap.isnan()]
        if known.numel():
            metrics[f"sampling/logp_diff_lag{lag}"] = float(known.square().mean().sqrt())
            counts[f"gap_lag{lag}"] = known.numel()
    return metrics, counts


def one_lag_metrics(metrics: MetricValues, num_tokens: float) -> tuple[MetricValues, MetricValues]:
    """The sampler's difference from the trainer, by the one lag (0 or 1) of all the step's tokens.

    `metrics`: of the step, including its staleness; `num_tokens`: number of compared tokens.
    -> the metric, and its count, as from `staleness_metrics`
    """
    lag = int(metrics["staleness/max"] > 0)
    gap = {f"sampling/logp_diff_lag{lag}": metrics["sampling/logp_diff_rms"]}
    return gap, {f"gap_lag{lag}": num_tokens}


def token_versions(batch: Batch) -> Tensor:
    """The version of the weights that sampled each token of a batch. -> (N,) int64"""
    spans = [
        span
        for group in batch.groups
        for r in group.rollouts
        for span in r.version_spans or [(r.weight_version, r.length)]
    ]
    versions, counts = torch.tensor(spans, dtype=torch.int64).unbind(1)
    return versions.repeat_interleave(counts)


def _logp_gaps(batch: Batch) -> Tensor:
    """Trainer's minus sampler's log-probability of each token, NaN where one is missing. -> (N,)"""
    parts = []
    for group in batch.groups:
        for k, rollout in enumerate(group.rollouts):
            theirs, ours = rollout.sampled_logp, group.old_logp
            if theirs is None or ours is None:
                parts.append(torch.full((rollout.length,), torch.nan, dtype=torch.float64))
            else:
                parts.append(ours[k].double() - torch.tensor(theirs, dtype=torch.float64))
    return torch.cat(parts)

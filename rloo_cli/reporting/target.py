"""The target of a run (`target`): the held-out score that ends it, and the clock until then.

The score counts with the lower end of its 95 % interval, which the evaluation has computed
(`statistics`). The clock is the time of the steps: sampling, rewards, updates, syncs and saves
between steps, without evaluations. It is read from metrics.jsonl, so that it adds up over all
attempts, and a resumed run decides as the interrupted one would have.
"""

from rloo_cli.config.schema import TargetConfig
from rloo_cli.reporting import eval_lines
from rloo_cli.reporting.log import RunLog
from rloo_cli.utils.files import JsonObject


def target_result(target: TargetConfig, log: RunLog) -> JsonObject:
    """The target and the last evaluation's score beside it; {} without a target or evaluation."""
    line = next((m for m in reversed(log.metrics_lines) if eval_lines.is_evaluation(m)), None)
    if target.metric is None or target.at_least is None or line is None:
        return {}
    low = line.get(f"{target.metric}/low")  # None: without variation there is no interval
    return {
        "metric": target.metric,
        "at_least": target.at_least,
        "confidence": target.confidence,
        "value": line.get(target.metric),
        "low": low,
        "reached": low is not None and low >= target.at_least,
        "step": line["step"],
        "seconds": round(training_seconds(log), 2),
    }


def is_target_reached(target: TargetConfig, log: RunLog, step: int) -> bool:
    """Whether the evaluation after `step` steps has reached the target."""
    result = target_result(target, log)
    return bool(result) and result["step"] == step and bool(result["reached"])


def training_seconds(log: RunLog) -> float:
    """Seconds of all steps of a run's folder, in all attempts, without evaluations."""
    total, before = 0.0, 0
    for line in log.training_lines:  # its step_time is the mean over the steps since `before`
        steps = line["step"] - before if before else min(line["step"], log.every)
        total, before = total + steps * line["step_time"], line["step"]
    return total + sum(float(metrics["step_time"]) for metrics in log.pending_steps)


def target_text(result: JsonObject) -> str:
    """The result of `target_result` as a line."""
    low = "unknown" if result["low"] is None else f"{result['low']:.4g}"
    verb = "has reached" if result["reached"] else "has not reached"
    return (
        f"{result['metric']}/low {low} {verb} {result['at_least']:g} at step {result['step']},"
        f" after {result['seconds']:.1f} s of training"
    )

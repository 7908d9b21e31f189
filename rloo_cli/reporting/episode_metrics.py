"""The metrics of episodes: their turns and calls, failures, and limits reached.

They are computed from the facts that each rollout carries, so they cover all ranks and
held-out sets alike. Without an agent there are none.
"""

from collections.abc import Sequence

from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.metrics import MetricValues

LIMITS = ("turns", "tokens", "context", "completion")  # an episode that reaches one is truncated

METRICS = {"Episodes": [  # read by utils.metrics
    ("agent/turns", "count", "mean:episodes", "sampled turns of an episode, mean"),
    ("agent/calls", "count", "mean:episodes", "calls of tools in an episode, mean"),
    ("agent/bad_calls", "count", "mean:episodes",
     "calls in an episode that could not be parsed, named an unknown tool or had wrong "
     "arguments, mean"),
    ("agent/errors", "count", "mean:episodes",
     "calls in an episode whose tool raised, timed out or exited, mean"),
    ("agent/failures", "share", "mean:episodes",
     "episodes whose environment failed: out of baseline and loss"),
    ("agent/tool_s", "s", "mean:calls", "seconds of a call, mean"),
    ("agent/retokenised", "count", "mean",
     "turns whose prompt differs from the ids sampled before it; one of them stops the run"),
    ("agent/refused", "count", "mean:episodes",
     "requests of an episode's agent that got an error (agent=proxy), mean"),
    ("agent/truncated_by/turns", "share", "mean:episodes",
     "episodes that made a call in their last turn, or whose agent requested another turn"),
    ("agent/truncated_by/tokens", "share", "mean:episodes",
     "episodes ended by agent.max_episode_tokens"),
    ("agent/truncated_by/context", "share", "mean:episodes",
     "episodes ended by the model's context"),
    ("agent/truncated_by/completion", "share", "mean:episodes",
     "episodes whose last turn was cut at max_completion_length"),
]}  # fmt: skip


def episode_metrics(facts: Sequence[JsonObject]) -> MetricValues:
    """Means over episodes; `facts`: `Rollout.episode_facts` of each."""
    if not facts:
        return {}
    count, calls = len(facts), sum(f["calls"] for f in facts)
    ends = [f["ended_by"] for f in facts]
    means = ("turns", "calls", "bad_calls", "errors")
    metrics = {f"agent/{name}": sum(f[name] for f in facts) / count for name in means}
    metrics |= {
        "agent/failures": ends.count("failed") / count,
        "agent/tool_s": sum(f["tool_s"] for f in facts) / calls if calls else 0.0,
        "agent/retokenised": float(sum(f["retokenised"] for f in facts)),
    }
    if any("refused" in f for f in facts):  # from agents behind the proxy
        metrics["agent/refused"] = sum(f.get("refused", 0) for f in facts) / count
    for limit in LIMITS:
        metrics[f"agent/truncated_by/{limit}"] = ends.count(limit) / count
    return metrics

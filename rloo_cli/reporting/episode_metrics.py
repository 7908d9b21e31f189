"""The metrics of episodes: their turns and calls, what failed, and what cut them off.

They are computed from the facts that each rollout carries, so that they hold for all ranks and for
held-out sets alike. Without an agent there are none.
"""

from collections.abc import Sequence

from rloo_cli.utils.files import JsonObject

MetricValues = dict[str, float]
LIMITS = ("turns", "tokens", "context", "completion")  # an episode ended by one was cut off


def episode_metrics(facts: Sequence[JsonObject]) -> MetricValues:
    """Means over episodes; `facts`: `Rollout.episode_facts` of each."""
    if not facts:
        return {}
    count = len(facts)

    def mean(name: str) -> float:
        return float(sum(f[name] for f in facts)) / count

    calls = sum(f["calls"] for f in facts)
    ends = [f["ended_by"] for f in facts]
    metrics = {
        "agent/turns": mean("turns"),
        "agent/calls": mean("calls"),
        "agent/bad_calls": mean("bad_calls"),
        "agent/errors": mean("errors"),
        "agent/failures": ends.count("failed") / count,
        "agent/tool_s": sum(f["tool_s"] for f in facts) / calls if calls else 0.0,
        "agent/retokenised": float(sum(f["retokenised"] for f in facts)),
    }
    if any("refused" in f for f in facts):  # of agents behind the proxy
        metrics["agent/refused"] = sum(f.get("refused", 0) for f in facts) / count
    for limit in LIMITS:
        metrics[f"agent/truncated_by/{limit}"] = ends.count(limit) / count
    return metrics

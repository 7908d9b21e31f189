"""The metrics of episodes: their turns and calls, what failed, and what cut them off.

They are computed from the facts that each rollout carries, so that they hold for all ranks and for
held-out sets alike. Without an agent there are none.
"""

from collections.abc import Sequence

from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.metrics import MetricValues

LIMITS = ("turns", "tokens", "context", "completion")  # an episode ended by one was cut off

METRICS = {"Episodes": [  # read by utils.metrics
    ("agent/turns", "count", "mean:episodes", "sampled turns of an episode, mean"),
    ("agent/calls", "count", "mean:episodes", "calls of tools in an episode, mean"),
    ("agent/bad_calls", "count", "mean:episodes",
     "calls in an episode that could not be read, were of an unknown tool or had wrong "
     "arguments, mean"),
    ("agent/errors", "count", "mean:episodes",
     "calls in an episode whose tool raised, was late or ended, mean"),
    ("agent/failures", "share", "mean:episodes",
     "episodes whose environment failed: out of baseline and loss"),
    ("agent/tool_s", "s", "mean:calls", "seconds of a call, mean"),
    ("agent/retokenised", "count", "mean",
     "turns whose prompt was not the ids that were sampled before it; a run with one stops"),
    ("agent/refused", "count", "mean:episodes",
     "requests of an episode's agent that got an error (agent=proxy), mean"),
    ("agent/truncated_by/turns", "share", "mean:episodes",
     "episodes that made a call in their last turn, or whose agent asked for one more"),
    ("agent/truncated_by/tokens", "share", "mean:episodes",
     "episodes ended by agent.max_episode_tokens"),
    ("agent/truncated_by/context", "share", "mean:episodes",
     "episodes ended by the model's context"),
    ("agent/truncated_by/completion", "share", "mean:episodes",
     "episodes with a turn that was cut at max_completion_length, which is their last"),
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
    if any("refused" in f for f in facts):  # of agents behind the proxy
        metrics["agent/refused"] = sum(f.get("refused", 0) for f in facts) / count
    for limit in LIMITS:
        metrics[f"agent/truncated_by/{limit}"] = ends.count(limit) / count
    return metrics

"""Which failures stop the run, and what is said about them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rloo_cli.rewards.engine.arguments import CompletionTable
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.results import CallFailure, CallResult
from rloo_cli.utils import redact
from rloo_cli.utils.errors import Problem, RewardError

MAX_DETAILED_FAILURES = 8  # failed rows per reward written out in full


class RewardFailed(RewardError):
    """A reward failed and the run has to stop. `detail` goes to debug/reward_error.json."""

    def __init__(self, *problems: Problem, detail: dict[str, Any]):
        super().__init__(*problems)
        self.detail = redact.redact_tree(detail)


@dataclass
class RewardResult:
    """All that one reward said about a step."""

    reward: Reward
    values: dict[int, float | None]  # row -> value; failed rows are not in it
    failures: dict[int, CallFailure]  # row -> why
    call_results: list[CallResult]
    seconds: float


def check_reward_failures(results: Sequence[RewardResult], table: CompletionTable) -> None:
    """Raises RewardFailed, with one problem per reward that must not go on."""
    stopping = [v for v in results if v.failures and _stops_run(v, len(table))]
    if stopping:
        step = getattr(table.context.trainer_state, "step", None)
        detail = {"step": step, "rewards": [_failure_detail(v, table) for v in stopping]}
        raise RewardFailed(*(_failure_problem(v, table, step) for v in stopping), detail=detail)


def _stops_run(result: RewardResult, num_completions: int) -> bool:
    config = result.reward.config
    return (
        config.on_error == "raise" or len(result.failures) > config.max_error_rate * num_completions
    )


def _failure_problem(result: RewardResult, table: CompletionTable, step: int | None) -> Problem:
    name, config = result.reward.name, result.reward.config
    row, failure = next(iter(result.failures.items()))
    which = describe_completion(table, row)
    together = [r for r, f in result.failures.items() if f is failure]
    if len(together) > 1:  # their whole call failed
        which = f"rows {together[0]} to {together[-1]}; the first: {which}"
    why = f"{failure.frames}{failure.message}\n{len(result.failures)} of {len(table)} rows failed"
    if config.on_error != "raise":
        why += f", more than reward.{name}.max_error_rate = {config.max_error_rate:g} of them"
    verb = "" if failure.kind == "invalid" else "failed: "
    return Problem(
        f"reward {name!r} {verb}{failure.message.splitlines()[-1]}",
        where=f"{result.reward.location}, step {step}, {which}",
        why=why,
        fix=f"correct the reward, or reward.{name}.on_error=none to leave a few such rows out",
        more="debug/reward_error.json in the run's folder has these rows",
    )


def describe_completion(table: CompletionTable, index: int) -> str:
    """A row of the step in words."""
    group, _ = table.group_and_rollout(index)
    return (
        f"row {index} (prompt {index // table.k}, completion {index % table.k}, "
        f"draw {group.prompt_offset}): {group.prompt!r:.80}"
    )


def _failure_detail(result: RewardResult, table: CompletionTable) -> dict[str, Any]:
    """Everything about a reward's failures, as JSON has it."""
    rows = []
    for row, failure in list(result.failures.items())[:MAX_DETAILED_FAILURES]:
        group, rollout = table.group_and_rollout(row)
        rows.append(
            {
                "row": row,
                "draw": group.prompt_offset,
                "prompt": group.prompt if isinstance(group.prompt, str) else repr(group.prompt),
                "completion": rollout.text,
                "completion_ids": list(rollout.completion_ids),
                "columns": {c: repr(v)[:500] for c, v in group.example.items()},
                "kind": failure.kind,
                "message": failure.message,
            }
        )
    return {
        "reward": result.reward.name,
        "code": result.reward.location,
        "failed_rows": list(result.failures),
        "traceback": next(iter(result.failures.values())).trace,
        "rows": rows,
    }

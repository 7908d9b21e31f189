"""Which failures stop the run, and what is said about them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rloo_cli.rewards.engine.arguments import Table
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.results import Failure, Outcome
from rloo_cli.utils import redact
from rloo_cli.utils.errors import Problem, RewardError

DETAILED = 8  # failed rows per reward written out in full


class RewardFailed(RewardError):
    """A reward failed and the run has to stop. `detail` goes to debug/reward_error.json."""

    def __init__(self, *problems: Problem, detail: dict[str, Any]):
        super().__init__(*problems)
        self.detail = redact.tree(detail)


@dataclass
class Verdict:
    """All that one reward said about a step."""

    reward: Reward
    values: dict[int, float | None]  # row -> value; failed rows are not in it
    failures: dict[int, Failure]  # row -> why
    outcomes: list[Outcome]
    seconds: float


def check(verdicts: Sequence[Verdict], table: Table) -> None:
    """Raises RewardFailed, with one problem per reward that must not go on."""
    stopping = [v for v in verdicts if v.failures and _stops(v, len(table))]
    if stopping:
        step = getattr(table.context.trainer_state, "step", None)
        detail = {"step": step, "rewards": [_detail(v, table) for v in stopping]}
        raise RewardFailed(*(_problem(v, table, step) for v in stopping), detail=detail)


def _stops(verdict: Verdict, rows: int) -> bool:
    config = verdict.reward.config
    return config.on_error == "raise" or len(verdict.failures) > config.max_error_rate * rows


def _problem(verdict: Verdict, table: Table, step: int | None) -> Problem:
    name, config = verdict.reward.name, verdict.reward.config
    row, failure = next(iter(verdict.failures.items()))
    which = place(table, row)
    together = [r for r, f in verdict.failures.items() if f is failure]
    if len(together) > 1:  # their whole call failed
        which = f"rows {together[0]} to {together[-1]}; the first: {which}"
    why = f"{failure.frames}{failure.message}\n{len(verdict.failures)} of {len(table)} rows failed"
    if config.on_error != "raise":
        why += f", more than reward.{name}.max_error_rate = {config.max_error_rate:g} of them"
    verb = "" if failure.kind == "invalid" else "failed: "
    return Problem(
        f"reward {name!r} {verb}{failure.message.splitlines()[-1]}",
        where=f"{verdict.reward.location}, step {step}, {which}",
        why=why,
        fix=f"correct the reward, or reward.{name}.on_error=none to leave a few such rows out",
        more="debug/reward_error.json in the run's folder has these rows",
    )


def place(table: Table, row: int) -> str:
    """A row of the step in words."""
    group, _ = table.at(row)
    return (
        f"row {row} (prompt {row // table.k}, completion {row % table.k}, "
        f"draw {group.draw}): {group.prompt!r:.80}"
    )


def _detail(verdict: Verdict, table: Table) -> dict[str, Any]:
    """Everything about a reward's failures, as JSON has it."""
    rows = []
    for row, failure in list(verdict.failures.items())[:DETAILED]:
        group, rollout = table.at(row)
        rows.append(
            {
                "row": row,
                "draw": group.draw,
                "prompt": group.prompt if isinstance(group.prompt, str) else repr(group.prompt),
                "completion": rollout.text,
                "completion_ids": list(rollout.completion_ids),
                "columns": {c: repr(v)[:500] for c, v in group.row.items()},
                "kind": failure.kind,
                "message": failure.message,
            }
        )
    return {
        "reward": verdict.reward.name,
        "code": verdict.reward.location,
        "failed_rows": list(verdict.failures),
        "traceback": next(iter(verdict.failures.values())).trace,
        "rows": rows,
    }

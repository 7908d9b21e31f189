"""Decides which failures of rewards stop the run, and reports them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rloo_cli.rewards.engine.arguments import CompletionTable
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.results import CallFailure, CallResult
from rloo_cli.utils import redact
from rloo_cli.utils.errors import Problem, RewardError
from rloo_cli.utils.files import JsonObject

MAX_DETAILED_FAILURES = 8  # failed completions per reward that are reported in full


class RewardFailed(RewardError):
    """A reward failed and the run has to stop. `detail` goes to debug/reward_error.json."""

    def __init__(self, *problems: Problem, detail: JsonObject):
        super().__init__(*problems)
        self.detail = redact.redact_tree(detail)


@dataclass
class RewardResult:
    """One reward's scores of a step, by a completion's index in the step."""

    reward: Reward
    values: dict[int, float | None]  # of the completions that did not fail
    failures: dict[int, CallFailure]
    call_results: list[CallResult]
    seconds: float


@dataclass(frozen=True)
class ToleratedFailures:
    """One reward's failures that do not stop the run by themselves: those of a rank's share."""

    reward: str
    count: int
    limit: float  # `max_error_rate`: the share of the step's completions that may fail
    problem: Problem  # the error if all ranks' failures are too many
    detail: JsonObject


def check_reward_failures(
    results: Sequence[RewardResult], table: CompletionTable, num_completions: int
) -> list[ToleratedFailures]:
    """-> the failures that do not stop the run. `num_completions`: those of the whole step

    Raises RewardFailed, with one problem for each reward whose failures stop the run.
    """
    failed = [v for v in results if v.failures]
    stopping = [v for v in failed if _stops_run(v, num_completions)]
    step = getattr(table.context.trainer_state, "step", None)
    if stopping:
        detail = {"step": step, "rewards": [_failure_detail(v, table) for v in stopping]}
        problems = (
            _failure_problem(v, table, step, len(v.failures), num_completions) for v in stopping
        )
        raise RewardFailed(*problems, detail=detail)
    return [
        ToleratedFailures(
            v.reward.name, len(v.failures), v.reward.config.max_error_rate,
            _failure_problem(v, table, step, len(v.failures), num_completions),
            {"step": step, "rewards": [_failure_detail(v, table)]},
        )
        for v in failed
    ]  # fmt: skip


def check_failures_of_ranks(failures: Sequence[ToleratedFailures], num_completions: int) -> None:
    """Check the failures of all ranks together. `num_completions`: those of the whole step

    Raises RewardFailed for the first reward with more failures than allowed.
    """
    counts: Counter[str] = Counter()
    for failure in failures:
        counts[failure.reward] += failure.count
    for failure in failures:
        count = counts[failure.reward]
        if count <= failure.limit * num_completions:
            continue
        cause = failure.problem.why.rpartition("\n")[0]
        why = f"{cause}\n{_share_text(failure.reward, count, num_completions, failure.limit)}"
        raise RewardFailed(replace(failure.problem, why=why), detail=failure.detail)


def _share_text(name: str, count: int, num_completions: int, limit: float) -> str:
    return (
        f"{count} of {num_completions} rows failed,"
        f" more than reward.{name}.max_error_rate = {limit:g} of them"
    )


def _stops_run(result: RewardResult, num_completions: int) -> bool:
    config = result.reward.config
    too_many = len(result.failures) > config.max_error_rate * num_completions
    return config.on_error == "raise" or too_many


def _failure_problem(
    result: RewardResult, table: CompletionTable, step: int | None, count: int, num_completions: int
) -> Problem:
    name, config = result.reward.name, result.reward.config
    index, failure = next(iter(result.failures.items()))
    which = describe_completion(table, index)
    of_call = [i for i, f in result.failures.items() if f is failure]
    if len(of_call) > 1:  # the whole call failed
        which = f"rows {of_call[0]} to {of_call[-1]}; the first: {which}"
    share = f"{count} of {num_completions} rows failed"
    if config.on_error != "raise":
        share = _share_text(name, count, num_completions, config.max_error_rate)
    why = f"{failure.frames}{failure.message}\n{share}"
    verb = "" if failure.kind == "invalid" else "failed: "
    return Problem(
        f"reward {name!r} {verb}{failure.message.splitlines()[-1]}",
        where=f"{result.reward.location}, step {step}, {which}",
        why=why,
        fix=f"fix the reward, or reward.{name}.on_error=none to leave out a few such rows",
        more="debug/reward_error.json in the run's folder has these rows",
    )


def describe_completion(table: CompletionTable, index: int) -> str:
    """Describe a completion of the step for an error or a warning."""
    group, _ = table.group_and_rollout(index)
    return (
        f"row {index} (prompt {index // table.k}, completion {index % table.k}, "
        f"draw {group.prompt_offset}): {group.prompt!r:.80}"
    )


def _failure_detail(result: RewardResult, table: CompletionTable) -> JsonObject:
    """A reward's failures with the prompts and completions, for debug/reward_error.json."""
    details = []
    for index, failure in list(result.failures.items())[:MAX_DETAILED_FAILURES]:
        group, rollout = table.group_and_rollout(index)
        details.append(
            {
                "row": index,
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
        "rows": details,
    }

"""What a test asks of a refusal: its exit code, the key and the place that it names. Not its prose.

The prose of each rule is read once, by the fixture `sentence` (sentence_snapshot.py).
"""

import re
from typing import Any

from rloo_cli.utils.errors import Problem, RunError

PARTS = ("where", "why", "fix", "more")


def printed_problems(text: str) -> list[Problem]:
    """The problems of a text that a command printed: `error: ...` with its indented parts."""
    problems: list[dict[str, str]] = []
    part = "what"
    for line in text.splitlines():
        if line.startswith("error: "):
            problems.append({"what": line.removeprefix("error: ")})
            part = "what"
        elif problems and (named := re.match(rf"  ({'|'.join(PARTS)}) +(.*)", line)):
            part = named[1]
            problems[-1][part] = named[2]
        elif problems and line.startswith(" " * 11):
            problems[-1][part] += "\n" + line[11:]
    return [Problem(**one) for one in problems]


def refused_problems(result: Any) -> tuple[int, list[Problem]]:
    """Exit code and problems of a RunError, of pytest's record of one, or of a command that ended
    (`code`, and what it printed in `err` or `said`)."""
    error = getattr(result, "value", result)
    if isinstance(error, RunError):
        return error.code, error.problems
    return error.code, printed_problems(getattr(error, "err", "") or error.said)


def assert_refused(
    result: Any, code: int = 2, key: str = "", where: str = "", fix: str = ""
) -> Problem:
    """Assert that `result` is a refusal with this exit code, one of whose problems names `key` as a
    whole word (a config key, a file, a flag, a value), has `where` in its "where" line, and `fix`
    (what can be pasted, such as `algorithm.beta=0.05`) in its fix. Returns that problem."""
    its_code, problems = refused_problems(result)
    text = "\n".join(problem.render() for problem in problems)
    assert its_code == code, f"exit code {its_code}, not {code}:\n{text}"
    word = re.compile(rf"(?<![\w.]){re.escape(key)}(?![\w])") if key else re.compile("")
    for problem in problems:
        if word.search(problem.render()) and where in problem.where and fix in problem.fix:
            return problem
    raise AssertionError(f"no problem with key {key!r}, where {where!r}, fix {fix!r} in:\n{text}")

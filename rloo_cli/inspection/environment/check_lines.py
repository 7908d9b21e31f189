"""The lines of `rloo doctor` before a run: what was checked, the result, and the fix."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from rloo_cli.utils import redact
from rloo_cli.utils.errors import Problem, RunError

CheckStatus = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class CheckLine:
    """One check."""

    status: CheckStatus
    name: str  # one or two words: python, port, reward NAME
    found: str
    fix: str = ""  # to paste, or to do


@dataclass
class CheckLines:
    """The lines so far, in the order of the checks."""

    lines: list[CheckLine] = field(default_factory=list)

    def add_ok(self, name: str, found: str) -> None:
        """Add a passed check."""
        self._add("ok", name, found)

    def add_warning(self, name: str, found: str, fix: str = "") -> None:
        """Add a warning: something optional, or worth knowing."""
        self._add("warn", name, found, fix)

    def add_failure(self, name: str, found: str, fix: str = "") -> None:
        """Add a failure: something that a run needs."""
        self._add("fail", name, found, fix)

    def add_problem(self, name: str, problem: Problem, status: CheckStatus = "fail") -> None:
        """Add a problem as a refused run would print it, in one line."""
        parts = [problem.what, *([problem.why] if problem.why else [])]
        text = ": ".join(parts)
        where = problem.where.partition(" (")[0]
        if where and where not in text:
            text = f"{text} [{problem.where}]"
        self._add(status, name, text, problem.fix)

    @contextmanager
    def noting_refusal(self, name: str, status: CheckStatus = "fail") -> Iterator[None]:
        """While inside, errors that would refuse a run become lines of this name."""
        try:
            yield
        except RunError as error:
            for problem in error.problems:
                self.add_problem(name, problem, status)

    def _add(self, status: CheckStatus, name: str, found: str, fix: str = "") -> None:
        texts = (redact.redact_text(" ".join(text.split())) for text in (found, fix))
        line = CheckLine(status, name, *texts)
        if line not in self.lines:  # two rewards can lack the same column
            self.lines.append(line)

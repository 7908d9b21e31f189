"""The lines of `rloo doctor` before a run: what was looked at, what was found, and the fix."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from rloo_cli.utils import redact
from rloo_cli.utils.errors import Problem, RunError

CheckStatus = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class CheckLine:
    """One thing that was looked at."""

    status: CheckStatus
    name: str  # one or two words: python, port, reward NAME
    found: str
    fix: str = ""  # what can be pasted, or done


@dataclass
class CheckLines:
    """The lines so far, in the order in which they were looked at."""

    lines: list[CheckLine] = field(default_factory=list)

    def add_ok(self, name: str, found: str) -> None:
        """Note that something is as it should be."""
        self._add("ok", name, found)

    def add_warning(self, name: str, found: str, fix: str = "") -> None:
        """Note what a run may do without, or what should be known."""
        self._add("warn", name, found, fix)

    def add_failure(self, name: str, found: str, fix: str = "") -> None:
        """Note what a run cannot do without."""
        self._add("fail", name, found, fix)

    def add_problem(self, name: str, problem: Problem, status: CheckStatus = "fail") -> None:
        """Note a problem as a refused run would print it, in one line."""
        parts = [problem.what, *([problem.why] if problem.why else [])]
        text = ": ".join(parts)
        where = problem.where.partition(" (")[0]
        if where and where not in text:
            text = f"{text} [{problem.where}]"
        self._add(status, name, text, problem.fix)

    @contextmanager
    def noting_refusal(self, name: str, status: CheckStatus = "fail") -> Iterator[None]:
        """While inside, what would refuse a run becomes lines of this name."""
        try:
            yield
        except RunError as error:
            for problem in error.problems:
                self.add_problem(name, problem, status)

    def _add(self, status: CheckStatus, name: str, found: str, fix: str = "") -> None:
        texts = (redact.redact_text(" ".join(text.split())) for text in (found, fix))
        line = CheckLine(status, name, *texts)
        if line not in self.lines:  # two rewards may lack the same column
            self.lines.append(line)

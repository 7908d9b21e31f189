"""What holds for all tests.

`server` is the one real rollout server that all tests of a session share: whoever uses it connects
and sends weights first, and leaves it running.
"""

import importlib
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many processes run as there are cores
# Modules of tests/support whose fixtures and hooks hold for all tests.
pytest_plugins = (
    "cli_cases", "endpoint_cases", "fork_cases", "rank_cases", "sentence_snapshot", "slurm_cases",
    "smollm2_cases", "suite_guard", "suite_marks", "sweep_cases",
)  # fmt: skip


class ByFile(LoadScopeScheduling):
    """With several processes, the tests of a file share one, and so do the files of the one server.
    (xdist's own groups are not seen with pytest 9.2, whose node ids are fixed.)"""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.partition("::")[0]).name
        return "server" if file.endswith("_on_server.py") else file


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Who runs which test."""
    return ByFile(config, log)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`vllm_cases.Real`: its url, token, folder and model. Two API processes take its requests, so
    all that is asked of it holds whichever of them is met."""
    cases = importlib.import_module("vllm_cases")  # it imports torch, most tests do not
    base = tmp_path_factory.getbasetemp()
    words = ("generation.server.api_server_count=2",)
    with cases.serving(tmp_path_factory.mktemp("real"), base, *words) as real:
        yield real


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Where the time of a whole run went: seconds of each folder, of all processes together."""
    spent: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                spent["/".join(report.nodeid.split("/")[:2])] += report.duration
    if len(spent) > 1:
        terminalreporter.section("seconds by folder")
        for folder, seconds in sorted(spent.items(), key=lambda item: -item[1]):
            terminalreporter.write_line(f"{seconds:8.0f} {folder}")

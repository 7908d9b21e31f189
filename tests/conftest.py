"""Before torch is imported: its threads must not spin long while they wait for each other.

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
from cli_cases import rloo, rloo_without_torch
from endpoint_cases import serve
from fork_cases import fast, forked
from rank_cases import launchers
from sentence_snapshot import sentence
from slurm_cases import slurm
from smollm2_cases import smollm2_folder
from suite_guard import pytest_configure, pytest_unconfigure
from sweep_cases import quick
from xdist.scheduler import LoadScopeScheduling

# Fixtures and hooks for all: defined once, so that a session's process or cluster is one for all.
__all__ = [
    "fast", "forked", "launchers", "pytest_configure", "pytest_unconfigure", "quick", "rloo",
    "rloo_without_torch", "sentence", "serve", "slurm", "smollm2_folder",
]  # fmt: skip

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Files whose tests use `server`.
ONE_SERVER = (
    "test_vllm_contract.py", "test_vllm_truth.py", "test_judge_vllm.py", "test_ranks_vllm.py",
    "test_vllm_api_processes.py", "test_stream_vllm.py", "test_vllm_carry.py",
    "test_teacher_vllm.py",
)  # fmt: skip
# Files that take a minute and more, the longest first.
LONGEST = (
    "test_slurm_runs.py", "test_vllm_contract.py", "test_faults.py", "test_ranks.py",
    "test_run_ends.py", "test_resume.py", "test_vllm_serve.py", "test_fetch.py", "test_house.py",
    "test_docs_run.py", "test_sweep.py", "test_vllm_weights.py", "test_refusals_config.py",
    "test_hostile.py", "test_trl.py", "test_run_folder.py", "test_family.py",
    "test_slurm.py", "test_signals.py", "test_loop.py", "test_resume_ways.py", "test_fast_path.py",
    "test_cli.py", "test_processes.py", "test_eval_verb.py", "test_trl_grpo.py",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest --update`: what is said is taken as it is, for the fixture `sentence`."""
    parser.addoption("--update", action="store_true", help="write tests/sentences.txt anew")


COLLECTED = pytest.StashKey[set[str]]()


def slow_cases() -> set[str]:
    """Node ids of tests that are slow without a mark of their own, and why: slow_cases.txt."""
    lines = Path(__file__).with_name("slow_cases.txt").read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}


class ByFile(LoadScopeScheduling):
    """With several processes (`make test`), the tests of a file share one, and so do all that use
    the one server. (xdist's own groups are not seen with pytest 9.2, whose node ids are fixed.)"""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.partition("::")[0]).name
        return "server" if file in ONE_SERVER else file


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Who runs which test."""
    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what slow_cases.txt lists; and the files that take longest come first: the last ones to
    end are then short ones. COLLECTED keeps all names, for tests/house/test_slow_cases.py."""
    config.stash[COLLECTED] = {item.nodeid for item in items}
    listed = slow_cases()
    for item in items:
        if {item.nodeid, item.nodeid.partition("[")[0]} & listed:
            item.add_marker(pytest.mark.slow)
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`vllm_cases.Real`: its url, token, folder and model. Two API processes take its requests, so
    all that is asked of it holds whichever of them is met."""
    cases = importlib.import_module("vllm_cases")  # it imports torch, most tests do not
    base = tmp_path_factory.getbasetemp()
    words = ("generation.server.api_processes=2",)
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

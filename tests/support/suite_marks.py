"""Which command runs a test (CONTRIBUTING.md): a plug-in of pytest.

`make test` runs what is marked `smoke`, and what has none of the marks `slow`, `gpu` and
`engines`. All of `vllm`, `slurm`, `ranks`, `process`, `trl` and `wide` are `engines`, and a fixture
that starts processes marks its tests. A test without such a mark fails if it starts a Python
process; with CI in the environment, also if it takes over LIMIT_S seconds of the processor.
"""

import os
import sys
import time
from collections.abc import Generator
from multiprocessing import util
from pathlib import Path
from typing import Any

import pytest

from rloo_cli.generation.vllm.versions import installed_vllm_version

ENGINES = ("vllm", "slurm", "ranks", "process", "trl", "wide")
FIXTURE_MARKS = {
    "server": "vllm", "slurm": "slurm", "fast": "process", "launchers": "process",
    "rloo": "process", "rloo_without_torch": "process",
}  # fmt: skip
LIMIT_S = 30.0  # five on a quiet machine: a shared host has been five times as slow
NO_VLLM = pytest.mark.skipif(
    not installed_vllm_version(), reason="vLLM is not installed: make test-engines does it"
)
SHARED = "rloo_cli.utils.worker_process math-verify"  # it stays for the tests that come later
COLLECTED = pytest.StashKey[set[str]]()  # names of all tests, chosen by `-m` or not
STARTED: list[str] = []  # Python processes that the running test has started


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the marks that follow from others; engines come first, since they take longest."""
    config.stash[COLLECTED] = {item.nodeid for item in items}
    for item in items:
        for fixture in {*FIXTURE_MARKS} & {*getattr(item, "fixturenames", ())}:
            item.add_marker(FIXTURE_MARKS[fixture])
        if item.get_closest_marker("vllm"):
            item.add_marker(NO_VLLM)
        if any(item.get_closest_marker(name) for name in ENGINES):
            item.add_marker("engines")
        case = case_name(item)
        for name in ("slow", "smoke"):
            if any(case in mark.args for mark in item.iter_markers(f"{name}_cases")):
                item.add_marker(name)
        if any(case not in mark.args for mark in item.iter_markers("slow_but")):
            item.add_marker("slow")
    items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in ENGINES])


def case_name(item: pytest.Item) -> str:
    """Of a parametrised test: what stands in brackets behind its name."""
    return item.name.partition("[")[2].removesuffix("]")


def watch_starts() -> None:
    """Write down each Python process that is started from here, in STARTED."""

    def heard(event: str, given: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and Path(os.fsdecode(given[0])).name.startswith("python"):
            words = " ".join(word for word in map(str, given[1]) if not word.isdigit())
            if SHARED not in words:
                STARTED.append(words)

    sys.addaudithook(heard)
    spawn = util.spawnv_passfds  # of multiprocessing: it raises no event

    def spawn_heard(path: bytes, words: list[bytes], passed: list[int]) -> int:
        STARTED.append("multiprocessing")
        return spawn(path, words, passed)

    util.spawnv_passfds = spawn_heard  # type: ignore[assignment]


watch_starts()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What its fixtures start is its own, too."""
    STARTED.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Run it; then look at what it took."""
    began = time.process_time()
    result = yield
    if not any(item.get_closest_marker(name) for name in ("engines", "slow", "smoke", "gpu")):
        seconds = time.process_time() - began
        if STARTED:
            pytest.fail(f"it started {STARTED[0]}: mark it process", pytrace=False)
        if seconds > LIMIT_S and "CI" in os.environ:
            pytest.fail(f"it took {seconds:.1f} s: make it smaller, or mark it slow", pytrace=False)
    return result

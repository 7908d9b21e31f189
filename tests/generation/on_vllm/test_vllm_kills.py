"""A run's own rollout server is killed, or stopped, while the run goes on: nothing is lost, nothing
is trained twice, nothing is left behind. Real vLLM, real signals."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ledger_audit import audit_ledger

from rloo_cli.generation.vllm import server_file
from rloo_cli.utils import child_process

pytestmark = pytest.mark.vllm
slow = pytest.mark.slow
STEPS = 6
WORDS = (
    "+recipe=smoke", "generation=vllm_server", f"max_steps={STEPS}", "checkpoint.every=0",
    "generation.max_completion_length=48", "train.prompts_per_step=8", "logging.console=plain",
    "eval.at_start=false", "eval.max_samples=4", "generation.server.request_timeout_s=20",
)  # fmt: skip


class Going:
    """A run in a process of its own."""

    def __init__(
        self, root: Path, *more: str, words: Sequence[str] = WORDS, attempt: int = 1, **env: str
    ):
        self.folder = root / "smoke"
        self.out = root.parent / f"{root.name}.{attempt}.out"
        command = [sys.executable, "-m", "rloo_cli", "train", *words, f"root={root}", *more]
        self.process = subprocess.Popen(
            command,
            stdout=self.out.open("w"),
            stderr=subprocess.STDOUT,
            env=os.environ | {"RLOO_ALLOW_FAULTS": "1"} | env,
        )

    def until(self, found: Callable[[], Any], limit: float = 240) -> Any:
        end = time.monotonic() + limit
        while not (value := found()):
            assert self.process.poll() is None, self.said
            assert time.monotonic() < end, self.said
            time.sleep(0.02)
        return value

    @property
    def said(self) -> str:
        return self.out.read_text()

    @property
    def rows(self) -> list[dict[str, Any]]:
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
        return [row for row in map(json.loads, lines) if "step_time" in row]

    @property
    def samples(self) -> list[tuple[Any, ...]]:
        """(step, prompt, seed, version) of every row that was trained on."""
        found = []
        for file in sorted((self.folder / "samples").glob("step_*.jsonl")):
            rows = map(json.loads, file.read_text().splitlines())
            found += [(file.name, r["prompt"], r["seed"], r["weight_version"]) for r in rows]
        return found

    def server(self) -> server_file.ServerRecord:
        found: server_file.ServerRecord = self.until(
            lambda: server_file.running_server(self.folder)
        )
        return found

    def ends(self, limit: float = 240) -> int:
        return self.process.wait(limit)


def members(group: int) -> dict[int, str]:
    """pid -> name of every process of a group that runs."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == group and child_process.process_start_time(int(entry.name)):
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
    return found


def child(server: server_file.ServerRecord, name: str) -> int:
    """The server's process of that name."""
    for pid, line in members(server.group).items():
        if name in line:
            return pid
    raise AssertionError(members(server.group))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Going]:
    """The same run, left alone."""
    run = Going(tmp_path_factory.mktemp("left_alone") / "runs")
    assert run.ends() == 0, run.said
    yield run


def completions(run: Going) -> list[tuple[str, str]]:
    files = sorted((run.folder / "samples").glob("step_*.jsonl"))
    return [
        (file.name, json.loads(line)["completion"])
        for file in files
        for line in file.read_text().splitlines()
    ]


def check(run: Going, alone: Going, groups: list[int]) -> None:
    assert run.ends() == 0, run.said
    assert [row["step"] for row in run.rows] == [*range(1, STEPS + 1)]
    assert run.rows[-1]["vllm/restarts"] == 1.0
    assert run.said.count("restarting it in") == 1
    assert run.samples == alone.samples
    assert completions(run) == completions(alone)  # of the weights that the lost engine had
    assert all(version == int(name[5:11]) - 1 for name, _, _, version in run.samples)
    audit_ledger(run.folder)
    assert not any(members(group) for group in groups)
    assert not (run.folder / server_file.SERVER_FILE).exists()


def kill(run: Going, name: str, number: int = signal.SIGKILL) -> int:
    """Hit the server once the run has done two steps; the server's group."""
    server = run.server()
    run.until(lambda: len(run.rows) >= 2)
    os.kill(server.pid if name == "API" else child(server, name), number)
    return server.group


def replaced(run: Going, first: int) -> int:
    """The group of the server that came after `first`."""

    def found() -> int | None:
        server = server_file.running_server(run.folder)
        return server.group if server is not None and server.group != first else None

    group: int = run.until(found)
    return group


@slow
def test_a_killed_engine_is_replaced_and_only_what_is_missing_is_drawn_again(
    tmp_path: Path, alone: Going
) -> None:
    run = Going(tmp_path / "runs")
    first = kill(run, "EngineCore")
    check(run, alone, [first, replaced(run, first)])


OVERLAPPED = {"ahead": (), "carry": ("generation.max_lag=2",)}


@slow
@pytest.mark.parametrize("mode", OVERLAPPED)
def test_so_is_one_that_is_killed_while_the_training_goes_on(
    tmp_path: Path, alone: Going, mode: str
) -> None:
    run = Going(tmp_path / "runs", f"generation.overlap={mode}", *OVERLAPPED[mode])
    first = kill(run, "EngineCore")
    groups = [first, replaced(run, first)]
    assert run.ends() == 0, run.said
    assert [row["step"] for row in run.rows] == [*range(1, STEPS + 1)]
    assert run.rows[-1]["vllm/restarts"] == 1.0
    drawn = [row[:3] for row in run.samples]
    steps = {name: int(name[5:11]) for name, *_ in run.samples}
    lags = [steps[name] - 1 - version for name, _, _, version in run.samples]
    if mode == "carry":  # which group a step takes is the clock's; none is lost or too old
        assert len(set(drawn)) == len(drawn) == len(alone.samples)
        assert all(0 <= lag <= 2 for lag in lags)
    else:
        assert drawn == [row[:3] for row in alone.samples]
        assert all(
            lag == (steps[name] > 1) for lag, (name, *_) in zip(lags, run.samples, strict=True)
        )
    audit_ledger(run.folder)
    assert not any(members(group) for group in groups)


@slow
@pytest.mark.parametrize("name", ["Worker", "API"])
def test_so_is_a_killed_worker_and_a_killed_api_process(
    tmp_path: Path, alone: Going, name: str
) -> None:
    run = Going(tmp_path / "runs")
    first = kill(run, name)
    check(run, alone, [first, replaced(run, first)])


@slow
def test_so_is_a_server_that_lost_one_of_its_api_processes(tmp_path: Path, alone: Going) -> None:
    run = Going(tmp_path / "runs", "generation.server.api_server_count=2")
    first = kill(run, "VLLM::APIServer_1")
    check(run, alone, [first, replaced(run, first)])


@slow
def test_a_worker_that_stands_still_is_found_by_its_deadline(tmp_path: Path, alone: Going) -> None:
    run = Going(tmp_path / "runs")
    first = kill(run, "Worker", signal.SIGSTOP)
    check(run, alone, [first, replaced(run, first)])


@slow
def test_a_server_that_dies_too_often_ends_the_run_which_goes_on_later(
    tmp_path: Path, alone: Going
) -> None:
    root = tmp_path / "runs"
    run = Going(root, "generation.server.max_restarts=0")
    kill(run, "Worker")
    assert run.ends() == 6, run.said
    assert "checkpoint  checkpoint-" in run.said
    assert not (run.folder / server_file.SERVER_FILE).exists()
    again = Going(root, "resume=auto", attempt=2)
    assert again.ends() == 0, again.said
    assert again.samples == alone.samples


@slow
def test_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    run = Going(tmp_path / "runs")
    server = run.server()
    run.until(lambda: len(run.rows) >= 1)
    run.process.kill()
    run.process.wait()
    end = time.monotonic() + 30
    while members(server.group) and time.monotonic() < end:
        time.sleep(0.1)
    assert not members(server.group)


@slow
def test_a_second_trainer_takes_over_the_server_of_one_that_was_killed(
    tmp_path: Path, alone: Going
) -> None:
    root = tmp_path / "runs"
    words = [w for w in WORDS if "=" in w or w.startswith("+")]
    command = [sys.executable, "-m", "rloo_cli", "vllm-serve", *words, f"root={root}"]
    out = (tmp_path / "serve.out").open("w")
    serve = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 240
        while (server := server_file.running_server(root / "smoke")) is None:
            assert serve.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        first = Going(root, "checkpoint.every=1")
        first.until(lambda: len(first.rows) >= 2)
        rank = json.loads((first.folder / "run.json").read_text())["ranks"][0]["pid"]
        os.kill(rank, signal.SIGKILL)
        assert first.ends() == 6, first.said
        second = Going(root, "checkpoint.every=1", "resume=auto", attempt=2)
        assert second.ends() == 0, second.said
        assert "the server at " in second.said
        assert second.samples == alone.samples
        assert server_file.running_server(root / "smoke") == server
    finally:
        serve.terminate()
        assert serve.wait(60) == 0
    assert not members(server.group)


@slow
def test_a_colocated_engine_that_is_killed_is_replaced(tmp_path: Path, alone: Going) -> None:
    words = [w.replace("vllm_server", "vllm_colocate") for w in WORDS if ".server." not in w]
    run = Going(tmp_path / "runs", words=words)
    run.until(lambda: len(run.rows) >= 2)
    rank = json.loads((run.folder / "run.json").read_text())["ranks"][0]["pid"]
    engine = next(
        int(p.name) for p in Path("/proc").iterdir()
        if p.name.isdigit() and f" {rank} " in (p / "stat").read_text()
        and b"rloo_cli.generation.vllm.child_main" in (p / "cmdline").read_bytes()
    )  # fmt: skip
    os.kill(engine, signal.SIGKILL)
    assert run.ends() == 0, run.said
    assert run.rows[-1]["vllm/restarts"] == 1.0
    assert run.samples == alone.samples and completions(run) == completions(alone)


@slow
def test_a_run_on_one_engine_is_repeated_and_resumed_with_the_same_completions(
    tmp_path: Path,
) -> None:
    words = [w.replace("vllm_server", "vllm_colocate") for w in WORDS if ".server." not in w]
    whole, again = (Going(tmp_path / name, words=words) for name in ("whole", "again"))
    assert whole.ends() == again.ends() == 0, whole.said + again.said
    assert completions(whole) == completions(again)
    root = tmp_path / "resumed"
    first = Going(root, words=words, RLOO_FAULTS="step@4=term")
    assert first.ends() == 75, first.said
    second = Going(root, "resume=auto", words=words, attempt=2)
    assert second.ends() == 0, second.said
    assert completions(second) == completions(whole)


@slow
def test_two_runs_at_once_have_a_server_each(tmp_path: Path, alone: Going) -> None:
    runs = [Going(tmp_path / name) for name in ("one", "two")]
    seen: dict[str, server_file.ServerRecord] = {}
    while any(run.process.poll() is None for run in runs):
        for run in runs:
            server = server_file.running_server(run.folder)
            seen |= {str(run.folder): server} if server is not None else {}
        time.sleep(0.02)
    one, two = seen.values()
    assert one.url != two.url and one.token != two.token and one.group != two.group
    for run in runs:
        assert run.ends() == 0, run.said
        assert run.samples == alone.samples
    assert not members(one.group) and not members(two.group)

"""Servers on nodes of their own: whose file is whose, and what a trainer does that waits."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import vllm_cases
from assert_refused import assert_refused
from fake_server import Fake

from rloo_cli.cli import vllm_serve
from rloo_cli.generation.vllm import server_file
from rloo_cli.generation.vllm.discovery import ServerFinder
from rloo_cli.generation.vllm.http import HttpClient
from rloo_cli.utils.errors import ConfigError, GenerationError, MachineError, Problem

HERE = vllm_cases.server_record()
REFUSED = MachineError(Problem("the port is taken", "generation.server.port", "by somebody"))


def finder(folder: Path, nodes: int) -> ServerFinder:
    keys = vllm_cases.config(base_url=None, num_nodes=nodes, ready_timeout_s=1.0).generation.server  # type: ignore[attr-defined]
    made = ServerFinder(keys, folder, HttpClient(keys.api_key_env), lambda text: None)
    made._run_server_timeout_s = lambda: 1.0  # type: ignore[method-assign]
    return made


def serving(folder: Path, fake: Fake, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLOO_SERVER_NUMBER", str(number))
    server_file.write_server_file(folder, replace(HERE, url=fake.url, token=fake.token))
    monkeypatch.delenv("RLOO_SERVER_NUMBER")


def test_each_serving_node_has_a_file_of_its_own_and_all_are_found(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving(tmp_path, fake, 1, monkeypatch)
    with pytest.raises(GenerationError, match=r"server_2\.json"):
        finder(tmp_path, 2).find_servers(reconnecting=False)  # one of two is not enough
    serving(tmp_path, fake, 2, monkeypatch)
    found = {p.name for p in server_file.server_file_paths(tmp_path)}
    assert found == {"server.json", "server_2.json"}
    assert [s.url for s in finder(tmp_path, 2).find_servers(reconnecting=False)] == [fake.url] * 2
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in server_file.server_file_paths(tmp_path))


def test_a_failed_server_stops_the_trainer_with_its_words(tmp_path: Path) -> None:
    server_file.write_server_failure(tmp_path, "vllm-serve", REFUSED, tmp_path / "logs")
    with pytest.raises(GenerationError) as caught:
        finder(tmp_path, 1).find_servers(reconnecting=False)
    problem = assert_refused(caught, 6, str(tmp_path / "logs"))
    assert REFUSED.problems[0].what in problem.why and REFUSED.problems[0].why in problem.why


@pytest.mark.parametrize(
    ("theirs", "ours", "failed", "stale"),
    [
        (("7", "0"), ("7", "0"), "x", False),
        (("7", "0"), ("7", "1"), "x", True),
        (("7", "0"), ("7", "1"), "", True),
        (("7", "0"), ("8", "0"), "x", True),
        (("7", "0"), ("8", "0"), "", False),  # a server in a job of its own is still one
        (None, ("8", "0"), "x", True),
        (None, None, "x", False),
    ],
)
def test_what_an_earlier_attempt_left_is_not_believed(
    theirs: tuple[str, str] | None,
    ours: tuple[str, str] | None,
    failed: str,
    stale: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def inside(job: tuple[str, str] | None) -> None:
        for name, value in zip(("SLURM_JOB_ID", "SLURM_RESTART_COUNT"), job or (), strict=False):
            monkeypatch.setenv(name, value)

    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    inside(theirs)
    left = replace(HERE, failed=failed, job=server_file.slurm_job_attempt())
    inside(ours)
    assert left.is_stale() is stale


def test_a_stale_failure_is_waited_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    server_file.write_server_failure(tmp_path, "vllm-serve", REFUSED, tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with pytest.raises(GenerationError) as refused:
        finder(tmp_path, 1).find_servers(reconnecting=False)
    key = "generation.server.ready_timeout_s"
    assert_refused(refused, 6, "server.json", where=key, fix=f"{key}=2")
    sentence(refused)


def test_a_server_does_not_hear_the_trainers_early_warning() -> None:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: pytest.fail("it was heard"))
    try:
        with vllm_serve._stop_signals() as heard:
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.05)
        assert heard == []
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_server_of_a_node_that_went_down_does_not_keep_the_next_one_out(
    tmp_path: Path, fake: Fake
) -> None:
    server_file.write_server_file(tmp_path, replace(HERE, host="gone", url="http://127.0.0.1:9"))
    vllm_serve._check_no_other_server(tmp_path)
    server_file.write_server_file(tmp_path, replace(HERE, host="there", url=fake.url))
    with pytest.raises(ConfigError, match="already has a server"):
        vllm_serve._check_no_other_server(tmp_path)

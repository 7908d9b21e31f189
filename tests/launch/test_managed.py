"""Whose GPUs are whose, and which server a run uses: no vLLM is started here."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import vllm_cases

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.distributed import device_count
from rloo_cli.generation.vllm import server_file
from rloo_cli.launch import rollout_server
from rloo_cli.utils.errors import ConfigError, GenerationError, MachineError, Problem

HERE = vllm_cases.server_record(devices=["GPU-b"])


def test_a_trainer_has_the_first_gpus_and_its_server_the_next() -> None:
    ours, theirs = rollout_server.split_gpus(["0", "1", "2", "3"], 2, 2)
    assert ours == {"CUDA_VISIBLE_DEVICES": "0,1"} and theirs == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert rollout_server.split_gpus([], 1, 8) == ({}, {})


def test_a_server_and_a_trainer_on_one_gpu_are_refused_with_the_line_to_use() -> None:
    with pytest.raises(MachineError) as refused:
        rollout_server.split_gpus(["0"], 1, 1)
    problem = refused.value.problems[0]
    assert "found 1" in problem.what and problem.fix == "generation=vllm_colocate"


def test_a_server_that_runs_already_keeps_its_gpus() -> None:
    assert rollout_server.gpus_left_by_server(["GPU-a", "GPU-b"], HERE) == {
        "CUDA_VISIBLE_DEVICES": "GPU-a"
    }
    assert rollout_server.gpus_left_by_server([], HERE) == {}
    elsewhere = replace(HERE, host="another")
    assert rollout_server.gpus_left_by_server(["GPU-b"], elsewhere) == {}
    with pytest.raises(ConfigError) as refused:
        rollout_server.gpus_left_by_server(["GPU-b"], HERE)
    assert "generation=vllm_colocate" in refused.value.problems[0].fix


def test_a_gpu_is_the_servers_whether_it_is_named_by_its_number_or_its_uuid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_count, "_listed_gpus", lambda: ("GPU-aa", "GPU-bb", "GPU-cc"))
    assert device_count.gpu_uuids(["1", "GPU-c", "MIG-7", "9"]) == [
        "GPU-bb", "GPU-cc", "MIG-7", "9",
    ]  # fmt: skip
    here = replace(HERE, devices=["GPU-bb"])
    for gpus, left in ((["0", "1"], "0"), (["GPU-b", "GPU-c"], "GPU-c")):
        assert rollout_server.gpus_left_by_server(gpus, here) == {"CUDA_VISIBLE_DEVICES": left}
    with pytest.raises(ConfigError):
        rollout_server.gpus_left_by_server(["1"], here)


def test_a_server_that_somebody_started_is_used_and_left(tmp_path: Path) -> None:
    run, said = vllm_cases.config(base_url=None), []
    server_file.write_server_file(tmp_path, HERE)
    with rollout_server.managed_server(tmp_path, run, said.append) as (look, env):
        look()
        assert env == {}
    assert "http://127.0.0.1:1" in said[0]
    assert server_file.read_server_file(tmp_path) == HERE


@pytest.mark.parametrize("keys", [{"base_url": ["http://h:1"]}, {"num_nodes": 1}], ids=str)
def test_a_trainer_whose_servers_others_start_starts_none(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    run = vllm_cases.config(**{"base_url": None} | keys)
    with rollout_server.managed_server(tmp_path, run, pytest.fail) as (look, env):
        look()
        assert env == {}
    assert not [*tmp_path.iterdir()]


class Dies:
    """A server's process that is dead as soon as it is started."""

    def __init__(self, log: Path):
        self.child, self.log, self.exit_code, self.started_at = self, log, 9, 0.0
        self.pid = 2**22 + 1


def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any) -> tuple[Any, list[str]]:
    """A Watched whose servers die at once, of `error`; what it said."""
    said: list[str] = []
    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setattr(rollout_server, "start_server", lambda *_: Dies(tmp_path / "log"))
    monkeypatch.setattr(rollout_server, "stop_server", lambda *_: [])
    monkeypatch.setattr(rollout_server, "answering_server", lambda *_: None)
    monkeypatch.setattr(rollout_server, "server_failure", lambda *_: error)
    monkeypatch.setattr(rollout_server.time, "monotonic", iter(range(0, 10**6, 100)).__next__)
    run = vllm_cases.config(base_url=None)
    keys = run.generation.server
    return rollout_server.ServerSupervisor(tmp_path, {}, keys, {}, said.append), said


def test_restarts_are_counted_and_then_no_server_will_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = GenerationError(Problem("what", why="why"))
    found, said = watched(tmp_path, monkeypatch, error)
    for _ in range(10):
        found.check_server_alive()
    last = server_file.read_server_file(tmp_path)
    assert last is not None and last.failed == "what\nwhy"
    assert [line.partition("restart ")[2] for line in said] == ["1 of 2)", "2 of 2)"]
    found.end_server()
    assert server_file.read_server_file(tmp_path) is None


def test_what_is_wrong_with_the_machine_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = MachineError(Problem("the port is taken", fix="generation.server.port=0"))
    found, said = watched(tmp_path, monkeypatch, error)
    for _ in range(3):
        found.check_server_alive()
    last = server_file.read_server_file(tmp_path)
    assert last is not None and "generation.server.port=0" in last.failed and not said


def test_where_and_how_an_engine_runs_is_no_part_of_a_runs_name() -> None:
    plain = vllm_cases.config(base_url=None)
    moved = vllm_cases.config("http://b:1", max_in_flight=3, gpu_memory_utilization=0.5)
    other = vllm_cases.config(base_url=None, dtype="bfloat16")
    assert check.config_hash(plain) == check.config_hash(moved)
    assert check.config_hash(plain) != check.config_hash(other)


def test_debug_samples_without_vllm_unless_it_is_asked_for() -> None:
    recipe = ("+recipe=tldr_1b", "+debug=cpu")
    assert compose_config(recipe).values["generation"]["backend"] == "transformers"
    asked = compose_config((*recipe, "generation=vllm_server")).values["generation"]
    assert asked["backend"] == "vllm_server" and asked["max_completion_length"] == 16

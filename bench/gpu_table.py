"""The rows of `gpu.py`, as data: what each measures, needs and may take. Imports no torch.

A row's work is one function, a generator of facts: `function(device, dtype, sizes)`. Each facts it
yields replace those before, so a row that is killed keeps its last ones. `tiny` are the sizes that
a rehearsal on a CPU has in their place. `code` are the files of rloo_cli that the row measures: a
result is known again by their digest. `--rows NAME` and the order here say what runs when.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Sizes = dict[str, Any]
LEAST_VLLM = "0.22"
POLICY, TRAIN = ("policy", "data"), ("policy", "data", "train", "algorithms")
ENGINE, WHOLE = ("policy", "data", "generation"), ("",)


class CannotRun(Exception):
    """A row cannot be measured on this machine; the text says why. That is not a failure."""


@dataclass(frozen=True)
class GpuRow:
    """One row: a question that only a GPU answers."""

    name: str
    does: str
    work: str  # module:function
    sizes: Sizes = field(default_factory=dict)
    tiny: Sizes = field(default_factory=dict)  # of some of the same keys
    code: tuple[str, ...] = POLICY  # files and folders of rloo_cli
    dtype: str = "bfloat16"
    seconds: int = 120  # the most it may take on a GPU, and in a rehearsal
    gpus: int = 1
    vllm: str = ""  # the least version; "" = not needed
    packages: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()  # packages that change the result where they are installed
    runner: str = ""  # vLLM's model runner, where a result does not say it
    expected: str = ""  # written down before the first time it was measured, for an H100
    floor: str = ""  # what the work takes at the rates of an H100
    goal: str = ""
    refusal: str = ""  # of `arguments._untested_problems`, until this row was confirmed
    rehearsal: str = ""  # what a CPU leaves out

    def changed_sizes(self, given: Sizes) -> Sizes:
        """Those of `given` that this row has."""
        return {name: value for name, value in given.items() if name in self.sizes}


SHARES = {"W5": None, "W8": 0.3, "W10": 0.45}  # of the GPU's memory for vLLM, in both tools
IPC = "by gloo: a CPU has no CUDA IPC"
LARGE = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 16,
         "vocab_size": 65536}  # fmt: skip
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2,
         "vocab_size": 512}  # fmt: skip


def kernel_rows() -> Iterator[GpuRow]:
    """Every path of the forward and backward pass against float64."""
    yield GpuRow("machine", "What a matrix product and a copy reach", "gpu_kernels:measure_machine",
                 {"size": 8192, "copy_mb": 4096}, {"size": 128, "copy_mb": 8}, ())  # fmt: skip
    yield GpuRow("order of waits", "Weights are read after the kernels that write them",
                 "gpu_kernels:check_waits", {"size": 4096, "queued": 200},
                 {"size": 64, "queued": 2}, ("utils/device_waits.py",),
                 rehearsal="nothing is queued on a CPU")  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        half = dtype == "bfloat16"
        yield GpuRow(
            f"head {dtype}", "The fused head and its tile sizes against log_softmax in float64",
            "gpu_kernels:compare_heads",
            {"rows": 1024, "width": 1536, "words": 151936, "timed": 3, "tiles": [22, 23, 25]},
            {"rows": 24, "width": 32, "words": 300, "timed": 1, "tiles": [8, 10]},
            ("policy/fused_head.py",), dtype,
            expected="5 to 6 ms, log_softmax 4.7 ms" if half else "",
        )  # fmt: skip
        for layout in ("shared", "packed", "padded"):
            yield GpuRow(
                f"{layout} {dtype}", f"{layout.capitalize()} rows against single rows in float64",
                "gpu_kernels:compare_layout",
                {"layout": layout, "model": "kernel", "longest": 300},
                {"model": "tiny", "longest": 20}, POLICY, dtype,
            )  # fmt: skip
    yield GpuRow("optimizer", "AdamW fused and foreach", "gpu_kernels:time_optimizer",
                 {"tensors": 64, "size": 16_000_000, "steps": 10},
                 {"tensors": 3, "size": 1000, "steps": 1}, ("distributed/optimizer.py",),
                 expected="fused: 9.6 ms per 1B")  # fmt: skip
    for model, expected in {
        "0.1B": "eager 12 to 15 ms; captured 55,000 and 190,000 tokens/s with 64 and 256 rows",
        "1.5B": "captured 28,000 and 90,000 tokens/s with 64 and 256 rows",
    }.items():
        yield GpuRow(
            f"captured decode {model}", "A token of our own sampler, eager and as a CUDA graph",
            "gpu_kernels:capture_decode",
            {"model": model, "prompt": 200, "prompts": 8, "completions": [8, 32], "decoded": 60,
             "timed": 20},
            {"model": "tiny", "prompt": 8, "prompts": 2, "completions": [2], "decoded": 3,
             "timed": 1},
            ("generation/hf",), expected=expected, rehearsal="a CPU has no CUDA graphs",
        )  # fmt: skip


def training_rows() -> Iterator[GpuRow]:
    """The train phase, whole runs and steps without vLLM, memory, and one switch."""
    phase = {
        "W5": {"expected": "ours 580 to 660 ms, 38 to 44 % MFU; TRL 3.0 to 3.7 s",
               "floor": "310 ms"},
        "W7": {"expected": "with 4 prompts: ours 1.3 s, 35 % MFU"},
        "W6-8L": {},
        "W6-lora": {"packages": ("peft",)},
    }  # fmt: skip
    for name, more in phase.items():
        yield GpuRow(
            f"train phase {name}", "The train phase beside TRL's order of work",
            "gpu_phase:train_phase",
            {"workload": name, "tiny": False, "rounds": 3, "prompts": None, "tokens": 16384,
             "judged_groups": 4},
            {"tiny": True, "rounds": 1, "tokens": 128, "judged_groups": 2}, POLICY, seconds=420,
            optional=("trl", "liger-kernel"), **more,
        )  # fmt: skip
    yield GpuRow(
        "real run", "`rloo train +recipe=smollm2_arithmetic`: seeds, one repeated, one killed",
        "gpu_runs:real_run",
        {"recipe": "smollm2_arithmetic", "words": [], "seeds": [1, 2, 3], "kill_step": 20,
         "every": 10},
        {"recipe": "quickstart", "words": ["max_steps=4", "eval.every=2"], "seeds": [1, 2],
         "kill_step": 3, "every": 2}, WHOLE, seconds=400,
        expected="score .195 to .75; .3 to .4 s a step", rehearsal="another recipe, four steps",
    )  # fmt: skip
    yield whole_row("W5", "transformers", 3, ["rloo", "trl", "trl_best"],
                    expected="ours 1.3 s, TRL 4 to 5 s")  # fmt: skip
    for name in ("plain", "reference", "recomputed", "no logits", "bfloat16", "lora"):
        yield GpuRow(
            f"memory, {name}", "Peak memory of a run against what `rloo plan` says",
            "gpu_runs:compare_memory",
            {"setting": name, "model": LARGE, "prompt": 384, "within": 0.15,
             "words": ["train.prompts_per_step=16", "train.micro_batch_tokens=8192"]},
            {"model": SMALL, "prompt": 16, "within": None,
             "words": ["train.prompts_per_step=2", "generation.max_completion_length=4"]},
            ("policy", "planning", "train"), "bfloat16" if name == "bfloat16" else "float32",
            seconds=200, packages=("peft",) * (name == "lora"), expected="within 3 %",
        )  # fmt: skip
    yield switch_row("micro-batch tokens", "train.micro_batch_tokens=8192")
    yield switch_row("compile", "train.compile=true", seconds=590)
    yield marked_row("gpu and not vllm", "tests marked gpu", 400)


def switch_row(name: str, word: str, *base: str, **more: Any) -> GpuRow:
    """A row of one word of the config; `base`: words that stand there in both cases."""
    tiny = {"model": SMALL, "steps": 1, "prompts": 2, "length": 4, "rounds": 1}
    return GpuRow(
        f"switch: {name}", f"An update without `{word}` and with it, A B A B",
        "gpu_runs:compare_switch",
        {"word": word, "base": list(base), "model": LARGE, "steps": 4, "prompts": 16,
         "length": 128, "rounds": 2},
        tiny, TRAIN, **{"seconds": 300} | more,
    )  # fmt: skip


def whole_row(name: str, sampler: str, steps: int, tools: list[str], **more: Any) -> GpuRow:
    """Whole steps of one workload by these tools."""
    with_vllm = sampler == "vllm"
    by = "vLLM beside the trainer" if with_vllm else "transformers"
    return GpuRow(
        f"whole step {name}" + ("" if with_vllm else ", no vLLM"),
        f"A step of `rloo` and of TRL's RLOOTrainer, sampled by {by}", "gpu_whole:whole_step",
        {"workload": name, "tiny": False, "turns": 2, "steps": steps, "prompts": None,
         "tokens": 16384, "sampler": sampler, "tools": tools, "share": SHARES[name]},
        {"tiny": True, "turns": 1, "steps": 1, "tokens": 256},
        WHOLE, packages=("trl",), optional=("liger-kernel",), seconds=590,
        vllm=LEAST_VLLM if with_vllm else "", **more,
    )  # fmt: skip


def marked_row(marks: str, name: str, seconds: int, **more: Any) -> GpuRow:
    """The tests with these marks."""
    return GpuRow(name, f"pytest -m '{marks}'", "gpu_kernels:run_marked_tests",
                  {"marks": marks, "collect": False}, {"collect": True}, WHOLE, seconds=seconds,
                  rehearsal="they are collected, not run", **more)  # fmt: skip


QWEN3 = "V2 (Qwen3)"  # by vLLM 0.22's own rule; other architectures get V1


def colocated_row(name: str, does: str, *words: str, **more: Any) -> GpuRow:
    """A row of an engine beside the trainer; `words`: of its config."""
    gpu_only = ("sleep", "tensor_parallel", "transfer", "utilization", "top_k", "sampling_mask")
    calm = [w for w in words if not any(name in w for name in gpu_only)]
    sizes = {"model": "0.1B", "words": list(words), "updates": 3, "rows": 64, "length": 64}
    sizes = {size: more.pop(size, value) for size, value in sizes.items()}
    small = "moe tiny" if sizes["model"] == "moe" else "tiny"
    given = {"seconds": 300, "vllm": LEAST_VLLM, "runner": QWEN3, "rehearsal": IPC} | more
    return GpuRow(
        name, does, "gpu_engines:compare_colocated", sizes,
        {"model": small, "words": calm, "updates": 2, "rows": 2, "length": 4}, ENGINE, **given,
    )  # fmt: skip


def server_row(name: str, does: str, transfer: str, tp: int = 1, api: int = 1, **more: Any):
    """A row of a server of one's own."""
    model = more.pop("model", "0.1B")
    return GpuRow(
        name, does, "gpu_engines:compare_server",
        {"model": model, "transfer": transfer, "tp": tp, "api": api, "updates": 3, "rows": 64,
         "length": 64},
        {"model": "tiny", "transfer": "gloo", "tp": 1, "updates": 2, "rows": 2, "length": 4},
        ENGINE, **{"vllm": LEAST_VLLM, "seconds": 400, "runner": QWEN3} | more,
    )  # fmt: skip


def engine_rows() -> Iterator[GpuRow]:
    """vLLM on one GPU."""
    sleep, apart = "generation.colocate.sleep=", "generation.colocate.core_process="
    awake = f"without sleep, {IPC}"
    yield whole_row("W8", "vllm", 3, ["rloo", "trl"], expected="ours 2.8 s, TRL 8.2 s",
                    floor="1.26 s", goal="2.4 s", rehearsal=IPC,
                    runner="V1 (GPT-NeoX)")  # fmt: skip
    yield whole_row("W10", "vllm", 1, ["rloo", "trl"], floor="19.9 s", goal="40 s", rehearsal=IPC,
                    runner="V1 (Qwen2)")  # fmt: skip
    for name, rounds in (("W8", 3), ("W10", 1)):
        yield GpuRow(
            f"rollout {name}", "Completion tokens per second by each of vLLM's model runners",
            "gpu_engines:time_rollouts",
            {"workload": name, "tiny": False, "rounds": rounds, "prompts": None,
             "runners": ["V2", "V1"], "share": SHARES[name]},
            {"tiny": True, "rounds": 1, "runners": ["V1"]}, ("generation",), vllm=LEAST_VLLM,
            seconds=500, rehearsal="V1 alone: V2 needs Triton",
        )  # fmt: skip
    yield colocated_row("colocate, float32", "Weights by CUDA IPC give the trainer's numbers",
                        dtype="float32")  # fmt: skip
    yield colocated_row("colocate, no sleep", "The same in bfloat16", f"{sleep}none")
    yield colocated_row("colocate, sleep kv", "The KV cache is freed while the trainer trains",
                        f"{sleep}kv", vllm="0.32", rehearsal=awake)  # fmt: skip
    yield colocated_row("colocate, sleep weights", "All memory is freed, and weights sent anew",
                        f"{sleep}weights", rehearsal=awake)  # fmt: skip
    yield colocated_row("colocate, LoRA, sleep weights", "The base weights survive level 1",
                        f"{sleep}weights", "+lora=default", packages=("peft",), rehearsal=awake,
                        runner="not recorded")  # fmt: skip
    yield colocated_row("colocate, one process", "The engine's core beside our pipe",
                        f"{apart}false")  # fmt: skip
    yield colocated_row(
        "colocate, sampling masks", "Log-probabilities over the ids that top_k left",
        "generation.top_k=64", "generation.return_sampling_mask=true", vllm="0.32",
        refusal="is untested with vLLM on a GPU", runner="V2",
        rehearsal="without top_k and masks: vLLM's model runner V2 needs Triton",
    )  # fmt: skip
    share = "generation.colocate.gpu_memory_utilization=0.45"
    for model in ("0.1B", "1B", "1.5B", "7B"):
        yield colocated_row(
            f"weight sync {model}", "Seconds and bytes per second of an update's weights", share,
            model=model, rows=2, length=4, updates=4,
            runner=QWEN3 if model == "0.1B" else "V1 (GPT-NeoX, Qwen2)",
        )  # fmt: skip
    yield server_row("server, gloo, one GPU", "A server and a trainer on one GPU", "gloo")
    yield server_row("server, two API processes", "The same with two processes that take requests",
                     "gloo", api=2, vllm="0.32")  # fmt: skip
    yield marked_row("gpu and vllm", "tests marked gpu and vllm", 590, vllm=LEAST_VLLM)


def several_gpu_rows() -> Iterator[GpuRow]:
    """Two GPUs and more."""
    for name, words in {
        "ddp": ["distributed=ddp"],
        "fsdp2, reduce each": ["distributed=fsdp2", "distributed.reduce=each"],
        "fsdp2, reduce last": ["distributed=fsdp2", "distributed.reduce=last"],
        "zero3": ["distributed=zero3"],
    }.items():
        yield GpuRow(
            name, "Two processes make the update of one", "gpu_runs:compare_ranks",
            {"words": words, "ranks": 2, "steps": 2}, {"steps": 1}, ("distributed",), "float32",
            gpus=2, packages=("deepspeed",) * (name == "zero3"), seconds=300,
            rehearsal="by gloo in the place of NCCL",
        )  # fmt: skip
    yield GpuRow(
        "colocate per rank", "An engine beside each of two processes, on its own GPU",
        "gpu_runs:compare_rank_engines", {"words": ["distributed=ddp"], "ranks": 2, "steps": 3},
        {"steps": 1}, ENGINE, gpus=2, vllm=LEAST_VLLM, seconds=500, runner=QWEN3,
        refusal="an engine for each of", rehearsal=IPC,
    )  # fmt: skip
    size, gloo = "generation.colocate.tensor_parallel_size=2", "generation.colocate.transfer=gloo"
    one = f"{IPC}; one process in the place of two"
    yield colocated_row("colocate, TP 2, gloo", "One engine over two GPUs", size, gloo, gpus=2,
                        model="odd", rehearsal=one)  # fmt: skip
    yield colocated_row("colocate, TP 2, IPC", "One engine over two GPUs, weights by CUDA IPC",
                        size, gpus=2, refusal="does not work with weight sync by ipc",
                        rehearsal=one)  # fmt: skip
    yield colocated_row("colocate, TP 2, MoE", "One engine over two GPUs, a mixture of experts",
                        size, gloo, "generation.allow_moe=true", gpus=2, model="moe",
                        rehearsal=one, runner="V1 (MoE)",
                        refusal="is untested with a mixture of experts")  # fmt: skip
    yield server_row("server, NCCL", "Weights to a server on another GPU", "nccl", gpus=2,
                     rehearsal="by gloo: a CPU has no NCCL")  # fmt: skip
    yield server_row("server, NCCL, TP 2", "The same to two GPUs", "nccl", 2, gpus=3, model="odd",
                     rehearsal="by gloo, one engine process in the place of two")  # fmt: skip


ROWS: Sequence[GpuRow] = [
    *kernel_rows(), *training_rows(), *engine_rows(), *several_gpu_rows()
]  # fmt: skip

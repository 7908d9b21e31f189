"""The rows of `gpu_proof.py`, as data: what each shows, needs and may take. Imports no torch.

A row is one function of (device, dtype, sizes) that returns plain facts; `sizes` is for a GPU,
`tiny` for a rehearsal on a CPU, which calls the same function with the same keys. Rows without vLLM
come first, then those of one GPU with it, then those of several GPUs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Sizes = dict[str, Any]
TP2 = "one engine over two GPUs"


@dataclass(frozen=True)
class ProofRow:
    """One row: a question that only a GPU answers."""

    name: str
    does: str
    work: str  # module:function
    sizes: Sizes = field(default_factory=dict)
    tiny: Sizes = field(default_factory=dict)  # the same keys
    dtype: str = "bfloat16"
    gpus: int = 1
    vllm: str = ""  # the least version; "" = not needed
    lacks: str = ""  # what an older vLLM lacks
    packages: tuple[str, ...] = ()
    seconds: int = 120
    findings: tuple[str, ...] = ()  # lines of the first reading that it confirms or refutes
    refusal: str = ""  # what `arguments._unproven` says until this row was confirmed
    rehearsal: str = ""  # what a CPU leaves out
    slow: bool = False  # its rehearsal takes long

    def changes(self, given: Sizes, short: bool = False) -> Sizes:
        """Those of `given` that this row has, on top of its short sizes where those are wanted."""
        asked = (SHORT.get(self.name, {}) if short else {}) | given
        return {name: value for name, value in asked.items() if name in self.sizes}

    @property
    def quick(self) -> bool:
        """Whether `make test` rehearses it."""
        return not (self.slow or self.vllm or "trl" in self.packages)


LEAST_VLLM = "0.22"
# What a reading of the sources expected of a GPU, before there was one: what had to be mended, or
# could only be guessed.
FINDINGS = {
    "S1": "weights are sent only after the optimizer's kernels have written them",
    "S5": "float32 in the engine is float32, or the tolerance allows for TF32",
    "C1": "each process's engine is on its own GPU",
    "C2": "the buffer holds the largest tensor",
    "C3": "the KV cache can be let go of: the engine is drained first",
    "C4": "base weights under an adapter survive sleep",
    "C5": "there is room to wake up in",
    "C6": "one engine over several GPUs beside the trainer gets its weights",
    "C9": "a vocabulary that does not divide among GPUs arrives whole",
    "P2": "an engine in a process of its own does not wait for Python",
    "P4": "answers cost the engine little",
    "P5": "AdamW in one kernel takes half the time",
    "P6": "compiling each decoder layer makes a step faster",
    "P7": "the head's products in half precision are as exact, and many times as fast",
    "P8": "keeping logits saves a tenth of a step",
    "P10": "adapters multiply as fast as their base",
    "P15": "an update of 1B travels in well under half a second",
    "P16": "reducing once an update is faster than with each micro-batch",
    "P19": "AdamW in the CPU's memory is one pass over it, and its copies are page-locked",
    "P20": "the plan's memory is the GPU's",
    "P21": "checkpointing comes on only where a row needs it",
    "P28": "the fused head is within rounding of the model's own",
}
IPC = "by gloo: a CPU has no CUDA IPC"
AWAKE = f"without sleep, {IPC}"


def kernels() -> list[ProofRow]:
    """Every path of the forward and backward pass against float64 rows alone."""
    rows = [
        ProofRow("machine", "What a matrix product and a copy reach", "proof_kernels:machine",
                 {"size": 8192, "copy_mb": 4096}, {"size": 128, "copy_mb": 8}),
        ProofRow("order of waits", "Weights are read after the kernels that write them",
                 "proof_kernels:order", {"size": 4096, "queued": 200}, {"size": 64, "queued": 2},
                 findings=("S1",), rehearsal="nothing is queued on a CPU"),
    ]  # fmt: skip
    for dtype in ("float32", "bfloat16"):
        rows.append(ProofRow(
            f"head {dtype}", "The fused head against log_softmax in float64", "proof_kernels:head",
            {"rows": 1024, "width": 1536, "words": 151936, "timed": 3},
            {"rows": 24, "width": 32, "words": 300, "timed": 1}, dtype, findings=("P7", "P28"),
        ))  # fmt: skip
        for layout in ("shared", "packed", "padded"):
            rows.append(ProofRow(
                f"{layout} {dtype}", f"{layout} rows against single rows in float64",
                "proof_kernels:layout", {"layout": layout, "model": "kernel", "longest": 300},
                {"layout": layout, "model": "tiny", "longest": 20}, dtype,
            ))  # fmt: skip
    return rows


SETTINGS = ("plain", "reference", "recomputed", "no logits", "bfloat16", "lora")
LARGE = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 16,
         "vocab_size": 65536}  # fmt: skip
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2,
         "vocab_size": 512}  # fmt: skip


def training() -> list[ProofRow]:
    """The train phase, the optimizer, and memory."""
    rows = [
        ProofRow(
            f"train phase {name}", "The train phase against TRL's order of work",
            "proof_train:phase",
            {"workload": name, "tiny": False, "rounds": 3, "prompts": None},
            {"workload": name, "tiny": True, "rounds": 1, "prompts": None}, seconds=420,
            packages=("peft",) * name.endswith("lora"), findings=("P6", "P8", "P10"),
        ) for name in ("W5", "W7", "W6-8L", "W6-lora")
    ]  # fmt: skip
    rows += [
        ProofRow(
            f"memory, {name}", "Peak memory of a run against what `rloo plan` says",
            "proof_train:memory",
            {"setting": name, "model": LARGE, "prompt": 384, "within": 0.15,
             "words": ["train.prompts_per_step=16", "train.micro_batch_tokens=8192"]},
            {"setting": name, "model": SMALL, "prompt": 16, "within": None,
             "words": ["train.prompts_per_step=2", "generation.max_completion_length=4"]},
            "bfloat16" if name == "bfloat16" else "float32", seconds=200,
            packages=("peft",) * (name == "lora"), findings=("P20", "P21"),
        ) for name in SETTINGS
    ]  # fmt: skip
    switches = {
        "logits made again": ("P8", "train.keep_logits_gb=0"),
        "head in float32": ("P7", "model.lm_head_fp32=true"),
    }
    rows += [switch(n, word, findings=(found,)) for n, (found, word) in switches.items()]
    rows.append(ProofRow(
        "optimizer", "AdamW fused against foreach", "proof_train:optimizer",
        {"tensors": 64, "size": 16_000_000, "steps": 10},
        {"tensors": 3, "size": 1000, "steps": 1}, "float32", findings=("P5",),
    ))  # fmt: skip
    rows.append(ProofRow(
        "optimizer in the CPU's memory", "AdamW fused against torch's default, and the copies",
        "proof_train:offloaded", {"tensors": 16, "size": 16_000_000, "steps": 3},
        {"tensors": 2, "size": 1000, "steps": 1}, "float32", findings=("P19",),
        rehearsal="nothing is copied to a GPU",
    ))  # fmt: skip
    return rows


def switch(name: str, word: str, *base: str, **more: Any) -> ProofRow:
    """A row of one word of the config; `base`: words that stand there in both cases."""
    given: dict[str, Any] = {"seconds": 300, "slow": True} | more
    return ProofRow(
        f"switch: {name}", f"A step with `{word}` and without, A B A B", "proof_train:switch",
        {"word": word, "base": list(base), "model": LARGE, "steps": 4, "prompts": 16,
         "length": 128},
        {"word": word, "base": list(base), "model": SMALL, "steps": 1, "prompts": 2, "length": 4},
        **given,
    )  # fmt: skip


def whole(name: str, sampler: str, prompts: int | None, steps: int, **more: Any) -> ProofRow:
    """Whole steps of one workload. `prompts`: of a step, where the workload's would take long."""
    by = "transformers" if sampler != "vllm" else "vLLM beside the trainer"
    given: Sizes = {"workload": name, "tiny": False, "turns": 2, "steps": steps, "prompts": prompts,
                    "sampler": sampler, "enough_s": 300}  # fmt: skip
    tiny = given | {"tiny": True, "turns": 1, "steps": 1, "prompts": None}
    does = f"A step of `rloo` and of TRL's RLOOTrainer, both with {by}"
    title = f"whole step {name}" + (", no vLLM" if sampler != "vllm" else "")
    return ProofRow(title, does, "proof_steps:whole", given, tiny, packages=("trl",), seconds=590,
                    **more)  # fmt: skip


def whole_steps() -> list[ProofRow]:
    """Whole steps against TRL's real RLOOTrainer, A B A B, each turn in a process of its own."""
    told = (
        f"{IPC}; TRL's side, if its vLLM is there, ends at its first weights, which vLLM's build"
        " for CPUs keeps packed"
    )
    more: dict[str, Any] = {"vllm": LEAST_VLLM, "findings": ("P2", "P15"), "rehearsal": told}
    return [
        whole("W5", "transformers", None, 3),
        whole("W7", "transformers", None, 1),
        whole("W8", "vllm", None, 3, **more),
        whole("W9", "vllm", None, 3, **more),
        whole("W10", "vllm", 32, 1, **more),
    ]


def tests() -> list[ProofRow]:
    """The tests that are marked gpu."""
    told = "they are collected, not run: each needs a GPU"
    return [
        ProofRow("tests marked gpu", "pytest -m 'gpu and not vllm'", "proof_kernels:marked",
                 {"marks": "gpu and not vllm", "collect": False},
                 {"marks": "gpu and not vllm", "collect": True}, seconds=400,
                 rehearsal=told, slow=True),
        ProofRow("tests marked gpu and vllm", "pytest -m 'gpu and vllm'", "proof_kernels:marked",
                 {"marks": "gpu and vllm", "collect": False},
                 {"marks": "gpu and vllm", "collect": True}, seconds=590, vllm=LEAST_VLLM,
                 rehearsal=told, findings=("C3", "S5")),
    ]  # fmt: skip


def beside(name: str, does: str, *words: str, **more: Any) -> ProofRow:
    """A row of an engine beside the trainer; `words`: of its config."""
    given: dict[str, Any] = {"rehearsal": IPC, "seconds": 300, "vllm": LEAST_VLLM} | more
    gpu_only = ("sleep", "tensor_parallel", "top_k", "sampling_mask")
    calm = [w for w in words if not any(name in w for name in gpu_only)]
    calm = [w.replace("transfer=ipc", "transfer=gloo") for w in calm]
    model = given.pop("model", "0.1B")
    return ProofRow(
        name, does, "proof_engines:colocate",
        {"model": model, "words": list(words), "updates": 3, "rows": 64, "length": 64},
        {"model": "moe tiny" if "moe" in model else "tiny", "words": calm, "updates": 2, "rows": 2,
         "length": 4},
        **given,
    )  # fmt: skip


def engines() -> list[ProofRow]:
    """vLLM on one GPU."""
    sleep = "generation.colocate.sleep="
    apart = "generation.colocate.core_process="
    rows = [
        beside("colocate, float32", "Weights by CUDA IPC answer with the trainer's numbers",
               dtype="float32", findings=("S5",)),
        beside("colocate, no sleep", "The same in bfloat16", sleep + "none"),
        beside("colocate, sleep kv", "The KV cache goes while the trainer trains", sleep + "kv",
               findings=("C3",), rehearsal=AWAKE),
        beside("colocate, sleep weights", "All of it goes, and the weights come anew",
               sleep + "weights", findings=("C5",), rehearsal=AWAKE),
        beside("colocate, core process", "The engine's core in a process of its own",
               apart + "true", findings=("P2",)),
        beside("colocate, one process", "The engine's core beside our pipe", apart + "false",
               findings=("P2",)),
        beside("colocate, LoRA, sleep weights", "The base weights survive level 1",
               sleep + "weights", "+lora=default", packages=("peft",), findings=("C4",),
               rehearsal=AWAKE),
        beside("colocate, core process, sleep weights", "Sleep with the core apart",
               apart + "true", sleep + "weights", findings=("C5", "P2"), rehearsal=AWAKE),
        beside("colocate, sampling masks", "Log-probabilities over the ids that top_k left",
               "generation.top_k=64", "generation.return_sampling_mask=true", vllm="0.32",
               lacks="sampling masks", refusal="was never tried with vLLM on a GPU",
               rehearsal="without top_k and masks: vLLM's model runner V2 needs Triton"),
    ]  # fmt: skip
    rows += [
        ProofRow(
            f"weight sync {model}", "Seconds and bytes per second of an update's weights",
            "proof_engines:sync", {"model": model, "times": 5}, {"model": "tiny", "times": 2},
            vllm=LEAST_VLLM, seconds=300, rehearsal=IPC,
            findings=("P15", "C2") if model == "7B" else ("P15",),  # an embedding above 1 GiB
        ) for model in ("0.1B", "1B", "1.5B", "7B")
    ]  # fmt: skip
    rows += [
        ProofRow(
            f"rollout {name}", "Completion tokens per second, against vLLM alone",
            "proof_engines:rollout",
            {"workload": name, "tiny": False, "rounds": rounds, "prompts": prompts},
            {"workload": name, "tiny": True, "rounds": 1, "prompts": None},
            vllm=LEAST_VLLM, seconds=500, findings=("P2", "P4"),
        ) for name, prompts, rounds in (("W8", None, 3), ("W10", 64, 1))
    ]  # fmt: skip
    # Our own sampler would use the compiled layers: `train.compile` is for engines.
    rows.append(switch("compile", "train.compile=true", "generation=vllm_colocate",
                       vllm=LEAST_VLLM, findings=("P6",), seconds=590, rehearsal=IPC))  # fmt: skip
    rows.append(served("server, gloo, one GPU", "A server and a trainer on one GPU", "gloo"))
    rows.append(
        served(
            "server, two API processes", "The same with two processes that take requests", "gloo",
            api=2, vllm="0.32", lacks="labels of weights in the engine",
        )
    )  # fmt: skip
    return rows


def served(name: str, does: str, transfer: str, tp: int = 1, api: int = 1, **more: Any) -> ProofRow:
    """A row of a server of one's own."""
    given: dict[str, Any] = {"vllm": LEAST_VLLM, "seconds": 400} | more
    model = given.pop("model", "0.1B")
    return ProofRow(
        name, does, "proof_engines:server",
        {"model": model, "transfer": transfer, "tp": tp, "api": api, "updates": 3, "rows": 64,
         "length": 64},
        {"model": "moe tiny" if "moe" in model else "tiny", "transfer": "gloo", "tp": 1,
         "api": api, "updates": 2, "rows": 2, "length": 4},
        **given,
    )  # fmt: skip


def several() -> list[ProofRow]:
    """Two GPUs and more."""
    rows = []
    for name, words in {
        "ddp": ["distributed=ddp"],
        "fsdp2, reduce each": ["distributed=fsdp2", "distributed.reduce=each"],
        "fsdp2, reduce last": ["distributed=fsdp2", "distributed.reduce=last"],
        "zero3": ["distributed=zero3"],
    }.items():
        rows.append(ProofRow(
            name, "Two processes make the update of one", "proof_ranks:same",
            {"words": words, "ranks": 2, "steps": 2}, {"words": words, "ranks": 2, "steps": 1},
            "float32", gpus=2, packages=("deepspeed",) * (name == "zero3"), seconds=300,
            findings=("P16",), rehearsal="by gloo in the place of NCCL", slow=True,
        ))  # fmt: skip
    beside_each = {"words": ["distributed=ddp"], "ranks": 2, "steps": 3}
    one_gpu = f"{IPC}; one process in the place of two"
    one_engine = "one engine process in the place of two"
    return [
        *rows,
        ProofRow(
            "colocate per rank", "An engine beside each of two processes, on its own GPU",
            "proof_ranks:engines", beside_each, {**beside_each, "steps": 1}, gpus=2,
            vllm=LEAST_VLLM, seconds=500, findings=("C1",),
            refusal="an engine beside each of", rehearsal=IPC,
        ),
        beside(
            "colocate, TP 2, gloo", TP2, "generation.colocate.tensor_parallel_size=2",
            "generation.colocate.transfer=gloo", gpus=2, model="odd", findings=("C6", "C9"),
            rehearsal=one_gpu,
        ),
        beside(
            "colocate, TP 2, IPC", TP2 + ", weights by CUDA IPC",
            "generation.colocate.tensor_parallel_size=2", gpus=2, findings=("C6",),
            refusal="cannot be sent weights by ipc", rehearsal=one_gpu,
        ),
        beside(
            "colocate, TP 2, MoE", TP2 + ", of a mixture of experts",
            "generation.colocate.tensor_parallel_size=2", "generation.colocate.transfer=gloo",
            gpus=2, model="moe", findings=("C6",), rehearsal=one_gpu,
            refusal="was never tried with a mixture of experts",
        ),
        served("server, NCCL", "Weights to a server on another GPU", "nccl", gpus=2,
               findings=("S1",), rehearsal="by gloo: a CPU has no NCCL"),
        served("server, NCCL, TP 2", "The same to two GPUs", "nccl", 2, gpus=3, model="odd",
               findings=("C9",), rehearsal=f"by gloo, {one_engine}"),
    ]  # fmt: skip


def every() -> list[ProofRow]:
    """All rows, in the order in which they run."""
    steps, marked = whole_steps(), tests()
    alone = [row for row in steps if not row.vllm]
    with_vllm = [row for row in steps if row.vllm]
    first = [*kernels(), *training(), *alone, marked[0]]
    return [*first, *engines(), *with_vllm, marked[1], *several()]


ROWS: Sequence[ProofRow] = every()

# For a GPU that is there for a quarter of an hour: the rows that say most, in small sizes; first
# those that no GPU has run. The others of a machine that is there for longer are not among them.
_THIN = LARGE | {"num_hidden_layers": 4}
SHORT: dict[str, Sizes] = {
    "train phase W5": {"prompts": 16, "rounds": 2},
    "whole step W8": {"prompts": 32, "turns": 1, "steps": 2},
    "weight sync 1B": {"times": 3},
    "optimizer": {},
    "whole step W5, no vLLM": {"prompts": 16, "turns": 1, "steps": 2},
    "memory, bfloat16": {"model": _THIN},
    "memory, no logits": {"model": _THIN},
    "colocate, float32": {},
    "colocate, one process": {},
    "memory, reference": {"model": _THIN},
    "memory, recomputed": {"model": _THIN},
    "train phase W7": {"prompts": 4, "rounds": 2},
    "colocate, no sleep": {},
    "colocate, sleep weights": {},
    "colocate, LoRA, sleep weights": {},
    "head bfloat16": {},
    "tests marked gpu": {},
}

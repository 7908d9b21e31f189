"""One turn of a whole step's comparison: a tool in a process of its own, a few steps, then its end.

    python bench/proof_side.py rloo FOLDER/spec.json

The spec says workload, sampler and number of steps, and where model and prompts lie. The last line
of the output is JSON: seconds of each step after the first one, which does not count. TRL's side
may be another environment's Python, so it imports nothing of `rloo` (RLOO_TRL_PYTHON).
"""

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from shapes import Shape

Spec = dict[str, Any]
Answer = dict[str, Any]
SEED, SHARE = 1, 0.3  # SHARE: of the GPU's memory for vLLM, in both tools


def shape_in(spec: Spec) -> Shape:
    """The workload of a spec, from JSON, which knows no tuples."""
    given = spec["shape"]
    return Shape(**given | {n: tuple(given[n]) for n in ("prompt", "completion")})


def peak() -> float | None:
    """GB that torch's tensors of this process took at most."""
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None


def rloo(spec: Spec, folder: Path) -> Answer:
    """`rloo`'s turn."""
    import gpu
    import gpu_step
    from proof_kernels import bandwidth

    shape, tiny = shape_in(spec), spec["tiny"]
    backend = "vllm_colocate" if spec["sampler"] == "vllm" else "transformers"
    with gpu_step.started(shape, spec["beta"], folder, SEED, tiny, backend) as run:
        gpu_step.step(run)  # does not count
        seconds = [gpu_step.step(run) for _ in range(spec["steps"])]
        memory, cost = peak(), asdict(run.forward_limits.cost)
        level, device = str(run.layout_choice), run.policy.device
    gpu.clear()
    return {
        "seconds": [each["step"] for each in seconds], "split": seconds[-1], "peak_gb": memory,
        "settings": f"{level}, {backend}", "cost": cost,
        "peak_flops": gpu.ceiling(device, 128 if tiny else 8192),
        "bandwidth": bandwidth(device, 8 if tiny else 4096),
    }  # fmt: skip


class Steps:
    """So many steps as orders, and what was answered."""

    def __init__(self, count: int):
        self.left, self.answers = count, []

    def __call__(self) -> Answer | None:
        self.left -= 1
        return {"do": "step"} if self.left >= 0 else None

    def answer(self, **values: Any) -> None:
        """One step's answer."""
        self.answers.append(values)


def with_tokenizer(folder: Path) -> None:
    """Model and tokenizer in one folder, where TRL's vLLM looks for both."""
    place = folder / "with_tokenizer"
    place.mkdir(exist_ok=True)
    for path in [*(folder / "model").iterdir(), *(folder / "tokenizer").iterdir()]:
        if not (place / path.name).exists():
            (place / path.name).symlink_to(path)


def trl(spec: Spec, folder: Path) -> Answer:
    """TRL's turn: its RLOOTrainer, with the largest micro-batch that fits and no checkpointing."""
    import side_trl

    share = SHARE if spec["sampler"] == "vllm" else None
    with_tokenizer(folder)
    orders: Any = Steps(spec["steps"] + 1)
    with side_trl.compact_head(True):
        trainer = side_trl.build(
            shape_in(spec), folder, SEED, spec["checkpointing"], spec["micro"], spec["beta"], share
        )
        trainer.add_callback(side_trl.Side(trainer, orders))
        with contextlib.suppress(side_trl.Done):
            trainer.train()
    told = orders.answers[1:]
    checkpointing = "with" if spec["checkpointing"] else "no"
    return {
        "seconds": [each["seconds"] for each in told], "split": told[-1]["split"],
        "peak_gb": peak(),
        "settings": f"micro-batches of {spec['micro']}, {checkpointing} gradient checkpointing",
    }  # fmt: skip


def main() -> int:
    """The command. Exit code 9 = out of memory."""
    tool, path = sys.argv[1], Path(sys.argv[2])
    spec = json.loads(path.read_text(encoding="utf-8"))
    try:
        told = {"rloo": rloo, "trl": trl}[tool](spec, path.parent)
    except torch.OutOfMemoryError as error:
        print(error, file=sys.stderr)
        return 9
    print("\n" + json.dumps(told), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

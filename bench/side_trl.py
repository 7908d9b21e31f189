"""TRL 1.16's RLOOTrainer as a side of the benchmark, all of its own code, stepped from outside.

Its `train()` runs as always; at the beginning of every step a callback reports the step that has
just ended and waits for the next order. So a step holds everything its loop does, logging too.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["CI"] = "1"  # or it reports its use over the network

import torch
from datasets import Dataset
from shapes import Shape
from sides import (
    BETA,
    CLIP,
    LONG,
    RATE,
    Answer,
    Order,
    Orders,
    Rows,
    Watch,
    body,
    digits,
    disturb,
    keep_gradient,
    memory,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import RLOOConfig, RLOOTrainer


class Done(Exception):
    """No more orders."""


@contextmanager
def compact_head(wanted: bool) -> Iterator[None]:
    """TRL's head on the completions' rows alone, as it runs on a GPU.

    TRL 1.16 asks `_use_triton(device)` whether to leave the other rows out, and would not on a CPU.
    The name is replaced in `trl.trainer.utils` only, where that is its one use: the kernels, which
    ask their own module's, stay the CPU's.
    """
    if not wanted:
        yield
        return
    with mock.patch("trl.trainer.utils._use_triton", lambda device: True):
        yield


class Phases:
    """Seconds in methods of TRL's trainer, by a name for each; an inner one's are its own."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, holder: Any, method: str, name: Callable[..., str]) -> None:
        """Time a method under what `name` says of its arguments."""
        called = getattr(holder, method)

        def timed(*args: Any, **options: Any) -> Any:
            began, inside = time.perf_counter(), sum(self.seconds.values())
            try:
                return called(*args, **options)
            finally:
                spent = time.perf_counter() - began - (sum(self.seconds.values()) - inside)
                self.seconds[name(*args)] += spent

        setattr(holder, method, timed)

    def take(self) -> dict[str, float]:
        """Since the last call."""
        found, _ = dict(self.seconds), self.seconds.clear()
        return found


def build(
    shape: Shape,
    folder: Path,
    seed: int,
    checkpointing: bool,
    micro: int,
    beta: float = BETA,
    share: float | None = None,
    dtype: torch.dtype = torch.float32,
    more: dict[str, Any] | None = None,
) -> RLOOTrainer:
    """The trainer: its defaults, but for what must be as in `rloo` and what a CPU cannot do.

    `share`: of a GPU's memory for vLLM beside the trainer; None = transformers samples.
    `dtype`: of the weights. `more`: arguments of RLOOConfig on top of all others.
    """
    both, tokens = folder / "with_tokenizer", folder / "tokenizer"
    path = str(both if both.exists() else folder / "model")
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    trainer = RLOOTrainer(
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype),
        reward_funcs=digits,
        args=settings(shape, folder, seed, checkpointing, micro, beta, share, more or {}),
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(tokens if tokens.exists() else path),
    )
    assert trainer.model.dtype == dtype
    assert trainer.ref_model is None or trainer.ref_model.dtype == dtype
    trainer.remove_callback(PrinterCallback)
    disturb(trainer.model)
    return trainer


def settings(
    shape: Shape,
    folder: Path,
    seed: int,
    checkpointing: bool,
    micro: int,
    beta: float,
    share: float | None,
    more: dict[str, Any],
) -> RLOOConfig:
    """The trainer's arguments; see `build`."""
    parts, cuda = shape.batch // micro, torch.cuda.is_available()
    length = shape.completion[1]
    given = {
        "output_dir": str(folder / "trl"),
        "seed": seed,
        "num_generations": shape.k,
        "max_completion_length": length,
        **sampler(length, shape.prompt[1] + length, share),
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": parts,
        "steps_per_generation": parts,
        "gradient_checkpointing": checkpointing,
        "max_steps": LONG,
        "beta": beta,
        "learning_rate": RATE,
        "max_grad_norm": CLIP,
        "shuffle_dataset": False,
        "use_cpu": not cuda,
        "bf16": cuda,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return RLOOConfig(**given | more)


def sampler(length: int, longest: int, share: float | None) -> dict[str, Any]:
    """The settings of who samples. EOS does not end a completion: the length is forced."""
    if share is None:
        return {"generation_kwargs": {"min_new_tokens": length}}
    return {
        "generation_kwargs": {"min_tokens": length, "ignore_eos": True},
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": share,
        "vllm_max_model_length": longest,
    }


class Side(TrainerCallback):
    """The trainer's steps, one for each order."""

    def __init__(self, trainer: RLOOTrainer, orders: Orders):
        self.trainer, self.orders = trainer, orders
        self.order: Order | None = None
        self.trained: dict[str, float] = {}  # seconds when the step's optimizer was done
        self.watch, self.rows, self.phases = Watch(), Rows(trainer.model), Phases()
        reference = trainer.ref_model
        wrap = self.phases.wrap
        wrap(trainer, "_generate", lambda *_: "generation")
        wrap(trainer, "_calculate_rewards", lambda *_: "reward")
        wrap(trainer, "training_step", lambda *_: "update")
        wrap(
            trainer, "_get_per_token_logps_and_entropies",
            lambda model, *_: "update" if torch.is_grad_enabled()
            else "reference" if model is reference else "old_logp",
        )  # fmt: skip
        self.tokenize, self.sample = trainer._tokenize_prompts, trainer._generate_single_turn
        trainer._tokenize_prompts, trainer._generate_single_turn = self.prompts, self.completions
        self.clip = trainer.accelerator.clip_grad_norm_
        trainer.accelerator.clip_grad_norm_ = self.clipped

    def recorded(self, column: int) -> list[list[int]] | None:
        """Prompts (0) or completions (1) to train on, where sampling is not asked for."""
        return [row[column] for row in self.order["rows"]] if self.order["do"] == "train" else None

    def prompts(self, *args: Any) -> Any:
        """In the place of tokenizing."""
        rows = self.recorded(0)
        return self.tokenize(*args) if rows is None else (rows, None, {})

    def completions(self, *args: Any) -> list[list[int]]:
        """In the place of sampling."""
        rows = self.recorded(1)
        return self.sample(*args) if rows is None else rows

    def clipped(self, *args: Any, **options: Any) -> Any:
        """What clips the gradient comes last before the optimizer: keep what it gets."""
        if self.order.get("gradient"):
            keep_gradient(self.trainer.model, self.order["gradient"])
        return self.clip(*args, **options)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The optimizer is there from now on."""
        self.phases.wrap(self.trainer.optimizer, "step", lambda *_: "optimizer")

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Report the step before, and wait for what is to be done next."""
        if self.order is not None:
            self.orders.answer(**self.report())
        self.order = self.orders()
        if self.order is None:
            raise Done
        self.phases.take()
        self.rows.take()
        self.watch.start(self.order.get("count", False))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """The optimizer is done; what the loop does now is no part of the train phase."""
        self.trained = self.watch.read()

    def report(self) -> Answer:
        """The answer to the order that has been obeyed."""
        got, split = self.watch.read(), self.phases.take()
        if self.order["do"] == "train":
            got = dict(self.trained)
            # Its scoring and its bookkeeping of texts are in the way, but no part of this phase.
            # The share of the processor's time they had is not known apart: one thread, so that of
            # the wall's.
            spent = split.pop("generation", 0.0) + split.pop("reward", 0.0)
            got["cpu"] *= 1 - spent / got["seconds"]
            got["seconds"] -= spent
        split["other"] = got["seconds"] - sum(split.values())
        computed = self.rows.take()
        return {**got, "split": split, "computed": computed, "peak": memory("VmHWM")}


def serve(shape: Shape, folder: Path, seed: int, orders: Orders, setting: str, micro: int) -> None:
    """Obey until there are no more orders. `setting`: default, best or untouched."""
    with compact_head(setting != "untouched"):
        trainer = build(shape, folder, seed, setting != "best", micro)
        trainer.add_callback(Side(trainer, orders))
        orders.answer(
            base=memory("VmRSS"),
            body=body(trainer.model),
            level="padded",
            attention=trainer.model.config._attn_implementation,
        )
        try:
            trainer.train()
        except Done:
            return

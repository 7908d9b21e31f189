"""TRL's SFTTrainer and RewardTrainer, with the keys of `sft` and `reward_model` as their arguments.

Beyond TRL: the order of the examples, which is the same on any number of ranks, the lines of
metrics, stopping by a signal, and stopping at a loss that is not finite. Nothing is saved during
training: a stopped training starts over.
"""

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Sampler
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from trl.trainer.utils import add_fused_lm_head

from rloo_cli.config.schema import RunConfig, TrainConfig, TrainingConfig
from rloo_cli.config.supervised import split_batch
from rloo_cli.data.order import like_length_batches
from rloo_cli.distributed.optimizer import warmup_note, warmup_updates
from rloo_cli.distributed.world import World
from rloo_cli.policy import load
from rloo_cli.policy.vision import family_of_model
from rloo_cli.train.supervised.rows import ID_COLUMNS, TrainingRows
from rloo_cli.utils.errors import NumbersError, Problem
from rloo_cli.utils.files import JsonObject

WriteMetrics = Callable[[JsonObject], None]
# Logged by TRL besides a line's numbers: times, totals, and extremes that depend on the size of
# a forward pass.
LEFT_OUT = (
    "runtime", "samples_per_second", "steps_per_second", "num_tokens", "preparation_time",
    "min_reward", "max_reward",
)  # fmt: skip


class SeededOrder(Sampler[int]):
    """The examples of a training, pass after pass: those of similar length share a batch."""

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, total: int):
        """`total`: examples of all passes."""
        self.lengths, self.batch_size, self.seed, self.total = lengths, batch_size, seed, total

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        batches = like_length_batches(self.lengths, self.batch_size, self.seed)
        return islice(chain.from_iterable(batches), self.total)


class _OrderedTrainer:
    """A trainer whose examples come in `order`."""

    order: SeededOrder

    def _get_train_sampler(self, train_dataset: object = None) -> SeededOrder:
        return self.order


class OrderedSFTTrainer(_OrderedTrainer, SFTTrainer):
    """TRL's trainer of the likelihood of completions."""


class OrderedRewardTrainer(_OrderedTrainer, RewardTrainer):
    """TRL's trainer of Bradley and Terry's loss."""


@dataclass
class TrainingWatch(TrainerCallback):
    """Passes each line of metrics on, and ends a training that is stopped or diverges.

    `batch_size`: examples of a step; `num_examples`: of a pass; `total`: of all passes.
    `num_held_out`: examples evaluated before the first step and after the last one.
    """

    world: World
    write_metrics: WriteMetrics
    batch_size: int
    num_examples: int
    total: int
    num_held_out: int
    evaluations: list[JsonObject] = field(default_factory=list)
    logged_step: int = 0
    began: float = field(default_factory=time.monotonic)

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Raise Stopped if a signal has asked any rank to end."""
        self.world.check_stop(frequent=True)

    on_substep_end = on_prediction_step = on_step_begin

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> TrainerControl:
        """Log and evaluate after the last step."""
        if state.global_step == state.max_steps:
            control.should_log, control.should_evaluate = True, self.num_held_out > 0
        return control

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **_: object,
    ) -> None:
        """Write a line of a step or of an evaluation. Raises NumbersError."""
        _check_finite(logs, state.global_step)
        if "train_runtime" in logs:  # for the whole training, after its last line
            return
        found = {n: v for n, v in logs.items() if n != "epoch" and not n.endswith(LEFT_OUT)}
        if any(name.startswith("eval_") for name in found):
            found |= {"eval_rows": self.num_held_out}
            self.evaluations.append(found)
            self.write_metrics({"step": state.global_step} | found)
            return
        step, rate = state.global_step, found.pop("learning_rate")
        head = {"step": step, "steps": state.max_steps}
        head["epoch"] = step * self.batch_size / self.num_examples
        rows = self._rows_until(step) - self._rows_until(self.logged_step)
        tail = {"rows": rows, "learning_rate": rate, "seconds": time.monotonic() - self.began}
        self.logged_step = step
        self.write_metrics(head | found | tail)

    def _rows_until(self, step: int) -> int:
        return min(step * self.batch_size, self.total)


def _check_finite(logs: dict[str, float], step: int) -> None:
    """Raise NumbersError for a number that is not finite."""
    odd = {name: value for name, value in logs.items() if not math.isfinite(value)}
    if odd:
        why = ", ".join(f"{name} {value}" for name, value in odd.items())
        fix = "a lower learning_rate, or model.dtype=float32"
        what = "the loss or its gradient is not finite"
        raise NumbersError(Problem(what, f"step {step}", why, fix))


def count_steps(settings: TrainingConfig, num_examples: int) -> int:
    """Optimizer steps of all passes."""
    return math.ceil(settings.epochs * num_examples / settings.batch_size)


def build_trainer(
    section: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    run: RunConfig,
    world: World,
    rows: Sequence[TrainingRows],
    output_dir: Path,
    write_metrics: WriteMetrics,
) -> tuple[Any, TrainingWatch]:
    """Build TRL's trainer of a section. -> it, and what it has logged

    `rows`: the examples to train on and, if there are any, those to evaluate on. `output_dir`: a
    folder that TRL needs. Prints a note if the warm-up is shortened.
    """
    settings: TrainingConfig = getattr(run, section)
    count, held_out = len(rows[0].dataset), rows[1].dataset if len(rows) > 1 else None
    steps = count_steps(settings, count)
    given = _arguments(run, settings, world, steps, held_out is not None)
    given |= {
        "output_dir": output_dir,
        "use_cache": model.config.get_text_config().use_cache,
        "ddp_find_unused_parameters": family_of_model(model) is not None,  # the tower of images
    }
    data = {"train_dataset": rows[0].dataset, "eval_dataset": held_out}
    total = min(steps * settings.batch_size, math.ceil(settings.epochs * count))
    num_held_out = 0 if held_out is None else len(held_out)
    watch = TrainingWatch(world, write_metrics, settings.batch_size, count, total, num_held_out)
    trainer: Any
    if section == "sft":
        args = _make_arguments(SFTConfig, given)
        trainer = OrderedSFTTrainer(
            model, args, processing_class=tokenizer, callbacks=[watch], **data
        )
        if run.model.lm_head_fp32:
            fields = ("log_probs", "entropy", "is_top1")
            add_fused_lm_head(trainer.model, cast_lm_head_to_fp32=True, outputs=fields)
    else:
        center = run.reward_model.center_rewards_coefficient or None
        given |= {"center_rewards_coefficient": center, "disable_dropout": False}
        args = _make_arguments(RewardConfig, given)
        tokenizer = _padding_by_another_token(tokenizer, rows)
        trainer = OrderedRewardTrainer(
            model, args, processing_class=tokenizer, callbacks=[watch], **data
        )
    trainer.order = SeededOrder(rows[0].lengths, settings.batch_size, run.seed, total)
    trainer.remove_callback(PrinterCallback)
    return trainer, watch


def _arguments(
    run: RunConfig, settings: TrainingConfig, world: World, steps: int, evaluates: bool
) -> JsonObject:
    """The arguments that both trainers take."""
    on_cpu = world.device.type == "cpu"
    dtype = load.resolve_dtype(run.model.dtype, world.device)
    size, parts = split_batch(settings, world.size)
    schedule = TrainConfig.model_construct(
        lr_scheduler="linear", warmup_steps=settings.warmup_steps
    )
    note = warmup_note(schedule, steps)
    if note and world.is_main:
        print(f"note: {note}")
    return {
        "seed": run.seed,
        "max_steps": steps,
        "per_device_train_batch_size": size,
        "per_device_eval_batch_size": size,
        "gradient_accumulation_steps": parts,
        "optim": "adamw_torch" if on_cpu else "adamw_torch_fused",
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "linear",
        "warmup_steps": warmup_updates(schedule, steps),
        "weight_decay": settings.weight_decay,
        # Without a limit the norm is still computed, and so checked.
        "max_grad_norm": math.inf if settings.max_grad_norm is None else settings.max_grad_norm,
        "max_length": None,  # `rows` has left out longer examples
        "gradient_checkpointing": run.model.gradient_checkpointing is True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "ddp_timeout": math.ceil(run.distributed.timeout_s),
        "logging_steps": settings.log_every,
        "logging_nan_inf_filter": False,
        "eval_strategy": "no",  # TrainingWatch requests the one after the last step
        "eval_on_start": evaluates,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    } | _engine_arguments(run, settings, world.size)


def _engine_arguments(run: RunConfig, settings: TrainingConfig, ranks: int) -> JsonObject:
    """The settings of distributed.engine for transformers, with several ranks."""
    engine, offload = run.distributed.engine, run.distributed.offload
    if ranks == 1 or engine in ("single", "ddp"):
        return {}
    if engine == "fsdp2":
        config = {"version": 2, "cpu_offload": offload == "parameters"}
        return {"fsdp": True, "fsdp_config": config}
    zero: JsonObject = {"stage": int(engine.removeprefix("zero"))}
    zero["stage3_gather_16bit_weights_on_model_save"] = True  # in their own dtype
    if offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload == "parameters":
        zero["offload_param"] = {"device": "cpu"}
    deepspeed = {
        "zero_optimization": zero,
        "gradient_clipping": settings.max_grad_norm or 0.0,
        "gradient_accumulation_steps": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    return {"deepspeed": deepspeed}


def _make_arguments(kind: type[TrainingArguments], given: JsonObject) -> TrainingArguments:
    """Make a trainer's arguments, which join the ranks' process group.

    The number of CPU threads stays unchanged, and one process uses only one of its visible GPUs.
    """
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # accelerate's, about the number of threads
        args = kind(**given)
        args._n_gpu = min(args.n_gpu, 1)
    torch.set_num_threads(threads)
    return args


def _padding_by_another_token(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[TrainingRows]
) -> PreTrainedTokenizerBase:
    """A tokenizer whose padding ends no sequence.

    transformers reads a score at the last token that is not padding. If padding and EOS are one
    id that would be the token before the EOS, but a reward of type `model` reads it at the EOS.
    """
    columns = ID_COLUMNS["reward_model"]
    ends = {ids[-1] for part in rows for column in columns for ids in part.dataset[column]}
    if tokenizer.pad_token_id not in ends:
        return tokenizer
    other = copy.deepcopy(tokenizer)
    unused = next(i for i in range(len(ends) + 1) if i not in ends)
    other.pad_token = tokenizer.convert_ids_to_tokens(unused)
    return other

"""The process of `rloo sft` and `rloo reward-model`: data, model, one training, a folder.

`cli/supervised` starts it with a folder that has training/config.yaml and the section's name. Its
files (model, tokenizer, training/metrics.jsonl, training/summary.json) are complete when it exits
with 0; its caller then gives the folder its name.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rloo_cli.checkpoint import export
from rloo_cli.config import check, synthetic
from rloo_cli.config.schema import DataConfig, ModelConfig, RunConfig, TrainingConfig
from rloo_cli.config.supervised import SupervisedTraining, supervised_training
from rloo_cli.data import dataset
from rloo_cli.data.cache import shared_folder
from rloo_cli.distributed.world import (
    World,
    explain_lost_ranks,
    is_printed_elsewhere,
    join_ranks,
)
from rloo_cli.policy import load, lora
from rloo_cli.train.supervised import rows, trainers
from rloo_cli.train.supervised.rows import TrainingRows
from rloo_cli.utils import paths, process_exit, rng
from rloo_cli.utils.errors import ConfigError, DataError, Problem, RunError, refuse
from rloo_cli.utils.files import JsonObject, write_json

DEFAULT_EVAL_EXAMPLES = 200  # examples, if eval_rows is null
SHARDED_ENGINES = ("fsdp2", "zero3")  # engines that shard weights
SUPERVISED_PROGRESS_S = 2.0  # seconds between two lines of progress on the terminal


def run_supervised_training(folder: Path, section: str) -> JsonObject:
    """Run the training that folder/training/config.yaml describes. -> its summary. Raises RunError.

    Data is checked before any weights load.
    """
    process_exit.silence_libraries()
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch, at DeepSpeed
    run = check.read_config(folder / "training" / "config.yaml")
    keys = supervised_training(run, section)
    rng.seed_generators(run.seed)
    world = join_ranks(run)
    say = print_line if world.is_main else print_nothing
    say("loading data ...")
    with _errors_name_section(section):
        for path in filter(None, (keys.model.path, keys.model.tokenizer)):
            world.run_on_rank0(lambda path=path: synthetic.resolve_model_path(path))  # type: ignore[misc]
        tokenizer = load.load_policy_tokenizer(keys.model)
        prepared = _read_examples(keys, run, tokenizer, world, say)
    say("loading the model ...")
    with _errors_name_section(section):
        model = _load_model(section, keys.model, run, world)
    training = folder / "training"
    write = _metrics_writer(training) if world.is_main else print_nothing
    trainer, watch = trainers.build_trainer(
        section, model, tokenizer, run, world, prepared, training, write
    )
    trainer.train()
    dtype = load.resolve_dtype(run.model.dtype, world.device)
    world.run_on_all_ranks(lambda: _save_model(trainer, dtype, folder, tokenizer))
    before, after = watch.evaluations or ({}, {})
    trained = prepared[0]
    left_out = trained.num_too_long + trained.num_empty
    counts = {"rows": len(trained.dataset), "left_out": left_out}
    seconds = round(time.monotonic() - watch.began, 2)
    steps = trainer.state.global_step
    summary = {"steps": steps, **counts, "seconds": seconds, "before": before, "after": after}
    world.run_on_rank0(lambda: write_json(training / "summary.json", summary))
    return summary


def _read_examples(
    keys: SupervisedTraining,
    run: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    say: Callable[[str], None],
) -> list[TrainingRows]:
    """The examples to train on, and those to evaluate on, as ids."""
    section, source = keys.section, keys.data
    limits = (keys.settings.max_length, load.read_max_positions(keys.model))
    limit = min((n for n in limits if n is not None), default=sys.maxsize)
    reader = rows.RowReader(section, source, tokenizer, run, limit, world)
    with shared_folder(world) as shared:
        opened = world.rank0_first(lambda: _load_examples(source, keys.settings, section, shared))
        files = [shared and shared / f"{name}.ids.arrow" for name in ("train", "eval")]
        prepared = [reader.read_rows(*one) for one in zip(opened, files, strict=False)]
    for name, part in zip(("trained on", "measured on"), prepared, strict=False):
        say(f"{name}: {part.describe(limit)}")
    return prepared


def _load_examples(
    source: DataConfig, settings: TrainingConfig, section: str, shared: Path | None = None
) -> list["Dataset"]:
    """The examples to train on and, if there are any, those to evaluate on."""
    file, eval_file = (shared and shared / name for name in ("train", "eval"))
    data, eval_rows = dataset.load_split(source, source.split, False, file), settings.eval_rows
    if source.eval_split is not None and eval_rows != 0:
        eval_data = dataset.load_split(source, source.eval_split, False, eval_file)
        most = DEFAULT_EVAL_EXAMPLES if eval_rows is None else eval_rows
        return [data, eval_data.select(range(min(most, len(eval_data))))]
    count = min(DEFAULT_EVAL_EXAMPLES, len(data) // 10) if eval_rows is None else eval_rows
    if not count:
        return [data]
    num_trained = len(data) - count
    if num_trained <= 0:
        why = f"the split has {len(data)} rows, of which {section}.eval_rows={count} are held out"
        fix = f"{section}.eval_rows=0, or data.eval_split=..."
        refuse("data.split", "no rows are left to train on", fix, why, error=DataError)
    return [data.select(range(num_trained)), data.select(range(num_trained, len(data)))]


def _load_model(
    section: str, model_config: ModelConfig, run: RunConfig, world: World
) -> PreTrainedModel:
    """Load the model, with a new head if it becomes a reward model, and with model.lora's adapter.

    Weights are float32 if all of them are trained: TRL computes with them in model.dtype.
    """
    adapter, device = model_config.lora, world.device
    if world.size > 1 and run.distributed.engine in SHARDED_ENGINES:
        device = torch.device("cpu")  # a device gets only its shard
    if section == "sft" and adapter is not None:
        model = lora.load_trained_model(model_config, None, device, run.seed)
        _refuse_adapted_head(model)
        return model
    if adapter is None:
        model_config = model_config.model_copy(update={"dtype": "float32"})
    if section == "sft":
        return load.load_causal_lm(model_config, model_config.path, device)
    model = load.load_sequence_classifier(model_config, model_config.path, device)
    _init_score_head(model, run.seed)
    if adapter is not None:
        whole = [*adapter.modules_to_save, "score"]
        kwargs = adapter.kwargs | {"task_type": "SEQ_CLS"}  # its head must not be adapted
        keys = adapter.model_copy(update={"modules_to_save": whole, "kwargs": kwargs})
        lora.attach_adapter(model, keys, run.seed)
    return model


def _refuse_adapted_head(model: PreTrainedModel) -> None:
    """Raise ConfigError for an adapter that TRL would neither apply nor train."""
    head = model.get_output_embeddings()
    names = [name for name in lora.adapter_scales(model) if model.get_submodule(name) is head]
    if names:
        what, where = "sft cannot adapt the output embedding", "model.lora.target_modules"
        why = f"TRL's loss reads the weight of {names[0]} without its adapter"
        raise ConfigError(Problem(what, where, why, "model.lora.target_modules=all-linear"))


def _init_score_head(model: PreTrainedModel, seed: int) -> None:
    """Initialize the score head: N(0, 1 / (H + 1)), no bias (arXiv 2403.17031)."""
    weight = model.score.weight
    initial = torch.empty(weight.shape)
    std = (weight.shape[1] + 1) ** -0.5
    torch.nn.init.normal_(initial, std=std, generator=torch.Generator().manual_seed(seed))
    weight.data.copy_(initial)


def _save_model(
    trainer: Any, dtype: torch.dtype, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write the model's folder: safetensors in `dtype`, JSON, no pickle. All ranks take part."""
    model, is_sharded = trainer.model, trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped) if is_sharded else None
    if not trainer.is_world_process_zero():
        return
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if state is None:
        export.write_merged_model(model.to(dtype), tokenizer, folder)
        return
    model.save_pretrained(folder, state_dict={name: t.to(dtype) for name, t in state.items()})
    tokenizer.save_pretrained(folder)


def print_line(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def print_nothing(line: object) -> None:
    """Print nothing: rank 0 does."""


def _metrics_writer(folder: Path) -> Callable[[JsonObject], None]:
    """A function that writes each line to metrics.jsonl.

    It prints one to the terminal every few seconds, and the last of a training or an evaluation.
    """
    printed = [0.0]

    def write(line: JsonObject) -> None:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        last = line["step"] == line.get("steps", line["step"])
        if last or time.monotonic() - printed[0] >= SUPERVISED_PROGRESS_S:
            printed[0] = time.monotonic()
            print(_format_line(line), flush=True)

    return write


def _format_line(metrics: JsonObject) -> str:
    step = f"step {metrics['step']}" + (f"/{metrics['steps']}" if "steps" in metrics else "")
    shown = [n for n in ("loss", "accuracy", "margin") if n in metrics or f"eval_{n}" in metrics]
    values = [(n if n in metrics else f"eval_{n}") for n in shown]
    rate = f"  lr {metrics['learning_rate']:.2g}" if "learning_rate" in metrics else ""
    return step + "".join(f"  {n} {metrics[n]:.4g}" for n in values) + rate


@contextmanager
def _errors_name_section(section: str) -> Iterator[None]:
    """Let errors inside name the keys of this section instead of those of `data`."""
    try:
        yield
    except RunError as error:
        parts = ("what", "where", "why", "fix")
        renamed = [replace(p, **{part: rows.section_key(section, getattr(p, part))
                                 for part in parts})
                   for p in error.problems]  # fmt: skip
        raise type(error)(*renamed) from error


def main() -> None:
    """Run the process that `cli/supervised` starts; its exit code is that of the error."""
    folder = paths.absolute_path(Path(sys.argv[1]))  # user code may change the current folder
    section = sys.argv[2]

    def train() -> None:
        with explain_lost_ranks(f"in rloo {section.replace('_', '-')}"):
            run_supervised_training(folder, section)

    process_exit.run_and_exit(train, f"lower {section}.micro_batch_size", is_printed_elsewhere)

"""The process of `rloo sft` and `rloo reward-model`: data, model, one training, a folder.

`cli/supervised` starts it with a folder that holds training/config.yaml and the section's name. Its
files (model, tokenizer, training/metrics.jsonl, training/summary.json) are complete when it exits
with 0; its caller gives the folder its name then.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rloo_cli.checkpoint import export
from rloo_cli.config import check, synthetic
from rloo_cli.config.schema import DataConfig, ModelConfig, RunConfig, TrainingConfig
from rloo_cli.config.supervised import training_data, training_model
from rloo_cli.data import dataset
from rloo_cli.data.cache import shared_folder
from rloo_cli.distributed import gather, meta_load
from rloo_cli.distributed.engine import ParallelEngine
from rloo_cli.distributed.world import (
    World,
    explain_lost_ranks,
    is_printed_elsewhere,
    join_ranks,
)
from rloo_cli.policy import load
from rloo_cli.policy.model import Policy
from rloo_cli.train.supervised import examples, parallel, reward_model, sft
from rloo_cli.train.supervised.examples import PreparedExamples
from rloo_cli.train.supervised.fit import MetricsObject, SupervisedTrainer, optimizer_config
from rloo_cli.train.supervised.parallel import Objective
from rloo_cli.utils import paths, process_exit, rng
from rloo_cli.utils.errors import DataError, Problem, RunError
from rloo_cli.utils.files import write_json

if TYPE_CHECKING:
    from datasets import Dataset

DEFAULT_EVAL_EXAMPLES = 200  # examples, if eval_rows is null
SUPERVISED_PROGRESS_S = 2.0  # seconds between two lines of progress on the terminal


def run_supervised_training(folder: Path, section: str) -> MetricsObject:
    """Run the training that folder/training/config.yaml describes. -> its summary. Raises RunError.

    Data is checked before any weights load.
    """
    process_exit.silence_libraries()
    run = check.read_config(folder / "training" / "config.yaml")
    settings: TrainingConfig = getattr(run, section)
    rng.seed_generators(run.seed)
    world = join_ranks(run)
    model_config, source = training_model(run, section), training_data(run, section)
    say = print_line if world.is_main else print_nothing
    say("loading data ...")
    with _errors_name_section(section):
        for path in filter(None, (model_config.path, model_config.tokenizer)):
            world.run_on_rank0(lambda path=path: synthetic.resolve_model_path(path))  # type: ignore[misc]
        with shared_folder(world) as shared:
            datasets = world.rank0_first(lambda: _load_examples(source, settings, section, shared))
        tokenizer = load.load_policy_tokenizer(model_config)
        limits = (settings.max_length, load.read_max_positions(model_config), sys.maxsize)
        limit = min(n for n in limits if n is not None)
        read = examples.EXAMPLE_READERS[section]
        prepared = [read(data, source, settings, tokenizer, run, limit, world) for data in datasets]
    for name, part in zip(("trained on", "measured on"), prepared, strict=False):
        for line in (f"{name}: {part.describe(limit)}", *part.notes):
            say(line)
    say("loading the model ...")
    with _errors_name_section(section):
        trainer = _build_trainer(section, model_config, run, world, folder, tokenizer)
    return _train_and_save(trainer, prepared, folder, tokenizer)


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
        why = f"the split has {len(data)} rows, and {section}.eval_rows={count} are held out"
        fix = f"{section}.eval_rows=0, or data.eval_split=..."
        raise DataError(Problem("nothing is left to train on", "data.split", why, fix))
    return [data.select(range(num_trained)), data.select(range(num_trained, len(data)))]


def _build_trainer(
    section: str,
    model_config: ModelConfig,
    run: RunConfig,
    world: World,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> SupervisedTrainer[Any]:
    settings: TrainingConfig = getattr(run, section)
    objective: Objective[Any] = sft.SftObjective()
    if section == "reward_model":
        center = run.reward_model.center_rewards_coefficient
        objective = reward_model.PreferenceObjective(center)
    write = _metrics_writer(folder / "training") if world.is_main else print_nothing
    engine = parallel.build_supervised_engine(run, model_config, optimizer_config(settings), world)
    pad_id = tokenizer.pad_token_id
    model, meta_weights = _load_model(section, model_config, run, engine, pad_id)
    module = parallel.TrainedModule(model, world.device, meta_weights)
    return SupervisedTrainer(model, objective, settings, run.seed, write, (engine, module))


def _load_model(
    section: str,
    model_config: ModelConfig,
    run: RunConfig,
    engine: ParallelEngine,
    pad_id: int | None,
) -> tuple[PreTrainedModel, gather.MetaWeights | None]:
    """Load the model, with a new head if it becomes a reward model. -> it, or a shell of it and its
    weights where the engine shards them"""
    world = engine.world

    def read(device: torch.device) -> PreTrainedModel:
        if section == "sft":
            return load.load_causal_lm(model_config, model_config.path, device, world.device)
        keys = (model_config, model_config.path, device, world.device)
        loaded, _ = load.load_classifier_with_head(*keys)
        loaded.config.pad_token_id = pad_id
        reward_model.init_score_head(loaded, run.seed)
        return loaded

    if not engine.sharded:
        return read(world.device), None
    if section == "sft":
        return meta_load.load_causal_shell(model_config, world, lambda: read(gather.CPU))
    return meta_load.load_classifier_shell(model_config, world, lambda: read(gather.CPU))


def _train_and_save(
    trainer: SupervisedTrainer[Any],
    example_sets: list[PreparedExamples],
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> MetricsObject:
    began, trained = time.monotonic(), example_sets[0]
    trainer.distribute(len(trained.examples))
    held_out = example_sets[1].examples if len(example_sets) > 1 else []
    before = trainer.evaluate_loss(held_out) if held_out else {}
    if before:
        trainer.write_metrics({"step": 0} | before)
    steps = trainer.train(trained.examples, trained.lengths)
    after = trainer.evaluate_loss(held_out) if held_out else {}
    if after:
        trainer.write_metrics({"step": steps} | after)
    left_out = trained.num_too_long + trained.num_empty
    counts = {"rows": len(trained.examples), "left_out": left_out}
    seconds = round(time.monotonic() - began, 2)
    summary = {"steps": steps, **counts, "seconds": seconds, "before": before, "after": after}
    trainer.world.run_on_all_ranks(lambda: _save_model(trainer, folder, tokenizer))
    if trainer.world.is_main:
        write_json(folder / "training" / "summary.json", summary)
    trainer.world.run_on_rank0(lambda: None)  # the others end when all is written
    return summary


def _save_model(
    trainer: SupervisedTrainer[Any], folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write the model's folder; all ranks take part where its weights are in shards."""
    if trainer.engine is not None and trainer.engine.sharded:
        module = cast(Policy, trainer.module)
        export.write_gathered_model(trainer.engine, module, tokenizer, folder)
    elif trainer.world.is_main:
        trainer.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def print_line(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def print_nothing(line: object) -> None:
    """Print nothing: rank 0 does it."""


def _metrics_writer(folder: Path) -> Callable[[MetricsObject], None]:
    """A function that writes each line to metrics.jsonl.

    It prints one to the terminal every few seconds, and the last of a training or an evaluation.
    """
    printed = [0.0]

    def write(line: MetricsObject) -> None:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        last = line["step"] == line.get("steps", line["step"])
        if last or time.monotonic() - printed[0] >= SUPERVISED_PROGRESS_S:
            printed[0] = time.monotonic()
            print(_format_line(line), flush=True)

    return write


def _format_line(metrics: MetricsObject) -> str:
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
        renamed = [replace(p, **{part: examples.section_key(section, getattr(p, part))
                                 for part in parts})
                   for p in error.problems]  # fmt: skip
        raise type(error)(*renamed) from error


def main() -> None:
    """Run the process that `cli/supervised` starts; its exit code says what stopped it."""
    folder = paths.absolute_path(Path(sys.argv[1]))  # user code may change the current folder
    section = sys.argv[2]

    def train() -> None:
        with explain_lost_ranks(f"in rloo {section.replace('_', '-')}"):
            run_supervised_training(folder, section)

    process_exit.run_and_exit(train, f"lower {section}.micro_batch_size", is_printed_elsewhere)

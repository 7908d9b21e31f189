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
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from rloo_cli.config import check
from rloo_cli.config.schema import DataConfig, ModelConfig, RunConfig, TrainingConfig
from rloo_cli.config.supervised import training_data, training_model
from rloo_cli.data import dataset
from rloo_cli.distributed.world import World, single_process_world
from rloo_cli.policy import load
from rloo_cli.train.supervised import examples, reward_model, sft
from rloo_cli.train.supervised.examples import PreparedExamples
from rloo_cli.train.supervised.fit import MetricsObject, Objective, SupervisedTrainer
from rloo_cli.utils import process_exit, rng
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
    world = single_process_world(run.distributed)
    model_config, source = training_model(run, section), training_data(run, section)
    print("loading data ...", flush=True)
    with _errors_name_section(section):
        datasets = _load_examples(source, settings, section)
        tokenizer = load.load_policy_tokenizer(model_config)
        limits = (settings.max_length, load.read_max_positions(model_config), sys.maxsize)
        limit = min(n for n in limits if n is not None)
        read = examples.EXAMPLE_READERS[section]
        prepared = [read(data, source, settings, tokenizer, run, limit) for data in datasets]
    for name, part in zip(("trained on", "measured on"), prepared, strict=False):
        print(f"{name}: {part.describe(limit)}", flush=True)
    print("loading the model ...", flush=True)
    with _errors_name_section(section):
        trainer = _build_trainer(section, model_config, run, world, folder, tokenizer)
    return _train_and_save(trainer, prepared, folder, tokenizer)


def _load_examples(source: DataConfig, settings: TrainingConfig, section: str) -> list["Dataset"]:
    """The examples to train on and, if there are any, those to evaluate on."""
    data, eval_rows = dataset.load_split(source, source.split), settings.eval_rows
    if source.eval_split is not None and eval_rows != 0:
        eval_data = dataset.load_split(source, source.eval_split)
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
    if section == "sft":
        model = load.load_causal_lm(model_config, model_config.path, world.device)
    else:
        model = load.load_sequence_classifier(model_config, model_config.path, world.device)
        model.config.pad_token_id = tokenizer.pad_token_id
        reward_model.init_score_head(model, run.seed)
        center = run.reward_model.center_rewards_coefficient
        objective = reward_model.PreferenceObjective(center)
    write = _metrics_writer(folder / "training")
    return SupervisedTrainer(model, objective, settings, run.seed, write)


def _train_and_save(
    trainer: SupervisedTrainer[Any],
    example_sets: list[PreparedExamples],
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
) -> MetricsObject:
    began, trained = time.monotonic(), example_sets[0]
    held_out = example_sets[1].examples if len(example_sets) > 1 else []
    before = trainer.evaluate_loss(held_out) if held_out else {}
    if before:
        trainer.write_metrics({"step": 0} | before)
    steps = trainer.train(trained.examples)
    after = trainer.evaluate_loss(held_out) if held_out else {}
    if after:
        trainer.write_metrics({"step": steps} | after)
    left_out = trained.num_too_long + trained.num_empty
    counts = {"rows": len(trained.examples), "left_out": left_out}
    seconds = round(time.monotonic() - began, 2)
    summary = {"steps": steps, **counts, "seconds": seconds, "before": before, "after": after}
    trainer.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(folder / "training" / "summary.json", summary)
    return summary


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
    folder, section = Path(sys.argv[1]), sys.argv[2]
    process_exit.run_and_exit(
        lambda: run_supervised_training(folder, section), f"lower {section}.micro_batch_size"
    )

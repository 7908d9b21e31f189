"""The process of `rloo sft` and `rloo reward-model`: data, model, one training, a folder.

Started by `tools/training` with a folder that holds training/config.yaml and the section's name.
What it writes (model, tokenizer, training/metrics.jsonl, training/summary.json) is whole when it
ends with 0; who started it gives the folder its name then.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rloo_cli.config import check
from rloo_cli.config.schema import DataConfig, ModelConfig, RunConfig, TrainingConfig
from rloo_cli.config.supervised import training_data, training_model
from rloo_cli.data import dataset
from rloo_cli.distributed.world import World, single_process_world
from rloo_cli.policy import load
from rloo_cli.train.supervised import examples, reward_model, sft
from rloo_cli.train.supervised.examples import PreparedExamples
from rloo_cli.train.supervised.fit import MetricsObject, SupervisedTrainer
from rloo_cli.utils import process_exit, rng
from rloo_cli.utils.errors import DataError, Problem, RunError
from rloo_cli.utils.files import write_json

DEFAULT_EVAL_EXAMPLES = 200  # rows, where eval_rows is null
SUPERVISED_PROGRESS_S = 2.0  # seconds between two lines of progress on the terminal


def run_supervised_training(folder: Path, section: str) -> MetricsObject:
    """Do one training as folder/training/config.yaml says; its summary. Raises RunError.

    Data is looked at before any weights load.
    """
    process_exit.silence_libraries()
    run = check.read_config(folder / "training" / "config.yaml")
    settings: TrainingConfig = getattr(run, section)
    rng.seed_generators(run.seed)
    world = single_process_world(run.distributed)
    model_config, source = training_model(run, section), training_data(run, section)
    print("loading data ...", flush=True)
    with _errors_name_section(section):
        opened = _load_examples(source, settings, section)
        tokenizer, context = (
            load.load_policy_tokenizer(model_config),
            load.read_max_positions(model_config),
        )
        limit = min(n for n in (settings.max_length, context, sys.maxsize) if n is not None)
        read = examples.EXAMPLE_READERS[section]
        kept = [read(rows, source, settings, tokenizer, run, limit) for rows in opened]
    for name, part in zip(("trained on", "measured on"), kept, strict=False):
        print(f"{name}: {part.describe(limit)}", flush=True)
    print("loading the model ...", flush=True)
    with _errors_name_section(section):
        fitted = _build_trainer(section, model_config, run, world, folder, tokenizer)
    return _train_and_save(fitted, kept, folder, tokenizer)


def _load_examples(source: DataConfig, settings: TrainingConfig, section: str) -> list[Any]:
    """The rows to train on and, where there are any, those to measure on."""
    rows, asked = dataset.load_split(source, source.split), settings.eval_rows
    if source.eval_split is not None and asked != 0:
        measured = dataset.load_split(source, source.eval_split)
        most = DEFAULT_EVAL_EXAMPLES if asked is None else asked
        return [rows, measured.select(range(min(most, len(measured))))]
    count = min(DEFAULT_EVAL_EXAMPLES, len(rows) // 10) if asked is None else asked
    if not count:
        return [rows]
    if len(rows) <= count:
        why = f"the split has {len(rows)} rows, and {section}.eval_rows={count} are held out"
        raise DataError(Problem("nothing is left to train on", "data.split", why,
                                f"{section}.eval_rows=0, or data.eval_split=..."))  # fmt: skip
    return [rows.select(range(len(rows) - count)), rows.select(range(len(rows) - count, len(rows)))]


def _build_trainer(
    section: str,
    model_config: ModelConfig,
    run: RunConfig,
    world: World,
    folder: Path,
    tokenizer: Any,
) -> SupervisedTrainer[Any]:
    settings: Any = getattr(run, section)
    objective: Any = sft.SftObjective()
    if section == "sft":
        model = load.load_causal_lm(model_config, model_config.path, world.device)
    else:
        model = load.load_sequence_classifier(model_config, model_config.path, world.device)
        model.config.pad_token_id = tokenizer.pad_token_id
        reward_model.init_score_head(model, run.seed)
        objective = reward_model.PreferenceObjective(settings.center_rewards_coefficient)
    return SupervisedTrainer(
        model, objective, settings, run.seed, _metrics_writer(folder / "training")
    )


def _train_and_save(
    trainer: SupervisedTrainer[Any],
    example_sets: list[PreparedExamples],
    folder: Path,
    tokenizer: Any,
) -> MetricsObject:
    began, measured = time.monotonic(), example_sets[1].examples if len(example_sets) > 1 else []
    before = trainer.evaluate_loss(measured) if measured else {}
    if before:
        trainer.write_metrics({"step": 0} | before)
    steps = trainer.train(example_sets[0].examples)
    after = trainer.evaluate_loss(measured) if measured else {}
    if after:
        trainer.write_metrics({"step": steps} | after)
    counts = {
        "rows": len(example_sets[0].examples),
        "left_out": example_sets[0].num_too_long + example_sets[0].num_empty,
    }
    seconds = round(time.monotonic() - began, 2)
    summary = {"steps": steps, **counts, "seconds": seconds, "before": before, "after": after}
    trainer.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(folder / "training" / "summary.json", summary)
    return summary


def _metrics_writer(folder: Path) -> Callable[[MetricsObject], None]:
    """Each line goes to metrics.jsonl; the terminal gets one every few seconds, and the ends."""
    said = [0.0]

    def write(line: MetricsObject) -> None:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        last = line["step"] == line.get("steps", line["step"])
        if last or time.monotonic() - said[0] >= SUPERVISED_PROGRESS_S:
            said[0] = time.monotonic()
            print(_format_line(line), flush=True)

    return write


def _format_line(metrics: MetricsObject) -> str:
    place = f"step {metrics['step']}" + (f"/{metrics['steps']}" if "steps" in metrics else "")
    shown = [n for n in ("loss", "accuracy", "margin") if n in metrics or f"eval_{n}" in metrics]
    values = [(n if n in metrics else f"eval_{n}") for n in shown]
    rate = f"  lr {metrics['learning_rate']:.2g}" if "learning_rate" in metrics else ""
    return place + "".join(f"  {n} {metrics[n]:.4g}" for n in values) + rate


@contextmanager
def _errors_name_section(section: str) -> Iterator[None]:
    """A refusal inside names the keys of this section rather than those they stand for."""
    try:
        yield
    except RunError as error:
        own = [replace(p, **{part: examples.section_key(section, getattr(p, part))
                             for part in ("what", "where", "why", "fix")})
               for p in error.problems]  # fmt: skip
        raise type(error)(*own) from error


def main() -> None:
    """The process that `tools/training` starts. Exits with the code of what stopped it."""
    folder, section = Path(sys.argv[1]), sys.argv[2]
    process_exit.run_and_exit(
        lambda: run_supervised_training(folder, section), f"lower {section}.micro_batch_size"
    )

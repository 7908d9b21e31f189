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
from rloo_cli.config.supervised import data_of, model_of
from rloo_cli.data import dataset
from rloo_cli.distributed.world import World, alone
from rloo_cli.policy import load
from rloo_cli.train.supervised import examples, reward_model, sft
from rloo_cli.train.supervised.examples import Kept
from rloo_cli.train.supervised.fit import Fit, Line
from rloo_cli.utils import process_exit, rng
from rloo_cli.utils.errors import DataError, Problem, RunError
from rloo_cli.utils.files import write_json

MOST_MEASURED = 200  # rows, where eval_rows is null
SAY_S = 2.0  # seconds between two lines of progress on the terminal


def work(folder: Path, section: str) -> Line:
    """Do one training as folder/training/config.yaml says; its summary. Raises RunError.

    Data is looked at before any weights load.
    """
    process_exit.libraries()
    run = check.read(folder / "training" / "config.yaml")
    settings: TrainingConfig = getattr(run, section)
    rng.seed(run.seed)
    world = alone(run.distributed)
    model_config, source = model_of(run, section), data_of(run, section)
    print("loading data ...", flush=True)
    with _said_of(section):
        opened = _open(source, settings, section)
        tokenizer, context = load.tokenizer(model_config), load.context_length(model_config)
        limit = min(n for n in (settings.max_length, context, sys.maxsize) if n is not None)
        read = examples.READ[section]
        kept = [read(rows, source, settings, tokenizer, run, limit) for rows in opened]
    for name, part in zip(("trained on", "measured on"), kept, strict=False):
        print(f"{name}: {part.told(limit)}", flush=True)
    print("loading the model ...", flush=True)
    with _said_of(section):
        fitted = _fit(section, model_config, run, world, folder, tokenizer)
    return _train(fitted, kept, folder, tokenizer)


def _open(source: DataConfig, settings: TrainingConfig, section: str) -> list[Any]:
    """The rows to train on and, where there are any, those to measure on."""
    rows, asked = dataset.load(source, source.split), settings.eval_rows
    if source.eval_split is not None and asked != 0:
        measured = dataset.load(source, source.eval_split)
        most = MOST_MEASURED if asked is None else asked
        return [rows, measured.select(range(min(most, len(measured))))]
    count = min(MOST_MEASURED, len(rows) // 10) if asked is None else asked
    if not count:
        return [rows]
    if len(rows) <= count:
        why = f"the split has {len(rows)} rows, and {section}.eval_rows={count} are held out"
        raise DataError(Problem("nothing is left to train on", "data.split", why,
                                f"{section}.eval_rows=0, or data.eval_split=..."))  # fmt: skip
    return [rows.select(range(len(rows) - count)), rows.select(range(len(rows) - count, len(rows)))]


def _fit(
    section: str, given: ModelConfig, run: RunConfig, world: World, folder: Path, tokenizer: Any
) -> Fit[Any]:
    settings: Any = getattr(run, section)
    objective: Any = sft.Objective()
    if section == "sft":
        model = load.model(given, given.path, world.device)
    else:
        model = load.scorer(given, given.path, world.device)
        model.config.pad_token_id = tokenizer.pad_token_id
        reward_model.new_head(model, run.seed)
        objective = reward_model.Objective(settings.center_rewards_coefficient)
    return Fit(model, objective, settings, run.seed, _writer(folder / "training"))


def _train(fitted: Fit[Any], kept: list[Kept], folder: Path, tokenizer: Any) -> Line:
    began, measured = time.monotonic(), kept[1].rows if len(kept) > 1 else []
    before = fitted.measure(measured) if measured else {}
    if before:
        fitted.write({"step": 0} | before)
    steps = fitted.run(kept[0].rows)
    after = fitted.measure(measured) if measured else {}
    if after:
        fitted.write({"step": steps} | after)
    counts = {"rows": len(kept[0].rows), "left_out": kept[0].long + kept[0].empty}
    seconds = round(time.monotonic() - began, 2)
    summary = {"steps": steps, **counts, "seconds": seconds, "before": before, "after": after}
    fitted.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(folder / "training" / "summary.json", summary)
    return summary


def _writer(folder: Path) -> Callable[[Line], None]:
    """Each line goes to metrics.jsonl; the terminal gets one every few seconds, and the ends."""
    said = [0.0]

    def write(line: Line) -> None:
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        last = line["step"] == line.get("steps", line["step"])
        if last or time.monotonic() - said[0] >= SAY_S:
            said[0] = time.monotonic()
            print(_text(line), flush=True)

    return write


def _text(line: Line) -> str:
    place = f"step {line['step']}" + (f"/{line['steps']}" if "steps" in line else "")
    shown = [n for n in ("loss", "accuracy", "margin") if n in line or f"eval_{n}" in line]
    values = [(n if n in line else f"eval_{n}") for n in shown]
    rate = f"  lr {line['learning_rate']:.2g}" if "learning_rate" in line else ""
    return place + "".join(f"  {n} {line[n]:.4g}" for n in values) + rate


@contextmanager
def _said_of(section: str) -> Iterator[None]:
    """A refusal inside names the keys of this section rather than those they stand for."""
    try:
        yield
    except RunError as error:
        own = [replace(p, **{part: examples.own_key(section, getattr(p, part))
                             for part in ("what", "where", "why", "fix")})
               for p in error.problems]  # fmt: skip
        raise type(error)(*own) from error


def main() -> None:
    """The process that `tools/training` starts. Exits with the code of what stopped it."""
    folder, section = Path(sys.argv[1]), sys.argv[2]
    process_exit.run(lambda: work(folder, section), f"lower {section}.micro_batch_size")

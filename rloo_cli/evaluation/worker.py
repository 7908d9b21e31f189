"""The process of `rloo eval`: model, rewards and held-out sets, and nothing that trains.

Started by `tools/eval` with a folder that holds config.yaml (a checkpoint is its model.path) and,
in about.json, what is known of the run that the model is from. Writes the results beside them.
"""

import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rloo_cli.algorithms.common.base import Algorithm, load_algorithm
from rloo_cli.algorithms.common.config import Switches
from rloo_cli.config import check, registry, rules_paths, synthetic
from rloo_cli.config.judge import REFERENCE
from rloo_cli.config.schema import RunConfig
from rloo_cli.config.user_code import code_notes
from rloo_cli.data import splits
from rloo_cli.data.prompts import Prompts
from rloo_cli.distributed.world import World, alone
from rloo_cli.evaluation.evaluate import Answered, answers, judge_all, of_all, others_of
from rloo_cli.evaluation.judges.judge import Judge, Judged, Others, make, summary, table
from rloo_cli.generation import Generator
from rloo_cli.policy import load, lora, reward_load
from rloo_cli.policy.model import Policy
from rloo_cli.reporting.log import lines_of
from rloo_cli.reporting.panel import evaluation_table
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.columns import check_splits
from rloo_cli.rewards.engine.ready import ready, rewards_of
from rloo_cli.run import State
from rloo_cli.utils import fault_injection, process_exit
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import read_json, write_json, write_text

Row = dict[str, Any]
SAY_S = 10.0  # seconds between two lines of progress


@dataclass
class Parts:
    """What `evaluate.answers` needs."""

    config: RunConfig
    algorithm: Algorithm[Switches]
    generator: Generator
    rewards: Sequence[Reward]
    sets: dict[str, Prompts]
    judge: Judge | None
    world: World


def work(folder: Path) -> Row:
    """Evaluate as folder/config.yaml says; the metrics. Raises RunError.

    Writes metrics.json and one file of samples per set into `folder`.
    """
    process_exit.libraries()
    settings = check.read(folder / "config.yaml")
    torch.manual_seed(settings.seed)
    about = read_json(folder / "about.json")
    state = _state(about)
    parts, policy = _parts(settings, alone(settings.distributed), folder)
    parts.generator.load(policy, state.updates)  # each sample says which weights made it
    rows = _rows(about["run"], state.step)
    seen = state.told(about["steps"], about["prompts"], settings, rows)
    try:
        found = answers(parts, seen, _Progress())
    finally:
        parts.generator.close()
    del policy
    judged = judge_all(parts, found, seen, _others(parts, found, folder))
    row = {"step": state.step, **of_all(parts, found, judged)}
    _write(folder, found, row)
    console = Console(soft_wrap=not sys.stdout.isatty())
    console.print(evaluation_table(row, list(found)))
    if judged is not None and parts.judge is not None:
        _write_judged(folder, parts.judge, judged, console)
    return row


def _others(parts: Parts, found: dict[str, Answered], folder: Path) -> Others | None:
    """The answers of the model that ours are judged against; None: reference texts are."""
    keys: Any = parts.config.eval.judge
    if keys is None or keys.against == REFERENCE:
        return None
    wanted = {}
    for name, answered in found.items():
        numbers, greedy = parts.sets[name].numbers, [s for s in answered.samples if s["greedy"]]
        draws = [sample["draw"] for sample in greedy[: keys.max_pairs]]
        wanted[name] = {numbers[d] if numbers else d for d in draws}
    del parts.generator  # and with it the first model, before the second loads
    gc.collect()
    torch.cuda.empty_cache()
    print(f"the other model: {keys.against}", flush=True)
    own = {"path": keys.against, "tokenizer": None, "revision": None}
    own |= {"lora": None, "quantization": None}  # a folder with an adapter alone names its base
    model = parts.config.model.model_copy(update=own)
    unjudged = parts.config.eval.model_copy(update={"judge": None})
    settings = parts.config.model_copy(update={"model": model, "eval": unjudged})
    other, policy = _parts(settings, alone(settings.distributed), folder)
    other.generator.load(policy, 0)
    try:
        return others_of(other, wanted, _Progress())
    finally:
        other.generator.close()


def _write_judged(folder: Path, judge: Judge, judged: Judged, console: Console) -> None:
    for note in judged.notes:
        print(note)
    write_text(folder / "pairs.jsonl", lines_of(judged.rows))
    write_json(folder / "judge.json", summary(judge, judged))
    console.print(table(judge, judged))


def _rows(run: str | None, step: int) -> list[Row]:
    """The lines of metrics that a reward could see at that step of the run."""
    path = Path(run, "metrics.jsonl") if run else None
    if path is None or not path.is_file():
        return []
    lines = path.read_text().split("\n")[:-1]  # the last may be cut
    rows = map(json.loads, lines)
    return [row for row in rows if row["step"] <= step and "step_time" in row]


def _state(about: Row) -> State:
    """Where the run stood. Raises ConfigError for one that this version does not know."""
    known = {f.name for f in fields(State)} - {"memory"}  # which only training asks for
    values = about["state"]
    if any(not isinstance(values.get(name, 0), int) for name in known):
        raise ConfigError(Problem("the run's state is not one of rloo", about["source"]))
    return State(**{name: value for name, value in values.items() if name in known})


def _parts(settings: RunConfig, world: World, folder: Path) -> tuple[Parts, Policy]:
    """Everything built, in the order in which mistakes are cheapest: weights come last."""
    print("loading data ...", flush=True)
    opened = splits.load(settings, training=False)
    rewards = rewards_of(settings, {})
    for note in code_notes(settings):
        if not note.startswith("train."):
            print(note)
    check_splits(settings, opened, rewards)
    # A reward's call would have too little time for it.
    for path in rules_paths.made_models(settings):
        print(f"finding or making {path} ...", flush=True)
        synthetic.folder(path)
    tokenizer, context = load.tokenizer(settings.model), load.context_length(settings.model)
    prepared = splits.tokenised(settings, opened, tokenizer, context)
    sets = {name: prompts for name, prompts in prepared.items() if name is not None}
    for note in splits.all_notes(settings, prepared, context):
        print(note)
    length = settings.generation.max_completion_length
    judge = make(settings, sets, tokenizer, training=False)
    own = [judge.reward] if judge is not None and judge.reward is not None else []
    ready([*rewards, *own], tokenizer, sets, length, world.device, print, reward_load)
    print("loading the model ...", flush=True)
    model = lora.model(settings.model, None, world.device, settings.seed)
    where = registry.module("generation", settings.generation.backend).IMPLEMENTATION
    generator = registry.load_code(where)(model, tokenizer, settings, context, folder, print)
    policy = Policy(model, settings.generation.temperature)
    algorithm = load_algorithm(settings.algorithm)
    return Parts(settings, algorithm, generator, rewards, sets, judge, world), policy


class _Progress:
    """A line now and then, for evaluations that take long."""

    def __init__(self) -> None:
        self.said = time.monotonic()

    def __call__(self, name: str, done: int, of: int) -> None:
        if time.monotonic() - self.said >= SAY_S:
            self.said = time.monotonic()
            print(f"{name or 'held out'}: {done} of {of} completions", flush=True)


def _write(folder: Path, found: dict[str, Answered], row: Row) -> None:
    for name, answered in found.items():
        file = f"samples_{name}.jsonl" if name else "samples.jsonl"
        write_text(folder / file, lines_of(answered.samples))
    write_json(folder / "metrics.json", row)


def main() -> None:
    """The process that `tools/eval` starts. Exits with the code of what stopped it."""

    def all_of_it() -> None:
        fault_injection.check()
        work(Path(sys.argv[1]))

    process_exit.run(all_of_it, "lower eval.batch_size")

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
from rloo_cli.config.judge import AGAINST_REFERENCE
from rloo_cli.config.schema import RunConfig
from rloo_cli.config.user_code import user_code_notes
from rloo_cli.data import splits
from rloo_cli.data.prompts import Prompts
from rloo_cli.distributed.world import World, single_process_world
from rloo_cli.evaluation.evaluate import (
    AnsweredSet,
    answer_eval_sets,
    answer_with_other_model,
    evaluation_metrics,
    judge_eval_sets,
)
from rloo_cli.evaluation.judges.judge import (
    Judge,
    JudgedSets,
    OtherAnswers,
    build_judge,
    judge_summary,
    judge_table,
)
from rloo_cli.generation import Generator
from rloo_cli.policy import load, lora, reward_load
from rloo_cli.policy.model import Policy
from rloo_cli.reporting.log import samples_to_jsonl
from rloo_cli.reporting.panel import evaluation_table
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.columns import check_reward_splits
from rloo_cli.rewards.engine.ready import build_rewards, run_ready_hooks
from rloo_cli.run import RunState
from rloo_cli.utils import fault_injection, process_exit
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject, read_json, write_json, write_text

PROGRESS_INTERVAL_S = 10.0  # seconds between two lines of progress


@dataclass
class EvalWorkerSetup:
    """What `evaluate.answers` needs."""

    config: RunConfig
    algorithm: Algorithm[Switches]
    generator: Generator
    rewards: Sequence[Reward]
    eval_sets: dict[str, Prompts]
    judge: Judge | None
    world: World


def run_evaluation(folder: Path) -> JsonObject:
    """Evaluate as folder/config.yaml says; the metrics. Raises RunError.

    Writes metrics.json and one file of samples per set into `folder`.
    """
    process_exit.silence_libraries()
    settings = check.read_config(folder / "config.yaml")
    torch.manual_seed(settings.seed)
    about = read_json(folder / "about.json")
    state = _restore_run_state(about)
    parts, policy = _build_setup(settings, single_process_world(settings.distributed), folder)
    parts.generator.load(policy, state.updates)  # each sample says which weights made it
    rows = _training_lines(about["run"], state.step)
    seen = state.trainer_state(about["steps"], about["prompts"], settings, rows)
    try:
        found = answer_eval_sets(parts, seen, _ProgressPrinter())
    finally:
        parts.generator.close()
    del policy
    judged = judge_eval_sets(parts, found, seen, _other_answers(parts, found, folder))
    row = {"step": state.step, **evaluation_metrics(parts, found, judged)}
    _write_results(folder, found, row)
    console = Console(soft_wrap=not sys.stdout.isatty())
    console.print(evaluation_table(row, list(found)))
    if judged is not None and parts.judge is not None:
        _write_judge_results(folder, parts.judge, judged, console)
    return row


def _other_answers(
    setup: EvalWorkerSetup, answered_sets: dict[str, AnsweredSet], folder: Path
) -> OtherAnswers | None:
    """The answers of the model that ours are judged against; None: reference texts are."""
    keys: Any = setup.config.eval.judge
    if keys is None or keys.against == AGAINST_REFERENCE:
        return None
    wanted = {}
    for name, answered in answered_sets.items():
        numbers, greedy = (
            setup.eval_sets[name].example_numbers,
            [s for s in answered.samples if s["greedy"]],
        )
        draws = [sample["draw"] for sample in greedy[: keys.max_pairs]]
        wanted[name] = {numbers[d] if numbers else d for d in draws}
    del setup.generator  # and with it the first model, before the second loads
    gc.collect()
    torch.cuda.empty_cache()
    print(f"the other model: {keys.against}", flush=True)
    own = {"path": keys.against, "tokenizer": None, "revision": None}
    own |= {"lora": None, "quantization": None}  # a folder with an adapter alone names its base
    model = setup.config.model.model_copy(update=own)
    unjudged = setup.config.eval.model_copy(update={"judge": None})
    settings = setup.config.model_copy(update={"model": model, "eval": unjudged})
    other, policy = _build_setup(settings, single_process_world(settings.distributed), folder)
    other.generator.load(policy, 0)
    try:
        return answer_with_other_model(other, wanted, _ProgressPrinter())
    finally:
        other.generator.close()


def _write_judge_results(folder: Path, judge: Judge, judged: JudgedSets, console: Console) -> None:
    for note in judged.notes:
        print(note)
    write_text(folder / "pairs.jsonl", samples_to_jsonl(judged.pair_records))
    write_json(folder / "judge.json", judge_summary(judge, judged))
    console.print(judge_table(judge, judged))


def _training_lines(run_path: str | None, step: int) -> list[JsonObject]:
    """The lines of metrics that a reward could see at that step of the run."""
    path = Path(run_path, "metrics.jsonl") if run_path else None
    if path is None or not path.is_file():
        return []
    lines = path.read_text().split("\n")[:-1]  # the last may be cut
    rows = map(json.loads, lines)
    return [row for row in rows if row["step"] <= step and "step_time" in row]


def _restore_run_state(about: JsonObject) -> RunState:
    """Where the run stood. Raises ConfigError for one that this version does not know."""
    known = {f.name for f in fields(RunState)} - {"memory"}  # which only training asks for
    values = about["state"]
    if any(not isinstance(values.get(name, 0), int) for name in known):
        raise ConfigError(Problem("the run's state is not one of rloo", about["source"]))
    return RunState(**{name: value for name, value in values.items() if name in known})


def _build_setup(settings: RunConfig, world: World, folder: Path) -> tuple[EvalWorkerSetup, Policy]:
    """Everything built, in the order in which mistakes are cheapest: weights come last."""
    print("loading data ...", flush=True)
    opened = splits.open_splits(settings, training=False)
    rewards = build_rewards(settings, {})
    for note in user_code_notes(settings):
        if not note.startswith("train."):
            print(note)
    check_reward_splits(settings, opened, rewards)
    # A reward's call would have too little time for it.
    for path in rules_paths.synthetic_model_paths(settings):
        print(f"finding or making {path} ...", flush=True)
        synthetic.resolve_model_path(path)
    tokenizer, context = (
        load.load_policy_tokenizer(settings.model),
        load.read_max_positions(settings.model),
    )
    prepared = splits.tokenize_splits(settings, opened, tokenizer, context)
    sets = {name: prompts for name, prompts in prepared.items() if name is not None}
    for note in splits.data_notes(settings, prepared, context):
        print(note)
    length = settings.generation.max_completion_length
    judge = build_judge(settings, sets, tokenizer, training=False)
    own = [judge.reward] if judge is not None and judge.reward is not None else []
    run_ready_hooks([*rewards, *own], tokenizer, sets, length, world.device, print, reward_load)
    print("loading the model ...", flush=True)
    model = lora.load_trained_model(settings.model, None, world.device, settings.seed)
    where = registry.registered_module("generation", settings.generation.backend).IMPLEMENTATION
    generator = registry.load_code(where)(model, tokenizer, settings, context, folder, print)
    policy = Policy(model, settings.generation.temperature)
    algorithm = load_algorithm(settings.algorithm)
    return EvalWorkerSetup(settings, algorithm, generator, rewards, sets, judge, world), policy


class _ProgressPrinter:
    """A line now and then, for evaluations that take long."""

    def __init__(self) -> None:
        self.printed_at = time.monotonic()

    def __call__(self, name: str, done: int, total: int) -> None:
        if time.monotonic() - self.printed_at >= PROGRESS_INTERVAL_S:
            self.printed_at = time.monotonic()
            print(f"{name or 'held out'}: {done} of {total} completions", flush=True)


def _write_results(
    folder: Path, answered_sets: dict[str, AnsweredSet], metrics: JsonObject
) -> None:
    for name, answered in answered_sets.items():
        file = f"samples_{name}.jsonl" if name else "samples.jsonl"
        write_text(folder / file, samples_to_jsonl(answered.samples))
    write_json(folder / "metrics.json", metrics)


def main() -> None:
    """The process that `tools/eval` starts. Exits with the code of what stopped it."""

    def all_of_it() -> None:
        fault_injection.arm_faults()
        run_evaluation(Path(sys.argv[1]))

    process_exit.run_and_exit(all_of_it, "lower eval.batch_size")

"""The process of `rloo eval`: model, rewards and held-out sets, without training.

`rloo eval` starts it with a folder that has config.yaml (with a checkpoint as model.path) and
about.json, which describes the model's run. It writes the results there.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from rloo_cli.agents.common import build as agent_build
from rloo_cli.algorithms.common.base import Algorithm, load_algorithm
from rloo_cli.algorithms.common.config import Switches
from rloo_cli.config import check, rules_paths, synthetic
from rloo_cli.config.agent import agent_config
from rloo_cli.config.judge import AGAINST_REFERENCE
from rloo_cli.config.schema import RunConfig
from rloo_cli.config.user_code import user_code_notes
from rloo_cli.data import chat_templates, splits
from rloo_cli.data.image_rules import check_image_run
from rloo_cli.data.prompts import Prompts
from rloo_cli.distributed import device_count, gather
from rloo_cli.distributed.engine import ParallelEngine
from rloo_cli.distributed.world import (
    World,
    explain_lost_ranks,
    is_printed_elsewhere,
    join_ranks,
)
from rloo_cli.evaluation.evaluate import (
    AnsweredSet,
    answer_eval_sets,
    answer_with_other_model,
    evaluation_metrics,
    ignore_progress,
    judge_eval_sets,
)
from rloo_cli.evaluation.judges import judge as judging
from rloo_cli.evaluation.judges.judge import Judge, JudgedSets, OtherAnswers
from rloo_cli.evaluation.judges.pairs import pairs_to_csv
from rloo_cli.generation import Generator
from rloo_cli.generation.common.rank0_proxy import Rank0Proxy
from rloo_cli.policy import load, lora, reward_load
from rloo_cli.policy.model import Policy
from rloo_cli.reporting.log import samples_to_jsonl
from rloo_cli.reporting.metrics_lines import read_training_lines
from rloo_cli.reporting.panel import evaluation_table
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.columns import check_reward_splits
from rloo_cli.rewards.engine.ready import build_rewards, run_ready_hooks
from rloo_cli.run import RunState
from rloo_cli.utils import fault_injection, paths, process_exit
from rloo_cli.utils.files import JsonObject, read_json, write_json, write_text

Functions = Mapping[str, Callable[..., object]]
PROGRESS_INTERVAL_S = 10.0  # seconds between two lines of progress


@dataclass
class EvalWorkerSetup:
    """The `EvaluationSetup` of this process."""

    config: RunConfig
    algorithm: Algorithm[Switches]
    generator: Generator
    rewards: Sequence[Reward]
    eval_sets: dict[str, Prompts]
    judge: Judge | None
    world: World


def run_evaluation(folder: Path, functions: Functions | None = None) -> JsonObject:
    """Evaluate as folder/config.yaml says, and return the metrics. Raises RunError.

    `functions`: rewards given as Python callables, by the name of their config entry. Writes
    metrics.json and one file of samples per set into `folder`.
    """
    folder = paths.absolute_path(folder)  # a reward may change the current folder
    process_exit.silence_libraries()
    settings = check.read_config(folder / "config.yaml")
    torch.manual_seed(settings.seed)
    about = read_json(folder / "about.json")
    chat_templates.set_template_clock(about.get("template_clock"))  # prompts as in the run
    state, world = _restore_run_state(about), join_ranks(settings)
    setup, policy = _build_setup(settings, world, folder, functions)
    setup.generator.load(policy, state.updates)  # each sample names its weights
    journal = Path(about["run"] or "", "metrics.jsonl")
    lines = read_training_lines(journal, state.step) if about["run"] else []
    trainer_state = state.trainer_state(about["steps"], about["prompts"], settings, lines)
    try:
        answered = answer_eval_sets(setup, trainer_state, _progress_printer(world))
    finally:
        setup.generator.close()
    del policy
    other_answers = _other_answers(setup, answered, folder)
    judged = world.run_on_rank0(
        lambda: judge_eval_sets(setup, answered, trainer_state, other_answers)
    )
    metrics = {"step": state.step, **evaluation_metrics(setup, answered, judged)}
    if not world.is_main:
        return metrics
    _write_results(folder, answered, metrics)
    console = Console(soft_wrap=not sys.stdout.isatty())
    console.print(evaluation_table(metrics, list(answered)))
    if judged is not None and setup.judge is not None:
        _write_judge_results(folder, setup.judge, judged, console)
    return metrics


def _other_answers(
    setup: EvalWorkerSetup, answered_sets: dict[str, AnsweredSet], folder: Path
) -> OtherAnswers | None:
    """The answers of the model that ours are judged against; None for reference texts."""
    keys = setup.judge.judge_config if setup.judge is not None else None
    if keys is None or keys.against == AGAINST_REFERENCE:
        return None
    example_numbers = {}
    for name, answered in answered_sets.items():
        numbers = setup.eval_sets[name].example_numbers
        greedy = [s["draw"] for s in answered.samples if s["greedy"]][: keys.max_pairs]
        example_numbers[name] = {int(numbers[index]) for index in greedy}
    del setup.generator  # frees the first model before the second loads
    gc.collect()
    torch.cuda.empty_cache()
    if setup.world.is_main:
        print(f"the other model: {keys.against}", flush=True)
    # A folder with only an adapter names its base model itself.
    none = dict.fromkeys(("tokenizer", "revision", "lora", "quantization"))
    model = setup.config.model.model_copy(update={"path": keys.against, **none})
    unjudged = setup.config.eval.model_copy(update={"judge": None})
    settings = setup.config.model_copy(update={"model": model, "eval": unjudged})
    other, policy = _build_setup(settings, setup.world, folder)
    other.generator.load(policy, 0)
    try:
        printer = _progress_printer(setup.world)
        return answer_with_other_model(other, example_numbers, printer)
    finally:
        other.generator.close()


def _write_judge_results(folder: Path, judge: Judge, judged: JudgedSets, console: Console) -> None:
    for note in judged.notes:
        print(note)
    write_text(folder / "pairs.jsonl", samples_to_jsonl(judged.pair_records))
    write_text(folder / "pairs.csv", pairs_to_csv(judged.pair_records))
    write_json(folder / "judge.json", judging.judge_summary(judge, judged))
    console.print(judging.judge_table(judge, judged))


def _restore_run_state(about: JsonObject) -> RunState:
    names = {f.name for f in fields(RunState)}
    names -= {"memory", "entropy_control"}  # only needed for training
    return RunState(**{name: value for name, value in about["state"].items() if name in names})


def _build_setup(
    settings: RunConfig, world: World, folder: Path, functions: Functions | None = None
) -> tuple[EvalWorkerSetup, Policy]:
    """Build everything, in the order in which mistakes are cheapest: weights come last."""

    def note(line: str) -> None:
        if world.is_main:
            print(line, flush=True)

    note("loading data ...")
    opened = splits.open_splits(settings, training=False, ranks=world)
    rewards = build_rewards(settings.rewards, functions or {})
    tools = agent_build.load_tool_set(agent_config(settings))
    for code_note in [n for n in user_code_notes(settings) if not n.startswith("train.")]:
        note(code_note)
    check_reward_splits(settings, opened, rewards)
    # Made now: the timeout of a reward's call would be too short for it.
    for path in rules_paths.synthetic_model_paths(rules_paths.named_paths(settings)):
        note(f"finding or making {path} ...")
        world.run_on_rank0(lambda path=path: synthetic.resolve_model_path(path))  # type: ignore[misc]
    tokenizer = load.load_policy_tokenizer(settings.model)
    context = load.read_max_positions(settings.model)
    tools_of = None if tools is None else tools.schemas_of
    prepared = splits.tokenize_splits(settings, opened, tokenizer, context, tools_of, ranks=world)
    sets = {name: prompts for name, prompts in prepared.items() if name is not None}
    if any(prompts.media for prompts in prepared.values()):
        check_image_run(settings, bool(device_count.visible_gpus()))
    for data_note in splits.data_notes(settings, prepared, context):
        note(data_note)
    length = settings.generation.max_completion_length
    judge = judging.build_judge(settings.eval, settings.seed, sets, tokenizer, training=False)
    judges = [] if judge is None or judge.reward is None else [judge.reward]
    scorers = [*rewards, *judges]
    run_ready_hooks(scorers, tokenizer, sets, length, world.device, note, reward_load)
    note("loading the model ...")
    model = lora.load_trained_model(settings.model, None, world.device, settings.seed)
    policy = Policy(model, settings.generation.temperature)
    vision = agent_build.load_episode_vision(settings, tokenizer)

    def build() -> Generator:
        return agent_build.build_generator(
            model, tokenizer, settings, context, folder, note, tools, vision
        )

    engine = ParallelEngine(world, settings.train, settings.distributed)  # whole model per rank
    alone = world.size == 1 or not settings.generation.is_server
    generator = build() if alone else _generator_of_ranks(engine, policy, build)
    parts = (load_algorithm(settings.algorithm), generator, rewards, sets, judge, world)
    return EvalWorkerSetup(settings, *parts), policy


def _generator_of_ranks(
    engine: ParallelEngine, policy: Policy, build: Callable[[], Generator]
) -> Generator:
    """One generator for all ranks: a server."""

    def weights() -> Iterator[dict[str, Tensor]]:
        if lora.has_adapter(policy.model):
            return gather.iter_gathered_adapter(engine, policy.model)
        return gather.iter_gathered_weights(engine, policy.model)

    return Rank0Proxy(engine.world, policy, weights, build)


def _progress_printer(world: World) -> Callable[[str, int, int], None]:
    """Only one rank prints progress, for all."""
    return _ProgressPrinter() if world.is_main else ignore_progress


class _ProgressPrinter:
    """Prints a line now and then, for long evaluations."""

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
    """Run the process of `rloo eval`. Exits with the code of the error that ended it."""

    def evaluate() -> None:
        fault_injection.arm_faults()
        with explain_lost_ranks("in the evaluation"):
            run_evaluation(Path(sys.argv[1]))

    process_exit.run_and_exit(evaluate, "lower eval.batch_size", is_printed_elsewhere)

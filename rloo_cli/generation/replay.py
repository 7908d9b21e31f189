"""No sampler: the completions that another run recorded, step by step (docs/replay.md).

Rewards score them anew, and the update is the run's own. With the recorded run's config the policy
is the one that sampled; with another it is not, and the recorded log-probabilities are those of
the behaviour policy. Held-out prompts are answered by the trained model itself.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import yaml

from rloo_cli.config import check, hf_cache, messages, registry
from rloo_cli.config.agent import agent_config
from rloo_cli.config.rules import LENGTH_FREE_SCHEDULES, RUN_LENGTH_KEYS, SHARDED_ENGINES
from rloo_cli.config.rules_sampling import keeps_masks
from rloo_cli.config.schema import Frozen, GenerationConfig, PathText, RunConfig, key
from rloo_cli.data import rollout_files
from rloo_cli.utils.errors import ConfigError, DataError, Problem
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rloo_cli.data.prompts import Prompts

IMPLEMENTATION = "rloo_cli.generation.common.record_player:build_record_player"
PATH_KEY = "generation.replay.path"


class ReplaySection(Frozen):
    path: PathText | None = key("Folder of the run whose recorded rollouts are trained on")


class Config(GenerationConfig):
    backend: Literal["replay"] = key("Sampler: none; another run's recorded rollouts")
    replay: ReplaySection


def recorded_folder(run: RunConfig) -> Path:
    """The folder of the run that is replayed."""
    section = cast(Config, run.generation).replay
    return Path(section.path or "").expanduser()


def first_recorded_head(run: RunConfig) -> JsonObject:
    """The head of the first step of the run that is replayed; {} where nothing is recorded.

    Raises DataError for a damaged one.
    """
    for path in rollout_files.list_rollout_files(recorded_folder(run)).values():
        return rollout_files.read_rollout_head(path)
    return {}


def rules(run: RunConfig) -> Iterator[Problem]:
    """Everything in which the run does not fit the record that it trains on."""
    if cast(Config, run.generation).replay.path is None:
        why = "generation=replay samples nothing, and nothing says whose rollouts to train on"
        yield Problem(f"{PATH_KEY} is not set", PATH_KEY, why, f"{PATH_KEY}=runs/NAME")
        return
    folder = recorded_folder(run)
    files = rollout_files.list_rollout_files(folder)
    if not files:
        why = f"looked at {(folder / rollout_files.RECORD_FOLDER).absolute()}: no recorded step"
        fix = "a run with logging.rollouts_every=1"
        yield Problem(f"{folder} has no recorded rollouts", PATH_KEY, why, fix)
        return
    if folder.resolve() == Path(run.root, str(run.name)).resolve():
        why = "its own record would be written over while it is read"
        yield Problem("a run cannot replay itself", PATH_KEY, why, "name=OTHER")
        return
    try:
        heads = rollout_files.read_rollout_heads(folder, files)
    except DataError as error:
        yield from error.problems
        return
    yield from _sampler_problems(run)
    yield from _turn_reward_problems(run, folder)
    yield from step_problems(folder, heads, run.num_steps())
    for head in heads.values():
        problems = [*_head_problems(run, folder, head)]
        if problems:  # the others of this run would say the same
            yield from problems
            return


def step_problems(
    folder: Path, recorded: Mapping[int, object], num_steps: int | None
) -> Iterator[Problem]:
    """The steps of a run of `num_steps` that are not recorded; None = not known yet."""
    missing = [step for step in range(1, (num_steps or 0) + 1) if step not in recorded]
    if not missing:
        return
    shown, there = (rollout_files.step_ranges(steps) for steps in (missing, recorded))
    first = next(step for step in range(1, len(recorded) + 2) if step not in recorded)
    fix = f"max_steps={first - 1}" if first > 1 else "another run, with logging.rollouts_every=1"
    what = f"{len(missing)} of {num_steps} steps are not recorded: {shown}"
    yield Problem(what, PATH_KEY, f"{folder} has the steps {there}", fix)


def _head_problems(run: RunConfig, folder: Path, head: JsonObject) -> Iterator[Problem]:
    """In which keys the run differs from a recorded step that it cannot be without."""
    where = f"step {head['step']} of {folder}"
    values = {
        "algorithm.num_generations": (run.algorithm.num_generations, head["num_generations"]),
        "train.prompts_per_step": (run.train.prompts_per_step, head["prompts"]),
        "seed": (run.seed, head["seed"]),
        "data.shuffle": (run.data.shuffle, head["shuffle"]),
        "generation.return_sampling_mask": (
            keeps_masks(run.generation), head.get("sampling_mask", False),
        ),
    }  # fmt: skip
    for name, (ours, recorded) in values.items():
        if ours != recorded:
            shown = str(recorded).lower() if isinstance(recorded, bool) else recorded
            why = f"{where} was recorded with {shown}"
            yield Problem(f"{name} = {ours} is not the record's", name, why, f"{name}={shown}")
    yield from _length_problems(run, where, head)
    try:
        known = hf_cache.read_model_config(run.model.path, run.model.revision)
    except ValueError:  # another rule says so
        known = {}
    vocab_size = known.get("text_config", known).get("vocab_size")
    if vocab_size is not None and vocab_size != head["vocab_size"]:
        what = f"the model has {vocab_size} tokens, and the record's had {head['vocab_size']}"
        fix = "a model of the family that sampled"
        yield Problem(what, "model.path", f"{where} holds ids of other tokens", fix)


def _length_problems(run: RunConfig, where: str, head: JsonObject) -> Iterator[Problem]:
    """Whether a step's completions, or the turns of its episodes, are longer than the run's are."""
    agent, turns = agent_config(run), head["most_turns"]
    if (agent is not None) != rollout_files.holds_episodes(head):
        what = "agent is null, and the record holds episodes of several turns"
        fix = "agent as in the recorded run's config.yaml"
        if agent is not None:
            what = f"agent.kind = {agent.kind}, and the record holds one answer to each prompt"
            fix = "agent=null"
        yield Problem(what, "agent", f"{where} was recorded so", fix)
        return
    longest, name = head["longest_completion"], "generation.max_completion_length"
    longest = head["longest_turn"] if agent is not None else longest
    if run.generation.max_completion_length < longest:
        what = f"{name} = {run.generation.max_completion_length} is less than was recorded"
        yield Problem(what, name, f"{where} has one of {longest} tokens", f"{name}={longest}")
    if agent is not None and agent.max_turns < turns:
        what = f"agent.max_turns = {agent.max_turns} is less than was recorded"
        why = f"{where} has an episode of {turns} turns"
        yield Problem(what, "agent.max_turns", why, f"agent.max_turns={turns}")


def _turn_reward_problems(run: RunConfig, folder: Path) -> Iterator[Problem]:
    """Whether the recorded rewards of environments were made of turns in another way."""
    name, config = "algorithm.turn_rewards", folder / "config.yaml"
    ours = getattr(run.algorithm, "turn_rewards", "sum")  # an algorithm of the user's own
    try:
        theirs = yaml.safe_load(config.read_text())["algorithm"].get("turn_rewards", "sum")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return  # a damaged one, which others name
    if run.agent is not None and (ours == "last") != (theirs == "last"):
        why = f"{config} has {theirs}, and a record keeps what came of it, not what made it up"
        yield Problem(f"{name} = {ours} is not the record's", name, why, f"{name}={theirs}")


def _sampler_problems(run: RunConfig) -> Iterator[Problem]:
    """What needs a sampler."""
    if run.algorithm.needs_greedy:
        why = "it needs a greedy completion of every prompt, and a record has their scores alone"
        what, where = f"algorithm = {run.algorithm.name} cannot be replayed", "algorithm.name"
        yield Problem(what, where, why, "algorithm=rloo")
    if run.held_out and run.distributed.engine in SHARDED_ENGINES:
        why = f"with distributed.engine={run.distributed.engine} no process has the whole model"
        what = "held-out prompts are answered by the trained model itself"
        yield Problem(what, "data.eval_split", why, "data.eval_split=null eval.sets={}")


def check_data(
    run: RunConfig, tokenizer: "PreTrainedTokenizerBase", prompts: "Prompts", num_steps: int
) -> None:
    """Check that tokens and prompts are those of the record, before any weights load.

    Raises ConfigError for another tokenizer, or for more steps than are recorded; DataError for
    other data.
    """
    from rloo_cli.data.fingerprint import tokenizer_digest  # lazy: it imports pyarrow

    folder = recorded_folder(run)
    files = rollout_files.list_rollout_files(folder)
    unknown_before = run.num_steps() is None  # train.epochs; else `rules` has looked
    if unknown_before and (problems := [*step_problems(folder, files, num_steps)]):
        raise ConfigError(*problems)
    head = first_recorded_head(run)
    if head["tokenizer"] != tokenizer_digest(tokenizer):
        what = "the tokenizer is not the one that the rollouts were recorded with"
        why = f"tokens have other ids than in {folder}"
        raise ConfigError(Problem(what, "model.tokenizer", why, "the recorded run's model.path"))
    if head["fingerprint"] != prompts.fingerprint:
        what = "the data are not those that the rollouts were recorded with"
        why = f"{len(prompts)} prompts, fingerprint {prompts.fingerprint}; in {folder} there were"
        why += f" {head['num_prompts']}, {head['fingerprint']}"
        raise DataError(Problem(what, "data.path", why, "the recorded run's keys of `data`"))


def sampled_by(values: JsonObject) -> str:
    """The backend whose rules hold for algorithm.correction.mode=auto.

    It is the recorded run's own while every key on which the weights depend is as in that run: the
    policy is then the sampler, as it was. Else `replay`, which is corrected. `values`: of a run.
    """
    try:
        folder = Path(values["generation"]["replay"]["path"]).expanduser()
        recorded = yaml.safe_load((folder / "config.yaml").read_text())
        if changed_keys(values, recorded):
            return "replay"
        return registry.sampler_backend(recorded)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return "replay"  # `rules` says what is wrong


def changed_keys(values: JsonObject, recorded: JsonObject) -> list[str]:
    """Keys on which the trained weights depend and that differ. Plain values of two runs."""
    ours, theirs = (
        {name: value for name, value in messages.walk_values(v) if not isinstance(value, dict)}
        for v in (values, recorded)
    )
    schedule = values["train"]["lr_scheduler"]
    free: tuple[str, ...] = check.KEYS_NOT_HASHED
    if schedule not in LENGTH_FREE_SCHEDULES:
        free = tuple(name for name in free if name not in RUN_LENGTH_KEYS)
    free = (*free, "data.eval_split")
    shared = {f"generation.{name}" for name in GenerationConfig.model_fields if name != "backend"}

    def counts(name: str) -> bool:
        if any(name == f or name.startswith(f"{f}.") for f in free):
            return False
        if name.partition(".")[0] == "generation":
            return any(name == s or name.startswith(f"{s}.") for s in shared)
        return True

    names: dict[str, Any] = {**ours, **theirs}
    return [name for name in names if counts(name) and ours.get(name) != theirs.get(name)]

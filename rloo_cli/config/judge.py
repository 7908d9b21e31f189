"""The keys of `eval.judge`: which judge compares held-out completions with which texts, and how.

There are two types: `openai`, a language model behind an OpenAI-compatible address, and `reward`,
any reward (a reward model, a rule) that scores both texts. The config reads this without torch; the
judging itself is in `judges/`.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, cast

import yaml
from pydantic import Field, create_model

from rloo_cli.config import registry
from rloo_cli.config import template as config_template
from rloo_cli.config.pasted import unknown_name_problem
from rloo_cli.config.schema import (
    DataConfig,
    EvalConfig,
    Frozen,
    GenerationConfig,
    PathText,
    Positive,
    RewardConfig,
    Text,
    key,
)
from rloo_cli.utils import paths
from rloo_cli.utils.errors import Problem, clash_problems
from rloo_cli.utils.files import JsonObject

AGAINST_REFERENCE = "reference"  # value of `against` for texts in the data; else a model
JUDGE_TYPES = ("openai", "reward")
Address = Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$", max_length=1000)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=100)]


class ChatKeys(Frozen):
    """Address, prompt and limits of a judge model."""

    base_url: Address = key("OpenAI-compatible base URL, without /chat/completions")
    model: Text = key("The model's name at this address")
    api_key_env: Variable | None = key("Environment variable with the API key; null = no key")
    system: str | None = key("System message of each request; null = none")
    template: str = key("The question; fills in {prompt}, other names and any {column}")
    pattern: str = key("Regular expression whose first group is the verdict in the answer")
    max_tokens: Positive | None = key("Most tokens per answer; null = the server's default")
    temperature: float | None = key("The judge's temperature; null = the server's default", ge=0)
    concurrency: Positive = key("Most concurrent requests")
    request_timeout_s: float = key("Timeout of one request in seconds", gt=0, le=1e6)
    extra: JsonObject = key("Further fields of the request body, e.g. {seed: 1}; they win")


class JudgeKeys(Frozen):
    """Keys of every judge."""

    against: PathText = key("reference = texts of the data; or hub name or folder of another model")
    reference_column: Text = key("Column of these texts, or of conversations that end with one")
    max_pairs: Positive | None = key("Judge only the first n pairs of each set; null = all")


class OpenaiJudge(JudgeKeys, ChatKeys):
    """Keys of a language-model judge."""

    type: Literal["openai"] = key("openai: a language model as judge")
    both_orders: bool = key("Ask about each pair twice, A and B exchanged; false = a seeded swap")
    retries: int = key("Retries after an answer without a verdict", ge=0)
    timeout_s: float = key("Timeout of all requests of one evaluation in seconds", gt=0, le=1e6)


class RewardJudge(JudgeKeys):
    """Keys of a scoring judge."""

    type: Literal["reward"] = key("reward: the text with the higher reward wins")
    reward: Any = key("An entry as those of `reward`")  # `config_class` sets its class


def judge_config_class(values: object) -> type[Frozen]:
    """The schema of these plain values of `eval.judge`."""
    if not isinstance(values, dict):
        return Frozen
    if values.get("type") != "reward":
        return OpenaiJudge
    name = _entry_type(values)
    names = registry.registry_names("rewards")
    entry_class = registry.config_class("rewards", name) if name in names else RewardConfig
    return create_model("Judge", __base__=RewardJudge, reward=(entry_class, key("The reward")))


def _entry_type(judge: JsonObject) -> str | None:
    entry = judge.get("reward")
    kind: str | None = entry.get("type") if isinstance(entry, dict) else None
    return kind


def unknown_judge_problems(values: JsonObject) -> Iterator[Problem]:
    """Problems found before the schema can be built."""
    section = values.get("eval")
    judge = section.get("judge") if isinstance(section, dict) else None
    if not isinstance(judge, dict):
        return
    where, kind = "eval.judge.type", judge.get("type")
    if kind not in JUDGE_TYPES:
        fix = "judge=openai, judge=reward_model or judge=rule"
        yield unknown_name_problem(where, kind, "judge", JUDGE_TYPES, fix)
    elif kind == "reward":
        name, where = _entry_type(judge), "eval.judge.reward.type"
        names = registry.registry_names("rewards")
        if name not in names:
            yield unknown_name_problem(where, name, "reward", names)


def merge_judge_defaults(values: JsonObject, common: JsonObject) -> JsonObject:
    """Fill in the judge's reward, and substitute debug's reward model for a judge
    that needs a network. `common`: the defaults of all rewards."""
    section = values.get("eval")
    judge = section.get("judge") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(judge, dict):
        return values
    debug = values.get("debug") or {}
    model = debug.get("reward_model_path")
    if debug.get("judge_stand_in") and model:
        judge = shipped_judge("reward_model")
        judge["reward"] = judge["reward"] | {"path": model}
    if isinstance(judge.get("reward"), dict):
        entry = judge["reward"]
        judge = judge | {"reward": common | reward_type_defaults(entry) | entry}
    return values | {"eval": section | {"judge": judge}}


def reward_type_defaults(entry: JsonObject) -> JsonObject:
    """The values of conf/reward/TYPE.yaml for an entry of that type; {} for an unknown type.

    An entry such as `two: {type: function, path: my.py:score}` gets its defaults from there.
    """
    kind = entry.get("type")
    if not isinstance(kind, str) or kind not in registry.registry_names("rewards"):
        return {}
    return dict(_read_reward_defaults(kind))


@cache
def _read_reward_defaults(kind: str) -> JsonObject:
    path = paths.CONF / "reward" / f"{kind}.yaml"
    defaults: JsonObject = yaml.safe_load(path.read_text())[kind] if path.is_file() else {}
    return defaults


def shipped_judge(name: str) -> JsonObject:
    """The values of the shipped choice `judge=<name>`."""
    values: JsonObject = yaml.safe_load((paths.CONF / "judge" / f"{name}.yaml").read_text())
    return values


def judge_problems(
    evaluation: EvalConfig, held_out: Mapping[str, DataConfig], generation: GenerationConfig
) -> Iterator[Problem]:
    """Problems of a judge whose keys are each valid by themselves."""
    judge = cast(OpenaiJudge | RewardJudge | None, evaluation.judge)
    if judge is None:
        return
    if judge.type == "openai":
        yield from chat_judge_problems("eval.judge", judge, ("prompt", "a", "b"))
    else:
        module = registry.registered_module("rewards", judge.reward.type)
        if hasattr(module, "problems"):
            yield from module.problems(judge.reward, "eval.judge.reward")
    if not held_out:
        why, fix = "there are no held-out data", "data.eval_split=test"
        yield Problem("eval.judge has nothing to judge", "eval.judge", why, fix)
    if judge.against != AGAINST_REFERENCE and generation.is_server:
        key, fix = "eval.judge.against", "generation=vllm_colocate or generation=transformers"
        why = "rollout servers only hold model.path"
        clash = (True, key, f"{key}={judge.against}", why, fix)
        yield from clash_problems(f"generation={generation.backend}", [clash])


def chat_judge_problems(where: str, keys: ChatKeys, needs: tuple[str, ...]) -> Iterator[Problem]:
    """Problems of a judge model's keys at `where`; its template must name `needs`."""
    yield from config_template.template_problems(f"{where}.template", keys.template, needs)
    pattern_key = f"{where}.pattern"
    try:
        groups = re.compile(keys.pattern).groups
    except re.error as error:
        fix = f"correct {pattern_key}, or omit it to use the default"
        yield Problem(f"{pattern_key} is not a regular expression", pattern_key, str(error), fix)
        return
    if not groups:
        why, fix = "the first group is read as the verdict", r"Score:\s*(\d+), in quotes"
        yield Problem(f"{pattern_key} has no group", pattern_key, why, fix)

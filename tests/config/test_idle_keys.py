"""`only_with` of the schema: which keys have no effect, how that is said, and its own grammar."""

import copy
import re
from collections.abc import Iterator

import pytest

from rloo_cli.cli import config as config_verb
from rloo_cli.cli.config import every_key, schema_fields
from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.config.idle_keys import idle_notes, idle_reasons, key_conditions
from rloo_cli.config.key_types import Frozen
from rloo_cli.utils.files import JsonObject

CHOICES = ("algorithm=ppo", "algorithm=reinforce_pp", "algorithm=opd", "generation=vllm_server")


def notes(key: str, *words: str) -> list[str]:
    run = check.check_config(compose_config(["+recipe=smoke", *words]))
    return idle_notes([key], type(run), check.dump_config(run))


@pytest.mark.parametrize(
    ("key", "idle", "acting"),
    [
        ("algorithm.epsilon", (), ("algorithm.num_iterations=2",)),
        ("algorithm.max_resample", (), ("algorithm.zero_std_groups=resample",)),
        ("algorithm.kl_estimator", ("algorithm.beta=0",), ("algorithm.beta=0.1",)),
        ("generation.max_sampling_mask_ids", (), ("generation.return_sampling_mask=true",)),
        ("train.warmup_steps", ("train.lr_scheduler=constant",), ("train.lr_scheduler=linear",)),
        ("checkpoint.every", ("checkpoint.every=500",), ("checkpoint.every=2",)),
        ("model.revision", ("model.path=make:tiny",), ("model.path=org/name",)),
        ("data.revision", ("data.path=make:arithmetic",), ("data.path=org/name",)),
        ("distributed.reduce", (), ("distributed=fsdp2",)),
        ("generation.max_lag", (), ("generation.overlap=carry", "generation=vllm_server")),
        ("data.allow_private_addresses", (), ("data.allow_remote_images=true",)),
    ],
)
def test_a_key_without_effect_is_noted_and_one_with_is_not(
    key: str, idle: tuple[str, ...], acting: tuple[str, ...]
) -> None:
    (note,) = notes(key, *idle)
    assert note.startswith(f"note: {key} has no effect: only with ")
    assert notes(key, *acting) == []


def test_keys_of_a_server_have_no_effect_on_one_that_runs_already() -> None:
    own = ("generation=vllm_server",)
    given = (*own, "generation.server.base_url=http://node7:8000")
    assert notes("generation.server.port", *own) == []
    assert notes("generation.server.kv_cache_gb", *given)
    assert notes("generation.server.api_key_env", *own)
    assert notes("generation.server.api_key_env", *given) == []
    assert notes("generation.colocate.kv_cache_gb", "generation=vllm_colocate") == []


def test_every_condition_is_of_keys_that_there_are_and_is_in_their_meaning() -> None:
    for choice in CHOICES:
        schema = every_key([choice])[1]
        keys = schema_fields(schema)
        conditions = key_conditions(schema)
        assert len(conditions) > 60 and conditions.keys() <= keys.keys()
    explained = config_verb.explain_key("algorithm.max_resample", ["+recipe=smoke"])
    said = "only with algorithm.zero_std_groups=resample"
    assert f"with zero_std_groups=resample; {said}" in explained
    assert f"idle     no effect: {said}" in explained


def sections_with_conditions(base: type[Frozen] = Frozen) -> Iterator[type[Frozen]]:
    for section in base.__subclasses__():
        yield from sections_with_conditions(section)
        if "only_with" in vars(section):
            yield section


def test_only_with_names_keys_of_its_section_and_conditions_on_keys_that_there_are() -> None:
    keys = {key for choice in CHOICES for key in schema_fields(every_key([choice])[1])}
    leaves = {key.rpartition(".")[2] for key in keys}
    sections = [*sections_with_conditions()]
    assert len(sections) > 20
    for section in sections:
        for condition, names in section.only_with.items():
            assert {*names} <= section.model_fields.keys(), section
            for term in condition.split(" or "):
                named = re.split("[!=>]", term)[0]
                assert named.lstrip(".") in (leaves if named.startswith(".") else keys), term


@pytest.mark.parametrize(
    ("condition", "values", "holds"),
    [
        ("a.b", {"a": {"b": 1}}, True),
        ("a.b", {"a": {"b": 0}}, False),
        ("a.b", {"a": {"b": {}}}, False),
        ("a.b", {"a": None}, True),  # a key that the config does not have is no reason
        ("a.b=null", {"a": {"b": {}}}, True),
        ("a.b=x|y", {"a": {"b": "y"}}, True),
        ("a.b!=x|y", {"a": {"b": "y"}}, False),
        ("a.b=make:*", {"a": {"b": "make:tiny"}}, True),
        ("a.b!=1", {"a": {"b": 1.0}}, False),
        ("a.b>1", {"a": {"b": 2}}, True),
        ("a.b>1", {"a": {"b": 1}}, False),
        ("a.b>=c", {"a": {"b": 1}, "c": 2}, False),
        ("a.b>=c", {"a": {"b": None}, "c": 2}, True),
        ("a.b>1 or c", {"a": {"b": 1}, "c": 1}, True),
        ("a.b>1 or c", {"a": {"b": 1}, "c": None}, False),
    ],
)
def test_the_grammar_of_a_condition(condition: str, values: JsonObject, holds: bool) -> None:
    before = copy.deepcopy(values)
    assert idle_reasons([condition], values) == ([] if holds else [f"only with {condition}"])
    assert values == before

"""A list, a mapping or a number where a key takes something else: an error, whatever the key is."""

import copy
from dataclasses import replace

import fuzz_cases
import pytest

from rloo_cli.config import check, messages
from rloo_cli.config.compose import ComposedConfig, compose_config
from rloo_cli.utils.errors import ConfigError

KINDS = ([], {}, [[1]], [{}], {"a": 1}, {1: 2}, "", "x", None, True, -1, 1.5, float("nan"))


def said(composed: ComposedConfig, key: str, value: object) -> str:
    """What a check says where `key` holds this value; "" where it takes it."""
    values = copy.deepcopy(composed.values)
    node: object = values
    *path, last = key.split(".")
    for name in path:
        node = node[int(name)] if isinstance(node, list) else node[name]
    node[int(last) if isinstance(node, list) else last] = value
    try:
        check.check_config(replace(composed, values=values))
    except ConfigError as error:
        return error.render()
    return ""


@pytest.mark.parametrize("value", [[], {}, [[1]]], ids=str)
def test_an_agent_whose_kind_is_no_name_is_refused(value):
    got = said(compose_config(["+recipe=tools_mini"]), "agent.kind", value)
    assert got.startswith(f"error: agent.kind = {value!r}: unknown agent\n"), got


def test_keys_are_explained_where_an_agents_kind_is_no_name(tmp_path):
    (tmp_path / "mine.yaml").write_text("agent: {kind: []}\n")
    code, out, err = fuzz_cases.said(
        tmp_path, "config", "explain", "agent.kind", "+recipe=mine.yaml"
    )
    assert (code, err) == (0, "") and out.startswith("agent.kind\n")


@pytest.mark.parametrize("section", ["model.lora", "model.quantization"])
def test_a_section_that_is_empty_is_incomplete(section):
    got = said(compose_config(["+recipe=tools_mini"]), section, {})
    assert got.startswith(f"error: {section} is incomplete\n"), got


@pytest.mark.parametrize("section", ["model", "data"])
def test_a_file_of_ones_own_without_its_defaults_list_is_one_mistake(section):
    composed = compose_config(["+recipe=quickstart"])
    values = composed.values | {section: {"path": "mine", "dtyp": "float32"}}
    with pytest.raises(ConfigError) as raised:
        check.check_config(replace(composed, values=values))
    found = {p.what.partition(" ")[0]: p.fix for p in raised.value.problems}
    assert found.keys() == {section, f"{section}.dtyp"}
    assert found[section].startswith("defaults: [default, _self_]")


def test_sources_without_a_weight_are_a_mistake_each():
    mixture = {name: {"path": name} for name in ("first", "second")}
    got = said(compose_config(["+recipe=quickstart"]), "data.mixture", mixture)
    assert [f"data.mixture.{name}.weight has no value" in got for name in mixture] == [True, True]
    assert "data is incomplete" not in got


@pytest.mark.slow  # a check for each key and kind: 4,000 of them
@pytest.mark.parametrize("recipe", ["tools_mini", "tldr_judge", "tldr_1b_ppo"])
def test_no_key_ends_in_a_traceback_whatever_it_holds(recipe):
    composed = compose_config([f"+recipe={recipe}"])
    for key, _ in messages.walk_values(composed.values):
        for value in KINDS:
            got = said(composed, key, value)
            assert not got or got.startswith("error: "), (key, value, got)

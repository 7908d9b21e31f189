"""The verbs that only read: recipes and config."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from assert_refused import assert_refused

from rloo_cli.cli import main
from rloo_cli.cli.config import value_keys
from rloo_cli.config import check, messages
from rloo_cli.config.compose import compose_config
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """`ask(*words)`: what a verb prints, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        assert main.find_verb([*words])() == 0
        return capsys.readouterr().out

    return run


def refusal(*words: str) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        main.find_verb([*words])()
    return error.value


# recipes


def test_recipes_are_listed_with_their_first_line(ask) -> None:
    lines = ask("recipes").splitlines()
    assert [line.split()[0] for line in lines] == [*paths.recipe_files()]
    for line, path in zip(lines, paths.recipe_files().values(), strict=True):
        assert line.split(None, 1)[1] == path.read_text().splitlines()[0].removeprefix("# ")
    assert ask("recipes", "list").splitlines() == lines


def test_a_recipe_is_shown_as_it_is(ask) -> None:
    for name, path in paths.recipe_files().items():
        assert ask("recipes", "show", name) == path.read_text()


def test_a_recipe_is_copied_but_never_over_a_file(ask, tmp_path: Path) -> None:
    said = ask("recipes", "copy", "smoke", "mine/my.yaml")
    assert "rloo train +recipe=mine/my.yaml" in said
    copy = tmp_path / "mine" / "my.yaml"
    assert copy.read_text() == paths.recipe_files()["smoke"].read_text()
    copy.write_text("mine\n")
    assert_refused(refusal("recipes", "copy", "tldr_1b", "mine/my.yaml"), key="mine/my.yaml")
    assert copy.read_text() == "mine\n"


@pytest.mark.parametrize(
    ("words", "key", "fix"),
    [
        (["show", "smok"], "smok", "rloo recipes show smoke"),
        (["copy", "smoke", "my.txt"], "my.txt", ""),
        (["copy", "smoke"], "rloo recipes copy", ""),
        (["delete", "smoke"], "rloo recipes delete", ""),
    ],
)
def test_recipes_refuses_what_it_does_not_understand(
    words: list[str], key: str, fix: str, sentence: Callable[..., None]
) -> None:
    error = refusal("recipes", *words)
    assert_refused(error, key=key, fix=fix)
    if words[0] == "copy":
        sentence(error)


# config


def test_config_lists_every_key_with_type_default_and_meaning(ask) -> None:
    found = {}
    for line in ask("config").splitlines():
        key, kind, value, meaning = re.fullmatch(r"(\S+) +(.+?) = (.*?)  # (.+)", line).groups()
        found[key] = (kind, value, meaning)
    assert list(found) == value_keys() and len(found) > 200
    assert found["algorithm.num_generations"][:2] == ("int >= 2, <= 65536", "4")
    assert found["algorithm.beta"][:2] == ("float >= 0", "0.05")
    assert all(meaning for _, _, meaning in found.values())
    assert found["data.overlong"][:2] == ("filter | error | truncate_left", '"filter"')
    assert found["train.max_grad_norm"][:2] == ("float > 0 or null", "1.0")
    assert found["data.columns"][:2] == ("dict[str, str]", "{}")
    composed = compose_config(["+recipe=smoke"])
    keys = {
        k
        for k, v in messages.walk_values(check.merge_defaults(composed.values))
        if not isinstance(v, dict)
    }
    assert keys <= set(found)


def test_config_lists_the_values_of_a_recipe(ask) -> None:
    lines = {line.split()[0]: line for line in ask("config", "+recipe=tldr_1b").splitlines()}
    assert " = 0.03  # " in lines["algorithm.beta"]
    assert ' = "linear"  # ' in lines["train.lr_scheduler"]


def test_explain_says_value_and_where_it_is_from(ask, tmp_path: Path) -> None:
    text = ask("config", "explain", "algorithm.beta")
    assert "meaning  Weight of KL" in text and "type     float >= 0\n" in text
    assert "value    0.05\n" in text
    assert re.search(r"from     \S*conf/algorithm/rloo.yaml:\d+\n", text) and "idle" not in text
    assert re.search(r"\n  default  0.05 \(\S*conf/algorithm/rloo.yaml:\d+\)", text)
    text = ask("config", "explain", "algorithm.beta", "+recipe=tldr_1b")
    assert re.search(r"value    0.03\n  from     \S*recipes/tldr_1b.yaml:\d+\n", text)
    assert re.search(r"\n  default  0.05 \(\S*conf/algorithm/rloo.yaml:\d+\)", text)
    text = ask("config", "explain", "generation.stop", "generation.stop=[a]")
    assert 'value    ["a"]\n' in text and re.search(r"\n  default  \[\] \(\S*yaml:\d+\)", text)
    assert "\n  default  null (" in ask("config", "explain", "max_steps")
    (tmp_path / "my.yaml").write_text("# Mine.\nalgorithm:\n  beta: 0.5\n")
    text = ask("config", "explain", "algorithm.beta", "+recipe=my.yaml")
    assert "value    0.5\n  from     my.yaml:3\n" in text
    text = ask("config", "explain", "algorithm.beta", "+recipe=my.yaml", "algorithm.beta=0.7")
    assert "value    0.7\n  from     command line: algorithm.beta=0.7\n" in text


def test_explain_names_a_section_by_its_keys_and_a_reward_that_is_not_chosen(ask) -> None:
    assert "keys     mode, level, cap, floor" in ask("config", "explain", "algorithm.correction")
    text = ask("config", "explain", "reward.regex.pattern", "+recipe=smoke")
    assert "note     this config lacks" in text
    text = ask("config", "explain", "reward.tldr_rm.path", "+recipe=tldr_6_9b")
    assert "pythia-6.9b" in text and "tldr_6_9b.yaml:" in text
    text = ask("config", "explain", "reward.length_tokens.weight", "+recipe=smoke")
    assert "value    0.01\n" in text and "smoke.yaml" in text
    text = ask("config", "explain", "reward.length_tokens.timeout_s", "+recipe=smoke")
    assert "value    120.0\n" in text and "conf/config.yaml" in text


IDLE = {
    "algorithm.epsilon": [],
    "algorithm.delta": ["algorithm.policy_loss=reinforce"],
    "algorithm.kl_estimator": ["algorithm.beta=0"],
    "algorithm.beta": ["algorithm.kl_in=none"],
    "algorithm.kl_temperature": [],
    "algorithm.max_resample": [],
    "algorithm.missing_eos_penalty.value": [],
    "algorithm.correction.cap": [],
    "eval.every": ["data.eval_split=null"],
    "train.warmup_steps": ["train.lr_scheduler=constant"],
    "model.revision": [],
}


@pytest.mark.parametrize("key", IDLE)
def test_explain_says_why_a_key_has_no_effect(key: str, ask, sentence: Callable[..., None]) -> None:
    lines = ask("config", "explain", key, "+recipe=smoke", *IDLE[key]).splitlines()
    idle = [line for line in lines if line.split()[:1] == ["idle"]]
    assert idle
    sentence("\n".join(idle))


def test_explain_is_silent_where_a_key_acts(ask) -> None:
    for key in ("algorithm.epsilon", "algorithm.kl_estimator", "train.learning_rate"):
        text = ask("config", "explain", key, "+recipe=smoke", "algorithm.num_iterations=2")
        assert "idle" not in text


@pytest.mark.parametrize(
    ("words", "key", "fix"),
    [
        (["explain"], "rloo config explain", ""),
        (["explain", "algorithm.beta=3"], "rloo config explain", ""),
        (["explain", "algorithm.betta"], "algorithm.betta", "algorithm.beta?"),
        (["explain", "algorithm.kl_coef"], "algorithm.kl_coef", "algorithm.beta"),
        (["nonsense"], "'nonsense'", ""),
    ],
)
def test_config_refuses_what_it_does_not_understand(words: list[str], key: str, fix: str) -> None:
    assert_refused(refusal("config", *words), key=key, fix=fix)


def valid(value: Any, schema: dict[str, Any], definitions: dict[str, Any]) -> bool:
    """As much of JSON schema as pydantic writes for our types."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]] | {
            k: v for k, v in schema.items() if k != "$ref"
        }
    if "anyOf" in schema and not any(valid(value, s, definitions) for s in schema["anyOf"]):
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    kinds = {
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "null": value is None,
        "integer": is_number and isinstance(value, int),
        "number": is_number,
    }
    if "type" in schema and not kinds[schema["type"]]:
        return False
    if is_number:
        limits = [
            value >= schema.get("minimum", value),
            value <= schema.get("maximum", value),
            value > schema.get("exclusiveMinimum", value - 1),
            value < schema.get("exclusiveMaximum", value + 1),
        ]
        if not all(limits):
            return False
    if isinstance(value, dict):
        known = schema.get("properties", {})
        rest = schema.get("additionalProperties", True)
        if rest is False and set(value) - set(known):
            return False
        kinds = {name: known.get(name, rest) for name in value}
        return all(name in value for name in schema.get("required", [])) and all(
            valid(item, kinds[name], definitions)
            for name, item in value.items()
            if isinstance(kinds[name], dict)
        )
    return True


@pytest.mark.wide
def test_config_json_is_a_json_schema_that_takes_our_configs_and_recipes_and_no_others(ask) -> None:
    schema = json.loads(ask("config", "--json"))
    definitions = schema["$defs"]
    assert schema["type"] == "object" and schema["additionalProperties"] is False
    assert {"model", "data", "reward", "algorithm", "train"} <= set(schema["properties"])
    beta = definitions[schema["properties"]["algorithm"]["$ref"].rpartition("/")[2]]
    assert beta["properties"]["beta"]["description"].startswith("Weight of KL")

    of_kind = {}  # a backend has keys of its own, and an algorithm
    for recipe in paths.recipe_files():
        values = check.dump_config(check.check_config(compose_config([f"+recipe={recipe}"])))
        kind = (f"generation={values['generation']['backend']}",
                f"algorithm={values['algorithm']['name']}")  # fmt: skip
        kind += (f"agent={values['agent']['kind']}",) if values["agent"] else ()
        if kind not in of_kind:
            of_kind[kind] = json.loads(ask("config", "--json", *kind))
        schema, definitions = of_kind[kind], of_kind[kind]["$defs"]
        assert valid(values, schema, definitions), recipe
        for key, wrong in (("seed", -1), ("max_steps", "two"), ("nonsense", 1), ("model", None)):
            assert not valid(values | {key: wrong}, schema, definitions), key
        recipe_itself = yaml.safe_load(paths.recipe_files()[recipe].read_text())
        assert valid(recipe_itself, schema, definitions), recipe
        broken = values | {"algorithm": values["algorithm"] | {"num_generations": 0}}
        assert not valid(broken, schema, definitions)

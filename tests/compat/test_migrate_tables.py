"""The tables of `rloo migrate` against our schema, and against the TRL that is installed."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from rloo_cli.compat import migrate
from rloo_cli.compat.migrate import model, scripts, versions
from rloo_cli.compat.migrate.recipe import (
    TABLE_SCHEMAS,
    schema_field,
    schema_refusal,
)
from rloo_cli.compat.migrate.table import RULES
from rloo_cli.config import registry
from rloo_cli.config.old_names import find_old_name
from rloo_cli.utils import paths

TOOLS = Path(migrate.__file__).parent
SECTION = "algorithm checkpoint data distributed eval generation logging model train"
KEY = re.compile(rf"({SECTION.replace(' ', '|')})(\.[a-z_]+)+")


def exists(key: str) -> bool:
    algorithms = ("rloo", "grpo", "reinforce_pp", "ppo")
    return any(schema_field(key, name) is not None for name in algorithms)


def keys_in_the_code() -> set[str]:
    """Every text in the files of migrate that looks like a key of ours."""
    found = set()
    for path in TOOLS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and KEY.fullmatch(str(node.value)):
                found.add(node.value)
    return found


def test_every_key_that_migrate_may_write_is_in_the_schema():
    found = keys_in_the_code()
    assert len(found) > 60
    chosen = {*TABLE_SCHEMAS, "eval.judge.model"}  # which a table's entry or a chosen judge has
    assert [key for key in sorted(found - chosen) if not exists(key)] == []


def test_keys_of_the_tables_are_in_the_schema():
    parts = {rule.key for rule in RULES.values() if rule.key}
    for defaults in model.ADAPTER_DEFAULTS.values():
        parts |= {f"model.lora.{key}" for key in defaults}
    for dialect in versions.DIALECTS.values():
        parts |= dialect.defaults.keys()
    parts |= {k for _, more in versions.SWIFT_ESTIMATORS.values() for k in more}
    for describe in scripts.BUILT_IN.values():
        parts |= describe("x.py").keys.keys()
    assert [key for key in sorted(parts) if not exists(key)] == []


def test_every_rule_is_of_a_name_that_the_table_of_names_has():
    assert [name for name in RULES if find_old_name(name) is None] == []


def test_choices_of_the_tables_are_shipped():
    groups = paths.group_choices([])
    assert {"default", "dora"} <= groups["lora"].keys()
    assert {"4bit", "8bit"} <= groups["quantization"].keys()
    wanted = {*versions.SWIFT_REWARDS.values(), *versions.TRL_REWARDS.values()}
    assert wanted <= set(registry.registry_names("rewards"))


@pytest.mark.parametrize("key", ["model.lora.r", "model.ref_sync.every", "data.mixture"])
def test_a_nested_key_is_found_and_a_misspelt_one_is_not(key):
    assert exists(key)
    assert schema_refusal(f"{key}x", 1) is not None


def of_the_installed_trl(kind: str) -> dict[str, ast.expr]:
    """Name -> default of a config's own fields, read and not imported."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("trl is not installed")
    path = Path(spec.submodule_search_locations[0]) / "trainer" / f"{kind}_config.py"
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            default = [k.value for k in node.value.keywords if k.arg == "default"]
            if isinstance(node.target, ast.Name) and default:
                found[node.target.id] = default[0]
    return found


NAMES = {
    "num_generations": "algorithm.num_generations",
    "beta": "algorithm.beta",
    "epsilon": "algorithm.epsilon",
    "num_iterations": "algorithm.num_iterations",
    "temperature": "generation.temperature",
    "max_completion_length": "generation.max_completion_length",
    "learning_rate": "train.learning_rate",
    "loss_type": "algorithm.loss_type",
    "scale_rewards": "algorithm.advantage_scale",
}


@pytest.mark.parametrize(("kind", "version"), [("rloo", "trl"), ("grpo", "grpo")])
def test_the_newest_defaults_are_those_of_the_trl_that_is_pinned(kind, version):
    theirs = of_the_installed_trl(kind)
    dialect = versions.DIALECTS[version]
    for name, key in NAMES.items():
        if name in theirs:
            assert dialect.defaults[key] == ast.literal_eval(theirs[name]), name
    assert dialect.vllm_mode == ast.literal_eval(theirs["vllm_mode"])
    if kind == "grpo":
        assert ast.literal_eval(theirs["vllm_importance_sampling_mode"]) == "sequence_mask"
        assert dialect.correction["level"] == "sequence"
        assert dialect.correction["mode"] == "mask"


def test_settings_that_tell_rloo_from_grpo_are_those_of_one_of_them():
    rloo, grpo = of_the_installed_trl("rloo").keys(), of_the_installed_trl("grpo").keys()
    assert not versions.ONLY_GRPO & rloo
    assert not versions.ONLY_RLOO & grpo
    assert {"loss_type", "scale_rewards"} <= versions.ONLY_GRPO & grpo
    assert {"normalize_advantages", "reward_clip_range"} <= versions.ONLY_RLOO & rloo

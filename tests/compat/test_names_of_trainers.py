"""Every setting of other trainers is converted, or answered with what to write or why not."""

import ast
import importlib.util
from pathlib import Path

import pytest
import yaml

from rloo_cli.compat.migrate.convert import convert_to_recipe
from rloo_cli.compat.migrate.read import OldRun
from rloo_cli.compat.migrate.recipe import Recipe, our_defaults, schema_refusal
from rloo_cli.config.old_names import find_old_name
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.wide

NAMES = yaml.safe_load((Path(__file__).parent / "names_of_trainers.yaml").read_text())
TRL_FILES = (
    "trl:trainer/base_config.py", "trl:trainer/rloo_config.py", "trl:trainer/grpo_config.py",
    "trl:trainer/model_config.py", "trl:scripts/utils.py", "trl:scripts/rloo.py",
    "trl:scripts/grpo.py", "transformers:training_args.py",
)  # fmt: skip
ANNOTATIONS = (("dict", {}), ("list", ["x"]), ("bool", True), ("int", 2), ("float", 0.5))
CONFIGS = ("Config", "Arguments")  # how classes of settings end
NOT_SETTINGS = {"path", "name", "data_dir", "data_files", "split", "id", "columns", "fraction"}
SAID_OTHERWISE = {"gradient_accumulation_steps": "W*GA"}


def installed(package: str, file: str) -> ast.Module:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text())


def settings_of_trl() -> dict[str, object]:
    """Name -> a value of its type, of every field of TRL's configs; read and not imported."""
    found: dict[str, object] = {}
    for spec in TRL_FILES:
        for node in ast.walk(installed(*spec.split(":"))):
            if isinstance(node, ast.ClassDef) and node.name.endswith(CONFIGS):
                fields = (n for n in node.body if isinstance(n, ast.AnnAssign))
                found |= {ast.unparse(f.target): example(f) for f in fields}
    return {k: v for k, v in found.items() if k not in NOT_SETTINGS and not k.startswith("_")}


def example(field: ast.AnnAssign) -> object:
    """The field's default, or another value of its type where that is null."""
    keywords = getattr(field.value, "keywords", ())
    default = next((k.value for k in keywords if k.arg == "default"), field.value)
    value = default.value if isinstance(default, ast.Constant) else None
    kinds = ast.unparse(field.annotation)
    return value if value else next((v for kind, v in ANNOTATIONS if kind in kinds), "x")


def answer(name: str, value: object, tool: str) -> str:
    """What `rloo migrate` makes of a command with this setting alone."""
    flags = {name: value} | ({"rlhf_type": "grpo"} if tool == "ms_swift" else {})
    try:
        return convert_to_recipe(OldRun(flags, tool=tool), tool, 1)
    except ConfigError as error:
        return str(error)


@pytest.mark.slow_cases("grpo")
@pytest.mark.parametrize("tool", ["trl", "grpo", "ms_swift"])
def test_no_setting_of_trl_or_ms_swift_is_lost(tool):
    settings = dict.fromkeys(NAMES.get(tool, "").split(), 1) or settings_of_trl()
    assert len(settings) > 200
    settings.pop("rlhf_type", None)
    lost = []
    for name, value in settings.items():
        text = answer(name, value, tool)
        after = text.partition("# unknown flags")[2]
        said = SAID_OTHERWISE.get(name, name) in text and name not in after
        if not said or find_old_name(name) is None:
            lost.append(name)
    assert not lost


@pytest.mark.slow_cases("ms_swift")
@pytest.mark.parametrize("tool", ["trl", "grpo", "ms_swift"])
def test_a_recipe_of_any_setting_has_keys_of_ours_alone(tool):
    settings = dict.fromkeys(NAMES.get(tool, "").split(), 1) or settings_of_trl()
    settings.pop("rlhf_type", None)
    algorithm = "rloo" if tool == "trl" else "grpo"
    for name, value in settings.items():
        text = answer(name, value, tool)
        assert "\n  override" not in text
        try:
            recipe = yaml.safe_load(text) if text.startswith("#") else {}
        except yaml.YAMLError:
            pytest.fail(f"{name}: the recipe is not YAML")
        for section, keys in (recipe or {}).items():
            if isinstance(keys, dict) and section not in ("reward", "defaults"):
                for key, written in keys.items():
                    refused = schema_refusal(f"{section}.{key}", written, algorithm)
                    assert refused is None or isinstance(written, dict), f"{name}: {key}: {refused}"


def test_a_setting_whose_answer_is_a_choice_is_not_written_as_a_key():
    recipe = Recipe({"device_map": "auto", "callbacks": "x"})
    recipe.apply_table()
    assert not recipe.unknown and not recipe.lines
    assert any("write distributed=zero3" in text for text in recipe.dropped)
    assert our_defaults()["distributed.engine"] == "single"

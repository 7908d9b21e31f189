"""The names of other trainers, and misspelt ones."""

import ast
import re
from pathlib import Path

import pytest

import rloo_cli
from rloo_cli.cli.config import every_key, schema_fields
from rloo_cli.compat.migrate.recipe import our_defaults
from rloo_cli.compat.migrate.versions import SWIFT_REWARDS, TRL_REWARDS
from rloo_cli.config import check, messages, old_names, registry

pytestmark = pytest.mark.wide

PACKAGE = Path(rloo_cli.__file__).parent
# A dotted key in a sentence: not a part of a path, an address, a file's name or a call.
DOTTED = re.compile(r"(?<![\w./])[a-z][a-z_0-9]*(?:\.[a-z][a-z_0-9]*)+(?![\w(/*]|\.\w)")

NO_KEYS = ("py", "json", "safetensors", "generate")  # train.py, transformers' model.generate


def _keys_in(text: str, known: dict[str, str]) -> list[str]:
    """What in a text looks like a key of a section."""
    dotted = DOTTED.findall(text)
    sections = {key.partition(".")[0] for key in known if "." in key} if dotted else set()
    found = [key for key in dotted if key.partition(".")[0] in sections]
    return [key for key in found if key.rpartition(".")[2] not in NO_KEYS]


def _is_named(key: str, known: dict[str, str]) -> bool:
    """Whether a key, with any name of the user's own in it, is one of these."""
    section, _, rest = key.partition(".")
    own = {f"reward.<name>.{rest.partition('.')[2]}", f"reward.<name>.{rest}"}
    return key in known or (section == "reward" and bool(own & set(known)))


def test_every_old_name_has_one_row():
    listed = [name for row in old_names.OLD_NAME_TABLE for name in row.names]
    assert len(listed) == len(set(listed)) > 200


@pytest.fixture(scope="module")
def known() -> dict[str, str]:
    """Every key that some choice of algorithm, backend, judge and rewards has; NAME is a user's."""
    found: dict[str, str] = {}
    words = [f"algorithm={name}" for name in registry.registry_names("algorithms")]
    words += [f"generation={name}" for name in registry.registry_names("generation")]
    for word in [*words, "judge=openai", "judge=reward_model", "judge=rule"]:
        found |= dict.fromkeys(schema_fields(every_key([word])[1]), "")
    for name in registry.registry_names("agents"):
        agent = messages.schema_keys(registry.config_class("agents", name))
        found |= {f"agent.{key}": "" for key in agent}
    for name in registry.registry_names("rewards"):
        keys = messages.schema_keys(registry.config_class("rewards", name))
        found |= {f"reward.<name>.{key}": "" for key in keys}
    return found | {"reward.<name>": ""}


def test_every_row_of_the_table_leads_to_a_key_of_today_or_says_that_there_is_none(known):
    assert {row.new_key for row in old_names.OLD_NAME_TABLE if row.new_key is not None} <= set(
        known
    )
    for row in old_names.OLD_NAME_TABLE:
        assert row.new_key or row.note, f"{row.names}: there is nothing for it, and no word on why"
        for key in _keys_in(f"{row.note} {row.fix}", known):
            assert _is_named(key, known), f"{row.names}: {key} is not a key"


def test_no_answer_to_an_old_name_is_that_name_or_a_key_that_the_run_has_not(known):
    plain = messages.schema_keys(check.run_config_class(every_key([])[0].values))
    for row in old_names.OLD_NAME_TABLE:
        section = (row.new_key or "train").rpartition(".")[0]
        for name in row.names:
            for key in {name, f"{section}.{name}".lstrip("."), f"train.{name}"} - set(plain):
                said = messages.unknown_key_problem(key, plain)
                assert key not in said.fix.replace(f"omit {key}", "").split(), said
                if row.new_key is None:
                    assert "rloo has no equivalent" in said.why
                    assert said.fix == f"omit {key}"
                elif row.new_key not in plain and "<" not in row.new_key:
                    assert "=" in said.fix, f"{said.fix}: which choice has {row.new_key}?"


def _is_module(name):
    """Whether it names a file of the package, as `processes.run` does."""
    return (PACKAGE / f"{name.replace('.', '/')}.py").is_file()


def test_every_key_that_the_package_names_in_a_message_is_a_key(known):
    unknown = []
    others = ("other_trainers.py", "versions.py")  # keys of other trainers
    for path in sorted(p for p in PACKAGE.rglob("*.py") if p.name not in others):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                keys = _keys_in(node.value, known)
                wrong = [k for k in keys if not _is_named(k, known) and not _is_module(k)]
                unknown += [f"{path.name}:{node.lineno}: {key}" for key in wrong]
    assert not unknown, "\n".join(unknown)


@pytest.mark.parametrize(
    ("key", "new"),
    [
        ("algorithm.rloo_k", "algorithm.num_generations"),
        ("kl_coef", "algorithm.beta"),
        ("algorithm.cliprange", "algorithm.epsilon"),
        ("num_ppo_epochs", "algorithm.num_iterations"),
        ("generation.response-length", "generation.max_completion_length"),
        ("reward_weights", "reward.<name>.weight"),
        ("train.per_device_train_batch_size", "train.prompts_per_step"),
    ],
)
def test_an_old_name_is_answered_with_todays(key, new):
    assert old_names.find_old_name(key).new_key == new


def test_a_name_of_nobodys_is_no_old_name():
    assert old_names.find_old_name("algorithm.frobnicate") is None


@pytest.mark.parametrize(
    ("key", "best"),
    [
        ("algorithm.num_generation", "algorithm.num_generations"),
        ("num_generation", "algorithm.num_generations"),
        ("betta", "algorithm.beta"),
        ("generation.temprature", "generation.temperature"),
        ("algoritm.beta", "algorithm.beta"),
        ("tldr_1B", "tldr_1b"),
        ("frobnicate", None),
        ("reward.exact_match.foo", None),  # not algorithm.correction.floor, of another section
    ],
)
def test_the_nearest_key_is_guessed(key, best):
    known = [*our_defaults(), "tldr_1b", "tldr_6_9b"]
    guesses = old_names.nearest_names(key, known)
    assert guesses[:1] == ([best] if best else [])
    assert len(guesses) <= 3


def test_rewards_of_the_tables_are_in_the_registry():
    wanted = {*SWIFT_REWARDS.values(), *TRL_REWARDS.values()}
    assert wanted <= set(registry.registry_names("rewards"))

"""What the tests of `rloo migrate` share: running it, and checking that its recipe composes."""

from pathlib import Path

import pytest
import yaml

from rloo_cli.cli.migrate import run
from rloo_cli.compat.migrate.recipe import our_defaults, schema_refusal
from rloo_cli.config import check as config_check
from rloo_cli.config.compose import compose_config


class Migrated:
    """What `rloo migrate` printed, and the recipe in it by dotted key."""

    def __init__(self, text: str):
        self.text = text
        self.recipe = yaml.safe_load(text) or {}
        self.groups = {k: v for d in self.recipe.pop("defaults", []) for k, v in d.items()}
        self.keys = dict(leaves(self.recipe))
        self.single = dict(leaves(self.recipe, inner=("generation.server", "generation.colocate")))
        self.algorithm = self.groups.get("override /algorithm", "rloo")

    def effective(self, key: str):
        """The value a run would have: the recipe's, else our default."""
        return self.keys.get(key, our_defaults(self.algorithm).get(key))


SECTIONS = ("reward", "model.lora", "model.quantization", "model.ref_sync")


def leaves(values: dict, prefix: str = "", inner: tuple[str, ...] = ()):
    """Dotted keys down to the depth of our schema: section.key, reward.<name>.key."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        deeper = not prefix or prefix == "reward." or key in (*SECTIONS, *inner)
        if isinstance(value, dict) and deeper:
            yield from leaves(value, f"{key}.", inner)
        else:
            yield key, value


@pytest.fixture
def migrate(capsys, tmp_path, monkeypatch):
    """Run `rloo migrate` on words, in an empty folder; its answer, every key of it checked."""
    monkeypatch.chdir(tmp_path)

    def call(*words: str, composes: bool = True) -> Migrated:
        assert run(list(words)) == 0
        text = capsys.readouterr().out
        found = Migrated(text)
        for key, value in found.single.items():
            assert schema_refusal(key, value, found.algorithm) is None, key
        if composes:
            check(text, found, tmp_path)
        return found

    return call


def check(text: str, found: Migrated, folder: Path) -> None:
    """The printed recipe passes the check that `rloo train` makes."""
    checked(text, folder)


def checked(text: str, folder: Path):
    """The run of a printed recipe, with what only its user can say put in, and its text."""
    found = Migrated(text)
    (folder / "my.yaml").write_text(text)
    words = ["+recipe=my.yaml"]
    words += [] if "model.path" in found.keys else ["model.path=org/model"]
    if "data.path" not in found.keys:
        words.append("data.path=org/stand-in")
        text += "\n# path: org/stand-in"
    if "reward" not in found.recipe and "override /reward" not in found.groups:
        words.append("+reward.stand_in={type: length_tokens}")
    for entry in found.recipe.get("reward", {}).values():
        where, _, name = str(entry.get("path", "")).rpartition(":")
        if entry.get("type") == "function" and where.endswith(".py"):
            Path(where).parent.mkdir(parents=True, exist_ok=True)
            with Path(where).open("a") as file:  # a reward is its user's
                file.write(f"\ndef {name}(completions, **kwargs): ...\n")
    return config_check.check_config(compose_config(words)), text


def flags(text: str) -> list[str]:
    """The words of a command given in one line."""
    return text.split()

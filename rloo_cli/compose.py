"""Command-line words and YAML groups -> one plain dictionary, by Hydra.

Hydra's own grammar, groups, sweeps and interpolation hold. What differs is answered here, before
it: plain `key=value` words reach Hydra as `++key=value`, so that our check (and not Hydra's
advice to add a +) answers an unknown key; recipes are a group that may also be a file's path.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from rloo_cli import paths
from rloo_cli.errors import ConfigError, Problem
from rloo_cli.names import nearest
from rloo_cli.sources import COMMAND_LINE, Sources, broken, readable

APPENDED = ("recipe", "debug")  # groups that conf/config.yaml does not name
OURS = re.compile(r"hydra\.(output_subdir|(run|sweep)(\.\w+)?)")  # where Hydra would write
SECRET_KEY = re.compile(r"(^|[._])(api_?key|password|passwd|secret|(hf|auth|access|wandb)_token)$")
SECRET_VALUE = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_\w{20,})")


@dataclass(frozen=True)
class Composed:
    """A composed config, not yet checked: plain values, and where each came from."""

    values: dict[str, Any]
    sources: Sources
    recipe: str | None = None
    words: tuple[str, ...] = ()  # that compose it again, as a person writes them


def rewrite(words: Iterable[str], config_dirs: Sequence[Path] = ()) -> list[str]:
    """Overrides as people write them -> as Hydra takes them, recipe first and debug last.

    Raises ConfigError for a word that is no override, an unknown choice of a group, a secret, and
    a recipe file that cannot be read; all of them at once.
    """
    groups = paths.group_choices(list(config_dirs))
    problems: list[Problem] = []
    done: list[tuple[int, str]] = []
    for word in words:
        try:
            done.append(_rewrite_one(word, groups))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return [word for _, word in sorted(done, key=lambda pair: pair[0])]


def _rewrite_one(word: str, groups: dict[str, dict[str, Path]]) -> tuple[int, str]:
    name, equals, value = word.partition("=")
    bare = name.lstrip("+~")
    where = f"{COMMAND_LINE}: {word}"
    _refuse_secrets(name.lstrip("+~-"), word)
    if name.startswith("--"):
        fix = word.lstrip("-") if equals else f"{word.lstrip('-')}=VALUE"
        raise ConfigError(
            Problem(f"{name} is not a flag of rloo", where, "keys are set without dashes", fix)
        )
    if name.startswith("~"):
        return 1, word
    if not equals:
        raise ConfigError(Problem(f"{word!r} is not key=value", where, fix=f"{word}=VALUE"))
    if OURS.fullmatch(bare):
        why = "a run is written to root/name, and Hydra writes nothing"
        raise ConfigError(Problem(f"{bare} is not a key of rloo", where, why, "root=FOLDER"))
    if bare.startswith("hydra/"):
        return 1, f"{bare}={value}"
    if bare not in groups:
        return 1, f"++{bare}={value}"
    if bare == "recipe":
        return 0, f"+recipe={','.join(_recipe(v, groups, where) for v in value.split(','))}"
    value = "[]" if value in ("", "null") else value
    for choice in [] if "$" in value else re.split(r"[,\[\]\s]+", value):
        if choice and choice not in groups[bare]:
            raise ConfigError(_unknown_choice(bare, choice, groups[bare], where))
    order = 2 if bare == "debug" else 1
    return order, f"{'+' if bare in APPENDED else ''}{bare}={value}"


def _recipe(choice: str, groups: dict[str, dict[str, Path]], where: str) -> str:
    """A recipe's name or file -> its name in the group `recipe`."""
    if choice.endswith((".yaml", ".yml")):
        return register_file(Path(choice), where, groups)
    if choice not in groups["recipe"]:
        raise ConfigError(_unknown_choice("recipe", choice, groups["recipe"], where))
    path = groups["recipe"][choice]
    return choice if paths.RECIPES in path.parents else register_file(path, where, groups)


def _unknown_choice(group: str, choice: str, known: Iterable[str], where: str) -> Problem:
    close = nearest(choice, known)
    return Problem(
        f"{group}={choice}: there is no {group} {choice!r}",
        where,
        f"{group} is one of: {', '.join(sorted(known))}",
        f"{'+' if group in APPENDED else ''}{group}={close[0]}" if close else "",
        more="rloo recipes" if group == "recipe" else "rloo config",
    )


def _refuse_secrets(key: str, word: str) -> None:
    if SECRET_KEY.search(key.lower().replace("-", "_")) or SECRET_VALUE.search(word):
        variable = "HF_TOKEN" if "hf" in word.lower() else "the tool's own variable"
        key = "a word" if SECRET_VALUE.search(key) else key
        raise ConfigError(
            Problem(
                f"{key}: this looks like a secret",
                COMMAND_LINE,
                "no key takes one: what a config holds is written to disk",
                f"export {variable} (or use the tool's login file), and leave {key} out",
            )
        )


def register_recipes(config_dirs: Sequence[Path] = ()) -> None:
    """Let `+recipe=a/b` mean recipes/a/b.yaml, though recipes/ is not a folder of conf/.

    Raises ConfigError for a file of these folders that is not YAML: Hydra would not say which.
    """
    for folder in config_dirs:
        for path in sorted(folder.rglob("*.yaml")):
            readable(path)
    for name, path in paths.group_choices(list(config_dirs))["recipe"].items():
        _store(name, path)


def register_file(path: Path, where: str, groups: dict[str, dict[str, Path]]) -> str:
    """Make a user's own recipe file a choice of the group `recipe`; returns its name there.

    Raises ConfigError when it is not there, not YAML, or chooses what no group has.
    """
    if not path.is_file():
        known = ", ".join(paths.recipe_files())
        raise ConfigError(
            Problem(
                f"recipe file {path} does not exist",
                where,
                f"looked at {path.absolute()}",
                f"+recipe=NAME, with NAME one of: {known}",
            )
        )
    problems = [*_chosen(path, groups)]
    if problems:
        raise ConfigError(*problems)
    name = re.sub(r"\W", "_", str(path.resolve().with_suffix("")))
    _store(name, path)
    _FILES[name] = path
    return name


_FILES: dict[str, Path] = {}  # store name of a user's own recipe file -> its path


def _chosen(path: Path, groups: dict[str, dict[str, Path]]) -> Iterator[Problem]:
    """Choices in a recipe's list of defaults that are not there."""
    root = readable(path)
    for key, entries in root.value if isinstance(root, yaml.MappingNode) else []:
        for entry in entries.value if key.value == "defaults" else []:
            for name, choice in entry.value if isinstance(entry, yaml.MappingNode) else []:
                group = name.value.rpartition("/")[2].partition("@")[0]
                known, where = groups.get(group), f"{path}:{name.start_mark.line + 1}"
                if known is None and "/" in name.value and "hydra/" not in name.value:
                    close = [f"override /{g}: {choice.value}" for g in nearest(group, groups)]
                    known_groups = f"groups: {', '.join(groups)}"
                    yield Problem(f"there is no group {group!r}", where, known_groups, *close[:1])
                listed = isinstance(choice, yaml.SequenceNode)
                for one in choice.value if listed else [choice]:
                    if known is not None and one.value not in ("", "null", "~", *known):
                        yield _unknown_choice(group, one.value, known, where)


def _store(name: str, path: Path) -> None:
    readable(path)
    try:
        node = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(broken(path, error)) from None
    if not isinstance(node, DictConfig):
        raise ConfigError(Problem(f"{path.name} is not a mapping of keys", str(path)))
    group = "/".join(["recipe", *name.split("/")[:-1]])
    ConfigStore.instance().store(
        group=group, name=name.split("/")[-1], node=node, package="_global_", provider=str(path)
    )


def compose(overrides: Iterable[str] = (), config_dirs: Sequence[str | Path] = ()) -> Composed:
    """Compose a config as `rloo train` does. Raises ConfigError."""
    dirs = [Path(d) for d in config_dirs]
    register_recipes(dirs)
    words = rewrite(overrides, dirs)
    path = [f"hydra.searchpath=[{','.join(f'file://{d.resolve()}' for d in dirs)}]"] if dirs else []
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(paths.CONF), version_base="1.3"):
            cfg = hydra_compose("config", overrides=[*words, *path], return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(from_hydra(error, words)) from None
    return gather(cfg, cfg.hydra, dirs)


def from_hydra(error: Exception, words: Sequence[str] = ()) -> Problem:
    """Hydra's or OmegaConf's refusal of these words, as one of ours."""
    text = str(error).replace("'++", "'")
    lines = [line.strip() for line in text.splitlines() if line.strip() and "hydra.cc" not in line]
    key = getattr(error, "full_key", None)
    what = f"{key}: {lines[0]}" if key and key not in lines[0] else lines[0]
    names = {word: word.lstrip("+~").partition("=")[0] for word in words}
    named = [word for word, name in names.items() if f"'{name}" in text or name == key]
    word = getattr(error, "override", None) or next(iter(named), None)
    where = f"{COMMAND_LINE}: {word.lstrip('+')}" if word else ""
    return Problem(f"the config does not compose: {what}", where, "\n".join(lines[1:6]))


def gather(cfg: DictConfig, hydra: DictConfig, config_dirs: Sequence[Path] = ()) -> Composed:
    """A config that Hydra composed -> plain values, and where they came from.

    Raises ConfigError for an interpolation to something that is not there.
    """
    choices = {str(k): v for k, v in hydra.runtime.choices.items()}
    # Unresolved: a word may hold an interpolation, which is the config's to resolve, not ours.
    raw: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    overrides = [str(word) for word in raw]
    groups = paths.group_choices(list(config_dirs))
    groups["recipe"] |= _FILES
    files: list[tuple[Path, str]] = []
    for group in ("debug", "recipe", *[g for g in choices if g not in APPENDED]):
        path = groups.get(group, {}).get(str(choices.get(group)))
        if path:
            files.append((path, "" if group in APPENDED else group.partition("/")[0]))
    files += [(path, "reward") for path in groups["reward"].values()]
    files += [(groups[g]["default"], g) for g in ("model", "data")]
    files.append((paths.CONF / "config.yaml", ""))
    sources = Sources(overrides, files)
    with open_dict(cfg):
        cfg.pop("hydra", None)
    try:
        values = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        key = str(getattr(error, "full_key", "") or "")
        raise ConfigError(
            Problem(f"{key}: cannot be resolved", sources.where(key), str(error).splitlines()[0])
        ) from None
    assert isinstance(values, dict)
    recipe = choices.get("recipe")
    label = _FILES[recipe].stem if recipe in _FILES else recipe
    words = (*[f"--config-dir={d}" for d in config_dirs], *[_plain(w) for w in overrides])
    return Composed({str(k): v for k, v in values.items()}, sources, label, words)


def _plain(word: str) -> str:
    """A word as Hydra got it -> as a person writes it."""
    name, _, value = word.partition("=")
    if name == "+recipe" and value in _FILES:
        return f"+recipe={_FILES[value]}"
    return word.removeprefix("++")

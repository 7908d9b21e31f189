"""Composes overrides and YAML groups into one plain dictionary, by Hydra.

Hydra's own grammar, groups, sweeps and interpolation apply. Two differences are handled here before
Hydra: a plain override `key=value` becomes `++key=value`, so that our check (and not Hydra's advice
to add a +) reports an unknown key; and a recipe can be a file path.
"""

import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import cast

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict
from omegaconf.errors import OmegaConfBaseException

from rloo_cli.config import mistakes, pasted
from rloo_cli.config.accelerate_file import apply_accelerate_file
from rloo_cli.config.escapes import decode_escapes
from rloo_cli.config.messages import walk_values
from rloo_cli.config.old_names import nearest_names
from rloo_cli.config.provenance import COMMAND_LINE, ConfigSources
from rloo_cli.config.user_files import (
    APPENDED_GROUPS,
    STORED_FILE_STATES,
    USER_RECIPE_FILES,
    register_config_dirs,
    register_recipe_file,
    unknown_choice_problem,
)
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError, Problem, refuse
from rloo_cli.utils.files import JsonObject

GROUP_OF_KEY = {"algorithm.dialect": "algorithm/dialect"}


def check_group_choices(
    values: Mapping[str, object], choices: Mapping[str, object], sources: ConfigSources
) -> None:
    """Raises ConfigError for a recipe that sets a group's name as a plain key.

    `choices`: group -> the choice that Hydra composed.
    """
    for key, group in GROUP_OF_KEY.items():
        section, _, leaf = key.partition(".")
        inside = values.get(section)
        value = inside.get(leaf) if isinstance(inside, dict) else None
        if value is not None and value != choices.get(group):
            why = f"{key} names a file of keys, which would not be loaded"
            fix = f"defaults: [override /{group}: {value}] at the recipe's head"
            what, where = f"{key} is set as a plain key", sources.location_of(key)
            refuse(where, what, fix, why)


def base_files(choices: dict[str, Path], choice: str) -> list[Path]:
    """The base files of `choice` (its `defaults`), nearest first.

    `choices`: choice of the group -> its file.
    """
    files: list[Path] = []
    while choice in choices and choices[choice] not in files:
        files.append(choices[choice])
        choice = _first_base(choices[choice], _file_state(choices[choice]))
    return files[1:]


@lru_cache(maxsize=256)
def _first_base(path: Path, state: tuple[int, int, int]) -> str:
    """The first choice in the `defaults` of a group's file, or ""; `state` is the cache's key."""
    content = yaml.safe_load(path.read_text()) or {}
    bases = [d for d in content.get("defaults", []) if isinstance(d, str)]
    return next((d for d in bases if d != "_self_"), "")


# Hydra's keys for users: how a sweep is split into jobs, and where they run.
HYDRA_SWEEP_KEYS = re.compile(
    r"hydra(/(launcher|sweeper)|\.(launcher|sweeper)\.(?!params\b)[\w.]+)"
)
# What Hydra raises for overrides and files that do not compose, including built-in exceptions.
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, ValueError, TypeError, RecursionError)


@dataclass(frozen=True)
class ComposedConfig:
    """A composed config, not yet checked: plain values, and where each came from."""

    values: JsonObject
    sources: ConfigSources
    recipe: str | None = None
    user_overrides: tuple[str, ...] = ()  # as typed; they recompose it
    swept_keys: tuple[str, ...] = ()  # keys swept by the recipe and the overrides
    changed_keys: tuple[str, ...] = ()  # keys that overrides or the recipe change


def rewrite_overrides(overrides: Iterable[str], config_dirs: Sequence[Path] = ()) -> list[str]:
    """Overrides as typed -> as Hydra expects them, recipe first and debug last.

    Raises ConfigError for an argument that is not an override, an unknown choice of a group, a
    secret, and an unreadable recipe file; all at once.
    """
    groups = paths.group_choices(list(config_dirs))
    problems: list[Problem] = []
    ranked: list[tuple[int, str]] = []
    overrides = list(overrides)
    for override in overrides:
        try:
            ranked.append(_rewrite_override(override, groups))
        except ConfigError as error:
            problems += error.problems
    problems += _unknown_plugin_keys_problems(overrides)
    recipes = [override for rank, override in ranked if rank == 0]
    if len(recipes) > 1:
        what, why = (
            f"{len(recipes)} recipes are given",
            "a run takes one recipe; a recipe can extend another",
        )
        where = f"{COMMAND_LINE}: {' '.join(map(_as_typed, recipes))}"
        fix = "defaults: [NAME] at the head of your recipe, or -m +recipe=a,b for one run each"
        problems.append(Problem(what, where, why, fix))
    if problems:
        raise ConfigError(*problems)
    overrides = [override for _, override in sorted(ranked, key=lambda pair: pair[0])]
    small = any(override.startswith("+debug=") for override in overrides)
    if small and not any(override.startswith("generation=") for override in overrides):
        overrides.insert(0, "generation=transformers")  # it needs nothing, whatever the recipe uses
    return overrides


def _unknown_plugin_keys_problems(overrides: Sequence[str]) -> Iterator[Problem]:
    """Keys of `hydra.sweeper` and `hydra.launcher` that the chosen plugin lacks. Hydra accepts them
    and fails when it starts the jobs, or never."""
    for override in overrides:
        bare = override.partition("=")[0].lstrip("+")
        if not HYDRA_SWEEP_KEYS.fullmatch(bare) or "/" in bare:
            continue
        _, part, name, *_ = bare.split(".")
        chosen = [w.partition("=")[2] for w in overrides if w.startswith(f"hydra/{part}=")]
        choice = (chosen or ["basic"])[-1]
        Plugins.instance()  # importing a plugin declares its keys
        try:
            declared = ConfigStore.instance().load(f"hydra/{part}/{choice}.yaml").node
        except HydraException:
            continue  # Hydra reports a missing plugin; a YAML plugin declares no keys
        keys = [str(key) for key in declared if key != "_target_"]
        if name not in keys:
            key, close = f"hydra.{part}.{name}", nearest_names(name, keys)
            meant = " or ".join(f"hydra.{part}.{near}" for near in close)
            why = f"hydra/{part}={choice} has {', '.join(keys) if keys else 'no keys'}"
            fix = f"did you mean {meant}?" if close else f"omit {key}"
            yield Problem(f"{key} is not a key", f"{COMMAND_LINE}: {override}", why, fix)


def _rewrite_override(override: str, groups: dict[str, dict[str, Path]]) -> tuple[int, str]:
    """An override -> its rank in the order, and Hydra's form."""
    name, equals, value = override.partition("=")
    bare = name.lstrip("+~")
    where = f"{COMMAND_LINE}: {override}"
    mistakes.refuse_secrets(bare, override)
    if (bare == "hydra" or bare.startswith(("hydra.", "hydra/"))) and (
        not HYDRA_SWEEP_KEYS.fullmatch(bare) or name.startswith("~") or "_target_" in override
    ):
        why = "a run writes to root/name; only Hydra's sweep keys can be set"
        fix = "root=FOLDER, or hydra/launcher=NAME, hydra.launcher.KEY=VALUE"
        if bare.startswith("hydra.sweeper.params"):
            why = "sweep keys belong in a recipe; on the command line, give several values"
            fix = "--multirun KEY=A,B"
        refuse(where, f"{bare} is not a key of rloo", fix, why)
    if name.startswith("~") and bare:
        return 1, override
    if not equals or not bare or "@" in bare:
        fix, why = "key=VALUE", "key names cannot contain @"
        if not equals:
            why = "the equals sign is missing"
        elif not bare:
            why = "the key before the equals sign is missing"
        if bare and not equals:
            fix = mistakes.suggest_for_bare_argument(override, groups["recipe"])
        refuse(where, f"{override!r} is not key=value", fix, why)
    if bare.startswith("hydra/"):
        return 1, f"{bare}={value}"
    bare = GROUP_OF_KEY.get(bare, bare)
    if bare not in groups:
        return 1, f"++{bare}={decode_escapes(value, where)}"
    return _rewrite_choice(bare, value, groups, where)


def _rewrite_choice(
    group: str, value: str, groups: dict[str, dict[str, Path]], where: str
) -> tuple[int, str]:
    """`group=choice` -> its rank in the order, and Hydra's form."""
    if value.startswith("{"):
        why, fix = f"{group} needs the name of a choice", f"{group}.KEY=VALUE for one of its keys"
        refuse(where, f"{group}={value} is not a choice", fix, why)
    if group == "recipe":
        return 0, f"+recipe={','.join(_recipe_choice(v, groups, where) for v in value.split(','))}"
    if value == "" or (value == "null" and group not in ("algorithm", "generation")):
        value = "[]"
    for choice in [] if "$" in value else re.split(r"[,\[\]\s]+", value):
        if choice and choice not in groups[group]:
            raise ConfigError(unknown_choice_problem(group, choice, groups[group], where, value))
    rank = 2 if group == "debug" else 1
    return rank, f"{'+' if group in APPENDED_GROUPS else ''}{group}={value}"


def _recipe_choice(choice: str, groups: dict[str, dict[str, Path]], where: str) -> str:
    """A recipe's name or file -> its name in the group `recipe`."""
    if choice.endswith((".yaml", ".yml")):
        return register_recipe_file(Path(choice).expanduser(), where, groups)
    if choice not in groups["recipe"]:
        raise ConfigError(unknown_choice_problem("recipe", choice, groups["recipe"], where))
    path = groups["recipe"][choice]
    return choice if paths.RECIPES in path.parents else register_recipe_file(path, where, groups)


def search_path_override(config_dirs: Sequence[Path]) -> list[str]:
    """The override that adds the user's folders to Hydra's search path."""
    escaped = [str(d.resolve()).replace("\\", "\\\\").replace("'", "\\'") for d in config_dirs]
    folders = ",".join(f"'file://{d}'" for d in escaped)
    return [f"hydra.searchpath=[{folders}]"] if escaped else []


def split_config_dirs(arguments: Iterable[str]) -> tuple[list[str], list[Path]]:
    """The arguments without each `--config-dir DIR`, and the folders that these name."""
    rest: list[str] = []
    folders: list[Path] = []
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name in ("--config-dir", "-cd"):
            folders.append(Path(value if equals else next(remaining, "")))
        else:
            rest.append(argument)
    return rest, folders


def read_arguments(
    arguments: Iterable[str], config_dirs: Sequence[str | Path] = ()
) -> tuple[list[str], list[Path]]:
    """The overrides as Hydra expects them, and the folders of groups, `config_dirs` first.

    `arguments` may have `--config-dir DIR` among them, any number of times. Raises ConfigError.
    """
    overrides, named = split_config_dirs(arguments)
    dirs = [*map(Path, config_dirs), *named]
    register_config_dirs(dirs)
    return rewrite_overrides(overrides, dirs), dirs


def compose_config(
    overrides: Iterable[str] = (), config_dirs: Sequence[str | Path] = ()
) -> ComposedConfig:
    """Compose a config as `rloo train` does, from `read_arguments`. Raises ConfigError."""
    rewritten, dirs = read_arguments(overrides, config_dirs)
    cfg = compose_by_hydra(rewritten, dirs)
    return read_hydra_config(cfg, cfg.hydra, dirs)


def config_text(arguments: Iterable[str], kind: str, package: str | None, resolve: bool) -> str:
    """What `--cfg job|hydra|all` prints: YAML, as `hydra.main` prints it. Raises ConfigError.

    `package`: only this section.
    """
    rewritten, dirs = read_arguments(arguments)
    cfg = compose_by_hydra(rewritten, dirs)
    HydraConfig.instance().set_config(cfg)
    OmegaConf.set_readonly(cfg.hydra, None)
    with flag_override(cfg, ["readonly", "struct"], False):
        for key in [k for k in cfg if (k == "hydra") != (kind == "hydra") and kind != "all"]:
            cfg.pop(key)
        for key in ("help", "hydra_help") if kind == "hydra" else ():
            cfg.hydra.pop(key)
    try:
        part = cfg if package is None else OmegaConf.select(cfg, package)
        if part is None:
            fix = f"--package {pasted.guess_name(str(package), [str(key) for key in cfg])}"
            what, why = f"section {package!r} not found", "the composed config lacks it"
            refuse("--package", what, fix, why)
        if not OmegaConf.is_config(part):
            return str(part)
        head = "" if package is None else f"# @package {package}\n"
        return (head + OmegaConf.to_yaml(part, resolve=resolve)).rstrip("\n")
    except COMPOSE_ERRORS as error:
        raise ConfigError(hydra_problem(error, rewritten)) from None


def compose_by_hydra(rewritten: Sequence[str], config_dirs: Sequence[Path] = ()) -> DictConfig:
    """Hydra's config for overrides of `rewrite_overrides`, including its section `hydra`.

    Hydra merges the same group choices once per process (0.3 s), as long as no file changes;
    `++key=value` is then set as Hydra would. Raises ConfigError.
    """
    try:
        parsed = OverridesParser.create().parse_overrides([*rewritten])
        settings = [] if any(o.is_delete() for o in parsed) else [*filter(_is_setting, parsed)]
        choices = [str(o.input_line) for o in parsed if o not in settings]
        states = (*_group_file_states(config_dirs), *_recipe_file_states(choices))
        words = (*choices, *search_path_override(config_dirs))
        cfg: DictConfig = pickle.loads(_compose_choices(words, states))
        for override in settings:
            key, value = override.key_or_group, override.value()
            OmegaConf.update(cfg, key, value, merge=True, force_add=True)
        if settings:
            cfg.hydra.overrides.task = [
                w for w in rewritten if not w.lstrip("+").startswith("hydra")
            ]
        return cfg
    except COMPOSE_ERRORS as error:
        raise ConfigError(hydra_problem(error, rewritten)) from None


def _is_setting(override: Override) -> bool:
    """Whether it sets a single value of one of our keys: `++key=value`."""
    elsewhere = override.is_hydra_override() or override.package is not None
    return override.is_force_add() and not override.is_sweep_override() and not elsewhere


def _group_file_states(config_dirs: Sequence[Path]) -> Iterator[tuple[object, ...]]:
    """Path, inode, time and size of every file that a group choice can name."""
    yield str(paths.CONF / "config.yaml"), *_file_state(paths.CONF / "config.yaml")
    for choices in paths.group_choices(list(config_dirs)).values():
        for path in choices.values():
            yield str(path), *_file_state(path)


def _recipe_file_states(choices: Sequence[str]) -> Iterator[object]:
    """The states of the chosen user recipe files, as stored."""
    for name in USER_RECIPE_FILES:
        if any(name in choice for choice in choices):
            yield STORED_FILE_STATES.get(name)


def _file_state(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


@lru_cache(maxsize=64)
def _compose_choices(words: tuple[str, ...], states: tuple[object, ...]) -> bytes:
    """Hydra's config of these overrides; `states` of its files are part of the cache key.

    Pickled: each caller changes its own copy, and `copy.deepcopy` is far slower.
    """
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(paths.CONF), version_base="1.3"):
        cfg = hydra_compose("config", overrides=[*words], return_hydra_config=True)
    return pickle.dumps(cfg)


def hydra_problem(error: Exception, overrides: Sequence[str] = ()) -> Problem:
    """Hydra's or OmegaConf's error about these overrides, as a Problem."""
    text = str(error).replace("'++", "'")
    key = getattr(error, "full_key", None)
    names = {override: override.lstrip("+~").partition("=")[0] for override in overrides}
    named = [override for override, name in names.items() if f"'{name}" in text or name == key]
    override = getattr(error, "override", None) or next(iter(named), None)
    override = _as_typed(override) if override else ""
    where = f"{COMMAND_LINE}: {override}" if override else ""
    if isinstance(error, RecursionError):
        why = "lists of defaults include each other, or a value is nested too deeply"
        fix = "remove the cycle from defaults, or nest values less deeply"
        return Problem("the config does not compose: infinite recursion", where, why, fix)
    if re.search("LexerNoViableAlt|^mismatched input|^extraneous input", text):
        name, _, value = override.partition("=")
        why = "a key has letters, digits, _ and dots; quote a value with other characters"
        is_key = re.fullmatch(r"[\w.]+", name, re.ASCII)
        fix = pasted.paste_setting(name, value) if is_key else "write key=value in plain letters"
        return Problem(f"{override!r} cannot be read", where, why, fix)
    for name, path in USER_RECIPE_FILES.items():
        text = text.replace(f"recipe/{name}", str(path)).replace(name, str(path))
    lines = [line.strip() for line in text.splitlines() if line.strip() and "hydra.cc" not in line]
    lines = lines or [type(error).__name__]
    what = f"{key}: {lines[0]}" if key and key not in lines[0] else lines[0]
    values = [override.partition("=")[2] for override in overrides]
    recipes = [str(USER_RECIPE_FILES[value]) for value in values if value in USER_RECIPE_FILES]
    where = where or next(iter(recipes), "")
    name = override if len(override) < 60 else override.partition("=")[0][:60]
    fix = f"correct {name}, or omit it" if name else f"correct {where or 'the overrides'}"
    why = "\n".join(lines[1:6]) or "Hydra gives no reason"
    return Problem(f"the config does not compose: {what}"[:400], where, why, fix)


def read_hydra_config(
    cfg: DictConfig, hydra: DictConfig, config_dirs: Sequence[Path] = ()
) -> ComposedConfig:
    """A config that Hydra composed -> plain values, and their origins.

    `hydra`: its section of that name. Raises ConfigError for an interpolation of an unknown key.
    """
    choices = {str(k): v for k, v in hydra.runtime.choices.items()}
    # Unresolved: an override may hold an interpolation, resolved in the config below.
    raw = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    overrides = [str(override) for override in raw or ()]
    groups = paths.group_choices(list(config_dirs))
    groups["recipe"] |= USER_RECIPE_FILES
    files: list[tuple[Path, str]] = []
    first = ("debug", "recipe", *GROUP_OF_KEY.values())
    for group in (*first, *[g for g in choices if g not in first]):
        path = groups.get(group, {}).get(str(choices.get(group)))
        if path:
            mount = "eval.judge" if group == "judge" else group.partition("/")[0]
            files.append((path, "" if group in first else mount))
    chosen = str(choices.get("algorithm"))
    files += [(path, "algorithm") for path in base_files(groups["algorithm"], chosen)]
    files += [(path, "reward") for path in groups["reward"].values()]
    files += [(groups[g]["default"], g) for g in ("model", "data")]
    files.append((paths.CONF / "config.yaml", ""))
    sources = ConfigSources(overrides, files)
    with open_dict(cfg):
        cfg.pop("hydra", None)
    try:
        values = OmegaConf.to_container(cfg, resolve=True)
    except COMPOSE_ERRORS as error:
        key = str(getattr(error, "full_key", "") or "")
        raise ConfigError(_unresolved(error, key, cfg, sources)) from None
    assert isinstance(values, dict)
    plain = {str(k): v for k, v in values.items()}
    check_group_choices(plain, choices, sources)
    plain = apply_accelerate_file(plain, overrides)
    recipe = choices.get("recipe")
    label = USER_RECIPE_FILES[recipe].stem if recipe in USER_RECIPE_FILES else recipe
    typed = (*[f"--config-dir={d}" for d in config_dirs], *[_as_typed(w) for w in overrides])
    swept = [str(key).lstrip("+") for key in hydra.sweeper.get("params") or ()]
    written = sources.keys_set_by_user(groups["recipe"].get(str(recipe)))
    return ComposedConfig(plain, sources, label, typed, tuple(swept), changed_keys=tuple(written))


def _as_typed(override: str) -> str:
    """An override as passed to Hydra -> as typed."""
    name, _, value = override.partition("=")
    if name == "+recipe" and value in USER_RECIPE_FILES:
        return f"+recipe={USER_RECIPE_FILES[value]}"
    return override.removeprefix("++")


def _unresolved(error: Exception, key: str, cfg: DictConfig, sources: ConfigSources) -> Problem:
    """The problem of an interpolation that cannot be resolved, with the chain leading to it."""
    values = dict(walk_values(cast(JsonObject, OmegaConf.to_container(cfg, resolve=False))))
    message = (str(error).splitlines() or [type(error).__name__])[0]
    variable = re.search(r"Environment variable '(\w+)' not found", message)
    fix = f"export {variable[1]}=..." if variable else ""
    chain: dict[str, str] = {}
    name = key
    while name in values and name not in chain:
        chain[name] = f"{name} = {values[name]}"
        referenced = re.findall(r"\$\{\s*([\w.]+)\s*\}", str(values[name]))
        unknown = [n for n in referenced if n not in values]
        if unknown and (close := nearest_names(unknown[0], values)):
            fix = f"did you mean ${{{close[0]}}}?"
        onward = [n for n in referenced if "$" in str(values.get(n, ""))]
        name = onward[0] if onward and not unknown else ""
    fix = fix or f"set a plain value for one of these keys: {', '.join(chain) or key}"
    why = "\n".join([*chain.values(), message])
    return Problem(f"{key}: cannot be resolved", sources.location_of(key), why, fix)

"""The user's recipes and groups: reads and checks these YAML files and registers them with Hydra.

Such a file is data: it can choose among our groups and set keys, and nothing else. Anything that
would make Hydra write, import or run something (its section `hydra`) is refused before Hydra.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rloo_cli.config import mistakes
from rloo_cli.config.old_names import nearest_names
from rloo_cli.config.provenance import broken_yaml_problem, read_user_yaml
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError, Problem, refuse

APPENDED_GROUPS = ("recipe", "debug")  # groups that conf/config.yaml does not name
USER_RECIPE_FILES: dict[str, Path] = {}  # store name of a user's own recipe file -> its path
STORED_FILE_STATES: dict[str, tuple[Path, int, int]] = {}  # store name -> path, time and size then
Groups = dict[str, dict[str, Path]]  # config group -> choice -> file
HYDRA_REASON = "rloo configures Hydra itself; your file can only set keys of rloo"


def register_config_dirs(config_dirs: Sequence[Path] = ()) -> None:
    """Let `+recipe=a/b` mean recipes/a/b.yaml, although recipes/ is not in conf/.

    Raises ConfigError for a user folder that is not a folder, and for every file in it
    that is unusable: not YAML, reaching into Hydra, or with the name of a shipped choice.
    """
    shipped = paths.group_choices([])
    problems: list[Problem] = []
    for folder in config_dirs:
        if not folder.is_dir():
            what, why = f"--config-dir {folder} is not a folder", f"looked at {folder.absolute()}"
            fix = "--config-dir FOLDER, with an existing folder"
            refuse("command line", what, fix, why)
        for path in sorted(folder.rglob("*.yaml")):
            try:
                problems += _forbidden_content(path, read_user_yaml(path))
                problems += _shadowing_problems(path.relative_to(folder), path, shipped)
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(*problems)
    for name, path in paths.group_choices(list(config_dirs))["recipe"].items():
        _store(name, path)


def register_recipe_file(path: Path, where: str, groups: Groups) -> str:
    """Make a user's recipe file a choice of the group `recipe`. -> its name there

    Raises ConfigError where it does not exist, is not YAML, or chooses something unknown.
    """
    if not path.exists():
        names = ", ".join(paths.recipe_files())
        why, fix = f"looked at {path.absolute()}", f"+recipe=NAME, with NAME one of: {names}"
        refuse(where, f"recipe file {path} does not exist", fix, why)
    root = read_user_yaml(path)
    if problems := [*_forbidden_content(path, root), *_chosen(path, root, groups)]:
        raise ConfigError(*problems)
    name = re.sub(r"\W", "_", str(path.resolve().with_suffix("")))
    _store(name, path)
    USER_RECIPE_FILES[name] = path
    return name


def unknown_choice_problem(
    group: str, choice: str, choices: Iterable[str], where: str, value: str = ""
) -> Problem:
    """The problem of `group=choice` for an unknown choice. `value`: as typed,
    if that was a list with the choice in it."""
    close = nearest_names(choice, choices)
    near = f"{'+' if group in APPENDED_GROUPS else ''}{group}={(close or ['CHOICE'])[0]}"
    if not close and group in ("model", "data"):
        near = f"{group}.path={choice}, for a name on the hub or a folder"
    return Problem(
        f"{group} {choice!r} not found",
        where,
        f"{group} is one of: {', '.join(sorted(choices))}",
        mistakes.suggest_for_choice(group, choice, value or choice) or near,
        more="rloo recipes" if group == "recipe" else "rloo config",
    )


def _store(name: str, path: Path) -> None:
    status = path.stat() if path.is_file() else None
    state = (path.absolute(), status.st_mtime_ns, status.st_size) if status else None
    if state is not None and STORED_FILE_STATES.get(name) == state:
        return  # parsing all recipes takes longer than composing a config from them
    read_user_yaml(path)
    try:
        node = OmegaConf.load(path)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(broken_yaml_problem(path, error)) from None
    if not isinstance(node, DictConfig):
        raise ConfigError(_no_mapping(path))
    group = "/".join(["recipe", *name.split("/")[:-1]])
    ConfigStore.instance().store(
        group=group, name=name.split("/")[-1], node=node, package="_global_", provider=str(path)
    )
    if state is not None:
        STORED_FILE_STATES[name] = state


def _no_mapping(path: Path) -> Problem:
    what, fix = f"{path.name} is not a mapping of keys", "write a `key: value` on each line"
    return Problem(what, str(path), "expected `key: value`", fix)


def _shadowing_problems(inside: Path, path: Path, shipped: Groups) -> Iterator[Problem]:
    group, _, choice = str(inside.with_suffix("")).partition("/")
    if "hydra" in inside.parts:
        fix = f"move {path.name} out of the folder hydra"
        yield Problem(f"{path} reaches into Hydra", str(path), HYDRA_REASON, fix)
    group = "recipe" if group == "recipes" else group
    if choice in shipped.get(group, {}):
        why = f"rloo already ships a {group} of that name"
        fix = f"mv {path} {path.with_name('my_' + path.name)}"
        yield Problem(f"{path}: {choice!r} is taken", str(path), why, fix)


def _forbidden_content(path: Path, root: yaml.Node | None) -> Iterator[Problem]:
    """Forbidden contents of a user's file."""
    for line, text in enumerate(path.read_text().splitlines(), 1):
        if text.strip() and not text.lstrip().startswith("#"):
            break
        if "@package" in text and "hydra" in (text + path.stem).lower():
            what, fix = f"{path.name} reaches into Hydra", "remove the @package line"
            yield Problem(what, f"{path}:{line}", HYDRA_REASON, fix)
    if root is None:
        return  # an empty file changes nothing
    if not isinstance(root, yaml.MappingNode):
        yield _no_mapping(path)
        return
    for key, value in root.value:
        where = f"{path}:{key.start_mark.line + 1}"
        if str(key.value).partition(".")[0] == "hydra":
            yield from _wrong_sweep(key.value, value, where)
        elif key.value == "reward" and isinstance(value, yaml.SequenceNode):
            fix = f"defaults: [override /reward: [{', '.join(str(n.value) for n in value.value)}]]"
            why = "its entries need names; a list only chooses shipped rewards"
            yield Problem("reward is not a mapping of entries", where, why, fix)
        elif key.value == "defaults":
            yield from _wrong_defaults(value, where)


def _wrong_sweep(name: str, node: yaml.Node, where: str) -> Iterator[Problem]:
    """Problems of a file's section `hydra`, which can only set what -m sweeps over."""
    for inner in ("sweeper", "params"):
        held = node.value if isinstance(node, yaml.MappingNode) else []
        node = held[0][1] if [key.value for key, _ in held] == [inner] else yaml.ScalarNode("", "")
    if name != "hydra" or not isinstance(node, yaml.MappingNode):
        fix = "remove it, except hydra: {sweeper: {params: ...}}; root=FOLDER"
        yield Problem("hydra is not a key of rloo", where, HYDRA_REASON, fix)
        return
    groups = paths.group_choices([])
    for key, value in node.value:
        bare = str(key.value).removeprefix("++")
        if not re.fullmatch(r"[\w.]+", bare) or re.match(r"hydra\b|_target_", bare):
            what = f"{key.value!r} is not a key to sweep over"
            fix = 'name a key of rloo, as in ++train.learning_rate: "1e-5,3e-5"'
            yield Problem(what, where, HYDRA_REASON, fix)
        elif not isinstance(value, yaml.ScalarNode):
            found = "list" if isinstance(value, yaml.SequenceNode) else "mapping"
            why = f"found a {found}, expected its values as one comma-separated text"
            yield Problem(f"{bare} needs its values as one text", where, why, f'{key.value}: "a,b"')
        elif bare == key.value and bare not in groups:
            why = "without ++, a command-line override would not replace it"
            yield Problem(f"{bare} must be ++{bare}", where, why, f"++{bare}: {value.value}")


def _wrong_defaults(node: yaml.Node, where: str) -> Iterator[Problem]:
    right = "a list of choices, e.g. [override /model: tiny, override /reward: accuracy]"
    entries = node.value if isinstance(node, yaml.SequenceNode) else None
    texts = [_text(entry) for entry in entries or []]
    if entries is None or None in texts:
        fix = "defaults: [override /model: tiny]"
        yield Problem("defaults is not a list of choices", where, f"expected {right}", fix)
    for entry, text in zip(entries or [], texts, strict=True):
        if text and re.search(r"(^|[\s/@.])hydra([/.@:\s]|$)", text):
            where = f"{where.rpartition(':')[0]}:{entry.start_mark.line + 1}"
            what, fix = f"defaults: {text!r} reaches into Hydra", f"remove {text!r}"
            yield Problem(what, where, HYDRA_REASON, fix)


def _text(entry: yaml.Node) -> str | None:
    """An entry of a list of defaults in one line; None if invalid."""
    if isinstance(entry, yaml.MappingNode) and len(entry.value) == 1:
        key, value = entry.value[0]
        nodes = value.value if isinstance(value, yaml.SequenceNode) else [value]
        parts = [n.value for n in (key, *nodes) if isinstance(n.value, str)]
        return " ".join(parts) if len(parts) == 1 + len(nodes) else None
    plain = isinstance(entry, yaml.ScalarNode) and entry.tag.endswith(":str")
    return entry.value if plain else None


def _chosen(path: Path, root: yaml.Node | None, groups: Groups) -> Iterator[Problem]:
    """Choices in a recipe's list of defaults that do not exist."""
    for key, entries in root.value if isinstance(root, yaml.MappingNode) else []:
        is_list = key.value == "defaults" and isinstance(entries, yaml.SequenceNode)
        for entry in entries.value if is_list else []:
            for name, choice in entry.value if isinstance(entry, yaml.MappingNode) else []:
                yield from _choice(name, choice, path, groups)


def _choice(name: yaml.Node, choice: yaml.Node, path: Path, groups: Groups) -> Iterator[Problem]:
    full = name.value.rpartition(" ")[2].lstrip("/").partition("@")[0]
    group = full if full in groups else full.rpartition("/")[2]
    choices, where = groups.get(group), f"{path}:{name.start_mark.line + 1}"
    if choices is None and "/" in name.value:
        close = [f"override /{g}: {choice.value}" for g in nearest_names(group, groups)]
        why = f"groups: {', '.join(groups)}"
        yield Problem(f"group {group!r} not found", where, why, *close[:1])
    for node in choice.value if isinstance(choice, yaml.SequenceNode) else [choice]:
        if choices is not None and node.value not in ("", "null", "~", *choices):
            yield unknown_choice_problem(group, str(node.value), choices, where)

"""Hydra composes faster in one process: what does not change from one config to the next is kept.

A file is read once for each of its contents, and the same choices of groups are merged once; the
overrides of values are then applied by Hydra itself. `install` puts that in place for the tests,
whose processes compose some thousands of configs; test_quick_compose.py holds it against Hydra.
"""

import copy
import os
from typing import Any

from hydra._internal import defaults_list as lists
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult

LOAD = ConfigRepository.load_config
MERGE = ConfigLoaderImpl._compose_config_from_defaults_list
START = CachingConfigRepository.__init__
CHOICES = lists._create_interpolation_map
MOST = 300  # of each that are kept
LOADED: dict[Any, ConfigResult] = {}
MERGED: dict[Any, Any] = {}


def install() -> None:
    """Let this process, and those that it forks, compose in this way."""
    use(load_config, merge, start, choices)


def remove() -> None:
    """Let Hydra do it alone again."""
    use(LOAD, MERGE, START, CHOICES)


def use(load: Any, merge_all: Any, begin: Any, known: Any) -> None:
    """Put these in the place of Hydra's."""
    ConfigRepository.load_config = load
    ConfigLoaderImpl._compose_config_from_defaults_list = merge_all
    CachingConfigRepository.__init__ = begin
    lists._create_interpolation_map = known


def start(self: CachingConfigRepository, delegate: Any) -> None:
    """Hydra copies all sources, and with them the whole store; here they get another list alone."""
    self.delegate, self.cache = copy.copy(delegate), {}
    self.delegate.sources = [*delegate.sources]


def choices(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
    """What the names of a list of defaults may be made of; none is wanted where none is made so."""
    if "$" in f"{defaults}{overrides.override_choices}":
        return CHOICES(overrides, defaults, self_added)
    return None


def content_key(source: Any, config_path: str) -> Any:
    """What tells a config's content apart: a file's place and state, a stored node; else None."""
    name, scheme = source._normalize_file_name(config_path), source.scheme()
    if scheme == "file":
        facts = os.stat(os.path.join(source.path, name))
        return source.path, name, facts.st_ino, facts.st_mtime_ns, facts.st_size
    if scheme == "structured":
        return source.provider, name, Same(ConfigStore.instance()._load(name))
    return (source.path, name) if source.path.startswith("hydra") else None  # Hydra's own files


class Same:
    """A key that is equal for the same object, which lives as long as its key."""

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value


def load_config(self: ConfigRepository, config_path: str) -> ConfigResult | None:
    """A config of these sources. Its values are shared, and are not to be changed."""
    source = self._find_object_source(config_path, ObjectType.CONFIG)
    key = source and content_key(source, config_path)
    if key is None:
        return LOAD(self, config_path)
    key = (config_path, key)
    if key not in LOADED:
        found = LOAD(self, config_path)
        assert found is not None
        found.content_key = key  # type: ignore[attr-defined]
        keep(LOADED, key, found)
    result = copy.copy(LOADED[key])
    result.header = dict(result.header)
    result.defaults_list = copy.deepcopy(result.defaults_list)
    return result


def merge(self: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Any:
    """The configs of a list of defaults, merged."""
    found = [repo.load_config(config_path=d.config_path) for d in defaults]
    keys = [getattr(result, "content_key", None) for result in found]
    if None in keys:
        return MERGE(self, defaults, Copies(repo))
    key = tuple(
        (key, d.package, d.primary, d.is_self, result.header["package"], result.is_schema_source)
        for key, d, result in zip(keys, defaults, found, strict=True)
    )
    if key not in MERGED:
        keep(MERGED, key, MERGE(self, defaults, Copies(repo)))
    return copy.deepcopy(MERGED[key])


class Copies:
    """A repository whose configs may be changed."""

    def __init__(self, repo: Any):
        self.repo = repo

    def __getattr__(self, name: str) -> Any:
        return getattr(self.repo, name)

    def load_config(self, config_path: str) -> Any:
        result = copy.copy(self.repo.load_config(config_path=config_path))
        if result is not None:
            result.config = copy.deepcopy(result.config)
        return result


def keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep it, and not more than so many."""
    if len(kept) >= MOST:
        kept.clear()
    kept[key] = value

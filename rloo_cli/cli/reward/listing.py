"""`rloo reward list`: every registered reward, its columns and extra packages; and the entries of
conf/reward that are one of these with other keys.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from rloo_cli.config import registry
from rloo_cli.utils import paths
from rloo_cli.utils.files import JsonObject


@dataclass(frozen=True)
class RewardEntry:
    """A reward of the registry, or an entry of conf/reward that is one with other keys."""

    name: str
    type: str  # of the registry; equal to the name for the reward itself
    meaning: str
    columns: list[str]  # of the data, with the values of conf/reward
    extra: str  # extra packages or services; "" = none


def list_rewards(config_dirs: list[Path]) -> list[RewardEntry]:
    """Every registered reward, then the variants of conf/reward and of the user's own folders."""
    files = paths.group_choices(config_dirs)["reward"]
    common = yaml.safe_load((paths.CONF / "config.yaml").read_text())["reward_defaults"]
    names = registry.registry_names("rewards")
    entries = []
    for name in sorted({*names, *files}):
        values = _entry_values(files[name], name) if name in files else {}
        reward_type = str(values.get("type", name))
        if reward_type not in names:
            continue
        module = registry.registered_module("rewards", reward_type)
        config = module.Config.model_construct(**(common | values))
        columns = _needed_columns(module, config)
        meaning = (module.__doc__ or "").strip().partition("\n")[0]
        if name not in names:
            meaning = _headline(files[name]) or meaning
        extra = str(getattr(module, "EXTRA", ""))
        entries.append(RewardEntry(name, reward_type, meaning, columns, extra))
    return sorted(entries, key=lambda entry: entry.name not in names)


def listing_lines(entries: list[RewardEntry]) -> list[str]:
    """The listing as text: for each reward a line with its meaning and one with its needs."""
    width = max(len(entry.name) for entry in entries)
    lines = []
    for entry in entries:
        lines.append(f"{entry.name:<{width}}  {entry.meaning}")
        needs = [f"type {entry.type}"] if entry.type != entry.name else []
        needs += [f"column {', '.join(entry.columns)}"] if entry.columns else []
        needs += [f"needs {entry.extra}"] if entry.extra else []
        if needs:
            lines.append(f"{'':<{width}}    {'; '.join(needs)}")
    return lines


def listing_json(entries: list[RewardEntry]) -> list[JsonObject]:
    """The listing as plain values."""
    return [asdict(entry) for entry in entries]


def _needed_columns(module: object, config: object) -> list[str]:
    needs = getattr(module, "needs", None)
    return [str(column) for column in needs(config)] if needs is not None else []


def _entry_values(path: Path, name: str) -> JsonObject:
    content = yaml.safe_load(path.read_text())
    values = content.get(name) if isinstance(content, dict) else None
    return values if isinstance(values, dict) else {}


def _headline(path: Path) -> str:
    """The comment in a file's first line."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""

"""`python -m rloo_cli.cli.key_page`: prints docs/keys.md, every key of the config with its meaning.

The type, the limits and the meaning are the schema's; the default and its reason (the comment
behind a value) are those of conf/. A key that only one choice of a group has stands below it.
"""

import json
import re
from collections.abc import Iterator
from itertools import groupby, zip_longest
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rloo_cli.cli.config import every_key, field_type_text, schema_fields
from rloo_cli.config import check
from rloo_cli.config.compose import ComposedConfig
from rloo_cli.config.idle_keys import key_conditions, key_meaning
from rloo_cli.config.messages import walk_values
from rloo_cli.utils import paths
from rloo_cli.utils.metrics import without_tags

# A choice of one may have keys of its own.
PLUGIN_GROUPS = ("algorithm", "generation", "agent", "distributed", "model")
REASON = re.compile(r"(?:^|\s)#\s*(?P<reason>.+)$")  # of a line of YAML
ANY_REWARD = "<reward>"  # stands for the name of a reward
HEAD = """# Every key

Type, default, meaning, and the reason for the default where it is not plain. `rloo config` prints
the same in a terminal, and `rloo config explain KEY +recipe=NAME` a key's value in a recipe and
where that comes from. A default `-` means that the key has none. Keys that every reward has stand
once, as `reward.<reward>.weight`. This page is made by
`python -m rloo_cli.cli.key_page > docs/keys.md`."""
REQUIRED, BAR = '"???"', "\\|"  # a value that must be given; a | inside a cell
TABLE = "| key | type | default | meaning | why this default |\n|---|---|---|---|---|"
REWARD_TYPE = ("the name of a reward", "Which reward it is, where its entry has another name")


def key_page() -> str:
    """The whole page, as Markdown."""
    composed, model = every_key([])
    fields, conditions = schema_fields(model), key_conditions(model)
    shown = _without_repeated_rewards(fields)
    parts = [HEAD]
    for section, keys in groupby(
        shown, key=lambda key: key.partition(".")[0] if "." in key else ""
    ):
        rows = list(_key_rows([*keys], shown, conditions, composed))
        if rows:
            parts += [f"\n## {section or 'the run'}\n\n{TABLE}", *rows]
    for (group, choice), (chosen, own) in _each_choice():
        inside = schema_fields(own)
        more = [key for key in inside if key not in fields and key.startswith(f"{group}.")]
        if more:
            rows = list(_key_rows(more, inside, key_conditions(own), chosen))
            parts += [f"\n## {group}={choice}, beside those of every {group}\n\n{TABLE}", *rows]
    return "\n".join(parts) + "\n"


def _each_choice() -> Iterator[tuple[tuple[str, str], tuple[ComposedConfig, type[BaseModel]]]]:
    """Each choice of the plugin groups, with a config and a schema that have it.

    To compose takes longest, so one config has a choice of every group.
    """
    names = {group: [*paths.group_choices([])[group]] for group in PLUGIN_GROUPS}
    together = [
        every_key([f"{group}={choice}" for group, choice in zip(names, row, strict=True) if choice])
        for row in zip_longest(*names.values())
    ]
    for group, choices in names.items():
        yield from zip([(group, choice) for choice in choices], together, strict=False)


def _without_repeated_rewards(fields: dict[str, FieldInfo]) -> dict[str, FieldInfo]:
    """All keys; those that every reward has stand once, as `reward.<reward>.weight`.

    Sections are left out, and keys without one (name, root, ...) come first.
    """
    values = {key: f for key, f in fields.items() if field_type_text(f) != "section"}
    rewards = {key.split(".")[1] for key in values if key.startswith("reward.")}
    of_all = [key.rpartition(".")[2] for key in values if key.count(".") == 2 and "reward." in key]
    common = {name for name in of_all if of_all.count(name) == len(rewards)}
    shown: dict[str, FieldInfo] = {}
    for key in sorted(values, key=lambda key: "." in key):
        section, _, rest = key.partition(".")
        name = rest.partition(".")[2]
        repeated = section == "reward" and name in common
        shown[f"reward.{ANY_REWARD}.{name}" if repeated else key] = values[key]
    return shown


def _key_rows(
    keys: list[str],
    fields: dict[str, FieldInfo],
    conditions: dict[str, list[str]],
    composed: ComposedConfig,
) -> Iterator[str]:
    values = dict(walk_values(check.merge_defaults(composed.values)))
    for key in keys:
        kind = field_type_text(fields[key])
        if kind == "section":
            continue
        used = key.replace(ANY_REWARD, next(iter(composed.values["reward"])))
        default = json.dumps(values[used], ensure_ascii=False) if used in values else "-"
        meaning = key_meaning(fields[key].description or "", conditions.get(key, ()))
        if key == f"reward.{ANY_REWARD}.type":
            (kind, meaning), default = REWARD_TYPE, "-"
        reason = _yaml_reason(composed, used) if used in values else ""
        meaning, reason = without_tags(meaning), without_tags(reason)
        cells = [f"`{key}`", kind, f"`{default}`", meaning, reason]
        yield (
            "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
        )


def _yaml_reason(composed: ComposedConfig, key: str) -> str:
    """The comment behind the value in conf/; "" where it has none."""
    file, _, line = (composed.sources.location_of(key) or "").rpartition(":")
    path = Path(file)
    if not line.isdigit() or not path.is_file():
        return ""
    found = REASON.search(path.read_text(encoding="utf-8").splitlines()[int(line) - 1])
    return found["reason"] if found else ""


if __name__ == "__main__":
    print(key_page(), end="")

"""Keys that have no effect at some values of other keys, by `only_with` of their section.

A section's `only_with` is a mapping of conditions to its keys that have an effect only with them.
A condition is terms joined by ` or `. A term is `KEY` (it is set), `KEY=A|B`, `KEY!=A|B`,
`KEY>NUMBER` or `KEY>=OTHER_KEY`. A value may end in *, and `null` includes empty lists and
mappings. A key that starts with a dot is in the same section, with two dots in the parent section.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import get_args

from pydantic import BaseModel

from rloo_cli.config.provenance import yaml_value
from rloo_cli.utils.files import JsonObject

TERM = re.compile(r"([\w.]+?)(!=|>=|=|>|$)(.*)")
RELATIVE_KEY = re.compile(r"(?<![\w.*|/])(\.+)(?=[a-z])")  # the dots at the beginning of a key
ABSENT = object()  # the value of a key missing in the config


def key_conditions(schema: type[BaseModel]) -> dict[str, list[str]]:
    """Each key that depends on values of other keys -> its conditions, which must all hold.

    A condition on a key missing in this schema is dropped.
    """
    sections = [*_sections(schema)]
    known = {prefix + name for prefix, section in sections for name in section.model_fields}
    found: dict[str, list[str]] = {}
    for prefix, section in sections:
        for base in section.__mro__:
            for condition, names in vars(base).get("only_with", {}).items():
                whole = _with_whole_keys(condition, prefix)
                if all(_parts(term)[0] in known for term in whole.split(" or ")):
                    for name in names:
                        found.setdefault(prefix + name, []).append(whole)
    return found


def idle_notes(keys: Iterable[str], schema: type[BaseModel], values: JsonObject) -> list[str]:
    """A line for each of these keys that has no effect on a run with these values."""
    conditions = key_conditions(schema)
    reasons = {key: idle_reasons(conditions.get(key, ()), values) for key in keys}
    return [f"note: {key} has no effect: {why[0]}" for key, why in reasons.items() if why]


def idle_reasons(conditions: Sequence[str], values: JsonObject) -> list[str]:
    """Why a key of these conditions has no effect on a run with these values; [] if it has one."""
    unmet = (c for c in conditions if not any(_holds(t, values) for t in c.split(" or ")))
    return [f"only with {condition}" for condition in unmet]


def key_meaning(meaning: str, conditions: Sequence[str]) -> str:
    """The meaning of a key with these conditions."""
    return f"{meaning}; only with {', and with '.join(conditions)}" if conditions else meaning


def _sections(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section of a schema, with what its keys begin with."""
    yield prefix, model
    for name, info in model.model_fields.items():
        for part in [info.annotation, *get_args(info.annotation)]:
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _sections(part, f"{prefix}{name}.")


def _with_whole_keys(condition: str, prefix: str) -> str:
    """A condition of the section with this prefix, with absolute keys."""
    parts = prefix.split(".")
    return RELATIVE_KEY.sub(lambda dots: ".".join([*parts[: -len(dots[1])], ""]), condition)


def _parts(term: str) -> tuple[str, str, str]:
    """The key of a term, its sign ("" without one), and the values behind it."""
    found = TERM.fullmatch(term)
    assert found is not None, term
    return found[1], found[2], found[3]


def _value_of(key: str, values: JsonObject) -> object:
    value: object = values
    for part in key.split("."):
        value = value.get(part, ABSENT) if isinstance(value, dict) else ABSENT
    return value


def _holds(term: str, values: JsonObject) -> bool:
    """Whether a term is true of these values; a key missing in the config counts as true."""
    key, sign, wanted = _parts(term)
    found = _value_of(key, values)
    if found is ABSENT:
        return True
    if not sign:
        return bool(found)
    if sign.startswith(">"):
        limit = yaml_value(wanted) if sign == ">" else _value_of(wanted, values)
        if not isinstance(found, int | float) or not isinstance(limit, int | float):
            return True
        return found > limit or (sign == ">=" and found == limit)
    return any(_is_value(found, text) for text in wanted.split("|")) == (sign == "=")


def _is_value(found: object, text: str) -> bool:
    if text == "null":
        return found in (None, [], {})
    return fnmatchcase(found, text) if isinstance(found, str) else found == yaml_value(text)

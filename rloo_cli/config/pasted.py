"""What the `fix` of an error offers: settings to paste after a command, and likely guesses.

A fix is usable as written. If the intended value is unknown, the fix shows a placeholder in
capitals instead of an arbitrary choice.
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import NoReturn

from rloo_cli.config.old_names import nearest_names
from rloo_cli.utils.errors import Problem, refuse

PLAIN_TEXT = re.compile(r"[A-Za-z_/.][\w./:@-]*", re.ASCII)
OTHER_TYPES = re.compile(r"true|false|null|yes|no|on|off|nan|inf", re.IGNORECASE)  # for a reader
PLAIN_COLUMN = re.compile(r"[A-Za-z_][\w-]*")  # as a key of data.columns may be written
# Common names of prompt columns in data sets.
PROMPT_NAMES = ("prompt", "question", "problem", "instruction", "query", "messages")


def paste_setting(key: str, value: object) -> str:
    """`key=value` with the quotes that a shell and Hydra need to read this very value."""
    return shlex.quote(f"{key}={_hydra_text(value)}")


def _hydra_text(value: object) -> str:
    if isinstance(value, str):
        plain = PLAIN_TEXT.fullmatch(value) and not OTHER_TYPES.fullmatch(value)
        return value if plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_hydra_text(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_hydra_text, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def guess_name(name: str, candidates: Iterable[str], placeholder: str = "NAME") -> str:
    """The nearest or only candidate; else the placeholder."""
    names = list(candidates)
    near = nearest_names(name, names)
    return near[0] if near else names[0] if len(names) == 1 else placeholder


def unknown_name_problem(
    key: str, name: object, kind: str, names: Iterable[str], fix: str = ""
) -> Problem:
    """The problem of a key whose name no `kind` has, such as a reward.

    names: the known ones. fix: for a name without a near match; without a fix it is left to
    `messages.locate_problem`.
    """
    near, known = nearest_names(str(name), names), ", ".join(sorted(names))
    what, why = f"{key} = {name!r}: unknown {kind}", f"one of: {known}"
    return Problem(what, key, why, fix or (f"{key}={near[0]}" if near else ""))


def refuse_unknown_name(
    kind: str,
    name: str | None,
    names: Iterable[str],
    fix: str,
    otherwise: str = "",
    key: str = "command line",
) -> NoReturn:
    """Refuse a name on the command line that is missing, or not one of `names`, which are listed.

    kind: what it names, such as "recipe". fix: with NAME where the near one goes; `otherwise`
    where none is near.
    """
    known = list(names)
    near = guess_name(name or "", known)
    what = f"{kind} {name!r} not found" if name else f"{kind} missing"
    why = f"known: {', '.join(known)}" if known else "none exist"
    way_out = otherwise if otherwise and near == "NAME" else fix.replace("NAME", near)
    refuse(key, what, way_out, why)


def guess_prompt_column(name: str, candidates: Iterable[str]) -> str:
    """The column nearest to `name`, or with a common prompt name; else COLUMN."""
    names = [column for column in candidates if PLAIN_COLUMN.fullmatch(column)]
    known = [column for column in PROMPT_NAMES if column in names]
    return next(iter([*nearest_names(name, names), *known]), "COLUMN")


def rename_column(old: str, new: str, key: str = "data.columns") -> str:
    """The setting that gives a column another name; in words if it cannot be written."""
    if PLAIN_COLUMN.fullmatch(old) and PLAIN_COLUMN.fullmatch(new):
        return paste_setting(key, {old: new})
    return f"data in which column {old!r} has another name"

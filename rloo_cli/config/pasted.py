"""What the `fix` of an error offers: settings to paste behind a command, and good guesses.

A fix is tried as it stands. Where nothing says which value is meant, it says what is needed in
words, with a placeholder in capitals: the first of several values is not what was meant.
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
# What data sets call their prompts; no other name says that a column has them.
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
    """The candidate that is near, or the only one; else the placeholder: it could be any."""
    names = list(candidates)
    near = nearest_names(name, names)
    return near[0] if near else names[0] if len(names) == 1 else placeholder


def unknown_name_problem(
    key: str, name: object, kind: str, names: Iterable[str], fix: str = ""
) -> Problem:
    """The problem of a key with a name that no `kind` has, such as a reward.

    names: those that there are. fix: where it is not the nearest of them; where that is none, it is
    left to `messages.locate_problem`.
    """
    near, known = nearest_names(str(name), names), ", ".join(sorted(names))
    what, why = f"{key} = {name!r}: there is no such {kind}", f"one of: {known}"
    return Problem(what, key, why, fix or (f"{key}={near[0]}" if near else ""))


def refuse_unknown_name(
    kind: str,
    name: str | None,
    names: Iterable[str],
    fix: str,
    otherwise: str = "",
    key: str = "command line",
) -> NoReturn:
    """Refuse a name on the command line that is missing, or is none of `names`, which are listed.

    kind: what it names, such as "recipe". fix: with NAME where the near one goes; `otherwise`
    where none is near.
    """
    known = list(names)
    near = guess_name(name or "", known)
    what = f"there is no {kind} {name!r}" if name else f"which {kind}?"
    why = f"there are: {', '.join(known)}" if known else "there is none"
    way_out = otherwise if otherwise and near == "NAME" else fix.replace("NAME", near)
    refuse(key, what, way_out, why)


def guess_prompt_column(name: str, candidates: Iterable[str]) -> str:
    """The column that is near to `name`, or is called as prompts are; else COLUMN."""
    names = [column for column in candidates if PLAIN_COLUMN.fullmatch(column)]
    known = [column for column in PROMPT_NAMES if column in names]
    return next(iter([*nearest_names(name, names), *known]), "COLUMN")


def rename_column(old: str, new: str, key: str = "data.columns") -> str:
    """The setting that gives a column another name; in words where it cannot be written."""
    if PLAIN_COLUMN.fullmatch(old) and PLAIN_COLUMN.fullmatch(new):
        return paste_setting(key, {old: new})
    return f"data whose column {old!r} has another name"

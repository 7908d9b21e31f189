"""The one validator of what rewards return.

Exactly one value per row; each a finite real number or None. Everything else is a failure: it is
neither 0 nor None, and nothing is broadcast, rounded or filled in.
"""

import math
from typing import Any

LARGEST = 1e30  # beyond it a sum of squares overflows float64's range of sense

Values = list[float | None]


class Invalid(ValueError):
    """The whole return is not a list of scores."""


def validate(returned: Any, rows: int, nan_is_none: bool) -> tuple[Values, dict[int, str]]:
    """Scores of the rows, and for each row that has none the reason: {place: reason}.

    Accepts a list, a tuple, a 1-d array or tensor. Raises Invalid for anything else and for a
    wrong number of values.
    """
    entries = _entries(returned)
    if len(entries) != rows:
        raise Invalid(f"returned {len(entries)} values for {rows} rows")
    values: Values = []
    wrong: dict[int, str] = {}
    for place, entry in enumerate(entries):
        value, reason = _number(entry, nan_is_none)
        values.append(value)
        if reason:
            wrong[place] = reason
    return values, wrong


def _entries(returned: Any) -> list[Any]:
    if isinstance(returned, list | tuple):
        return list(returned)
    if hasattr(returned, "shape") and hasattr(returned, "tolist"):  # numpy, torch, pandas
        if len(returned.shape) == 1:
            return list(returned.tolist())
        kind = f"{type(returned).__name__} of shape {tuple(returned.shape)}"
        raise Invalid(f"returned a {kind}, not a list of one score per row")
    raise Invalid(f"returned {_short(returned)}, not a list of one score per row")


def _number(entry: Any, nan_is_none: bool) -> tuple[float | None, str]:
    """The value, or None and a reason. (None, "") is a reward that does not apply."""
    if entry is None:
        return None, ""
    plain = entry
    if hasattr(entry, "item") and math.prod(getattr(entry, "shape", (2,))) == 1:
        plain = entry.item()  # a 0-d or one-element array or tensor
    if not isinstance(plain, int | float):
        return None, f"gave {_short(entry)}, not a number"
    if isinstance(plain, float) and math.isnan(plain):
        return None, "" if nan_is_none else "gave nan"
    if abs(plain) > LARGEST:
        return None, f"gave {float(plain) if isinstance(plain, float) else 'an int'} (beyond 1e30)"
    return float(plain), ""


def _short(thing: Any) -> str:
    return f"{thing!r:.80} ({type(thing).__name__})"

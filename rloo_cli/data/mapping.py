"""data.map: each row of a split goes through a function of the user's, `row -> row`.

It comes after data.columns and before everything else: the prompts, data.filter and the rewards see
what it returns. Needs no torch.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rloo_cli.config.user_code import load_user_code, said, user_frames
from rloo_cli.utils.errors import DataError, Problem

if TYPE_CHECKING:
    from datasets import Dataset

Row = dict[str, Any]


def map_rows(rows: Iterable[Row], spec: str) -> Iterator[Row]:
    """What the function says of each row. Raises ConfigError (no such function), DataError."""
    change = load_user_code(spec, "data.map")
    for number, row in enumerate(rows):
        yield _changed(change, row, number, spec)


def map_data(data: "Dataset", spec: str) -> "Dataset":
    """All rows of a split, changed. Raises as `map_rows`; DataError for rows that do not agree."""
    from datasets import Dataset

    rows = list(map_rows(data, spec))
    try:
        return Dataset.from_list(rows)
    except (ValueError, TypeError, OverflowError) as error:  # Arrow's own are ValueErrors
        why = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        what = "data.map returned rows that make no table"
        fix = "return the same columns with values of the same type for every row"
        raise DataError(Problem(what, f"data.map={spec}", why, fix)) from None


def _changed(change: Callable[..., Any], row: Row, number: int, spec: str) -> Row:
    where = f"data.map={spec}, row {number}"
    try:
        returned = change(dict(row))
    except (Exception, SystemExit) as error:
        what = f"data.map failed at row {number}: {said(error).splitlines()[-1]}"
        why = f"{user_frames(error)}{said(error)}"
        raise DataError(
            Problem(what, where, why, f"columns of the row: {', '.join(row)}")
        ) from None
    if not isinstance(returned, dict) or not all(isinstance(name, str) for name in returned):
        what = (
            f"data.map returned {type(returned).__name__} for row {number}, not a dict of columns"
        )
        forgot = " (is a return missing?)" if returned is None else ""
        why = f"it returned {returned!r:.80}{forgot}"
        raise DataError(Problem(what, where, why, "return the row: a dict of columns"))
    return returned

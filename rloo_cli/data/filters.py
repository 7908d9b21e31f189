"""Which rows of a split are used: data.filter, and data.streaming's reading row by row.

A filter is applied to the split as it is, its columns renamed, before max_samples counts: the
first n rows that pass. How many it left out is said. Needs no torch.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rloo_cli.config.old_names import nearest_names
from rloo_cli.config.registry import load_code
from rloo_cli.config.user_code import exception_text, format_user_frames
from rloo_cli.utils.errors import ConfigError, DataError, Problem
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from datasets import Dataset

Filter = JsonObject | str
ExampleDict = JsonObject


def filter_dataset(
    data: "Dataset", row_filter: Filter | None, max_samples: int | None
) -> tuple["Dataset", int]:
    """The first `most` rows that pass, and how many in all did not.

    Raises DataError (no such column, no row is left, the function failed), ConfigError (no such
    function).
    """
    left_out = 0
    if row_filter is not None and len(data):
        passes = _filter_predicate(row_filter, data.column_names)
        kept = [n for n, row in enumerate(data) if passes(n, row)]
        left_out = len(data) - len(kept)
        if not kept:
            raise _nothing_passes_error(row_filter, len(data))
        data = data.select(kept)
    return (
        data if max_samples is None else data.select(range(min(max_samples, len(data))))
    ), left_out


def filter_stream(
    examples: Iterable[ExampleDict], row_filter: Filter | None, max_samples: int
) -> tuple["Dataset", int]:
    """The first `most` rows that pass, of rows that are read one after the other and no further.

    Raises as `chosen`.
    """
    from datasets import Dataset

    kept, left_out = [], 0
    passes: Callable[[int, ExampleDict], bool] | None = None
    for n, row in enumerate(examples):
        if row_filter is not None:
            passes = passes or _filter_predicate(row_filter, list(row))
            if not passes(n, row):
                left_out += 1
                continue
        kept.append(row)
        if len(kept) == max_samples:
            break
    if left_out and not kept:
        assert row_filter is not None
        raise _nothing_passes_error(row_filter, left_out)
    return Dataset.from_list(kept), left_out


def _filter_predicate(row_filter: Filter, columns: list[str]) -> Callable[[int, ExampleDict], bool]:
    if isinstance(row_filter, str):
        return _load_predicate(row_filter)
    unknown = [c for c in row_filter if c not in columns]
    if unknown:
        close = nearest_names(unknown[0], columns)
        raise DataError(
            Problem(
                f"data.filter names {unknown[0]!r}, which is no column",
                "data.filter",
                f"columns: {', '.join(columns)}",
                f"data.filter={{{close[0]}: ...}}" if close else "",
            )
        )
    return lambda _, row: matches_columns(row, row_filter)


def matches_columns(example: ExampleDict, column_values: JsonObject) -> bool:
    """Whether every column that `wanted` names has its value in the row, or one of its list."""
    lists = {c: v if isinstance(v, list) else [v] for c, v in column_values.items()}
    return all(_among(example.get(c), values) for c, values in lists.items())


def _among(value: Any, values: list[Any]) -> bool:
    # 1 == True in Python; a column of flags and one of numbers are told apart.
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)


def _load_predicate(spec: str) -> Callable[[int, ExampleDict], bool]:
    where = "data.filter"
    try:
        code = load_code(spec)
    except ConfigError as error:
        raise ConfigError(*[Problem(p.what, where, p.why, p.fix) for p in error.problems]) from None
    except Exception as error:  # the file is the user's, and so is what it raises
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(Problem(f"{spec} could not be imported", where, why)) from None
    if not callable(code):
        raise ConfigError(Problem(f"{spec} is not a function", where))

    def passes(number: int, row: ExampleDict) -> bool:
        try:
            passed = code(row)
        except Exception as error:
            what, why = (
                f"data.filter failed at row {number}",
                f"{format_user_frames(error)}{exception_text(error)}",
            )
            raise DataError(Problem(what, f"data.filter={spec}", why)) from None
        if passed is not True and passed is not False:
            what = f"data.filter said {passed!r:.80} of row {number}"
            raise DataError(Problem(what, f"data.filter={spec}", "True or False was expected"))
        return bool(passed)

    return passes


def _nothing_passes_error(row_filter: Filter, num_examples: int) -> DataError:
    what = f"data.filter leaves none of {num_examples} rows"
    return DataError(Problem(what, "data.filter", f"the filter: {row_filter}", "data.filter=null"))

"""data.map: each example of a split goes through a user function, `example -> example`.

It comes after data.columns and before everything else: the prompts, data.filter and the rewards get
its results. This file imports no torch.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_cli.config.user_code import exception_text, format_user_frames, load_user_code
from rloo_cli.data.exact_values import dataset_of_rows, read_rows, write_rows
from rloo_cli.data.filters import ExampleDict
from rloo_cli.utils.errors import DataError, refuse

if TYPE_CHECKING:
    from datasets import Dataset


def map_examples(examples: Iterable[ExampleDict], spec: str) -> Iterator[ExampleDict]:
    """The function's result for each example. Raises ConfigError (no such function), DataError."""
    function = load_user_code(spec, "data.map")
    for number, example in enumerate(examples):
        yield _map_example(function, example, number, spec)


def map_dataset(data: "Dataset", spec: str, file: Path | None = None) -> "Dataset":
    """Map all examples of a split. `file`: where the result is written, or was by another process.

    Raises as `map_examples`; DataError for results with different columns.
    """
    try:
        if file is None:
            return dataset_of_rows(map_examples(data, spec))
        if not file.exists():
            write_rows(map_examples(data, spec), file)
        return read_rows(file)
    except (ValueError, TypeError, OverflowError) as error:  # Arrow's own are ValueErrors
        what = "data.map returned rows that do not form a table"
        fix = "return the same columns with values of the same type for every row"
        refuse(f"data.map={spec}", what, fix, error, error=DataError)


def _map_example(
    function: Callable[..., object], example: ExampleDict, number: int, spec: str
) -> ExampleDict:
    where = f"data.map={spec}, row {number}"
    try:
        with contextlib.chdir(os.getcwd()):  # relative paths start at the run folder
            returned = function(dict(example))
    except BaseException as error:  # also SystemExit and KeyboardInterrupt raised by user code
        what = f"data.map failed at row {number}: {exception_text(error).splitlines()[-1]}"
        why = f"{format_user_frames(error)}{exception_text(error)}"
        fix = f"columns of the row: {', '.join(example)}"
        refuse(where, what, fix, why, error=DataError)
    if not isinstance(returned, dict) or not all(isinstance(name, str) for name in returned):
        kind = type(returned).__name__
        what = f"data.map returned {kind} for row {number}, not a dict of columns"
        forgot = " (missing return statement?)" if returned is None else ""
        why = f"it returned {returned!r:.80}{forgot}"
        refuse(where, what, "return the row: a dict of columns", why, error=DataError)
    return dict(returned)  # a function may return the same dict for all rows

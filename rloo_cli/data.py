"""A data set's split: found, opened, its columns checked.

Needs no tokenizer and no torch, so that a wrong column or split is found before any model is
touched. `prompts` turns the rows into token ids.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_cli import made
from rloo_cli.errors import DataError, MachineError, Problem
from rloo_cli.names import nearest
from rloo_cli.schema import DataConfig

if TYPE_CHECKING:
    from datasets import Dataset

READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def load(config: DataConfig, split: str) -> "Dataset":
    """Open one split, rename its columns, and check that the prompts are there.

    Raises DataError (no such split or column, no rows) and MachineError (not to be found here).
    """
    data = _open(config, split)
    unknown = [old for old in config.columns if old not in data.column_names]
    if unknown:
        raise DataError(
            Problem(
                f"data.columns renames {unknown[0]!r}, which is no column",
                "data.columns",
                f"columns: {', '.join(data.column_names)}",
            )
        )
    data = data.rename_columns(config.columns) if config.columns else data
    column = config.prompt_column
    if column not in data.column_names:
        strings = [c for c in data.column_names if c in _likely(data)]
        close = nearest(column, data.column_names) or strings or data.column_names
        raise DataError(
            Problem(
                f"the data has no column {column!r}",
                f"data.prompt_column, {config.path} [{split}]",
                f"columns: {', '.join(data.column_names)}",
                f"data.prompt_column={close[0]}" if close else "",
            )
        )
    if config.max_samples is not None:
        data = data.select(range(min(config.max_samples, len(data))))
    if not len(data):
        raise DataError(
            Problem(f"the data is empty: {config.path} [{split}] has 0 rows", "data.path")
        )
    return data


def _likely(data: "Dataset") -> list[str]:
    """Columns that could be prompts: strings, or lists of messages."""
    first = data[0] if len(data) else {}
    return [c for c, v in first.items() if isinstance(v, str) or is_messages(v)]


def _open(config: DataConfig, split: str) -> "Dataset":
    import datasets

    datasets.disable_progress_bars()
    if config.path.startswith(made.MADE):
        return _of_made(config.path, split)
    path = Path(config.path).expanduser()
    try:
        if path.is_dir() and any((path / f"{n}.json").is_file() for n in ("state", "dataset_dict")):
            return _of_disk(datasets.load_from_disk(str(path)), split, config.path)
        if path.is_file():
            kind = READERS.get(path.suffix)
            if kind is None:
                why = f"it ends in {path.suffix or 'nothing'}; known: {', '.join(READERS)}"
                raise DataError(Problem(f"{path} is not a data file", "data.path", why))
            files = {"train": str(path)}
            return datasets.load_dataset(kind, data_files=files, split=split)
        source = str(path) if path.is_dir() else config.path
        return datasets.load_dataset(source, config.name, split=split, revision=config.revision)
    except (ValueError, KeyError) as error:
        if "split" in str(error).lower():
            raise DataError(
                Problem(f"no split {split!r} in {config.path}", "data.split", str(error))
            ) from None
        raise DataError(
            Problem(f"{config.path} cannot be read", "data.path", _short(error))
        ) from None
    except (OSError, datasets.exceptions.DatasetGenerationError) as error:
        raise _unreachable(config.path, path, error) from None


def _of_made(path: str, split: str) -> "Dataset":
    import datasets

    try:
        return datasets.Dataset.from_list(made.rows(path, split))
    except KeyError:
        why = "rloo makes the splits train and test"
        raise DataError(Problem(f"no split {split!r} in {path}", "data.split", why)) from None


def _of_disk(found: Any, split: str, path: str) -> "Dataset":
    if not hasattr(found, "keys"):  # a single Dataset: its one split has whatever name one likes
        return found
    if split not in found:
        why = f"splits: {', '.join(found)}"
        raise DataError(Problem(f"no split {split!r} in {path}", "data.split", why))
    return found[split]


def _unreachable(name: str, path: Path, error: Exception) -> DataError | MachineError:
    if path.exists():
        return DataError(Problem(f"{name} cannot be read", "data.path", _short(error)))
    why = f"not a file or folder here, not in the local cache, and the hub: {_short(error)}"
    fix = "on a machine with network, load it once so that it is cached, or name a local file"
    return MachineError(Problem(f"data set {name!r} is not to be had", "data.path", why, fix))


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]


def is_messages(value: Any) -> bool:
    """A conversation: a list of {role, content}."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(m, dict) and "role" in m and "content" in m for m in value)
    )

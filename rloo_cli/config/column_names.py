"""Finds the value that a config key names: a column, or a field inside one.

`answer` is a column. `labels.truth` is the column with that exact name if it exists, else the field
`truth` of the objects in the column `labels`.
"""

from collections.abc import Collection, Container, Iterable, Mapping
from typing import NoReturn

from rloo_cli.config.old_names import nearest_names
from rloo_cli.utils.errors import DataError, refuse


def refuse_unknown_column(
    key: str, name: str, columns: Collection[str], in_braces: bool = False
) -> NoReturn:
    """Raise DataError: `key` names a column missing in the data. `in_braces`: it is in the
    text of a template."""
    shown, fix = repr(name), f"remove {name} from {key}"
    if in_braces:
        shown, fix = f"{{{name}}}", "{{ and }} for literal braces"
    if close := nearest_names(name, columns):
        near = close[0]
        fix = f"{{{near}}} instead" if in_braces else f"{near} instead of {name} in {key}"
    what = f"{key} names {shown}, which is not a column"
    refuse(key, what, fix, f"columns: {', '.join(columns)}", error=DataError)


def field_value(row: Mapping[str, object], name: str) -> object:
    """The value of a column or nested field; None if an object on the path is None.

    Raises KeyError for a name that is neither a column nor a field of one.
    """
    if name in row:
        return row[name]
    column, parts = _split_name(row, name)
    value = row[column]
    for part in parts:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise KeyError(name)
        value = value.get(part)
    return value


def field_or_none(row: Mapping[str, object], name: str) -> object:
    """The value of a column or nested field; None if this row has none."""
    try:
        return field_value(row, name)
    except KeyError:
        return None


def column_of_field(columns: Container[str], name: str) -> str | None:
    """The column that `name` is, or is a field of; None if there is none."""
    if name in columns:
        return name
    try:
        return _split_name(columns, name)[0]
    except KeyError:
        return None


def is_field_of_rows(rows: Iterable[Mapping[str, object]], name: str) -> bool:
    """Whether one of these rows has the column, or an object with the field."""
    return any(_has_field(row, name) for row in rows)


def _has_field(row: Mapping[str, object], name: str) -> bool:
    if name in row:
        return True
    if column_of_field(row, name) is None:
        return False
    column, parts = _split_name(row, name)
    value = row[column]
    for part in parts:
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def _split_name(columns: Container[str], name: str) -> tuple[str, list[str]]:
    """The longest column name that the dotted name starts with, and the fields after it."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        if (column := ".".join(parts[:count])) in columns:
            return column, parts[count:]
    raise KeyError(name)

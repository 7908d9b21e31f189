"""Reads the rows of JSON files, with values as written.

Arrow and pandas, which `datasets` uses, read the text "2024-01-15" as a date and the
number 1 beside 2.5 as 1.0, and crash on a row that is `null`.
"""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path

from rloo_cli.utils.errors import DataError, Problem, refuse
from rloo_cli.utils.files import JsonObject

JSON_ENDINGS = (".jsonl", ".json")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
KEY_END = re.compile(r'"\s*:')
HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # of UTF-16; whole pairs are characters


def json_rows(path: Path) -> Iterator[JsonObject]:
    """The rows of a file of JSON: an object a line, or one array of them.

    A file .json may also be one object, or one of lists: {column: [values]}. An array of strings
    has one column, `text`.

    Raises DataError with the line for what is not JSON, not UTF-8, not an object or nested too
    deep (Python reads some 990 levels).
    """
    with path.open("rb") as file:
        for line in file:
            text = line.removeprefix(BYTE_ORDER_MARK).strip()
            if not text:
                continue
            if text.startswith(b"[") or (path.suffix == ".json" and not _is_json(text)):
                yield from _rows_of_whole_file(path)
                return
            break
        file.seek(0)
        for number, line in enumerate(file, 1):
            text = line.removeprefix(BYTE_ORDER_MARK).strip()
            if text:
                yield _as_row(path, number, _parse_json(path, number, text))


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except RecursionError:
        return True
    except ValueError:
        return False
    return True


def _rows_of_whole_file(path: Path) -> Iterator[JsonObject]:
    value = _parse_json(path, 1, path.read_bytes().removeprefix(BYTE_ORDER_MARK))
    rows = value if isinstance(value, list) else [value]
    if isinstance(value, dict):
        lists = list(value.values())
        if lists and all(isinstance(v, list) and len(v) == len(lists[0]) for v in lists):
            rows = [dict(zip(value, row, strict=True)) for row in zip(*lists, strict=True)]
    for number, row in enumerate(rows):
        if row is None:
            why = f'a row must be an object, such as {{"prompt": "..."}}; element {number} is null'
            what, fix = "has an element that is not a JSON object", "remove that element"
            raise DataError(_row_problem(path, 1, what, why, fix))
        yield {"text": row} if isinstance(row, str) else _as_row(path, 1, row)


def _unique_keys(pairs: list[tuple[str, object]]) -> JsonObject:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise KeyError(next(name for name in names if names.count(name) > 1))
    return made


def _as_row(path: Path, number: int, value: object) -> JsonObject:
    if isinstance(value, dict):
        return value
    why = f'a row must be an object, such as {{"prompt": "..."}}, found {json.dumps(value):.80}'
    fix = "remove the line, or write an object there"
    raise DataError(_row_problem(path, number, "is not a JSON object", why, fix))


def _parse_json(path: Path, number: int, data: bytes) -> object:
    """The value of a line, or of the whole file, whose first line has this number."""
    what = f"{path} cannot be read"
    try:
        text = data.decode("utf-8")
        value: object = json.loads(text)
        # A hook takes three times as long. Every key that is written ends as KEY_END.
        if not isinstance(value, dict) or len(KEY_END.findall(text)) != len(value):
            value = json.loads(text, object_pairs_hook=_unique_keys)
        if HALF_OF_A_PAIR.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        line = number + data.count(b"\n", 0, error.start)
        start = data.rfind(b"\n", 0, error.start) + 1
        shown = repr(data[start:].partition(b"\n")[0][:80])
        byte = f"byte {error.start - start + 1} of line {line} is 0x{data[error.start]:02x}"
        why = f"it is not UTF-8: {byte}, in {shown}"
        name = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "latin1"
        fix = f"if it is {name}, convert it: iconv -f {name} -t utf-8 {path} > utf8{path.suffix}"
        where = f"data.path, {path}:{line}"
        refuse(where, f"{what}: it is not UTF-8", fix, why, error=DataError)
    except json.JSONDecodeError as error:
        line = number + error.lineno - 1
        shown = repr(text.split("\n")[error.lineno - 1].strip()[:80])
        why = f"{error.msg} at column {error.colno}: {shown}"
        fix = f"write line {line} as one complete JSON object"
        where = f"data.path, {path}:{line}"
        refuse(where, f"{what}: line {line} is not JSON", fix, why, error=DataError)
    except UnicodeEncodeError as error:
        why = f"it has {error.object[error.start]!a}, half of a surrogate pair: not valid text"
        fix = "write the whole pair there, or the character itself"
        raise DataError(_row_problem(path, number, "is not text", why, fix)) from None
    except KeyError as error:
        why, fix = "only one of the two could be used", "remove one of them"
        what = f"has the key {error.args[0]!r} twice in one object"
        raise DataError(_row_problem(path, number, what, why, fix)) from None
    except RecursionError:
        why, fix = "Python reads some 990 levels", "remove that row, or make it flatter"
        raise DataError(_row_problem(path, number, "is nested too deeply", why, fix)) from None
    return value


def _row_problem(path: Path, number: int, what: str, why: str, fix: str) -> Problem:
    return Problem(f"{path}: line {number} {what}", f"data.path, {path}:{number}", why, fix)

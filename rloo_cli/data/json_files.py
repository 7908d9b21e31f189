"""Files of JSON that would end the process, or that cannot be read: refused with the line.

Arrow, which reads them, dies of a segmentation fault where the first row is `null`, or where a row
is nested some thousand levels deep: nothing in Python hears of that.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from rloo_cli.utils.errors import DataError, Problem

JSON_ENDINGS = (".jsonl", ".json")
DEEP = 500  # brackets of a line from which on its depth is looked at: Python reads some 990 levels


def refuse_unreadable_json(path: Path) -> None:
    """Raise DataError for a file with a row that is `null`, or nested too deep for Arrow.

    Reads the file's bytes once; a line is parsed only where it has more than `DEEP` brackets.
    """
    for number, line in _lines_with_text(path):
        if number == 1 and line.startswith(b"["):
            return _refuse_array(path)
        if line.startswith(b"null") and (number == 1 or path.suffix == ".jsonl"):
            why = 'a row is an object, as in {"prompt": "..."}, found null'
            fix = "take the line out, or write an object there"
            raise DataError(_row_problem(path, number, "is not a JSON object", why, fix))
        if line.count(b"{") + line.count(b"[") > DEEP:
            try:
                json.loads(line)
            except RecursionError:
                raise DataError(_too_deep_problem(path, number)) from None
            except ValueError:
                continue  # told when it is read


def _refuse_array(path: Path) -> None:
    """As above, for a file that is one array: `datasets` hands its elements to Arrow as lines."""
    try:
        rows = json.loads(path.read_bytes())
    except RecursionError:
        raise DataError(_too_deep_problem(path, 1)) from None
    except ValueError:
        return  # told when it is read
    if isinstance(rows, list) and None in rows:
        why = f'a row is an object, as in {{"prompt": "..."}}; element {rows.index(None)} is null'
        what, fix = "has an element that is no JSON object", "take that element out"
        raise DataError(_row_problem(path, 1, what, why, fix))


def _lines_with_text(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line that is not blank; the first that is not counts as 1."""
    with path.open("rb") as file:
        seen = False
        for number, line in enumerate(file, 1):
            text = line.removeprefix(b"\xef\xbb\xbf").strip()
            if text:
                yield (number if seen else 1), text
                seen = True


def _too_deep_problem(path: Path, number: int) -> Problem:
    why, fix = "Python and Arrow read a few hundred levels", "take that row out, or make it flatter"
    return _row_problem(path, number, "is nested too deep", why, fix)


def _row_problem(path: Path, number: int, what: str, why: str, fix: str) -> Problem:
    return Problem(f"{path}: line {number} {what}", f"data.path, {path}:{number}", why, fix)


def refuse_broken_json(name: str) -> None:
    """Raise DataError with the line of a JSON file that is not UTF-8, or not JSON."""
    path = Path(name).expanduser()
    if not path.is_file() or path.suffix not in JSON_ENDINGS:
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            where, what = f"data.path, {path}:{number}", f"{path} cannot be read"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if path.suffix == ".jsonl" and text.strip():
                    json.loads(text)
            except UnicodeDecodeError as error:
                byte = f"byte {error.start + 1} of line {number} is 0x{line[error.start]:02x}"
                why = f"it is not UTF-8: {byte}, in {line[:80]!r}"
                fix = f"if it is latin-1: iconv -f latin1 -t utf-8 {path} > utf8{path.suffix}"
                raise DataError(Problem(f"{what}: it is not UTF-8", where, why, fix)) from None
            except json.JSONDecodeError as error:
                why = f"{error.msg} at column {error.colno}: {text.strip()[:80]!r}"
                fix = f"write line {number} as one whole JSON object"
                problem = Problem(f"{what}: line {number} is not JSON", where, why, fix)
                raise DataError(problem) from None
            except RecursionError:
                return

"""Commands and files as nobody would write them: how many are tried, and what must hold of each.

`make test` tries a few, the same ones each time; `tests/fuzz/hunt.py` tries others for as long as
it is told, by RLOO_FUZZ_CASES in the environment. What was found stands as `@example` at its test.
"""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from rloo_cli.cli import main
from rloo_cli.utils.errors import RunError

REFUSED = {2, 3, 4, 5, 6, 7, 8}
COUNTED = os.environ.get("RLOO_FUZZ_COUNTED")  # a file to which each case adds a byte


def effort(few: int, share: float = 1.0) -> settings:
    """So many cases in `make test`; in a hunt `share` of what it asks for, never the same."""
    hunt = int(os.environ.get("RLOO_FUZZ_CASES", "0"))
    return settings(
        max_examples=max(5, int(hunt * share)) if hunt else few,
        derandomize=not hunt,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def count_case() -> None:
    """Of a hunt: one more was tried."""
    if COUNTED:
        with Path(COUNTED).open("a") as file:
            file.write(".")


@contextlib.contextmanager
def clear_error() -> Iterator[None]:
    """What is inside ends well, or with one of our own errors, which can be shown."""
    count_case()
    try:
        yield
    except RunError as error:
        assert error.code in REFUSED, error
        got = error.render()
        assert got.startswith("error: ") and "Traceback" not in got
        got.encode()  # what is quoted of bad input can be printed
        error.render(as_json=True).encode()


def said(folder: Path, *words: str) -> tuple[int, str, str]:
    """`rloo WORDS` in a folder, in this process -> exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
        main._errors_to_exit_code() as status,
    ):  # fmt: skip
        status.code = main.find_verb([*words])()
    return status.code, out.getvalue(), err.getvalue()


def check_said(code: int, out: str, err: str, what: object) -> None:
    """Done, or found something, or one clear error: no traceback, and no code of a bug."""
    count_case()
    assert "Traceback" not in out + err and "this is a bug" not in err, (what, err)
    assert code in {0, 20} | REFUSED, (what, code, err)
    if code in REFUSED:
        assert err.startswith("error: "), (what, err)
    (out + err).encode()


# Whole texts: words of other alphabets, controls, escapes of terminals, half characters, NULs.
ESCAPES = [
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\r",
    "\x00",
    "\u202e",
    "\ud800",
    "</script>",
    "<|im_end|>",
]
TEXTS = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from([*ESCAPES, "a", " ", "\n", "1", "é", "🙂"]), max_size=12).map("".join),
)
SOUND_TEXTS = TEXTS.map(lambda text: text.encode("utf-8", "replace").decode())  # can be written
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(), st.sampled_from([0, 1, -1, 1e308, 5e-324])
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, SOUND_TEXTS)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SOUND_TEXTS, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def damage(draw: st.DrawFn, data: bytes) -> bytes:
    """These bytes, of which some were changed, lost, doubled or added."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(changed)))
        length = draw(st.sampled_from([1, 1, 2, 8, 64, 4096]))
        kind = draw(st.sampled_from(["flip", "cut", "lose", "double", "add", "blank"]))
        if kind == "flip" and at < len(changed):
            changed[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del changed[at:]
        elif kind == "lose":
            del changed[at : at + length]
        elif kind == "double":
            changed[at:at] = changed[at : at + length]
        elif kind == "add":
            changed[at:at] = draw(st.binary(max_size=8))
        elif kind == "blank":
            changed[at : at + length] = bytes(len(changed[at : at + length]))
    return bytes(changed)

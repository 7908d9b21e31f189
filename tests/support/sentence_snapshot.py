"""The fixture `sentence`: what a rule says to a person, held by one file that is read as text.

`sentence(result)` compares what is said with the entry of its test in tests/sentences.txt. With
`pytest --update` the entry is written anew; the difference is then reviewed as any text is.
"""

import fcntl
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from assert_refused import refused_problems

ROOT = Path(__file__).parents[2]
SENTENCES = ROOT / "tests" / "sentences.txt"
HEAD = "## "


def pytest_addoption(parser: pytest.Parser) -> None:
    """`pytest --update`: the fixture `sentence` takes what is said as it is."""
    parser.addoption("--update", action="store_true", help="write tests/sentences.txt anew")


def read_sentences(path: Path = SENTENCES) -> dict[str, str]:
    """Name of a test -> what is said in it."""
    entries = re.split(rf"^{HEAD}", path.read_text(), flags=re.MULTILINE)[1:]
    pairs = (entry.split("\n", 1) for entry in entries)
    return {name: text.strip("\n") for name, text in pairs}


def write_sentence(name: str, text: str) -> None:
    """Put one entry into the file, in the order of names. Other processes may do so as well."""
    with SENTENCES.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = file.read()
        top = before.partition(f"\n{HEAD}")[0].rstrip("\n")
        entries = sorted((read_sentences() | {name: text}).items())
        after = "\n\n".join([top, *(f"{HEAD}{name}\n{text}" for name, text in entries)]) + "\n"
        file.seek(0)
        file.write(after)
        file.truncate()


def plain_text(said: Any, folders: dict[str, str]) -> str:
    """The text of a refusal or of a string, without what differs between machines and commits:
    folders, and line numbers of our own YAML."""
    if not isinstance(said, str):
        said = "\n\n".join(problem.render() for problem in refused_problems(said)[1])
    for folder, name in folders.items():
        said = said.replace(folder, name)
    said = said.replace(f"{ROOT}/", "")
    said = re.sub(r"\b((?:conf|recipes)/[\w./]+\.yaml):\d+", r"\1:LINE", said)
    return re.sub(r"[ \t]+$", "", said, flags=re.MULTILINE).strip("\n")


@pytest.fixture
def sentence(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """`sentence(result)`, of a refusal or a text; `folder` is one more whose path is left out.

    A test that asks twice has a second entry, whose name ends in #2.
    """
    asked = 0

    def compare(said: Any, folder: Path | str | None = None) -> None:
        nonlocal asked
        asked += 1
        name = request.node.nodeid + (f" #{asked}" if asked > 1 else "")
        folders = {str(folder): "FOLDER"} if folder else {}
        text = plain_text(said, folders | {str(tmp_path): "FOLDER"})
        if request.config.getoption("--update"):
            write_sentence(name, text)
        else:
            known = read_sentences().get(name)
            assert text == known, "read the new text, then: pytest --update, and review the file"

    return compare

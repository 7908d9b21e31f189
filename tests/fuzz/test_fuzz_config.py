"""Any word on the command line and any YAML: taken, or refused with what is wrong, at once."""

import shutil
from pathlib import Path

import pytest
import yaml
from fuzz_cases import SCALARS, SOUND_TEXTS, TREES, check_said, damage, effort, said
from hypothesis import example, given
from hypothesis import strategies as st

from rloo_cli.cli.config import every_key, schema_fields

pytestmark = pytest.mark.wide

ROOT = Path(__file__).parents[2]
KEYS = sorted(schema_fields(every_key([])[1]))
SECTIONS = sorted({key.partition(".")[0] for key in KEYS})
PARTS = sorted({part for key in KEYS for part in key.split(".")})
RECIPES = sorted(path.read_bytes() for path in (ROOT / "recipes").glob("*.yaml"))
# Values as somebody types them, and as nobody does.
ODD = [
    "", "null", "true", "[]", "{}", "[1,2", "{a:1}", "???", "${seed}", "${nowhere}", "~",
    "${oc.decode:x}", "$", "'", '"', "\\", "a=b", "=", "1e999", "-0", "0x10", "1_000", "nan",
    "${oc.env:HOME}", ".inf",
    "!!python/name:os.system", "&a", "*a", "file.py:name", "../../etc/passwd", "/dev/null",
    "2026-01-01", "1:30", "off", "a,b", "choice(1,2)", "range(1,3)", "glob(*)", "[[[[]]]]",
]  # fmt: skip
VALUES = st.one_of(st.sampled_from(ODD), SOUND_TEXTS, SCALARS.map(str))
NAMES = st.one_of(
    st.sampled_from(KEYS),
    st.lists(st.one_of(st.sampled_from(PARTS), SOUND_TEXTS), min_size=1, max_size=4).map(".".join),
)
WORDS = st.one_of(
    st.builds("{}{}={}".format, st.sampled_from(["", "+", "++", "~", "--"]), NAMES, VALUES),
    st.builds("{}{}".format, st.sampled_from(["~", "--", "-", "@", ""]), NAMES),
    VALUES,
)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which commands are given."""
    return tmp_path_factory.mktemp("empty")


def refused_or_planned(empty: Path, *words: str) -> None:
    """`rloo train WORDS --dry-run` ends as it should, and leaves nothing."""
    before = sorted(empty.rglob("*"))
    check_said(*said(empty, "train", *words, "--dry-run"), words)
    assert sorted(empty.rglob("*")) == before, words


@effort(20)
@given(st.lists(WORDS, min_size=1, max_size=3))
def test_any_words_are_taken_or_refused(empty: Path, words: list[str]) -> None:
    refused_or_planned(empty, "+recipe=smoke", *(word.replace("\0", "") for word in words))


def nested(key: str, value: object) -> object:
    """A mapping that has the value at a dotted key."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def dumped(tree: object) -> bytes:
    """As YAML."""
    return yaml.safe_dump(tree, allow_unicode=True).encode()


@effort(20)
@given(
    st.one_of(
        TREES.map(dumped),
        st.dictionaries(st.sampled_from([*SECTIONS, "defaults", "hydra"]), TREES).map(dumped),
        st.builds(nested, NAMES, TREES).map(dumped),
        st.sampled_from(RECIPES).flatmap(damage),
        st.binary(max_size=60),
    )
)
@example(b"")
@example(b"defaults:\n- 1\n")
@example(b"agent: {kind: []}\n")
@example(b"model: {path: x, lora: {}}\n")
def test_any_recipe_is_taken_or_refused(empty: Path, text: bytes) -> None:
    folder = empty / "mine"
    folder.mkdir(exist_ok=True)
    (folder / "mine.yaml").write_bytes(text)
    refused_or_planned(empty, "+recipe=mine/mine.yaml")
    shutil.rmtree(folder)


READING = ("plan", "recipes", "config", "migrate", "completion", "compare", "runs")


@effort(10)
@given(
    st.lists(st.one_of(VALUES, WORDS, st.sampled_from(["--json", "--help", "-m"])), max_size=3),
    st.sampled_from(READING),
)
@example([], "migrate")
def test_any_words_of_a_verb_that_reads_are_answered(
    empty: Path, words: list[str], verb: str
) -> None:
    check_said(*said(empty, verb, *(word.replace("\0", "") for word in words)), (verb, words))

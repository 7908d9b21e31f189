"""What an error's `fix` offers can be pasted behind the command, and does what was meant."""

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from loop_cases import checked
from refusal_cases import Case, ask
from test_refusals_config import CASES

import rloo_cli
from rloo_cli.config import registry
from rloo_cli.config.escapes import decode_escapes
from rloo_cli.config.messages import CHOSEN_SECTIONS, schema_keys
from rloo_cli.config.pasted import (
    guess_name,
    guess_prompt_column,
    paste_setting,
    rename_column,
)
from rloo_cli.config.schema import RunConfig
from rloo_cli.utils.errors import ConfigError

PACKAGE = Path(rloo_cli.__file__).parent
KEY = re.compile(r"(?<![\w.{}/$'-])([a-z]\w*(?:\.[a-z]\w*)+)=")
# Entries whose keys depend on their type; a launcher's, which Hydra knows.
OPEN = ("reward.", "hydra.", "eval.judge.")
# `NAME`, `FILE.py`, `ORG/NAME`, `...`: the reader has to write what is meant.
PLACEHOLDER = re.compile(r"\b[A-Z][A-Z_]+\b|=N\b|\.\.\.|\bfile\.py:name\b")
SETTING = re.compile(r"\+{0,2}[a-z][\w./]*=.*", re.DOTALL)
FLAG = re.compile(r"--[a-z][\w-]*")


@pytest.mark.parametrize(
    "value",
    [
        "64", "true", "null", "1e-6", "prompt;answer", "Q: {prompt}\nA:", "it's", 'say "so"', "a b",
        "make:tiny", "", "Ünï", "~/x", 64, 1e-6, True, None, [0.8, 1.25], ["a b", "c"],
        {"prompt": "my_prompt"}, {"hf_overrides": {"rope": 8}},
    ],
    ids=repr,
)  # fmt: skip
def test_a_setting_that_is_pasted_has_the_very_value(value: Any) -> None:
    (word,) = shlex.split(paste_setting("some.key", value))
    (override,) = OverridesParser.create().parse_overrides([decode_escapes(word, "")])
    found = plain(override.value())
    assert found == value and type(found) is type(value)


def plain(value: Any) -> Any:
    """A value as Hydra has parsed it, without the quotes that it was in."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    return [*map(plain, value)] if isinstance(value, list) else getattr(value, "text", value)


def test_the_first_of_several_is_not_a_guess() -> None:
    assert guess_name("lenght", ["length", "format"]) == "length"
    assert guess_name("x", ["accuracy"]) == "accuracy"
    assert guess_name("x", ["accuracy", "format"]) == "NAME"


@pytest.mark.parametrize(
    ("columns", "guess"),
    [
        (["chosen", "rejected"], "COLUMN"),  # reward_model would train on one of them twice
        (["train"], "COLUMN"),
        (["prompt;answer"], "COLUMN"),
        (["answer", "question"], "question"),
        (["answer", "prompts"], "prompts"),
    ],
    ids=str,
)
def test_a_column_of_prompts_is_offered_where_its_name_says_so(
    columns: list[str], guess: str
) -> None:
    assert guess_prompt_column("prompt", columns) == guess


def test_a_nested_name_is_not_the_new_name_of_a_column() -> None:
    assert rename_column("old", "new") == "'data.columns={old: new}'"
    assert "data.columns=" not in rename_column("old", "a.b")


def test_a_number_for_a_text_is_offered_in_quotes() -> None:
    with pytest.raises(ConfigError) as refused:
        checked((), ("slurm.mem=64",))
    (problem,) = refused.value.problems
    assert problem.fix == "'slurm.mem=\"64\"'"
    assert checked((), tuple(shlex.split(problem.fix))).slurm.mem == "64"


@cache
def fix_texts() -> list[tuple[str, str]]:
    """(file:line, text) of every fix in the package; `{}` stands where it has a value.

    Those of `rloo migrate` are left out: they name the keys of other trainers, too.
    """
    return [
        found
        for path in sorted(PACKAGE.rglob("*.py"))
        if "migrate" not in path.parts
        for found in fixes_of(path)
    ]


def fixes_of(path: Path) -> Iterator[tuple[str, str]]:
    """The fixes of a file: what a Problem is given as one, and what variables of that name hold."""
    for node in ast.walk(ast.parse(path.read_text())):
        values: list[ast.expr] = []
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Problem":
            values = node.args[3:4] + [k.value for k in node.keywords if k.arg == "fix"]
        elif isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [n.id for t in targets for n in getattr(t, "elts", [t]) if hasattr(n, "id")]
            values = [node.value] if "fix" in names else []
        for value in values:
            for text in texts_of(value):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", text


def texts_of(node: ast.AST) -> Iterator[str]:
    """The texts in an expression, those of an f-string as one."""
    if isinstance(node, ast.JoinedStr):
        parts = (p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
        yield "".join(map(str, parts))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts_of(child)


def test_every_key_that_a_fix_names_is_a_key() -> None:
    known = {*schema_keys(RunConfig)}
    for section, (kind, _) in CHOSEN_SECTIONS.items():
        for name in registry.registry_names(kind):
            keys = schema_keys(registry.config_class(kind, name))
            known |= {f"{section}.{key}" for key in keys}
    assert len(fix_texts()) > 500
    wrong = [
        (where, key)
        for where, text in fix_texts()
        for key in KEY.findall(text)
        if key not in known and not key.startswith(OPEN)
    ]
    assert wrong == []


def test_a_mapping_that_a_fix_offers_is_quoted_for_the_shell() -> None:
    bare = [
        (where, text)
        for where, text in fix_texts()
        for at in re.finditer(r"[\w.]+=\{+[\w{}]+: ", text)
        if text[: at.start()].count("'") % 2 == 0 and "..." not in text
    ]
    assert bare == []


def pasted_words(fix: str) -> Iterator[list[str]]:
    """The arguments of each alternative of a fix; none where it is told in words."""
    for part in re.split(r", or |, (?=[\w.]+=)| or (?=[\w.]+=)|; |, for |\n", fix):
        try:
            words = shlex.split(part)
        except ValueError:  # words with an apostrophe
            continue
        is_whole = all(SETTING.fullmatch(word) or FLAG.fullmatch(word) for word in words)
        if words and is_whole and not PLACEHOLDER.search(part):
            yield words


def key_of(word: str) -> str:
    """The key of an argument `key=value`."""
    return word.lstrip("+~-").partition("=")[0]


def paste_into(
    command: Sequence[str], pasted: Sequence[str], problem: Mapping[str, str]
) -> Iterator[str]:
    """The command, checked alone, with the arguments in the place of those that the error names."""
    replaced = {key_of(word) for word in pasted}
    words = iter(command)
    for word in words:
        named, _, value = word.partition("=")
        named = named.lstrip("+~") or word
        is_wrong = problem["what"].startswith(
            (f"{named} is not", f"'{word}'", f"{named} cannot", f"{named} '{value}'", f"{word}:")
        )
        if is_wrong and word.startswith("-") and "=" not in word:
            following = next(words, "")  # the value of a flag
            if SETTING.fullmatch(following):
                yield following
        elif not is_wrong and (key_of(word) not in replaced or "=" not in word):
            yield word
    yield from pasted
    yield "--dry-run"


def problems_of(text: str) -> list[dict[str, str]]:
    """The problems that a command printed as JSON."""
    try:
        found: list[dict[str, str]] = json.loads(text)
    except ValueError:
        return []
    return found


@pytest.mark.slow
def test_each_fix_pasted_behind_its_command_ends_that_error(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "again").mkdir()
    asked = {n: replace(c, env={**c.env, "RLOO_ERRORS": "json"}) for n, c in CASES.items()}
    again: dict[str, Case] = {}
    meant: dict[str, str] = {}
    for name, answer in ask(asked, tmp_path / "first").items():
        for problem in problems_of(answer.err):
            if ".yaml:" in problem["where"] and problem["what"].endswith("is not a key"):
                continue  # the line is to be corrected there: no word behind the command does it
            for words in pasted_words(problem["fix"]):
                number = f"{name}: {shlex.join(words)}"
                case = asked[name]
                again[number] = replace(case, words=[*paste_into(case.words, words, problem)])
                meant[number] = problem["what"]
    assert len(again) > 50
    found = ask(again, tmp_path / "again")
    same = [n for n, a in found.items() if meant[n] in [p["what"] for p in problems_of(a.err)]]
    assert not same, "\n".join(same)

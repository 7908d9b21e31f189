"""Planted secrets: found in nothing that a run prints or writes, and the search would find them."""

import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cli_cases import Ended, Rloo

from rloo_cli.utils import redact
from rloo_cli.utils.errors import Problem, RunError

PLANTED = {
    "HF_TOKEN": "hf_PLANTEDplantedPLANTEDplanted01",
    "WANDB_API_KEY": "planted-wandb-0123456789abcdef",
    "OPENAI_API_KEY": "sk-planted-openai-0123456789abcdef",
    "AWS_SECRET_ACCESS_KEY": "planted/aws+0123456789abcdef=",
    "GITHUB_TOKEN": "ghp_plantedPLANTEDplanted0123456789",
    "MY_DB_PASSWORD": 'planted "quoted" \\ password',
}
IN_FILES = {
    ".netrc": "machine api.wandb.ai login user password planted-netrc-0123456789",
    ".cache/huggingface/token": "hf_plantedLOGINplantedLOGIN0123",
    ".aws/credentials": "aws_secret_access_key = planted-awsfile-0123456789",
}
EVERY = [*PLANTED.values(), *(text.rpartition(" ")[2] for text in IN_FILES.values())]

# A reward that tells everything it can, in every way.
TELLS = """
import os, sys, warnings, logging

ALL = "\\n".join(f"{k}={v}" for k, v in os.environ.items())
print("at import", ALL)

def tell():
    print("stdout", ALL)
    print("stderr", ALL, file=sys.stderr)
    sys.stdout.write(ALL + "\\n")
    sys.stderr.writelines([ALL, "\\n"])
    warnings.warn(ALL)
    logging.getLogger("mine").error("%s", ALL)

def good(completions, **kwargs):
    tell()
    return [float(len(c)) for c in completions]

def bad(completions, trainer_state, **kwargs):
    tell()
    if trainer_state.step == 0:
        return [0.0 for _ in completions]
    try:
        raise KeyError(os.environ["OPENAI_API_KEY"])
    except KeyError:
        raise RuntimeError("cannot log in: " + ALL)
"""


@pytest.fixture
def planted(rloo: Rloo, tmp_path_factory: pytest.TempPathFactory) -> Rloo:
    """The command, with secrets in its environment and its home."""
    home = tmp_path_factory.mktemp("home")
    for name, text in IN_FILES.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    (rloo.folder / "mine.py").write_text(TELLS)
    kept = {k: v for k, v in rloo.environment.items() if not k.startswith("HF_H")}
    environment = kept | PLANTED | {"HOME": str(home), "HF_HUB_OFFLINE": "1"}
    return replace(rloo, environment=environment)


def spellings(secret: str) -> Iterator[bytes]:
    """A secret as it is, and as JSON and Python write it."""
    yield from {s.encode() for s in (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1])}


def leaks(folder: Path, ended: Ended) -> list[str]:
    """Where a planted secret is found: files of the folder, and what was printed."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    found |= {"stdout": ended.out.encode(), "stderr": ended.err.encode()}
    return [
        f"{name}: {secret}"
        for name, content in found.items()
        for secret in EVERY
        if any(s in content for s in spellings(secret))
    ]


def test_a_run_that_ends_well_tells_no_secret(planted: Rloo) -> None:
    words = ("+recipe=smoke", "reward=function", "reward.function.path=mine.py:good")
    ended = planted("train", *words, "max_steps=1")
    assert ended.code == 0, ended.said
    for said in ("at import", "stdout ", "HF_TOKEN=[secret]"):
        assert said in ended.out
    assert "HF_TOKEN=[secret]" in ended.err
    assert leaks(planted.folder, ended) == []
    # The search finds one that is there.
    (planted.folder / "runs" / "smoke" / "x.bin").write_bytes(b"\0" + EVERY[3].encode() + b"\0")
    assert leaks(planted.folder, ended) == [f"runs/smoke/x.bin: {EVERY[3]}"]
    assert leaks(planted.folder / "none", Ended(0, EVERY[-1], "")) == [f"stdout: {EVERY[-1]}"]


@pytest.mark.slow_cases("json")
@pytest.mark.parametrize("flags", [[], ["--debug"], ["--errors=json"]], ids=["", "debug", "json"])
def test_a_run_that_crashes_tells_no_secret(flags: list[str], planted: Rloo) -> None:
    words = ("+recipe=smoke", "reward=function", "reward.function.path=mine.py:bad")
    ended = planted("train", *words, "eval.at_start=false", *flags)
    assert ended.code == 5, ended.said
    assert "cannot log in" in ended.err and "HF_TOKEN=[secret]" in ended.err
    run = planted.folder / "runs" / "smoke"
    for file in ("debug/reward_error.json", "logs/attempt_1/rank_0.log"):
        assert "OPENAI_API_KEY=[secret]" in (run / file).read_text()
    assert leaks(planted.folder, ended) == []


WORDS = [
    (f"+hf_token={PLANTED['HF_TOKEN']}",),
    (f"name=x{PLANTED['WANDB_API_KEY']}",),
    (f"data.system='\"{PLANTED['AWS_SECRET_ACCESS_KEY']}\"'",),
    ("data.system=${oc.env:OPENAI_API_KEY}",),
    ("root=${oc.env:WANDB_API_KEY}", "algorithm.beta=abc"),
    ("seed=${oc.env:GITHUB_TOKEN}",),
    ("-m", "seed=1,2", "name=${oc.env:GITHUB_TOKEN}"),
]
# --debug tells all that is told without it, and tracebacks.
CASES = [(words, ["--debug"]) for words in WORDS] + [(words, []) for words in WORDS[:2]]


@pytest.mark.parametrize(("words", "flags"), CASES, ids=str)
def test_a_secret_in_a_word_is_refused_and_told_nowhere(
    words: tuple[str, ...], flags: list[str], planted: Rloo
) -> None:
    (planted.folder / "mine.py").unlink()
    ended = planted("train", "+recipe=smoke", *words, *flags)
    assert ended.code == 2 and "looks like a secret" in ended.err
    assert planted.left() == [] and leaks(planted.folder, ended) == []


@pytest.mark.slow_but("hf_token", "train")
@pytest.mark.parametrize(
    "line",
    [
        f"hf_token: {PLANTED['HF_TOKEN']}",
        f"name: {PLANTED['GITHUB_TOKEN']}",
        f"seed: {PLANTED['OPENAI_API_KEY']}",
        "train: {learning_rate: '${oc.env:AWS_SECRET_ACCESS_KEY}'}",
        "logging: {wandb_api_key: 0123456789}",
    ],
    ids=lambda line: line.partition(":")[0],
)
def test_a_secret_in_a_recipe_is_refused_and_repeated_nowhere(line: str, planted: Rloo) -> None:
    recipe = planted.folder / "my.yaml"
    recipe.write_text(f"defaults: [smoke]\n{line}\n")
    for verb in (["train"], ["train", "--cfg", "job", "--resolve"], ["config"]):
        ended = planted(*verb, "+recipe=my.yaml")
        if verb == ["train"]:
            assert ended.code == 2 and "looks like a secret" in ended.err
            assert "my.yaml:2" in ended.err
        assert [x for x in leaks(planted.folder, ended) if not x.startswith("my.yaml")] == []
    assert planted.left() == ["mine.py", "my.yaml"]


# The redactor by itself.


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if redact.SECRET_VARIABLE.search(name):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("name", [*PLANTED, "TOKEN", "db_passwd", "X_PRIVATE_KEY", "SECRET_THING"])
def test_the_value_of_a_variable_that_looks_secret_is_masked(name: str, environment) -> None:
    environment.setenv(name, "some-value-1")
    assert redact.redact_text("a some-value-1, b") == "a [secret], b"
    assert redact.find_secret("a some-value-1, b") == name


@pytest.mark.parametrize("name", ["PATH", "TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH", "KEYBOARD"])
def test_other_variables_are_left_alone(name: str, environment) -> None:
    environment.setenv(name, "some-value-1")
    assert redact.redact_text("a some-value-1, b") == "a some-value-1, b"
    assert redact.find_secret("a some-value-1, b") == ""


def test_plain_words_and_paths_refuse_no_command_and_tokens_do(environment, tmp_path: Path) -> None:
    (tmp_path / "Runs-7Q").mkdir()
    plain = (
        "tmp/some/runs",
        "/data/run12/best",
        "~/my_runs/",
        "quickstart",
        "my big-model",
        "20261122",
    )
    for value in (*plain, str(tmp_path / "Runs-7Q")):
        environment.setenv("MY_SECRET", value)
        assert redact.find_secret(f"root={value}") == "", value
        assert redact.redact_text(f"root={value}") == "root=[secret]"  # masked as before
    tokens = (
        *PLANTED.values(), "Passw0rd", "hunter2-hunter2", "0123456789ab", "deadbeefdeadbeefcafe",
        "correct horse battery staple", "planted/aws+0123456789abcdef", "tmp/some/Runs-7Q",
        "f3a9/0c1d2e3f4a5b6c7d",
    )  # fmt: skip
    for value in tokens:
        environment.setenv("MY_SECRET", value)
        assert redact.find_secret(f"root={value}") == "MY_SECRET", value


def test_a_short_value_masks_no_sentence(environment) -> None:
    environment.setenv("MY_TOKEN", "true")
    assert redact.redact_text("it is true") == "it is true"


def test_of_two_secrets_the_longer_is_masked_whole(environment) -> None:
    environment.setenv("A_TOKEN", "12345678")
    environment.setenv("B_TOKEN", "12345678-more")
    assert redact.redact_text("12345678-more 12345678") == "[secret] [secret]"


@pytest.mark.parametrize("name", ["HF_TOKEN", "OPENAI_API_KEY", "GITHUB_TOKEN"])
def test_what_has_the_form_of_a_token_is_masked_wherever_it_is_from(name: str, environment) -> None:
    assert redact.redact_text(f"<{PLANTED[name]}>") == "<[secret]>"
    assert redact.redact_tree({"a": [PLANTED[name], 1, None]}) == {"a": ["[secret]", 1, None]}
    assert redact.redact_tree((PLANTED[name],)) == ["[secret]"]


def test_errors_streams_and_logs_are_masked(environment, tmp_path: Path) -> None:
    environment.setenv("MY_TOKEN", "some-value-1")
    error = RunError(Problem(*["is some-value-1"] * 5))
    assert "some-value-1" not in error.render() + error.render(as_json=True) + str(error)
    out = io.StringIO()
    environment.setattr(sys, "stdout", out)
    with redact.redacted_console():
        print("x", "some-value-1")
        sys.stdout.writelines(["some-value-1"])
        assert sys.stdout.isatty() is False
    assert sys.stdout is out and out.getvalue() == "x [secret]\n[secret]"
    record = logging.LogRecord("a", 40, "f", 1, "it is %s", ("some-value-1",), None)
    assert redact.RedactingFormatter("%(message)s").format(record) == "it is [secret]"

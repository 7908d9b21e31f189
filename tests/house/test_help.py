"""`rloo VERB --help`: it has every flag that the verb's code reads, and its examples work."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from rloo_cli.cli import main, migrate, verb_help, verify_resume, vllm_serve
from rloo_cli.config import check, compose
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError

PACKAGE = Path(main.__file__).parents[1]
# Where a verb reads its flags. Words that are other programs' are left out below.
CODE = {
    "train": ["cli/main.py", "config/compose.py"],
    "sweep": ["cli/sweep.py", "config/compose.py"],
    "sft": ["cli/supervised.py", "config/compose.py"],
    "reward-model": ["cli/supervised.py", "config/compose.py"],
    "vllm-serve": ["cli/vllm_serve.py", "config/compose.py"],
    "slurm": ["cli/slurm.py", "config/compose.py"],
    "plan": ["cli/plan.py", "config/compose.py"],
    "fetch": ["cli/fetch.py", "config/compose.py"],
    "config": ["cli/config.py", "config/compose.py"],
    "compare": ["cli/compare/__init__.py"],
    "doctor": ["cli/doctor.py", "config/compose.py"],
    "reward": ["cli/reward/__init__.py"],
    "migrate": ["cli/migrate.py"],
    "completion": [],  # it reads none, and has those of others as answers
}
OF_OTHERS = {"--parsable", "--version", "--errors", "--help", "-h"}
FLAG = re.compile(r"--?[a-z]([a-z-]*[a-z])?")
COMPOSE = ("train", "sft", "reward-model", "vllm-serve", "fetch", "plan")
# What an example says where there is nothing it could work on: the words themselves were read.
NOTHING_HERE = {
    "eval": "there is no",
    "runs": "there is no folder",
    "top": "there is no run",
    "doctor": "there is no run",
    "report": "there is no run",
    "replay": "there is no run",
    "sync": "there is no run",
    "push": "there is no run",
    "samples": "there is no run",
    "ledger": "there is no run",
    "compare": "no run",
}


def flags_in(name: str) -> set[str]:
    """Every flag that a file has as a text of its own."""
    tree = ast.parse((PACKAGE / name).read_text())
    texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    return {t for t in texts if isinstance(t, str) and FLAG.fullmatch(t)} - OF_OTHERS


@pytest.mark.parametrize("verb", main.VERBS)
def test_help_has_every_flag_that_the_verb_reads_and_two_examples(verb: str, capsys) -> None:
    assert main.find_verb([verb, "--help"])() == 0
    said = capsys.readouterr().out
    if verb == "migrate":  # which has help of its own
        assert said.strip() == str(migrate.__doc__).strip()
    else:
        assert said.startswith(f"usage: rloo {verb}")
        assert len(verb_help.VERBS[verb].examples) >= 2
        assert max(map(len, said.splitlines())) <= 100
    given = CODE.get(verb, [f"cli/{verb.replace('-', '_')}.py"])
    read = set().union(*(flags_in(name) for name in given))
    assert not {flag for flag in read if not re.search(rf"(?<![\w-]){flag}(?![\w-])", said)}


def test_flags_of_a_verb_are_known_with_the_values_they_take() -> None:
    assert {"--worst", "-n", "--json", "--debug"} <= {*verb_help.verb_flags("samples")}
    assert {"--multirun", "-m", "--cfg", "-c"} <= {*verb_help.verb_flags("train")}
    assert verb_help.flag_values("train", "--cfg") == ["job", "hydra", "all"]
    assert verb_help.flag_values("samples", "-n") == [] == verb_help.flag_values("train", "-cd")
    assert verb_help.flag_values("samples", "--worst") is None
    assert verb_help.verb_flags("nonsense") == []


@pytest.mark.wide
def test_every_example_of_help_is_read_as_it_stands(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for verb, texts in verb_help.VERBS.items():
        for example in texts.examples:
            if verb == "completion":
                assert re.search(r"rloo completion (bash|zsh)", example)
                continue
            rloo, said, *words = shlex.split(example)
            assert (rloo, said) == ("rloo", verb)
            plain = [w for w in words if w not in ("--multirun", "--dry-run")]
            if verb == "sweep" or "--multirun" in words:
                plain = [re.sub(r",.*", "", w) for w in plain]
            if verb == "sweep":
                plain = plain[: next((i for i, w in enumerate(plain) if w[0] == "-"), None)]
            if verb == "plan":
                assert main.find_verb(["plan", *words])() == 0
            elif verb in (*COMPOSE, "sweep"):
                if verb == "vllm-serve":  # as the verb does
                    named = any(w.startswith("+recipe=") for w in plain)
                    plain = plain if named else vllm_serve.server_words(plain)
                    plain += ["generation=vllm_server"]
                check.check_config(compose.compose_config(plain))
            elif verb == "verify-resume":
                check.check_config(compose.compose_config(verify_resume.read_words(words)[1]))
            elif verb == "migrate":
                assert ">" in words
            elif verb == "reward" and words != ["list"]:
                recipe = [w for w in words if w.startswith("+")]
                check.check_config(compose.compose_config(recipe))
            elif verb in NOTHING_HERE and words and not words[0].startswith("+"):
                with pytest.raises(ConfigError, match=NOTHING_HERE[verb]):
                    main.find_verb([verb, *words])()
            elif verb == "eval" or (verb == "doctor" and words):
                check.check_config(compose.compose_config([w for w in words if w != "--deep"]))
            else:
                assert main.find_verb([verb, *words])() == 0
    capsys.readouterr()


def test_the_overview_is_one_screen_and_its_columns_stand_below_each_other() -> None:
    lines = verb_help.help_overview().splitlines()
    assert len(lines) <= 65 and max(map(len, lines)) <= 140  # 26 verbs, 30 recipes
    at = lines.index("recipes:")
    for names, part in ((verb_help.VERBS, lines[:at]), (paths.recipe_files(), lines[at:])):
        rows = [next(line for line in part if line.startswith(f"  {name} ")) for name in names]
        starts = {re.match(r"  \S+ +", row).end() for row in rows}  # type: ignore[union-attr]
        assert len(starts) == 1

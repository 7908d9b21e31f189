"""`rloo VERB --help`: every flag and what it does; a wrong one is refused; the examples work."""

import re
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from assert_refused import assert_refused

from rloo_cli.cli import main, verb_parser, verify_resume, vllm_serve
from rloo_cli.cli.verbs import GROUPS, VERBS
from rloo_cli.config import check, compose
from rloo_cli.utils.errors import ConfigError

COMPOSE = ("train", "sft", "reward-model", "vllm-serve", "fetch", "plan")
# What an example says where there is nothing it could work on: the words themselves were read.
NOTHING_HERE = {
    "eval": "not found",
    "runs": "does not exist",
    "top": "not found",
    "doctor": "not found",
    "report": "not found",
    "replay": "not found",
    "sync": "not found",
    "push": "not found",
    "samples": "not found",
    "ledger": "not found",
    "compare": "no run",
    "record": "not found|is not a record",
}
# Words before the flag, of verbs that do nothing without an action.
WORDS = {"slurm": ["render"], "reward": ["test"], "recipes": ["list"]}


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_usage_every_flag_and_two_examples(verb: str, capsys) -> None:
    assert main.find_verb([verb, "--help"])() == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: rloo {verb}")
    assert len(VERBS[verb].examples) >= 2
    assert max(map(len, said.splitlines())) <= 100
    for flag in verb_parser.VerbParser(verb).flags:
        assert re.search(rf"(?<![\w-]){flag}(?![\w-])", said), flag


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "migrate"])
def test_a_wrong_flag_is_refused_and_the_nearest_one_named(verb: str) -> None:
    for words in (["--jsn"], ["a", "--jsn", "b=1"], ["+recipe=smoke", "seed=1", "--jsn"]):
        with pytest.raises(ConfigError) as refused:
            main.find_verb([verb, *WORDS.get(verb, []), *words])()
        assert_refused(refused, 2, "--jsn", fix="--json")


def test_flags_stand_anywhere_among_the_words() -> None:
    words = ["+recipe=smoke", "seed=1"]
    for at in range(3):
        given = [*words[:at], "--cfg", "job", "-m", "--config-dir=own", *words[at:]]
        options = verb_parser.parse_verb("train", given)
        assert options.overrides == ["--config-dir=own", *words] and options.multirun
        assert options.cfg == "job" and not options.dry_run
    options = verb_parser.parse_verb("eval", ["seed=1", "--json", "mine", "~x"])
    assert (options.run, options.overrides) == ("mine", ["seed=1", "~x"])
    options = verb_parser.parse_verb("sweep", ["--json", "resume", "s", "--jobs", "2"])
    assert (options.action, options.sweep, options.jobs) == ("resume", "s", 2)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["sweep", "show", "s", "--chunk", "3"], "--chunk"),
        (["sweep", "stop", "s"], "TRIAL"),
        (["sweep", "show", "s", "t"], "'t'"),
        (["plan", "+recipe=smoke", "--gpus", "0"], "--gpus"),
        (["train", "+recipe=smoke", "--resolve"], "--resolve"),
        (["train", "+recipe=smoke", "--cfg", "job", "--package", "modle"], "modle"),
        (["train", "-m", "+recipe=smoke", "hydra.sweeper.params={seed: '1,2'}"], "hydra.sweeper"),
    ],
)
def test_what_an_action_does_not_take_is_refused(words: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        main.find_verb(words)()
    assert_refused(refused, 2, key)


@pytest.mark.wide
def test_every_example_of_help_is_read_as_it_stands(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for verb, texts in VERBS.items():
        for example in texts.examples:
            if verb == "completion":
                assert re.search(r"rloo completion (bash|zsh)", example)
                continue
            rloo, said, *words = shlex.split(example)
            assert (rloo, said) == ("rloo", verb)
            options = verb_parser.parse_verb(verb, [w for w in words if w != ">"])
            plain = getattr(options, "overrides", [])
            if verb == "sweep" or "--multirun" in words:
                plain = [re.sub(r",.*", "", w) for w in plain]
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
                check.check_config(compose.compose_config(plain))
            else:
                assert main.find_verb([verb, *words])() == 0
    capsys.readouterr()


def test_the_overview_is_one_screen_in_groups_and_its_columns_stand_below_each_other() -> None:
    lines = verb_parser.help_overview().splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 110
    at = [lines.index(f"{group}:") for group in GROUPS]
    assert at == sorted(at)
    rows = [next(line for line in lines if line.startswith(f"  {name} ")) for name in VERBS]
    starts = {re.match(r"  \S+ +", row).end() for row in rows}  # type: ignore[union-attr]
    assert len(starts) == 1
    assert "rloo recipes" in lines[-2]


@pytest.mark.process
def test_help_takes_hardly_longer_than_python_and_imports_nothing_that_is_slow() -> None:
    slow = "torch", "hydra", "omegaconf", "pydantic", "rich", "yaml"
    program = "import sys; from rloo_cli.cli import main; main.find_verb(sys.argv[1:])();"
    program += f"assert not {{*{slow}}} & {{*sys.modules}}, sys.modules"
    for words in (["--help"], ["train", "--help"]):
        subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True)

    def seconds(*words: str) -> float:
        """Of the processor: other processes do not count."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    for words in (["--help"], ["train", "--help"]):
        gaps = [seconds("-m", "rloo_cli", *words) - seconds("-c", "pass") for _ in range(7)]
        assert min(gaps) < 0.06

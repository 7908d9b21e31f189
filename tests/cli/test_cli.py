"""The command line: what is refused, in which words, and that a refusal leaves nothing."""

import json
import time
from pathlib import Path

import pytest
from cli_cases import Ended, Rloo

from rloo_cli.cli import main
from rloo_cli.launch import launcher
from rloo_cli.utils import paths
from rloo_cli.utils.errors import RunError

MINE = """# A recipe of the user's own.
defaults:
  - override /model: tiny
  - override /data: tiny
  - override /reward: unique_chars
max_steps: 2
algorithm:
  num_generation: 4
  beta: abc
train: {prompts_per_stp: 3}
"""


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """`refused(*words)`: what `rloo train +recipe=smoke ...` says, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["rloo"])

    def run(*words: str, recipe: str = "+recipe=smoke", code: int = 2) -> str:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(RunError) as error:
            raise_code(main.find_verb(["train", *([recipe] if recipe else []), *words])())
        assert error.value.code == code
        assert sorted(tmp_path.rglob("*")) == before
        return error.value.render()

    return run


def raise_code(code: int) -> None:
    """A job's refusal is printed, not raised."""
    error = RunError()
    error.code = code
    raise error


@pytest.fixture
def said(refused, capsys: pytest.CaptureFixture[str]):
    """The same, with what was printed."""

    def run(*words: str, **options: str) -> str:
        text = refused(*words, **options)
        return text + capsys.readouterr().err

    return run


# What the command itself answers.


def test_help_lists_verbs_and_recipes_at_once_and_without_torch(rloo_without_torch: Rloo) -> None:
    start = time.monotonic()
    ended = rloo_without_torch("--help")
    assert time.monotonic() - start < 2
    assert ended.code == 0 and ended.out.startswith("usage: rloo VERB")
    for word in (*main.VERBS, *paths.recipe_files()):
        assert f"  {word} " in ended.out.replace(",", " ")


@pytest.mark.parametrize("words", [[], ["-h"], ["help"], ["train", "--help"], ["config", "-h"],
                                   ["help", "config"]])  # fmt: skip
def test_help_is_never_far(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.find_verb(words)() == 0
    verb = next((word for word in words if word in ("train", "config")), "VERB")
    assert capsys.readouterr().out.startswith(f"usage: rloo {verb}")


def test_an_unknown_verb_is_answered_with_the_nearest(rloo: Rloo) -> None:
    ended = rloo("trian", "+recipe=smoke")
    assert ended.code == 2 and ended.out == ""
    assert "rloo has no verb 'trian'" in ended.err and "fix      rloo train" in ended.err


# The issue's list, as a user meets it: four parts, exit 2, at once, nothing left, no torch.

ISSUE = {
    "algorithm.num_generation=4": ["is not a key", "algorithm.num_generations"],
    "+algorithm.betta=3": ["algorithm.betta is not a key", "did you mean algorithm.beta?"],
    "algorithm.beta=abc": ["valid number, got 'abc'", "fix      algorithm.beta=0.01"],
    "algorithm.beta=nan": ["finite number, got nan", "fix      algorithm.beta=0.01"],
    "algorithm.num_generations=1": ["greater than or equal to 2", "leave-one-out"],
    "algorithm.rloo_k=4": ["TRL <=0.21 calls it so", "write algorithm.num_generations instead"],
}


def is_clean(rloo: Rloo, ended: Ended) -> None:
    assert ended.code == 2, ended.said
    assert ended.out == "" and "Traceback" not in ended.err
    for part in ("error: ", "\n  where    ", "\n  why      ", "\n  fix      "):
        assert part in ended.err


@pytest.mark.parametrize("word", ISSUE)
def test_a_wrong_key_or_value_is_refused_in_four_parts(word: str, rloo_without_torch: Rloo) -> None:
    start = time.monotonic()
    ended = rloo_without_torch("train", "+recipe=quickstart", word)
    assert time.monotonic() - start < 20  # five are promised, on a machine that does nothing else
    is_clean(rloo_without_torch, ended)
    assert rloo_without_torch.left() == []
    assert f"where    command line: {word.lstrip('+')}\n" in ended.err
    for part in ISSUE[word]:
        assert part in ended.err


def test_a_key_misspelt_in_a_recipe_file_is_named_with_its_line(rloo_without_torch: Rloo) -> None:
    (rloo_without_torch.folder / "sub").mkdir()
    (rloo_without_torch.folder / "sub" / "my.yaml").write_text(MINE)
    ended = rloo_without_torch("train", "+recipe=sub/my.yaml", "seed=-1", "+nonsense=1")
    is_clean(rloo_without_torch, ended)
    places = [line.split(None, 1)[1] for line in ended.err.splitlines() if "  where " in line]
    assert places == [  # as written: the command line's words, then the file's lines
        "command line: seed=-1",
        "command line: nonsense=1",
        "sub/my.yaml:8",
        "sub/my.yaml:9",
        "sub/my.yaml:10",
    ]
    assert "did you mean algorithm.num_generations" in ended.err
    assert rloo_without_torch.left() == ["sub", "sub/my.yaml"]


# Every other refusal, in this process.

CASES: dict[str, list[str]] = {
    "--algorithm.beta=0.1": ["is not a flag of rloo", "fix      algorithm.beta=0.1"],
    "--dryrun": ["--dryrun is not a flag", "command line: --dryrun"],
    "algorithm.beta": ["is not key=value", "algorithm.beta=VALUE"],
    "algorithm.beta=": ["valid number, got ''"],
    "algorithm.beta=inf": ["finite number, got inf"],
    "algorithm.beta=-0.1": ["greater than or equal to 0, got -0.1"],
    "algorithm.beta=0,1": ["Ambiguous value", "command line: algorithm.beta=0,1"],
    "train.prompts_per_step=2.5": ["valid integer", "got 2.5"],
    "model.dtype=fp16": ["'auto', 'float32', 'bfloat16' or 'float16'", "got 'fp16'"],
    "generation.max_completion_length=0": ["greater than or equal to 1"],
    "train.micro_batch_size=6": ["does not hold whole groups", "train.micro_batch_size=4 or "],
    "max_steps=null": ["exactly one of max_steps, total_episodes, train.epochs", "none of them"],
    "total_episodes=10": ["found max_steps=2 and total_episodes=10", "total_episodes=null"],
    "reward_weights=[1,2]": ["TRL >=0.22 calls it so", "reward.<name>.weight"],
    "kl_coef=0.1": ["write algorithm.beta instead"],
    "cliprange=0.2": ["write algorithm.epsilon instead"],
    "num_ppo_epochs=4": ["write algorithm.num_iterations instead"],
    "response_length=53": ["write generation.max_completion_length instead"],
    "reward=accuracyy": ["there is no reward 'accuracyy'", "fix      reward=accuracy\n"],
    "reward=[length_tokens,lenght_chars]": ["'lenght_chars'", "reward=length_chars"],
    "reward=null": ["no reward is chosen", "fix      reward=accuracy"],
    "reward=[]": ["no reward is chosen"],
    "model=null": ["model has no value"],
    "algorithm=rlo": ["there is no algorithm 'rlo'", "algorithm=rloo"],
    "generation=vlm": [
        "there is no generation 'vlm'",
        "generation is one of: replay, transformers",
    ],
    "+debug=gpu": ["there is no debug 'gpu'", "debug is one of: cpu"],
    "model.path=./nothing": ["does not exist", "looked at "],
    "model.path=make:adition": ["rloo has no such model", "model.path=make:addition"],
    "data.path=nothing.jsonl": ["'nothing.jsonl' does not exist", "looked at "],
    "model.path=${model.pth}": ["model.path: cannot be resolved", "'model.pth' not found"],
    "name=${oc.env:NOT_SET_HERE}": ["name: cannot be resolved", "NOT_SET_HERE"],
    "+model._target_=os.system": ["a config names no Python objects", "nothing was run"],
    "model.path=[": ["does not compose", "command line: model.path=["],
    "~nothing": ["does not compose", "command line: ~nothing"],
    "~algorithm.beta": ["algorithm.beta has no value", "command line: ~algorithm.beta"],
    "hydra.run.dir=elsewhere": ["hydra.run.dir is not a key of rloo", "root=FOLDER"],
    "name=../elsewhere": ["name = '../elsewhere' is not valid"],
}


@pytest.mark.parametrize("word", CASES)
def test_it_is_refused_with_a_reason(word: str, said) -> None:
    text = said(word)
    assert text.startswith("error: ")
    for part in CASES[word]:
        assert part in text


def test_mini_batches_that_do_not_divide_the_prompts_are_refused_with_both_neighbours(said) -> None:
    text = said("train.prompts_per_step=5", "algorithm.num_minibatches=2")
    assert "5 = 2 * 2 + 1" in text and "train.prompts_per_step=4 or 6" in text


def test_a_filter_that_bends_the_sampler_is_refused_with_a_correction(said) -> None:
    text = said("generation.top_p=0.9", "algorithm.correction.mode=truncate")
    assert "generation.top_p=1.0, or algorithm.correction.mode=none" in text


def test_lengths_beyond_the_models_context_are_refused_with_the_sum(said, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"max_position_embeddings": 64}')
    text = said("model.path=./model", "data.max_prompt_length=60")
    assert "context of 64 tokens" in text and "60 + max_completion_length 16 = 76" in text
    assert "data.max_prompt_length=48" in text
    text = said("model.path=./model", "generation.max_completion_length=65")
    assert "64 tokens" in text and "generation.max_completion_length=32" in text


def test_a_recipe_misspelt_is_answered_with_the_nearest_and_the_list(said) -> None:
    text = said(recipe="+recipe=tldr_1B")
    assert "there is no recipe 'tldr_1B'" in text and "+recipe=tldr_1b" in text
    assert all(name in text for name in paths.recipe_files())


def test_without_a_recipe_what_has_no_value_is_named(said) -> None:
    text = said(recipe="")
    assert "model.path has no value" in text and "data.path has no value" in text


def test_at_most_twenty_errors_are_shown_and_the_rest_counted(said) -> None:
    text = said(*(f"nonsense{i}=1" for i in range(23)))
    assert text.count("error: ") == 20 and text.rstrip().endswith("... and 3 more")


def test_recipe_may_be_written_without_its_plus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["rloo"])
    for words in (["recipe=smoke"], ["seed=7", "+recipe=smoke"], ["+debug=cpu", "recipe=tldr_1b"]):
        assert main.find_verb(["train", "--dry-run", *words])() == 0
    out = capsys.readouterr().out
    assert out.count("run        runs/smoke") == 2 and out.count("runs/debug/tldr_1b") == 1
    assert "seed: 7" in out


# Flags.


def test_flags_may_stand_anywhere(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["rloo"])
    said = []
    for words in (
        ["--cfg", "job", "+recipe=smoke", "seed=9"],
        ["+recipe=smoke", "--cfg=job", "seed=9"],
        ["seed=9", "+recipe=smoke", "-c", "job"],
    ):
        assert main.find_verb(["train", *words])() == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2]
    assert "seed: 9" in said[0] and "path: make:tiny" in said[0]


@pytest.mark.parametrize("words", [["--cfg"], ["--cfg", "jobs"], ["--config-dir"]])
def test_a_flag_without_its_value_is_refused(words: list[str]) -> None:
    with pytest.raises(RunError) as error:
        main.find_verb(["train", "+recipe=smoke", *words])()
    assert error.value.code == 2 and words[0] in error.value.render()


@pytest.mark.parametrize("flags", [["--errors=json"], ["--errors", "json"]], ids=" ".join)
def test_errors_can_be_had_as_json(flags: list[str], rloo: Rloo) -> None:
    ended = rloo("train", *flags, "+recipe=smoke", "algorithm.beta=abc", "+algorithm.betta=3")
    assert ended.code == 2
    first, second = json.loads(ended.err)
    assert first["where"] == "command line: algorithm.beta=abc" and first["code"] == 2
    assert first["what"] and first["why"] and first["fix"] and first["more"]
    assert second["what"] == "algorithm.betta is not a key"


def test_a_traceback_is_shown_on_request_only(rloo: Rloo) -> None:
    plain = rloo("train", "+recipe=smoke", "algorithm.beta=abc")
    debug = rloo("train", "+recipe=smoke", "algorithm.beta=abc", "--debug")
    assert plain.code == debug.code == 2
    assert "Traceback" not in plain.err and "Traceback" in debug.err
    assert plain.err in debug.err


def test_a_dry_run_prints_the_plan_and_leaves_nothing(rloo_without_torch: Rloo) -> None:
    ended = rloo_without_torch("train", "+recipe=tldr_1b", "--dry-run")
    assert ended.code == 0 and ended.err == ""
    assert "512 prompts x 2 completions = 1024 completions" in ended.out
    assert "977 (total_episodes 1000000 / 1024)" in ended.out
    assert "2 iterations x 2 mini-batches = 4 per step" in ended.out
    assert "\nalgorithm:\n  name: rloo\n" in ended.out
    assert rloo_without_torch.left() == []


IDLE = "note: algorithm.loss_type has no effect: algorithm.policy_loss, ratio_level and loss_agg"


def test_a_key_that_does_nothing_is_told_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text("defaults: [smoke]\nalgorithm: {loss_type: sapo}\n")
    asked = {
        ("+recipe=smoke", "algorithm.loss_type=sapo"): 1,
        ("+recipe=my.yaml",): 1,
        ("+recipe=smoke", "algorithm=grpo", "algorithm.loss_type=sapo"): 0,
        ("+recipe=smoke", "algorithm.loss_type=null"): 0,
        ("+recipe=smoke", "algorithm.epsilon=0.2"): 0,  # what it is anyway
        ("+recipe=smoke", "algorithm.epsilon=0.3"): 1,
    }
    for words, count in asked.items():
        assert main.find_verb(["train", "--dry-run", *words])() == 0
        assert capsys.readouterr().out.count("note: algorithm.") == count, words


def test_a_run_begins_with_what_has_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = lambda *_: print("the ranks run") or 0  # noqa: E731
    monkeypatch.setattr(launcher.processes, "run_processes", ran)
    assert main.find_verb(["train", "+recipe=smoke", "algorithm.loss_type=sapo"])() == 0
    assert IDLE in capsys.readouterr().out.partition("the ranks run")[0]


def test_a_sweep_checks_every_job_and_ends_with_the_first_bad_code(rloo: Rloo) -> None:
    words = ["train", "-m", "+recipe=smoke", "algorithm.beta=0.0,abc,0.1", "--dry-run"]
    ended = rloo(*words)
    assert ended.code == 2 and ended.out.endswith("3 jobs, 1 failed\n")
    assert ended.out.count("run        runs/smoke-") == 2
    assert ended.err.count("error: ") == 1 and "algorithm.beta=abc" in ended.err
    assert rloo.left() == []

"""`rloo eval`: a run, its checkpoints, a recipe's model; what it leaves, and what it refuses."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from assert_refused import assert_refused
from cli_cases import Ended, Rloo, strict

from rloo_cli.cli import eval_target, main
from rloo_cli.utils.errors import ConfigError
from rloo_cli.utils.files import read_json

pytestmark = pytest.mark.process

# What a reward may know of the training is to be the same when its checkpoint is evaluated.
MINE = """
def state(completion_ids, trainer_state, **_):
    t = trainer_state
    past = sum(row["reward"] for row in t.log_history)
    known = [t.global_step, t.step, t.max_steps, t.epoch, t.episode, t.num_input_tokens_seen]
    whole = sum((i + 1) * v for i, v in enumerate(known)) + t.num_train_epochs + past
    return [whole + len(ids) for ids in completion_ids]
"""
TRAIN = [
    "train",
    "+recipe=smoke",
    "+reward.state={type: function, path: mine.py:state, kwargs: {}}",
]
TRAIN += ["max_steps=3", "eval.every=1", "checkpoint.every=1", "checkpoint.keep_last=3"]
TRAIN += ["eval.num_generations=2", "eval.sets.hard={split: test}", "logging.samples=0"]
TRAIN += ["eval.sets.sums={path: make:addition, split: 'test[:5]'}", "train.learning_rate=1e-3"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, fast: dict[str, str]) -> Rloo:
    """A folder in which a small run was trained."""
    rloo = Rloo(tmp_path_factory.mktemp("eval"), fast)
    (rloo.folder / "mine.py").write_text(MINE)
    ended = rloo(*TRAIN)
    assert ended.code == 0, ended.said
    return rloo


@pytest.fixture
def run(trained: Rloo) -> Path:
    return trained.folder / "runs" / "smoke"


def logged(run: Path, step: int) -> dict[str, object]:
    rows = [r for r in strict(run / "metrics.jsonl") if "eval_hard_reward" in r]
    (row,) = [r for r in rows if r["step"] == step]
    return row


def own_files(run: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a run but those of `rloo eval`."""
    files = [p for p in run.rglob("*") if p.is_file() and p.parts[len(run.parts)] != "eval"]
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in files}


# What it says of a run.


@pytest.mark.process
def test_the_final_model_gives_the_last_evaluation_of_its_run_again(
    trained: Rloo, run: Path
) -> None:
    before = own_files(run)
    ended = trained("eval", "runs/smoke")
    assert ended.code == 0 and ended.err == "", ended.said
    root = run / "eval" / "final"
    assert {p.name for p in root.iterdir()} == {
        "config.yaml",
        "about.json",
        "metrics.json",
        "samples_hard.jsonl",
        "samples_sums.jsonl",
    }
    assert read_json(root / "metrics.json") == logged(run, 3)
    for name in ("hard", "sums"):
        theirs = (run / "samples" / f"eval_{name}_000003.jsonl").read_text()
        assert (root / f"samples_{name}.jsonl").read_text() == theirs
    assert own_files(run) == before
    for part in ("held out", "hard", "sums", "avg@2", "pass@2", "results        runs/smoke/eval"):
        assert part in ended.out
    settings = yaml.safe_load((root / "config.yaml").read_text())
    assert settings["model"]["path"] == "runs/smoke/final"


@pytest.mark.process
def test_a_checkpoint_gives_the_evaluation_of_its_step_again(trained: Rloo, run: Path) -> None:
    ended = trained("eval", "runs/smoke/checkpoint-1")
    assert ended.code == 0, ended.said
    root = run / "eval" / "checkpoint-1"
    assert read_json(root / "metrics.json") == logged(run, 1)
    theirs = (run / "samples" / "eval_hard_000001.jsonl").read_text()
    assert (root / "samples_hard.jsonl").read_text() == theirs
    assert logged(run, 1) != logged(run, 3) | {"step": 1}


@pytest.mark.process
def test_other_words_have_results_of_their_own_and_replace_only_those(
    trained: Rloo, run: Path
) -> None:
    words = ["eval", "smoke/final", "eval.max_samples=3", "eval.num_generations=1"]
    words += ["~eval.sets.sums", "reward.state.weight=0.0"]
    ended = trained(*words)
    assert ended.code == 0, ended.said
    (root,) = run.glob("eval/final-*")
    row = read_json(root / "metrics.json")
    assert row["eval_hard_samples"] == 3 and not [k for k in row if "sums" in k or "@" in k]
    assert len(strict(root / "samples_hard.jsonl")) == 3
    (root / "metrics.json").write_text("old")
    (root / "stale").write_text("")
    assert trained(*words).code == 0
    assert read_json(root / "metrics.json") == row and not (root / "stale").exists()
    assert [p.name for p in (run / "eval").iterdir() if p.name.startswith(".")] == []


@pytest.mark.process
def test_results_that_do_not_come_to_their_end_leave_the_old_ones(trained: Rloo, run: Path) -> None:
    root = run / "eval" / "checkpoint-2"
    root.mkdir(parents=True)
    (root / "about.json").write_text("{}")
    faults = {"RLOO_ALLOW_FAULTS": "1"}
    for action, code in (("kill9", 6), ("term", 75), ("raise", 1)):
        ended = trained("eval", "runs/smoke/checkpoint-2", RLOO_FAULTS=f"eval@2={action}", **faults)
        assert ended.code == code, ended.said
        assert [p.name for p in root.iterdir()] == ["about.json"]
        assert [p.name for p in (run / "eval").iterdir() if p.name.startswith(".")] == []
    wrong = trained("eval", "runs/smoke/checkpoint-2", "eval.sets.hard.split=nothing")
    assert wrong.code == 4 and "eval.sets.hard.split" in wrong.err, wrong.said
    assert not [*run.glob("eval/checkpoint-2-*")]


@pytest.mark.process
def test_a_reward_that_fails_ends_it_with_5(trained: Rloo, run: Path) -> None:
    (trained.folder / "broken.py").write_text("def f(completions):\n    return [None, 'x']\n")
    word = "reward.state.path=broken.py:f"
    ended = trained("eval", "runs/smoke/final", word, "reward.state.timeout_s=9.0")
    assert ended.code == 5 and "broken.py" in ended.err, ended.said


# A recipe's model.


def test_a_recipes_model_is_scored_as_its_run_would_score_it_at_the_start(rloo: Rloo) -> None:
    words = ["+recipe=smoke", "logging.samples=0", "max_steps=1"]
    ended = rloo("eval", *words)
    assert ended.code == 0, ended.said
    (root,) = (rloo.folder / "runs" / "eval" / "smoke").iterdir()
    assert root.name.startswith("tiny-") and (root / "samples.jsonl").is_file()
    ended = rloo("train", *words)  # the folder of the run is still free
    assert ended.code == 0, ended.said
    run = rloo.folder / "runs" / "smoke"
    first = strict(run / "metrics.jsonl")[0]
    assert read_json(root / "metrics.json") == first
    theirs = (run / "samples" / "eval_000000.jsonl").read_text()
    assert (root / "samples.jsonl").read_text() == theirs
    # Another recipe, with the trained model.
    final = ["model.path=runs/smoke/final", "eval.max_samples=2", "data.eval_split=train"]
    ended = rloo("eval", "+recipe=tldr_1b", "+debug=cpu", *final, "eval.num_generations=2")
    assert ended.code == 0, ended.said
    (root,) = (rloo.folder / "runs" / "debug" / "eval" / "tldr_1b").iterdir()
    assert root.name.startswith("final-")
    row = read_json(root / "metrics.json")
    assert row["eval_samples"] == 2 and "eval_reward/tldr_rm/mean" in row and "eval_avg@2" in row


# What it takes, and refuses: in this process, with nothing loaded.


@pytest.fixture
def here(trained: Rloo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, in the current folder."""
    shutil.copytree(trained.folder / "runs" / "smoke", tmp_path / "runs" / "smoke")
    shutil.rmtree(tmp_path / "runs" / "smoke" / "eval", ignore_errors=True)
    shutil.copy(trained.folder / "mine.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "smoke"


def source(word: str, *words: str) -> str:
    return str(eval_target.eval_target_of_run(word, [*words]).provenance["source"])


@pytest.mark.process
def test_a_run_means_its_final_model_or_else_its_newest_whole_checkpoint(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert source("runs/smoke") == source("smoke") == "runs/smoke/final"
    shutil.rmtree(here / "final")
    assert source("runs/smoke") == "runs/smoke/checkpoint-3"
    (here / "checkpoint-3" / "model.safetensors").write_bytes(b"cut")
    assert source("runs/smoke") == "runs/smoke/checkpoint-2"
    assert "checkpoint-3 is skipped" in capsys.readouterr().out
    for n in (1, 2):
        shutil.rmtree(here / f"checkpoint-{n}")
    with pytest.raises(ConfigError, match="runs/smoke"):
        source("runs/smoke")


def test_a_damaged_checkpoint_is_refused(here: Path) -> None:
    weights = here / "checkpoint-3" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ConfigError, match="hash"):
        source("runs/smoke/checkpoint-3")
    (here / "checkpoint-2" / "MANIFEST.json").unlink()
    with pytest.raises(ConfigError, match="checkpoint-2"):
        source("runs/smoke/checkpoint-2")


def test_what_the_checkpoint_has_itself_is_not_looked_for_elsewhere(here: Path) -> None:
    path = here / "config.yaml"
    values = yaml.safe_load(path.read_text())
    gone = {"path": "./gone", "tokenizer": "./gone", "ref_path": "./gone", "chat_template": "no"}
    values["model"] |= gone
    path.write_text(yaml.safe_dump(values))
    model = eval_target.eval_target_of_run("runs/smoke", []).config.model
    assert (model.path, model.tokenizer, model.ref_path) == ("runs/smoke/final", None, None)


def test_words_change_keys_as_they_do_elsewhere(here: Path) -> None:
    words = ["eval.sets.more={split: train, max_samples: 4}", "eval.sets.hard={max_samples: 2}"]
    words += ["generation.stop=[a,'b c']", "eval.temperature=0.5", "~eval.sets.sums"]
    subject = eval_target.eval_target_of_run("runs/smoke", words)
    assert {n: s.max_samples for n, s in subject.config.held_out.items()} == {"hard": 2, "more": 4}
    assert subject.config.generation.stop == ["a", "b c"]
    assert subject.config.eval.temperature == 0.5
    other = eval_target.eval_target_of_run("runs/smoke", words[:1])
    assert subject.output_dir != other.output_dir and subject.output_dir.parent == Path(
        "runs/smoke/eval"
    )
    assert (
        eval_target.eval_target_of_run("runs/smoke", [*reversed(words)]).output_dir
        == subject.output_dir
    )


def test_a_run_made_longer_says_of_its_final_model_which_step_it_is_of(here: Path) -> None:
    facts = read_json(here / "run.json")
    facts["progress"]["step"] = 5
    (here / "run.json").write_text(json.dumps(facts))
    about = eval_target.eval_target_of_run("runs/smoke/final", []).provenance
    assert (about["state"]["step"], about["state"]["updates"]) == (3, 3)


WRONG = {
    "eval.num_generation=4": ["eval.num_generation is not a key", "eval.num_generations"],
    "eval.sets.hard.splitt=x": ["eval.sets.hard.splitt is not a key"],
    "seed=abc": ["seed = 'abc' is not valid", "command line: seed=abc"],
    "seed.more=1": ["seed.more is not a key"],
    "model.path=other": ["model.path cannot be changed"],
    "reward=accuracy": ["not a single key=value"],
    "+debug=cpu": ["not a single key=value"],
    "eval.max_samples=1,2": ["not a single key=value"],
    "eval.sets.hard={": ["{"],
    "eval.temperature=${generation.temperature}": ["eval.temperature"],
    "hf_token=x": ["this looks like a secret"],
}


@pytest.mark.parametrize("word", WRONG)
def test_a_word_that_is_wrong_is_named(here: Path, word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        eval_target.eval_target_of_run("runs/smoke", [word])
    for part in WRONG[word]:
        assert part in str(refused.value)


LINES = [f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]" for a, b in zip("abcd", "bcde", strict=True)]
BOMB = "\n".join(["a: &a [x]", *LINES, "f: [*e, *e]"])
HOSTILE = {
    "a: !!python/object/apply:os.system [touch pwned]": "not valid YAML",
    "seed: [": "not valid YAML",
    "- a\n- b": "not the config of a run",
    "": "not the config of a run",
    "model: {}": "not the config of a run",
    BOMB: "too large",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_config_that_is_none_is_refused(here: Path, text: str) -> None:
    (here / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=HOSTILE[text]):
        eval_target.eval_target_of_run("runs/smoke", [])
    assert not Path("pwned").exists()


def test_a_config_is_data_and_checked_like_any_other(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVATE", "s3cret")
    path = here / "config.yaml"
    whole = yaml.safe_load(path.read_text())
    changes = {
        ("data", "split"): ("${oc.env:PRIVATE}", None),  # a split of that name: nothing is resolved
        ("seed", None): ("${oc.env:PRIVATE}", "seed = '${oc.env:PRIVATE}' is not valid"),
        ("model", "_target_"): ("os.system", "cannot name Python objects"),
        ("eval", "surprise"): (1, "eval.surprise is not a key"),
        ("reward", "state"): ({"type": "nothing"}, "unknown reward"),
    }
    for (section, leaf), (value, said) in changes.items():
        values = json.loads(json.dumps(whole))
        if leaf is None:
            values[section] = value
        else:
            values[section][leaf] = value
        path.write_text(yaml.safe_dump(values))
        if said is None:
            assert eval_target.eval_target_of_run("runs/smoke", []).config.data.split == value
            continue
        with pytest.raises(ConfigError) as refused:
            eval_target.eval_target_of_run("runs/smoke", [])
        assert said in str(refused.value) and "s3cret" not in str(refused.value)


def test_a_state_that_is_none_is_refused(here: Path) -> None:
    (here / "run.json").write_text(json.dumps({"progress": "far"}))
    (here / "summary.json").unlink()
    with pytest.raises(ConfigError, match="the step of"):
        eval_target.eval_target_of_run("runs/smoke/final", [])


def test_rewards_that_only_the_training_process_had_are_named(here: Path) -> None:
    path = here / "config.yaml"
    path.write_text(path.read_text().replace("mine.py:state", "python:state"))
    with pytest.raises(ConfigError, match=r"reward.state.path=file.py:state"):
        eval_target.eval_target_of_run("runs/smoke", [])
    eval_target.eval_target_of_run("runs/smoke", ["reward.state.path=mine.py:state"])


# Refusals cost nothing and leave nothing.

REFUSED = [
    [],
    ["nothing"],
    ["--multirun", "+recipe=smoke"],
    ["+recipe=smok"],
    ["+recipe=smoke", "eval.num_generation=4"],
    ["+recipe=smoke", "data.eval_split=null"],
    ["+recipe=smoke", "model.path=./nothing"],
    ["--config-dir", "nothing", "+recipe=smoke"],
]


@pytest.mark.slow_but(
    "", "+recipe=smoke eval.num_generation=4", "--config-dir nothing +recipe=smoke"
)
@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_a_refused_evaluation_imports_no_torch_and_leaves_nothing(
    words: list[str], rloo_without_torch: Rloo
) -> None:
    ended = rloo_without_torch("eval", *words)
    assert ended.code == 2, ended.said
    assert "Traceback" not in ended.said and ended.err.startswith("error: ")
    assert rloo_without_torch.left() == []


def test_what_is_missing_is_named_with_both_keys_and_with_a_run_that_is_there(
    here: Path, sentence: Callable[..., None]
) -> None:
    with pytest.raises(ConfigError) as none:
        main.find_verb(["eval", "+recipe=smoke", "data.eval_split=null"])()
    for key in ("data.eval_split", "eval.sets", "data.eval_split=train"):
        assert key in str(none.value)
    with pytest.raises(ConfigError) as wrong:
        main.find_verb(["eval", "runs/smoek"])()
    assert_refused(wrong, key="runs/smoek", fix="rloo eval smoke")
    shutil.copytree(here / "final", "model")
    with pytest.raises(ConfigError) as wrong:
        main.find_verb(["eval", "model"])()
    assert_refused(wrong, fix="rloo eval +recipe=NAME model.path=model")
    Path("final").mkdir()
    with pytest.raises(ConfigError) as wrong:
        main.find_verb(["eval", "final"])()
    sentence(wrong)


def test_a_refused_data_set_leaves_nothing_at_all(rloo: Rloo) -> None:
    ended = rloo("eval", "+recipe=smoke", "data.eval_split=nothing")
    assert ended.code == 4 and "data.eval_split" in ended.err, ended.said
    assert rloo.left() == []


@pytest.mark.slow
def test_ctrl_c_ends_it_and_nothing_is_kept(rloo: Rloo) -> None:
    (rloo.folder / "slow.py").write_text(
        "import time\ndef f(completions):\n    print('asked', flush=True)\n    time.sleep(60)\n"
    )
    words = ["reward=function", "reward.function.path=slow.py:f"]
    process = rloo.start("eval", "+recipe=smoke", *words)
    for _ in range(600):
        if "asked" in (rloo.folder / "out").read_text():
            break
        time.sleep(0.1)
    process.send_signal(2)
    assert process.wait(30) == 75
    said: Ended | str = (rloo.folder / "out").read_text()
    assert "stopped by SIGINT" in str(said) and "Traceback" not in str(said)
    assert rloo.left() == ["out", "slow.py"]

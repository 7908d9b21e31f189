"""`rloo record`: a sealed run; what was changed in it is found, by its hash or by its score."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from assert_refused import assert_refused
from cli_cases import strict
from fork_cases import Forked
from loop_cases import cache
from replay_cases import last_line

from rloo_cli.checkpoint import manifest
from rloo_cli.cli import main, record
from rloo_cli.config.check import check_config
from rloo_cli.config.compose import compose_config
from rloo_cli.inspection import record_score
from rloo_cli.rewards.engine.ready import build_rewards
from rloo_cli.utils.errors import ConfigError, DataError
from rloo_cli.utils.files import update_json

# The quickstart with a smaller model, which answers nothing right.
QUICK = (
    "train", "+recipe=quickstart", "model=tiny", "max_steps=2", "train.prompts_per_step=2",
    "algorithm.num_generations=2", "eval.every=1", "eval.max_samples=8", "eval.num_generations=2",
    "distributed.threads=1", "logging.console=plain",
)  # fmt: skip
SAMPLES = "samples/eval_000002.jsonl"


@pytest.fixture(scope="module")
def forked(fast: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Forked:
    """A folder with a run of the quickstart and its record."""
    forked = Forked(fast, tmp_path_factory.mktemp("recorded"))
    assert forked(*QUICK) == 0, forked.said()
    assert forked("record", "quickstart", "--out", "record") == 0, forked.said()
    return forked


@pytest.fixture
def sealed(forked: Forked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the record, for one test alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLOO_CACHE", cache())
    yield Path(shutil.copytree(forked.folder / "record", "record"))


def verify(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """`rloo record verify record` -> its exit code and its answer as JSON."""
    capsys.readouterr()
    code = main.find_verb(["record", "verify", "record", "--json", *words])()
    return code, json.loads(capsys.readouterr().out)


def edit_line(path: Path, index: int, **changes: object) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[index] |= changes
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def edit_text(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def edit_completion(folder: Path) -> None:
    """The completion becomes the right answer."""
    right = strict(folder / SAMPLES)[0]["row"]["answer"]
    edit_line(folder / SAMPLES, 0, completion=str(right))


# What is changed -> the file that holds it, the file that its recomputation names, and the change.
TAMPERED: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    "a completion": (SAMPLES, f"{SAMPLES}:1:", edit_completion),
    "a score": (SAMPLES, f"{SAMPLES}:1:", lambda f: edit_line(f / SAMPLES, 0, score=1.0)),
    "a metric": (
        "metrics.jsonl", "metrics.jsonl: eval_reward ",
        lambda f: edit_line(f / "metrics.jsonl", -1, eval_reward=1.0),
    ),
    "the seed": (
        "config.yaml", "record.json: the seed ",
        lambda f: edit_text(f / "config.yaml", "\nseed: 1\n", "\nseed: 2\n"),
    ),
    "the record's score": (
        "record.json", "record.json: value ",
        lambda f: update_json(f / "record.json", score={"metric": "eval_reward", "value": 1.0,
                                                        "step": 2}),
    ),
}  # fmt: skip


def test_a_record_has_everything_and_verifies(
    forked: Forked, sealed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {str(path.relative_to(sealed)) for path in sealed.rglob("*") if path.is_file()}
    assert names >= {"recipe.yaml", "config.yaml", "env.json", "metrics.jsonl", SAMPLES}
    facts = json.loads((sealed / "record.json").read_text())
    assert facts["recipe"] == "quickstart" and facts["seed"] == 1 and facts["weights"]
    code, answer = verify(capsys)
    assert code == 0 and answer["problems"] == []
    assert answer["score"] == facts["score"]
    line = last_line(forked.folder / "runs" / "quickstart")
    assert facts["score"]["low"] == line["eval_reward/low"]


@pytest.mark.parametrize("what", TAMPERED)
def test_a_changed_file_is_named_by_the_seal(
    what: str, sealed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, _, change = TAMPERED[what]
    change(sealed)
    code, answer = verify(capsys)
    assert code == 20 and answer["problems"][0].startswith(f"{file} has ")


@pytest.mark.parametrize("what", TAMPERED)
def test_a_record_that_was_sealed_again_is_found_out_by_its_score(
    what: str, sealed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, named, change = TAMPERED[what]
    change(sealed)
    reseal(sealed)
    code, answer = verify(capsys)
    assert code == 20 and answer["problems"][0].startswith(named), answer


def reseal(folder: Path) -> None:
    (folder / "MANIFEST.json").unlink()
    manifest.write_manifest(folder, {})


def test_the_seal_itself_and_a_file_more_are_noticed(
    sealed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sealed / "samples" / "more.jsonl").write_text("{}\n")
    code, answer = verify(capsys)
    assert code == 20 and "samples/more.jsonl is not listed" in answer["problems"][0]
    (sealed / "samples" / "more.jsonl").unlink()
    edit_text(sealed / "MANIFEST.json", '"format": 1', '"format": 0')
    code, answer = verify(capsys)
    assert code == 20 and "MANIFEST.json was changed" in answer["problems"][0]


def test_content_that_no_run_writes_is_refused(sealed: Path) -> None:
    for line in ("[]", '{"greedy": true}'):
        (sealed / SAMPLES).write_text(f"{line}\n")
        reseal(sealed)
        with pytest.raises(DataError) as refused:
            main.find_verb(["record", "verify", "record"])()
        assert_refused(refused, 4, "record")


def test_a_reward_that_reads_what_samples_do_not_hold_is_refused() -> None:
    def mine(completion_ids: list[list[int]]) -> list[float]:
        return [float(sum(ids)) for ids in completion_ids]

    words = ["+recipe=smoke", "reward=[]"]
    words.append("+reward.mine={type: function, path: 'python:mine', kwargs: {}}")
    rewards = build_rewards(check_config(compose_config(words)).rewards, {"mine": mine})
    with pytest.raises(ConfigError) as refused:
        record_score._check_rewards(rewards)
    assert_refused(refused, 2, "reward.mine")
    shipped = build_rewards(check_config(compose_config(["+recipe=smoke"])).rewards, {})
    record_score._check_rewards(shipped)  # one counts the tokens


def test_a_second_seed_that_falls_short_is_found(
    forked: Forked, sealed: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    started = []

    def launch(composed: Any) -> int:
        started.append(composed)
        folder = Path("runs", composed.values["name"])
        if not folder.exists():
            shutil.copytree(forked.folder / "runs" / "quickstart", folder)
        return 0

    monkeypatch.setattr(record.launcher, "launch_run", launch)
    code, answer = verify(capsys, "--again")
    assert code == 0 and answer["again"]["reached"] is True
    assert started[0].values["seed"] == answer["again"]["seed"] == 2
    values = {"eval_reward": -1.0, "eval_reward/low": -1.1, "eval_reward/high": -0.9}
    edit_line(Path("runs/quickstart-seed-2/metrics.jsonl"), -1, **values)
    code, answer = verify(capsys, "--again")
    assert code == 20 and answer["again"]["reached"] is False
    assert answer["again"]["score"]["value"] == -1.0
    monkeypatch.setattr(record.launcher, "launch_run", lambda composed: 75)
    assert verify(capsys, "--again", "--seed", "7")[0] == 75


def test_a_second_seed_is_trained(forked: Forked) -> None:
    assert forked("record", "verify", "record", "--again", "--seed", "5") == 0, forked.said()
    line = last_line(forked.folder / "runs" / "quickstart-seed-5")
    assert line["step"] == 2 and "reaches the record's score" in forked.said()


def test_a_run_that_nobody_could_check_is_not_recorded(
    forked: Forked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(forked.folder)
    run = tmp_path / "run"

    def refuse(key: str, *words: str) -> None:
        with pytest.raises(ConfigError) as refused:
            main.find_verb(["record", *(words or (str(run),))])()
        assert_refused(refused, 2, key)
        assert not list(tmp_path.glob("**/record*"))

    def copy() -> None:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree("runs/quickstart", run)

    copy()
    update_json(run / "run.json", state="stopped")
    refuse("resume=auto")
    copy()
    update_json(run / "run.json", came_from="runs/other/checkpoint-2")
    refuse("runs/other/checkpoint-2")
    copy()
    edit_text(run / "config.yaml", "extract: text", "extract: text\n  length_tokens: {type: x}")
    refuse("config.yaml")
    copy()
    edit_text(run / "run.json", '"prompts"', '"promises"')
    refuse("rloo doctor")
    refuse("record", "quickstart", "--out", "record")  # it exists
    refuse("runs/quickstart", "verify", "runs/quickstart")  # not a record
    refuse("--again", "verify", "record", "--seed", "3")
    refuse("rloo record verify FOLDER --again", "quickstart", "--again")

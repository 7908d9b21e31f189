"""The folder that a run takes: what was there before is never changed, and never taken away."""

import json
import os
import random
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from assert_refused import assert_refused
from cli_cases import Ended, Rloo
from fork_cases import Forked
from resume_cases import WORDS

from rloo_cli.checkpoint import manifest, rollback, run_folder, save
from rloo_cli.checkpoint.resume import ResumePlan
from rloo_cli.cli import eval as evaluation
from rloo_cli.launch import launcher
from rloo_cli.utils.errors import ConfigError
from rloo_cli.utils.files import read_json

RUN = ("train", "+recipe=smoke", "max_steps=1", "eval.at_start=false", "data.eval_split=null",
       "logging.samples=0", "logging.samples_every=100")  # fmt: skip
REFUSED = "data.path=bad.jsonl"
RAISES = ("reward=function", "reward.function.path=bad.py:score")
# What a user may have in a folder, much of it by names that a run of ours uses too.
FILES = [
    ".env", ".git/HEAD", ".hidden/deep/er", "notes.txt", "config.yaml", "overrides.txt", "env.json",
    "run.json", "server.json", "server_2.json", "logs/old.log", "logs/server/server_1.log",
    "logs/server/config.yaml", "logs/attempt_1/config.yaml", "logs/attempt_1/rank_0.log",
    "metrics.jsonl", "samples/step_000001.jsonl", "final/model.safetensors", "latest",
    "checkpoint-1/MANIFEST.json", "checkpoint-7/mine", ".tmp-final-a1/file",
    ".trash-checkpoint-1-a1/file", "debug/reward_error.json", "adapter/file",
]  # fmt: skip
FOLDERS = ["logs", "samples", ".git", "final", "empty/inner", "checkpoint-2", "debug", "adapter"]
TEXTS = ("", "mine\n", "{}", "[]", "null", '{"state": "finished"}', '{"attempt": 1, "state": 5}')


def wreckage(root: Path) -> None:
    """What makes a run be refused, and what makes one fail."""
    (root / "bad.jsonl").write_text('{"prompt": null}\n')
    (root / "bad.py").write_text("def score(completions):\n    raise ValueError('no')\n")


def fill(folder: Path, outside: Path, draw: random.Random) -> None:
    """Put anything into a folder: files, folders, links to things in and outside of it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in draw.sample(FILES, draw.choice([0, 1, 1, 2, 5])):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(draw.choice(TEXTS))
        path.chmod(draw.choice([0o644, 0o600, 0o400]))
        os.utime(path, (1e9, 1e9 + draw.randrange(10**6)))
    for name in draw.sample(FOLDERS, draw.choice([0, 0, 1, 2])):
        if not (folder / name).exists():
            (folder / name).mkdir(parents=True)
    targets = [outside / "file", outside / "folder", outside / "nowhere", folder]
    for name in draw.sample([*FOLDERS, *FILES], draw.choice([0, 0, 1, 2])):
        path = folder / name
        if path.parent.is_dir() and not path.exists() and not path.is_symlink():
            path.symlink_to(draw.choice(targets))


def seen(root: Path) -> dict[str, Any]:
    """Every file, folder and link below a folder: what it holds, its mode, when it was changed."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        facts = path.lstat()
        if path.is_symlink():
            found[str(path)] = ("link", os.readlink(path), facts.st_mtime_ns)
        elif path.is_dir():
            found[str(path)] = ("folder", facts.st_mode)
        else:
            held = path.read_bytes() if facts.st_mode & stat.S_IRUSR else b""
            found[str(path)] = ("file", facts.st_mode, facts.st_mtime_ns, held)
    return found


# How a run is aimed at the folder `mine`, which somebody has filled.
AIMS = {
    "at it": ("root=.", "name=mine"),
    "at it by its path": ("root=elsewhere/..", "name=./mine"),
    "at the one above": ("root=.", "name=."),
    "below it": ("root=mine", "name=new"),
    "far below it": ("root=mine/a", "name=b/c"),
    "beside it": ("root=.", "name=other"),
    "through a link": ("root=.", "name=link"),
}
ENDS = {
    "refused": ((REFUSED,), ""),
    "fails": (RAISES, ""),
    "killed": ((), "gen.request@1=kill9"),
    "killed later": ((), "ckpt.rename@1=kill9"),
    "finishes": ((), ""),
}


@pytest.mark.slow_but("0")
@pytest.mark.parametrize("part", range(3))
def test_nothing_that_was_there_before_a_run_is_changed_or_gone(part: int, forked: Forked) -> None:
    for seed in range(8 * part, 8 * part + 8):
        draw, root = random.Random(seed), forked.folder / str(seed)
        outside = root / "outside"
        (outside / "folder").mkdir(parents=True)
        (outside / "file").write_text("theirs")
        (outside / "folder" / "inside").write_text("theirs")
        (root / "elsewhere").mkdir()
        fill(root / "mine", outside, draw)
        (root / "link").symlink_to(root / "mine")
        wreckage(root)
        before = seen(root)
        aim, end = draw.choice([*AIMS]), draw.choice([*ENDS])
        words, faults = ENDS[end]
        code = Forked(forked.env, root)(*RUN, *AIMS[aim], *words, faults=faults)
        said, after = (root / "out").read_text(), seen(root)
        changed = [p for p, facts in before.items() if after.get(p) != facts]
        assert not changed, (seed, aim, end, code, said)
        assert "Traceback" not in said.replace("bad.py", "") or end == "fails", (seed, said)
        if code in (2, 4):
            assert {*after} - {*before} == {str(root / "out")}, (seed, aim, end, said)


def test_what_a_refused_attempt_wrote_over_is_put_back_byte_for_byte(tmp_path: Path) -> None:
    theirs = dict.fromkeys(launcher.ATTEMPT_FILES, b"\xa1\r\nmine")
    for name, content in theirs.items():
        (tmp_path / name).write_bytes(content)
    plan = ResumePlan(tmp_path)
    before = launcher.snapshot_attempt_folder(plan)
    for name in theirs:
        (tmp_path / name).write_text("{}")
    launcher.restore_attempt_folder(plan, before)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == theirs


# What is refused, and what is not.

MINE = ({".env": "SECRET=1"}, {"logs/old.log": "old"}, {".git/HEAD": "ref", "logs/x": ""},
        {"config.yaml": "mine: 1"}, {"server.json": "{}"}, {"run.json": "{}"},
        {"run.json": "not json"}, {"logs/server/server_1.log": "mine"},
        {"logs/server/config.yaml": "a: 1"})  # fmt: skip


def test_a_folder_that_is_no_run_of_ours_is_refused_whatever_it_holds(tmp_path: Path) -> None:
    for number, files in enumerate(MINE):
        folder = tmp_path / str(number)
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        assert "not a run" in (run_folder.foreign_folder_reason(folder) or ""), files
    (tmp_path / "empty").mkdir()
    assert run_folder.foreign_folder_reason(tmp_path / "empty") is None
    (tmp_path / "logs").mkdir()
    assert run_folder.foreign_folder_reason(tmp_path) is not None


def test_a_server_waits_in_no_folder_of_somebody_else(rloo_without_torch: Rloo) -> None:
    mine = rloo_without_torch.folder / "runs" / "smoke"
    mine.mkdir(parents=True)
    (mine / "server.json").write_text('{"mine": 1}')
    ended = rloo_without_torch("vllm-serve", "+recipe=smoke")
    assert_refused(ended, 2, "runs/smoke")
    assert rloo_without_torch.left() == ["runs", "runs/smoke", "runs/smoke/server.json"]


def test_a_refused_attempt_leaves_a_run_as_it_was(copy: Path, forked: Forked) -> None:
    wreckage(forked.folder)
    before = seen(copy)
    words = (*WORDS, "resume=auto", "resume_allow_changes=true", REFUSED)
    assert forked(*words) == 4, forked.said()
    after = seen(copy)
    untimed = {p: f for p, f in after.items() if Path(p).name not in ("run.json", "overrides.txt",
               "env.json", "latest", "config.yaml")}  # fmt: skip
    assert {*after} == {*before} and untimed.items() <= before.items()
    assert {p: f[-1] for p, f in after.items() if f[0] == "file"} == {
        p: f[-1] for p, f in before.items() if f[0] == "file"
    }
    assert os.readlink(copy / "logs" / "latest") == "attempt_1"
    assert forked(*WORDS, "resume=auto") == 0, forked.said()


@pytest.mark.slow
def test_a_path_that_can_be_no_folder_is_one_clear_error(
    rloo_without_torch: Rloo, sentence
) -> None:
    here = rloo_without_torch.folder
    (here / "file").write_text("mine")
    (here / "loop").symlink_to("loop")
    (here / "dangling").symlink_to("nowhere/at/all")
    before = seen(here)
    for words, key in (
        (("root=.", "name=file"), "file"),
        (("root=.", "name=loop"), "loop"),
        (("root=loop", "name=x"), "loop"),
        (("root=file/below", "name=x"), "file/below"),
        (("root=dangling", "name=x"), "dangling"),
        (("root=" + "x" * 300, "name=x"), "x" * 300),
        (("root=.", "name=dangling"), "nowhere/at/all"),
    ):
        ended = rloo_without_torch("train", "+recipe=smoke", *words)
        assert_refused(ended, 2, key)
        assert ended.err.count("error: ") == 1 and "Traceback" not in ended.said, ended.said
    sentence(ended)
    assert seen(here) == before


# A name that is free again.


def test_a_run_that_failed_before_its_first_update_frees_its_name(forked: Forked) -> None:
    wreckage(forked.folder)
    run = forked.folder / "runs" / "smoke"
    assert forked(*RUN, *RAISES) == 5
    forked.said()
    (forked.folder / "good.py").write_text("def score(completions):\n    return [1.0] * 16\n")
    assert forked(*RUN, "reward=function", "reward.function.path=good.py:score") == 0, forked.said()
    assert forked.said().count("logs/attempt_1 ") == 1
    assert read_json(run / "run.json")["attempt"] == 2
    assert "good.py" in (run / "config.yaml").read_text()
    assert "bad.py" in (run / "logs" / "attempt_1" / "config.yaml").read_text()
    assert "ValueError" in (run / "logs" / "attempt_1" / "rank_0.log").read_text()
    code = forked(*RUN, "max_steps=1", "algorithm.beta=0.3")  # it is trained now
    problem = assert_refused(Ended(code, forked.said(), ""), 2, "runs/smoke", where="name")
    assert "reward.function.type: " in problem.why


def test_the_same_command_again_begins_anew_where_nothing_was_trained(forked: Forked) -> None:
    for faults, code in (("gen.request@1=raise", 1), ("load@1=kill9", 6)):
        assert forked(*RUN, faults=faults) == code
    assert forked(*RUN) == 0, forked.said()


@pytest.mark.slow_cases("step@1=kill9")
@pytest.mark.parametrize("faults", ["gen.request@3=raise", "step@1=kill9", "ckpt.write@1=kill9"])
def test_what_was_trained_is_never_begun_anew_unasked(faults: str, forked: Forked) -> None:
    words = (*RUN, "max_steps=3", "checkpoint.every=0")
    assert forked(*words, faults=faults) in (1, 6), forked.said()
    before = seen(forked.folder / "runs")
    assert_refused(Ended(forked(*words), forked.said(), ""), 2, "runs/smoke", fix="resume=auto")
    assert forked(*words, "algorithm.beta=0.3") == 2
    assert seen(forked.folder / "runs") == before
    assert forked(*words, "resume=auto") == 0, forked.said()


# Where every checkpoint is damaged.


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew_unasked(
    copy: Path, forked: Forked
) -> None:
    for folder in manifest.list_checkpoints(copy):
        (folder / "model.safetensors").write_bytes(b"x")
    before = seen(copy)
    ended = Ended(forked(*WORDS, "resume=auto"), forked.said(), "")
    problem = assert_refused(ended, 2, "checkpoint-1", "resume", "mv runs/smoke runs/smoke.old")
    assert "checkpoint-2" in problem.why and seen(copy) == before
    for folder in manifest.list_checkpoints(copy):
        folder.rename(copy.parent / folder.name)
    ended = Ended(forked(*WORDS, "resume=auto"), forked.said(), "")
    problem = assert_refused(ended, 2, "checkpoint-2", where="resume")
    assert "checkpoint-1" not in problem.why


def test_a_run_without_a_checkpoint_begins_anew_and_says_so(forked: Forked) -> None:
    assert forked(*RUN, "max_steps=3", "checkpoint.every=0", faults="step@2=kill9") == 6
    assert forked(*RUN, "max_steps=3", "checkpoint.every=0", "resume=auto") == 0
    assert "runs/smoke has no " in forked.said()


# While it runs.

REMOVES = """
import os, shutil
def score(completions, trainer_state):
    if trainer_state.step == 1 and os.path.exists({folder!r}):
        {what}
    return [float(len(c)) for c in completions]
"""


@pytest.mark.parametrize(
    "what",
    ["shutil.rmtree({folder!r})", "os.rename({folder!r}, {folder!r} + '-moved')",
     "shutil.rmtree({folder!r}); os.mkdir({folder!r})"],
)  # fmt: skip
def test_a_run_whose_folder_is_removed_while_it_runs_ends_with_8(what: str, forked: Forked) -> None:
    run = forked.folder / "runs" / "smoke"
    text = REMOVES.format(folder=str(run), what=what.format(folder=str(run)))
    (forked.folder / "mine.py").write_text(text)
    words = (*RUN, "max_steps=4", "checkpoint.every=1", "reward=function")
    code, said = forked(*words, "reward.function.path=mine.py:score"), forked.said()
    assert_refused(Ended(code, said, ""), 8, "runs/smoke", where="root, name", fix="resume=auto")
    assert "a bug in rloo" not in said
    assert not run.exists() or not [*run.iterdir()]


MOVES = """
import os
def score(completions, trainer_state):
    os.chdir({elsewhere!r})
    return [float(len(c)) for c in completions]
"""


def test_a_reward_that_changes_the_working_folder_moves_nothing_of_the_run(
    forked: Forked,
) -> None:
    elsewhere = forked.folder / "elsewhere"
    elsewhere.mkdir()
    (forked.folder / "mine.py").write_text(MOVES.format(elsewhere=str(elsewhere)))
    words = (*RUN, "max_steps=3", "checkpoint.every=1", "reward=function", "root=runs",
             "reward.function.path=mine.py:score")  # fmt: skip
    assert forked(*words, faults="gen.request@3=term") == 75, forked.said()
    assert forked(*words, "resume=auto") == 0
    said, run = forked.said(), forked.folder / "runs" / "smoke"
    assert "runs/smoke/checkpoint-2, step 2 of 3" in said
    assert "final          runs/smoke/final\n" in said
    assert (run / "final").is_dir() and not [*elsewhere.iterdir()]
    assert "root: runs\n" in (run / "config.yaml").read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2, 3]


# What is taken away in a run's own folder.


@pytest.mark.parametrize(("code", "ended"), [(0, 8), (6, 6)])
def test_a_run_whose_disk_takes_no_word_of_its_end_ends_with_8_or_its_own_code(
    code: int, ended: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "run.json").write_text('{"progress": {"step": 3}, "code": 0}')
    monkeypatch.setattr(launcher, "update_json", full)
    assert launcher.report_run_end(ResumePlan(tmp_path), code, "rloo train", []) == ended
    assert "run.json" in capsys.readouterr().err


def test_only_temporary_files_of_ours_are_taken_away(copy: Path) -> None:
    mine = [".notes.12.tmp", ".git/.tmp-final-a1x", ".tmp-mine", "samples/.draft.3.tmp"]
    ours = [".run.json.9999912.tmp", ".tmp-checkpoint-9-a1",
            "samples/.step_000003.jsonl.9999903.tmp", "logs/attempt_1/.config.yaml.9999909.tmp",
            ".metrics.attempt1.tail.jsonl.9999905.tmp"]  # fmt: skip
    for name in (*mine, *ours):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text("")
    (copy / ".trash-final-a1").symlink_to(copy / "samples")
    before = seen(copy / "samples")
    rollback.roll_back_folder(ResumePlan(copy, 2, copy / "checkpoint-2"))
    assert [n for n in mine if (copy / n).exists()] == mine
    assert not [n for n in ours if (copy / n).exists()]
    assert not (copy / ".trash-final-a1").is_symlink() and {*seen(copy / "samples")} <= {*before}


def test_what_could_not_be_removed_goes_at_the_next_save(copy: Path) -> None:
    ours, others = copy / ".trash-checkpoint-0-a2", copy / ".trash-checkpoint-0-a3"
    for folder in (ours, others):
        (folder / "trainer").mkdir(parents=True)
    keep = SimpleNamespace(checkpoint=SimpleNamespace(keep_last=1))
    save._prune_checkpoints(SimpleNamespace(folder=copy, config=keep, attempt=2))  # type: ignore[arg-type]
    assert not ours.exists() and others.exists()


def test_what_is_no_checkpoint_of_ours_is_never_pruned(copy: Path, tmp_path: Path) -> None:
    (copy / "checkpoint-0").mkdir()
    (copy / "checkpoint-0" / "mine").write_text("mine")
    (copy / "checkpoint-1").rename(tmp_path / "kept")
    (copy / "checkpoint-1").symlink_to(tmp_path / "kept")
    shutil.copytree(copy / "checkpoint-2", copy / "checkpoint-3")
    keep = SimpleNamespace(checkpoint=SimpleNamespace(keep_last=1))
    save._prune_checkpoints(SimpleNamespace(folder=copy, config=keep, attempt=2))  # type: ignore[arg-type]
    assert [p.name for p in manifest.list_checkpoints(copy)] == [
        "checkpoint-3", "checkpoint-1", "checkpoint-0",
    ]  # fmt: skip


@pytest.mark.parametrize("name", run_folder.WRITTEN_IN_PLACE)
def test_a_run_whose_files_lead_out_of_its_folder_does_not_go_on(
    name: str, copy: Path, tmp_path: Path, forked: Forked
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for file in ("file", "step_000001.jsonl", "step_000001.safetensors", "step_000009.jsonl"):
        (outside / file).write_text(
            "theirs, and longer than any journal of a run of two steps\n" * 99
        )
    (copy / name).rename(copy / "was") if (copy / name).exists() else None
    (copy / name).symlink_to(outside / "file" if name.endswith(".jsonl") else outside)
    before = seen(forked.folder) | seen(outside)
    ended = Ended(forked(*WORDS, "resume=auto", "max_steps=5"), forked.said(), "")
    problem = assert_refused(ended, 2, name)
    assert str(outside) in problem.why
    after = seen(forked.folder) | seen(outside)
    assert {p: f for p, f in after.items() if p in before} == before


def test_links_that_stay_inside_and_a_linked_folder_are_a_runs_own(
    copy: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    copy.rename(tmp_path / "disk" / "smoke")
    copy.symlink_to(tmp_path / "disk" / "smoke")
    (copy / "samples").rename(copy / "kept")
    (copy / "samples").symlink_to("kept")
    assert run_folder.foreign_folder_reason(copy) is None


def test_what_links_lead_to_is_never_removed(copy: Path, tmp_path: Path) -> None:
    """A checkpoint that is pruned, and temporary files, may hold links to anything."""
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "folder" / "file").write_text("theirs")
    shutil.copytree(copy / "checkpoint-2", copy / "checkpoint-3")
    for folder in (copy / "checkpoint-1", copy / ".tmp-checkpoint-9-a1"):
        folder.mkdir(exist_ok=True)
        (folder / "link").symlink_to(outside / "folder")
        (folder / "file").symlink_to(outside / "folder" / "file")
    (copy / ".trash-final-a1").symlink_to(outside / "folder")
    before = seen(outside)
    rollback.roll_back_folder(ResumePlan(copy, 2, copy / "checkpoint-3"))
    keep = SimpleNamespace(checkpoint=SimpleNamespace(keep_last=1))
    save._prune_checkpoints(SimpleNamespace(folder=copy, config=keep, attempt=2))  # type: ignore[arg-type]
    assert not (copy / "checkpoint-1").exists() and not (copy / ".tmp-checkpoint-9-a1").exists()
    assert not (copy / ".trash-final-a1").is_symlink()
    assert seen(outside) == before


def test_results_take_the_place_of_nothing_but_results(tmp_path: Path, sentence) -> None:
    home = tmp_path / "eval" / "final"
    home.mkdir(parents=True)
    evaluation._check_output_dir(home)
    (home / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError) as refused:
        evaluation._check_output_dir(home)
    assert_refused(refused, 2, str(home), where="name", fix=f"mv {home} {home}.old")
    sentence(refused)
    (home / "about.json").write_text("{}")
    evaluation._check_output_dir(home)
    mine = [home.with_name(".tmp-final-mine"), home.with_name(".tmp-final-99999999")]
    for folder in mine:
        folder.mkdir()
        (folder / "file").write_text("")
    with evaluation.temporary_output_dir(home) as folder:
        assert folder.is_dir()
    assert all((folder / "file").exists() for folder in mine)


# An end that is asked for again and again.

AGAIN = """
import atexit, os, signal
from rloo_cli.cli import main as cli
from rloo_cli.launch import processes
def run():
    with processes._forward_signals([], "none"):
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    return 75
cli.find_verb = lambda words: run
atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))
cli.main()
"""


@pytest.mark.process
def test_a_launcher_that_is_asked_to_end_three_times_ends_with_75() -> None:
    assert subprocess.run([sys.executable, "-P", "-c", AGAIN], check=False).returncode == 75

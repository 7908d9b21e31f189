"""What a sweep refuses, before anything starts and while it runs; turns and rungs by themselves."""

import contextlib
import fcntl
import os
import resource
import socket
import tempfile
from pathlib import Path

import pytest
from assert_refused import assert_refused

from rloo_cli.cli import main
from rloo_cli.launch.sweep import rules, state
from rloo_cli.launch.sweep import time_slices as turns_rungs
from rloo_cli.launch.sweep import trial as sweep_trial
from rloo_cli.launch.sweep.state import Rung, SweepState, Trial
from rloo_cli.launch.sweep.trial import FairShare
from rloo_cli.utils import child_process, sweep_time_slices
from rloo_cli.utils.errors import ConfigError, Problem, Stopped
from rloo_cli.utils.files import write_json
from rloo_cli.utils.timers import StepTimer

pytestmark = pytest.mark.wide

ROOT = Path(__file__).parents[2]
HOOKS = sweep_time_slices.TimeSliceHooks(lambda: None, lambda: None, lambda: None, lambda: None)


def refused(*words: str) -> ConfigError:
    """The refusal of `rloo sweep WORDS`."""
    with pytest.raises(ConfigError) as error:
        main.find_verb(["sweep", *words])()
    return error.value


# Turns and rungs by themselves.


def test_a_share_is_kept_over_many_turns() -> None:
    given = [FairShare(1), FairShare(2, share=3), FairShare(3, share=2)]
    for _ in range(60):
        sweep_trial.select_next(given, [1])[0].use_slice()
    assert [round(turns.weighted_slices * turns.share) for turns in given] == [10, 30, 20]


def test_trials_are_spread_over_devices_and_each_has_its_own_room() -> None:
    assert sweep_trial.trials_per_device(3, 2) == [2, 1]
    assert sweep_trial.trials_per_device(1, 1) == [1]
    given: list[FairShare] = []
    for number in range(4):
        device = sweep_trial.least_used_device(given, jobs=2, devices=8)
        given.append(FairShare(number, device=device))
    assert [turns.device for turns in given] == [0, 1, 0, 1]
    assert sweep_trial.least_used_device([], jobs=4, devices=0) == 0
    assert [turns.number for turns in sweep_trial.select_next(given, [1, 0])] == [0]


def test_one_that_was_let_in_has_its_chunk_before_the_others() -> None:
    late = FairShare(9, weighted_slices=5.0, slice_owed=True)
    assert sweep_trial.select_next([FairShare(1), late], [1]) == [late]
    late.use_slice()
    assert late.weighted_slices == 5.0 and not late.slice_owed


def test_chunks_end_at_multiples_and_at_the_rung() -> None:
    rung = Rung(2, 15)
    ends = [turns_rungs.slice_end_step(s, 10, rung) for s in (0, 3, 10, 15, 20)]
    assert ends == [10, 10, 15, 20, 30]
    assert turns_rungs.slice_end_step(10, 10, None) == 20


def test_a_worth_is_the_mean_of_the_last_chunk_and_an_unknown_one_is_the_worst() -> None:
    rows = [{"step": step, "reward": float(step), "kl": 0.1} for step in range(1, 9)]
    assert turns_rungs.metric_at_rung(rows, Rung(1, 6), 4) == 4.5
    assert turns_rungs.metric_at_rung(rows, Rung(1, 6, "kl:min"), 4) == pytest.approx(-0.1)
    # Logged seldom: the last there is.
    assert turns_rungs.metric_at_rung(rows[:2], Rung(1, 6), 3) == 2.0
    worths = {1: float("nan"), 2: 1.0, 3: 2.0, 4: 2.0}
    assert turns_rungs.trials_below_rung(worths, Rung(2, 6)) == [2, 1]


# What is refused.


def test_each_rung_has_a_number_a_step_and_a_metric() -> None:
    assert rules.early_stopping_rungs([4, 2], [5, 9], [], []) == [Rung(4, 5), Rung(2, 9)]
    assert rules.early_stopping_rungs([4, 2], [5, 9], ["kl:min"], [Rung(4, 5, "kl:min", True)]) == [
        Rung(4, 5, "kl:min", True), Rung(2, 9, "kl:min"),
    ]  # fmt: skip
    for keep, at, by in (([1], [], []), ([1], [2], ["kl", "reward"])):
        with pytest.raises(ConfigError, match=r"--keep.* --at"):
            rules.early_stopping_rungs(keep, at, by, [])


def test_rungs_that_stop_nobody_come_too_late_or_in_the_wrong_order_are_refused(
    sentence,
) -> None:
    def problems(*found: Rung) -> list[Problem]:
        return [*rules.rung_problems(found, 4, [None, 8])]

    assert not problems(Rung(2, 3), Rung(1, 5))
    for rungs in ([Rung(4, 3)], [Rung(2, 8)], [Rung(3, 5), Rung(1, 5)], [Rung(2, 3, ":min")]):
        (problem,) = problems(*rungs)
        sentence(problem.render())


SMOKE = "+recipe=smoke"
# The key that a problem names -> the words that are refused for it.
REFUSED = {
    "train.seed": ("train.seed=1,2",),
    "algorithm.beta=abc": ("algorithm.beta=abc,0.1",),
    "generation.server.base_url": (
        "generation=vllm_server", "generation.server.base_url=http://127.0.0.1:1",
    ),
    "distributed": ("distributed=ddp",),
    "name=a,b": ("name=mine", "checkpoint.every=1,2"),
    "--chunk": ("seed=1,2", "--chunk", "0"),
    "hydra/launcher": ("seed=1,2", "hydra/launcher=joblib"),
    "--cfg": ("seed=1,2", "--cfg", "job"),
    "--chunks": ("seed=1,2", "--chunks", "4"),
}  # fmt: skip


@pytest.mark.parametrize(("key", "words"), REFUSED.items(), ids=REFUSED)
def test_a_sweep_that_cannot_be_is_refused_before_anything_starts(
    key: str, words: tuple[str, ...], tmp_path: Path, sentence
) -> None:
    with contextlib.chdir(tmp_path):
        error = refused(SMOKE, *words)
    assert_refused(error, 2, key)
    sentence(error, folder=ROOT)
    assert not [*tmp_path.iterdir()]


def test_a_sweep_among_ranks_that_others_started_is_refused(
    monkeypatch: pytest.MonkeyPatch, sentence
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    error = refused(SMOKE, "seed=1,2")
    assert_refused(error, 2, "RANK", fix="unset RANK WORLD_SIZE")
    sentence(error)


@pytest.fixture
def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepState:
    """A sweep of two trials that does not run: runs/s, in the current folder."""
    monkeypatch.chdir(tmp_path)
    words = [SMOKE, "seed=1,2"]
    trials = [Trial(i, f"smoke-{i}a2b3c", [SMOKE, f"seed={i}"]) for i in (1, 2)]
    made = SweepState(Path("runs/s"), words, str(tmp_path), trials=trials, state="stopped")
    made.save()
    return made


ORDERS = [
    ("stop s 1", "runs/s", ""),
    ("promote runs/s 1", "runs/s", "rloo sweep resume runs/s"),
    ("clone s 2 seed=3", "smoke-2a2b3c", f"{SMOKE} seed=3 name=OTHER resume=runs/smoke-2a2b3c/"),
    ("stop t 1", "t", "rloo sweep stop s"),
    ("stop s", "TRIAL", ""),
    ("clone s 1", "runs/s", ""),
]


@pytest.mark.parametrize(("words", "key", "fix"), ORDERS, ids=[row[0] for row in ORDERS])
def test_a_sweep_that_does_not_run_takes_no_orders_and_says_what_to_do(
    words: str, key: str, fix: str, idle: SweepState, sentence
) -> None:
    error = refused(*words.split())
    assert_refused(error, 2, key, fix=fix)
    sentence(error)


def test_a_trial_is_named_by_number_name_or_a_piece_that_no_other_has(
    idle: SweepState, sentence
) -> None:
    names = [idle.find_trial(word).number for word in ("2", "smoke-1a2b3c", "2a2b")]
    assert names == [2, 1, 2]
    for word in ("3", "smoke"):
        sentence(refused("stop", "s", word))


def test_a_folder_that_is_another_sweep_or_none_is_not_taken(idle: SweepState, sentence) -> None:
    sentence(refused(SMOKE, "seed=3,4", "--name", "s"))
    Path("runs/other").mkdir()
    sentence(refused(SMOKE, "seed=3,4", "--name", "other"))


def test_a_sweep_that_runs_is_not_started_twice(idle: SweepState) -> None:
    idle.state = "training"
    idle.save()
    assert state.running_process(idle.folder)
    for words in ((SMOKE, "seed=1,2", "--name", "s"), ("resume", "s")):
        assert_refused(refused(*words), 2, str(os.getpid()))


def test_a_trial_whose_run_is_trained_by_another_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.find_verb(["sweep", SMOKE, "seed=1,2", "--dry-run"])() == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    name = next(row[1] for row in rows if row[:1] == ["2"])
    assert not [*tmp_path.iterdir()]
    me = os.getpid()
    facts = {"state": "training", "pid": me, "pid_started": child_process.process_start_time(me)}
    write_json(Path("runs", name, "run.json"), facts)
    assert_refused(refused(SMOKE, "seed=1,2"), 2, str(me), where="name")


def test_a_place_that_is_none_in_a_sweep_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_time_slices, "_sweep_trial", [])
    monkeypatch.setenv(sweep_time_slices.SOCKET_VARIABLE, "/nowhere/turns:1")
    with pytest.raises(ConfigError, match=sweep_time_slices.SOCKET_VARIABLE):
        sweep_time_slices.wait_in_sweep(0, HOOKS)


def test_a_trial_waits_however_many_files_its_run_has_open() -> None:
    before = soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= most < 2000:
        pytest.skip("no process may open more than 1024 files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), most))
    try:
        with tempfile.TemporaryDirectory() as root, socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"{root}/turns")
            listening.listen()
            trial = sweep_time_slices.SweepTrial(f"{root}/turns:1")
            line = sweep_time_slices.JsonLineSocket(listening.accept()[0])
            low = trial.json_socket.connection.detach()
            trial.json_socket.connection = socket.socket(
                fileno=fcntl.fcntl(low, fcntl.F_DUPFD, 1500)
            )
            os.close(low)
            line.send(do="go", until=3)
            assert trial.wait_for_time_slice(0, HOOKS) > 0.0
            line.connection.close()
            trial.json_socket.connection.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_trial_whose_sweep_is_gone_saves_and_stops() -> None:
    with tempfile.TemporaryDirectory() as root, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{root}/turns")
        listening.listen()
        trial = sweep_time_slices.SweepTrial(f"{root}/turns:1")
        line = sweep_time_slices.JsonLineSocket(listening.accept()[0])
        line.send(do="go", until=3)
        assert trial.wait_for_time_slice(0, HOOKS) > 0.0
        assert trial.wait_for_time_slice(2, HOOKS) == 0.0
        assert line.receive() == [{"trial": 1, "step": 0}]
        line.connection.shutdown(socket.SHUT_WR)  # while it waits
        with pytest.raises(Stopped):
            trial.wait_for_time_slice(3, HOOKS)
        line.connection.close()  # before
        with pytest.raises(Stopped):
            trial.wait_for_time_slice(3, HOOKS)


def test_a_trial_follows_orders_while_it_waits() -> None:
    done: list[str] = []
    hooks = sweep_time_slices.TimeSliceHooks(
        lambda: "here", lambda: done.append("away"), lambda: done.append("back"), lambda: None
    )
    with tempfile.TemporaryDirectory() as root, socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{root}/turns")
        listening.listen()
        trial = sweep_time_slices.SweepTrial(f"{root}/turns:2")
        line = sweep_time_slices.JsonLineSocket(listening.accept()[0])
        for order in ({"do": "save"}, {"do": "park"}, {"do": "go", "until": 5}):
            line.send(**order)
        trial.wait_for_time_slice(4, hooks)
        assert done == ["away", "back"]
        said = [{"step": 4}, {"saved": "here"}, {"parked": True}]
        assert line.receive() == [{"trial": 2, **values} for values in said]
        line.send(do="stop", why="rloo sweep stop")
        with pytest.raises(Stopped, match="rloo sweep stop"):
            trial.wait_for_time_slice(5, hooks)


def test_what_a_trial_waits_is_not_counted_as_its_own() -> None:
    clock = StepTimer()
    clock.started_at -= 5.0
    clock.step_started_at -= 5.0
    clock.leave_out(4.0)
    assert 1.0 <= clock.elapsed() < 4.0 and 1.0 <= clock.lap()["step_time"] < 4.0

"""Trackers get what metrics.jsonl has, and nothing that they do reaches the run."""

import contextlib
import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from compare_cases import write
from fork_cases import Forked

from rloo_cli.cli import sync
from rloo_cli.reporting import trackers
from rloo_cli.reporting.trackers import TrackerClient, tracker_about
from rloo_cli.train import worker
from rloo_cli.utils.errors import ConfigError, TrackerError

pytestmark = pytest.mark.process

# Clients that stand in for a tracker's own package: a folder that comes first on the path.
STAND_INS = {
    "absent": "raise ImportError('No module named wandb')",
    "refusing": "def init(**_): raise RuntimeError('no API key')\nSettings = dict",
    "hanging": "import time\ndef init(**_): time.sleep(3600)\nSettings = dict",
    "hanging later": """
import time
Settings = dict
class Run:
    id = "r1"
    def log(self, *_, **__): time.sleep(3600)
    def finish(self): pass
def init(**_): return Run()
""",
    "slow": """
import time
Settings = dict
class Run:
    id = "r1"
    def log(self, *_, **__): time.sleep(0.2)
    def finish(self): pass
def init(**_): return Run()
""",
    "disk full": """
Settings = dict
class Run:
    id = "r1"
    def log(self, *_, step, **__):
        if step < 2: raise OSError(28, "No space left on device")
    def finish(self): pass
def init(**_): return Run()
""",
    "killing itself": "import os\ndef init(**_): os.kill(os.getpid(), 9)\nSettings = dict",
}
SHORT = ("train", "+recipe=smoke", "train.prompts_per_step=2", "algorithm.num_generations=2")


def stand_in(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `import wandb` be this text, in the process of the trackers."""
    (folder / "stand_in").mkdir()
    (folder / "stand_in" / "wandb.py").write_text(text)
    path = os.pathsep.join([str(folder / "stand_in"), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path.rstrip(os.pathsep))


def make_client(folder: Path, *names: str) -> tuple[TrackerClient, list[str]]:
    notes: list[str] = []
    (folder / "run.json").write_text("{}")
    about = tracker_about(folder, names, None, "mine", {"seed": 1})
    return TrackerClient(about, notes.append), notes


def wait_for(true: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def hears(client: TrackerClient, notes: list[str], part: str) -> Callable[[], bool]:
    def heard() -> bool:
        client.hear_news()
        return any(part in note for note in notes)

    return heard


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("absent", "pip install wandb"),
        ("refusing", "it did not start: RuntimeError: no API key"),
        ("hanging later", "within 1 s"),
        ("killing itself", "its process exited with signal 9"),
    ],
)
def test_a_tracker_that_fails_is_a_warning_and_costs_the_loop_nothing(
    kind: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, STAND_INS[kind], monkeypatch)
    client, notes = make_client(tmp_path, "wandb")
    client.start()
    for step in range(200):
        client.send({"step": step, "reward": 0.5})
    if kind != "hanging later":
        wait_for(hears(client, notes, said))
    client.close(limit_s=1.0)
    assert any(said in note for note in notes), notes
    assert len([note for note in notes if note.startswith("warning")]) <= 2
    assert client.seconds < 200 * 0.05  # a millisecond each is meant; this only finds a wait


def test_lines_that_do_not_fit_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "QUEUE_LINES", 10)
    stand_in(tmp_path, STAND_INS["hanging"], monkeypatch)
    client, notes = make_client(tmp_path, "wandb")
    client.start()
    for step in range(30):
        client.send({"step": step, "reward": 0.5})
    (tracker,) = client.trackers
    assert tracker.left_out == 20
    client.close(limit_s=0.5)
    assert "rloo sync" in notes[-1]


def test_a_tracker_whose_queue_is_full_at_the_end_still_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "QUEUE_LINES", 2)
    finished = tmp_path / "finished"
    writes = f"def finish(self): open({str(finished)!r}, 'w')"
    stand_in(tmp_path, STAND_INS["slow"].replace("def finish(self): pass", writes), monkeypatch)
    client, _ = make_client(tmp_path, "wandb")
    client.start()
    for step in range(10):
        client.send({"step": step, "reward": 0.5})
    client.close(limit_s=60.0)
    assert finished.exists() and client.trackers[0].left_out > 0


def test_a_few_lines_that_a_tracker_refuses_are_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, STAND_INS["disk full"], monkeypatch)
    client, notes = make_client(tmp_path, "wandb")
    client.start()
    for step in range(3):
        client.send({"step": step, "reward": 0.5})
    client.close(limit_s=60.0)
    (note,) = notes
    assert "2 lines" in note and "OSError: [Errno 28]" in note and "rloo sync" in note


def test_a_required_tracker_that_refuses_ends_the_run_with_10(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, STAND_INS["refusing"], monkeypatch)
    client, _ = make_client(tmp_path, "wandb")
    with pytest.raises(TrackerError, match="no API key") as error:
        client.start(required=True)
    assert error.value.code == 10
    monkeypatch.setattr(trackers, "START_LIMIT_S", 0.5)
    (tmp_path / "stand_in/wandb.py").write_text(STAND_INS["hanging"])
    client, _ = make_client(tmp_path, "wandb")
    with pytest.raises(TrackerError, match=r"not ready within 0\.5 s"):
        client.start(required=True)


CLOCKS = re.compile(r"time/.*|perf/.*|step_time|eps|.*/time|memory/.*|eval_.*(time|seconds).*")
OF_AN_ATTEMPT = ("run.json", "config.yaml", "env.json", "summary.json", "overrides.txt")


def files_of(run: Path) -> dict[str, object]:
    """Every file that a run computed -> its bytes; of metrics all but what clocks say."""
    found: dict[str, object] = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if path.is_dir() or name in OF_AN_ATTEMPT or name.startswith("logs/"):
            continue
        found[name] = path.read_bytes()
        if path.name == "metrics.jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{k: v for k, v in x.items() if not CLOCKS.fullmatch(k)} for x in lines]
        elif path.name in ("state.json", "MANIFEST.json", "curves.png"):  # they have times
            found[name] = ""
    return found


@pytest.fixture(scope="module")
def untracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without a tracker."""
    with contextlib.chdir(tmp_path_factory.mktemp("untracked")):
        return Path(train_here("name=one")).absolute()


def train_here(*words: str) -> str:
    """A short run in this process; its folder."""
    from loop_cases import cache

    from rloo_cli.api import train

    short = ("train.prompts_per_step=2", "algorithm.num_generations=2", "distributed.threads=1")
    with mock.patch.dict(os.environ, RLOO_CACHE=cache(), HF_HUB_OFFLINE="1"):
        return str(train("smoke", overrides=[*short, "logging.console=plain", *words])["folder"])


@pytest.mark.slow_but("absent", "hanging")
@pytest.mark.parametrize("kind", ["absent", "refusing", "hanging", "slow", "hanging later"])
def test_whatever_a_tracker_does_the_files_of_a_run_are_equal(
    kind: str, untracked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, STAND_INS[kind], monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trackers, "CLOSE_LIMIT_S", 1.0)
    clients: list[TrackerClient] = []

    class Counted(TrackerClient):
        def __init__(self, *words: Any) -> None:
            super().__init__(*words)
            clients.append(self)

    monkeypatch.setattr(worker, "TrackerClient", Counted)
    run = Path(train_here("name=one", "logging.trackers=[wandb]"))
    assert files_of(run) == files_of(untracked)
    (client,) = clients
    assert client.sent == len((run / "metrics.jsonl").read_text().splitlines()) > 2
    # A millisecond a line is meant: this finds a wait.
    assert client.seconds < 0.05 * client.sent


def test_a_client_that_has_hung_for_long_is_not_waited_for_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "STALL_LIMIT_S", 0.2)
    stand_in(tmp_path, STAND_INS["hanging"], monkeypatch)
    client, notes = make_client(tmp_path, "wandb")
    client.start()
    time.sleep(0.5)
    began = time.monotonic()
    client.close(limit_s=3600.0)
    assert time.monotonic() - began < 30.0  # a minute is the limit of one call
    assert "rloo sync" in notes[-1]


def test_a_client_that_is_in_one_call_for_too_long_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "CALL_LIMIT_S", 0.5)
    stand_in(tmp_path, STAND_INS["hanging"], monkeypatch)
    client, notes = make_client(tmp_path, "wandb")
    client.start()
    wait_for(hears(client, notes, "no answer within 0.5 s"))
    client.close()


def test_a_tracker_that_ends_its_process_costs_the_other_trackers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    stand_in(tmp_path, STAND_INS["killing itself"], monkeypatch)
    client, _ = make_client(tmp_path, "wandb", "tensorboard")
    client.start()
    wait_for(lambda: client._num_heard() == 2)
    client.close()
    assert {*client.ready} == {"tensorboard"} and {*client.failed} == {"wandb"}


def test_trackers_of_a_rank_of_several_join_no_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate would wait for the other ranks, by what torchrun set for this one."""
    pytest.importorskip("tensorboard")
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (ranks | {"MASTER_PORT": "29999"}).items():
        monkeypatch.setenv(name, value)
    client, _ = make_client(tmp_path, "tensorboard")
    client.start(required=True)
    client.close()


def test_secrets_do_not_reach_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.json").write_text("{}")
    about = tracker_about(tmp_path, ["wandb"], None, "x", {"key": "hf_" + "a" * 34})
    assert "hf_a" not in json.dumps(about)


def lines_of(run: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "step_time" in line}


@pytest.mark.skipif(not find_spec("tensorboard"), reason="pip install tensorboard")
def test_tensorboard_has_every_number_also_after_a_resume(forked: Forked) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = (
        *SHORT,
        "name=one",
        "logging.trackers=[tensorboard]",
        "max_steps=3",
        "checkpoint.every=1",
    )
    assert forked(*words, faults="step@3=kill9") == 6
    assert forked(*words, "resume=auto") == 0
    run = forked.folder / "runs" / "one"
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    wanted: dict[str, dict[int, float]] = {}
    for text in (run / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        for name, value in line.items():
            if name != "step":
                wanted.setdefault(name, {})[line["step"]] = value
    assert {*events.Tags()["scalars"]} == {*wanted} and len(wanted) > 40
    for name, values in wanted.items():
        found = {event.step: event.value for event in events.Scalars(name)}
        assert found == pytest.approx(values, rel=1e-6, abs=1e-30), name
    assert json.loads((run / "run.json").read_text())["trackers"]["tensorboard"]["id"] == "one"


def wandb_records(data: bytes) -> list[bytes]:
    """The records of a .wandb file: 7 bytes, then LevelDB's log in blocks of 32 KiB."""
    records, at, part = [], 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no header fits into the rest of a block
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            records.append(part)
            part = b""
    return records


@pytest.mark.skipif(not find_spec("wandb"), reason="pip install wandb")
@pytest.mark.slow
def test_wandb_offline_keeps_a_run_that_can_be_opened_again(forked: Forked) -> None:
    words = (*SHORT, "name=one", "logging.trackers=[wandb]")
    assert forked(*words, env={"WANDB_MODE": "offline"}) == 0
    run = forked.folder / "runs" / "one"
    (file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    from wandb.proto import wandb_internal_pb2

    found = {}
    for data in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {i.key or i.nested_key[0]: i.value_json for i in record.history.item}
        if "reward" in items:
            found[int(items["_step"])] = float(items["reward"])
    assert found == pytest.approx({s: line["reward"] for s, line in lines_of(run).items()})


@pytest.mark.skipif(not find_spec("wandb"), reason="pip install wandb")
@pytest.mark.slow
def test_a_resumed_run_goes_on_under_the_id_that_wandb_gave_it(forked: Forked) -> None:
    words = (*SHORT, "name=one", "logging.trackers=[wandb]", "max_steps=3", "checkpoint.every=1")
    env = {"WANDB_MODE": "offline"}
    assert forked(*words, faults="step@3=kill9", env=env) == 6
    run = forked.folder / "runs" / "one"
    first = json.loads((run / "run.json").read_text())["trackers"]["wandb"]["id"]
    assert forked(*words, "resume=auto", env=env) == 0
    assert json.loads((run / "run.json").read_text())["trackers"]["wandb"]["id"] == first
    files = [*run.glob("wandb/offline-run-*/run-*.wandb")]
    assert files and all(file.stem == f"run-{first}" for file in files)


def needs(*trackers: str) -> list[Any]:
    """Trackers as parameters; a test of one whose package is not there is skipped."""
    return [
        pytest.param(name, marks=pytest.mark.skipif(not find_spec(name), reason=f"no {name} here"))
        for name in trackers
    ]


def kept_rewards(tracker: str, folder: Path) -> list[dict[int, float]]:
    """Step -> reward, out of the tracker's own files. SwanLab's series have no names there: all."""
    if tracker == "swanlab":
        series = []
        for path in folder.glob("runs/one/swanlab/run-*/logs/*/*.log"):
            points = [json.loads(line) for line in path.read_text().splitlines()]
            series.append({point["index"]: point["data"] for point in points})
        return series
    if tracker == "mlflow":
        database = sqlite3.connect(folder / "mlflow.db")
        return [dict(database.execute("select step, value from metrics where key = 'reward'"))]
    (path,) = (folder / "trackio").glob("*.db")
    rows = sqlite3.connect(path).execute("select step, metrics from metrics").fetchall()
    named = [(step, json.loads(text)) for step, text in rows]
    return [{step: line["reward"] for step, line in named if "reward" in line}]


def variables_of(folder: Path) -> dict[str, str]:
    """The environment in which these trackers keep their runs in a folder."""
    return {
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "SWANLAB_MODE": "local",
    }


@pytest.mark.parametrize("tracker", needs("trackio", "mlflow", "swanlab"))
@pytest.mark.slow
def test_a_tracker_keeps_a_run_that_can_be_opened_again(tracker: str, forked: Forked) -> None:
    words = (*SHORT, "name=one", f"logging.trackers=[{tracker}]", "logging.trackers_required=true")
    assert forked(*words, env=variables_of(forked.folder)) == 0, forked.said()
    lines = lines_of(forked.folder / "runs" / "one")
    rewards = pytest.approx({step: line["reward"] for step, line in lines.items()})
    assert rewards in kept_rewards(tracker, forked.folder)


def test_the_run_imports_no_client_and_no_accelerate_for_its_trackers() -> None:
    text = "import sys, rloo_cli.reporting.trackers; print('accelerate' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.process  # `make test` installs no tracker
@pytest.mark.skipif(not find_spec("tensorboard"), reason="pip install tensorboard")
def test_sync_sends_all_of_a_run_and_twice_is_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    folder = write(Path("runs"), "one")
    for _ in range(2):
        assert sync.run(["one", "tensorboard"]) == 0
    assert "tensorboard" in capsys.readouterr().out
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    found = [(event.step, round(event.value, 4)) for event in events.Scalars("reward")]
    assert found == [(step, round(line["reward"], 4)) for step, line in lines_of(folder).items()]


@pytest.mark.parametrize("tracker", needs("trackio", "mlflow"))
@pytest.mark.slow
def test_sync_sends_only_what_a_tracker_lacks(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in variables_of(tmp_path).items():
        monkeypatch.setenv(name, value)
    write(Path("runs"), "one")
    script = f"from rloo_cli.cli import sync; sync.run(['one', '{tracker}', '--json'])"
    got = []
    for _ in range(2):  # trackio keeps its folder from its import on
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        got.append(json.loads(done.stdout))
    assert got[0]["known"] == 0 and got[1]["sent"] == 0 and got[0]["sent"] == got[1]["known"]


def test_sync_refuses_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("runs"), "one", steps=0, scores=())
    for words, said in (
        (["one"], "tracker missing"), (["one", "wanb"], "wanb"), (["on", "wandb"], "not found"),
        (["one", "wandb"], "no metrics"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            sync.run(words)
    write(Path("runs"), "two")
    stand_in(tmp_path, STAND_INS["absent"], monkeypatch)
    with pytest.raises(TrackerError, match="pip install wandb") as error:
        sync.run(["two", "wandb"])
    assert error.value.code == 10

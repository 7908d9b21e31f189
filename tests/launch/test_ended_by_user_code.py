"""A run is finished when its worker has marked its own end, and by nothing else.

User code that ends the process, whatever its exit code, makes a failed run (6).
"""

import json
import os
from pathlib import Path

import pytest
from assert_refused import assert_refused
from cli_cases import Ended, Rloo
from rank_cases import Launchers

from rloo_cli.utils import heartbeat

ENDINGS = {
    "os._exit": "import os; os._exit(0)",
    "another code": "import os; os._exit(3)",
    "exec": "import os; os.execv('/bin/true', ['true'])",
    "exit of a C library": "import ctypes; ctypes.CDLL(None)._exit(0)",
}
CALLBACK = """
from rloo_cli.plugin import Events

class Ends(Events):
    def on_step(self, *values):
        {ending}
"""
# Where a user's code runs in a worker's main thread, each with the setting that names it.
IN_THE_MAIN_THREAD = {
    "data.map": ("def f(row): {ending}", "data.map=code.py:f"),
    "optimizer": ("def f(*a, **k): {ending}", "train.optimizer=code.py:f"),
}


def recorded_run(folder: Path) -> dict[str, object]:
    """What run.json says of the only run in a folder."""
    [path] = (folder / "runs").glob("*/run.json")
    return dict(json.loads(path.read_text()))


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_run_whose_process_user_code_ended_has_failed_with_6(ending: str, rloo: Rloo) -> None:
    (rloo.folder / "code.py").write_text(CALLBACK.format(ending=ENDINGS[ending]))
    ended = rloo("train", "+recipe=smoke", "logging.events=[code.py:Ends]")
    assert ended.code == 6
    run = recorded_run(rloo.folder)
    assert run["state"] == "failed" and run["code"] == 6
    assert "after step 1" in ended.err  # the first step was logged before its event


@pytest.mark.parametrize("where", IN_THE_MAIN_THREAD)
@pytest.mark.parametrize("ending", ["os._exit(0)", "sys.exit(0)"])
def test_user_code_that_ends_the_process_before_the_first_step_is_no_finished_run(
    where: str, ending: str, rloo: Rloo
) -> None:
    code, setting = IN_THE_MAIN_THREAD[where]
    (rloo.folder / "code.py").write_text("import os, sys\n" + code.format(ending=ending))
    ended = rloo("train", "+recipe=smoke", setting)
    assert ended.code not in (0, 1, 75), ended.said
    assert not list(rloo.folder.glob("runs/*/final"))


@pytest.mark.parametrize("code", [0, 3, 75])
def test_a_rank_that_ends_without_its_mark_counts_as_lost_whatever_its_exit_code(
    code: int, launchers: Launchers
) -> None:
    launched = launchers({0: f"leave:{code}:0.2", 1: "wait"}, {"KILL_TIMEOUT_S": 1.5})
    ended = Ended(launched.code(30), launched.said(), "")
    assert str(code) in assert_refused(ended, 6, "rank 0").what


@pytest.mark.parametrize("raised", ["SystemExit(0)", "KeyboardInterrupt", "GeneratorExit"])
def test_what_user_code_raises_to_end_the_process_is_an_error_with_its_line(
    raised: str, rloo: Rloo
) -> None:
    code = f"import torch\ndef f(params, **k):\n    raise {raised}\n"
    (rloo.folder / "code.py").write_text(code)
    ended = rloo("train", "+recipe=smoke", "train.optimizer=code.py:f")
    assert ended.code not in (0, 1, 75) and "Traceback" not in ended.said, ended.said
    assert "code.py" in ended.err


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "GeneratorExit"])
def test_a_callback_that_raises_any_exception_is_a_warning(raised: str, rloo: Rloo) -> None:
    (rloo.folder / "code.py").write_text(CALLBACK.format(ending=f"raise {raised}"))
    ended = rloo("train", "+recipe=smoke", "logging.events=[code.py:Ends]")
    assert ended.code == 0 and "Ends.on_step failed" in ended.said


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "GeneratorExit"])
def test_a_map_that_raises_any_exception_is_an_error_of_the_data(raised: str, rloo: Rloo) -> None:
    (rloo.folder / "code.py").write_text(f"def f(row): raise {raised}")
    ended = rloo("train", "+recipe=smoke", "data.map=code.py:f")
    assert_refused(ended, 4, "data.map")


def test_a_rank_that_marks_its_end_is_believed(launchers: Launchers) -> None:
    launched = launchers({0: "exit:0:0.1", 1: "exit:0:0.2"})
    assert launched.code(30) == 0 and launched.said() == ""


def test_the_mark_is_read_after_the_process_has_ended_and_signs_of_life_are_no_mark() -> None:

    reader = heartbeat.HeartbeatReader()
    os.write(reader.write_end, heartbeat.BEAT * 3)
    assert not reader.has_marked_end()
    os.write(reader.write_end, heartbeat.BEAT + heartbeat.END_MARK)
    reader.close_write_end()
    assert reader.has_marked_end() and reader.has_marked_end()
    reader.close()

"""What a reward starts ends with the run, and hears the signals that it is sent."""

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from rank_cases import gone

from rloo_cli.cli import main
from rloo_cli.config import rules_code
from rloo_cli.launch import processes
from rloo_cli.utils import signals

LEAVES = """
import subprocess, sys
from pathlib import Path
from rloo_cli.utils import heartbeat
def main():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                             start_new_session=True)
    Path(sys.argv[1]).write_text(str(child.pid))
    heartbeat.mark_end()
"""


@pytest.mark.process
def test_a_child_that_left_our_group_by_setsid_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    code = processes.run_processes("leaves", [str(tmp_path / "pid")], package="")
    assert code == 0 and gone(int((tmp_path / "pid").read_text()))
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_a_forked_child_ends_by_the_signals_that_we_only_note() -> None:
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    signals.install_signal_handlers()
    try:
        child = os.fork()
        if child == 0:  # as multiprocessing's pools do
            time.sleep(5)
            os._exit(3)
        time.sleep(0.3)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_rewards_file_is_read_in_the_coding_that_python_reads_it_in(tmp_path: Path) -> None:
    sources = {
        "latin": "# -*- coding: latin-1 -*-\nname = '\xe9'\ndef f(completions): ...\n".encode(
            "latin-1"
        ),
        "bom": b"\xef\xbb\xbfdef f(completions):\r\n    return [0.0]\r\n",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_bytes(source)
        assert not [*rules_code.code_problems("reward.x.path", f"{tmp_path}/{name}.py:f")]
    (tmp_path / "wrong.py").write_bytes(b"name = '\xe9'\ndef f(completions): ...\n")
    wrong = [*rules_code.code_problems("reward.x.path", f"{tmp_path}/wrong.py:f")]
    assert len(wrong) == 1 and wrong[0].where.endswith("wrong.py:1")


def test_a_sweep_of_hydras_own_kind_makes_no_folder_that_it_could_leave_where_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    words = ["train", "-m", "+recipe=smoke", "seed=1,2", "--dry-run"]
    assert main.find_verb(words)() == 0
    assert capsys.readouterr().out.endswith("2 jobs, 0 failed\n") and not [*tmp_path.iterdir()]

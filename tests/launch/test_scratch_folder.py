"""Temporary folders of an owner that was killed are removed by the next one's."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rloo_cli.utils.scratch_folder import LOCK_FILE, LOCKED, ScratchFolder

pytestmark = pytest.mark.process

OWNER = """
import sys, time
from rloo_cli.utils.scratch_folder import ScratchFolder
mine = ScratchFolder("rloo-kind-", sys.argv[1])
print(mine.path, flush=True)
time.sleep(600)
"""


def owner(root: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a folder, and the folder."""
    words = [sys.executable, "-c", OWNER, str(root)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_killed_owners_folder_goes_with_the_next_and_a_living_ones_stays(tmp_path: Path) -> None:
    killed, left = owner(tmp_path)
    (left / "deep").mkdir()
    (left / "deep" / "file").write_text("of a server")
    living, used = owner(tmp_path)
    try:
        assert left.is_dir() and used.is_dir()  # the first one's owner lived
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        new = tmp_path / "rloo-kind-new"  # its owner has not locked it yet
        new.mkdir()
        (new / LOCK_FILE).touch()
        other = tmp_path / "another-kind"
        other.mkdir()
        (other / LOCK_FILE).write_bytes(LOCKED)
        mine = ScratchFolder("rloo-kind-", str(tmp_path))
        assert not left.exists() and used.is_dir() and new.is_dir() and other.is_dir()
        assert mine.path.stat().st_mode & 0o777 == 0o700
        mine.remove()
        assert not mine.path.exists() and used.is_dir()
    finally:
        living.kill()
        living.wait()
        for process in (killed, living):
            assert process.stdout is not None
            process.stdout.close()

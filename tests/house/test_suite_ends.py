"""A suite that is ended leaves no process behind: suite_guard.py."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rloo_cli.utils.child_process import process_start_time

pytestmark = pytest.mark.process

SUPPORT = Path(__file__).parents[1] / "support"
# A server that no polite signal ends, and one of its processes, in a session of its own.
SERVER = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
with open("pids", "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(300)
"""
SUITE = """
import sys, time
from pathlib import Path
from cli_cases import Rloo, surroundings

def test_with_a_server():
    here = Path(__file__).parent
    server = (sys.executable, "-c", (here / "serve").read_text())
    Rloo(here, surroundings(here), program=server).start()
    time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "Ctrl-C"])
def test_a_server_that_a_test_started_ends_with_the_suite(
    number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "serve").write_text(SERVER)
    (tmp_path / "test_it.py").write_text(SUITE)
    options = ["-q", "-p", "suite_guard", "-p", "no:cacheprovider", "-p", "no:xdist"]
    suite = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, f"--rootdir={tmp_path}", "test_it.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{SUPPORT}{os.pathsep}{SUPPORT.parents[1]}"},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    pids, until = tmp_path / "pids", time.monotonic() + 60
    while not pids.exists() or len(pids.read_text().splitlines()) < 2:
        assert suite.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    servers = [int(line) for line in pids.read_text().splitlines()]
    suite.send_signal(number)
    suite.wait(20)
    until = time.monotonic() + 10
    while any(process_start_time(pid) for pid in servers):
        assert time.monotonic() < until, "the server outlives its suite"
        time.sleep(0.05)

"""A model's code in the sandbox: what it may not do, and what it may not be taken for."""

import dataclasses
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from assert_refused import assert_refused

from rloo_cli.rewards.common import sandbox, sandbox_harness
from rloo_cli.rewards.common.sandbox import SandboxLimits
from rloo_cli.utils.errors import MachineError

pytestmark = pytest.mark.process

LIMITS = SandboxLimits(seconds=9.0, memory_mb=96, processes=6, file_mb=2, open_files=32)
SHORT = SandboxLimits(seconds=1.0, memory_mb=96, processes=6, file_mb=2, open_files=32)
DOUBLES = [{"test": "assert f(2) == 4"}]


def refusal() -> str:
    """Why bubblewrap cannot run here, or ""."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    try:
        sandbox.require_sandbox("bwrap", None, LIMITS)
    except MachineError as error:
        return str(error)
    return ""


contained = pytest.mark.skipif(bool(refusal()), reason=refusal() or "it runs")


def why(code: str, limits: SandboxLimits = LIMITS, tests=DOUBLES, mode: str = "bwrap") -> str:
    """How the last test ended."""
    return sandbox.run_sandboxed_tests(code, tests, mode, None, limits, stop_at_failure=False)[
        -1
    ].failure_reason


def said(code: str, given: str = "", limits: SandboxLimits = LIMITS) -> str:
    """What a program prints in the sandbox."""
    (result,) = sandbox.run_sandboxed_tests(
        code, [{"stdin": given, "most": 1 << 16}], "bwrap", None, limits, stop_at_failure=True
    )
    assert result.failure_reason == "", result
    return result.output


def living(mark: str) -> list[int]:
    """Processes, on this whole machine, that have `mark` among their words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            ended = (path.parent / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if mark in path.read_text().split("\0") and not ended:
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


# Verdicts


@contained
def test_right_code_passes_and_wrong_code_does_not() -> None:
    assert why("def f(x): return x * 2") == ""
    assert why("def f(x): return x * 3") == "failed"
    assert why("def f(x: return") == "failed"
    assert why("") == "failed"


@contained
def test_a_program_is_given_its_input_and_its_output_comes_back() -> None:
    assert said("print(int(input()) + int(input()))", "1\n41\n") == "42\n"
    assert said("if __name__ == '__main__': print('ran')") == "ran\n"


@contained
def test_each_test_has_an_interpreter_of_its_own_and_one_time_for_all() -> None:
    code = "import os\nseen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)"
    tests = [{"test": "assert f(0) == 1"}, {"test": "assert f(0) == 2"}]
    found = sandbox.run_sandboxed_tests(
        code, [*tests, tests[0]], "bwrap", None, LIMITS, stop_at_failure=False
    )
    assert [r.failure_reason for r in found] == ["", "failed", ""]
    found = sandbox.run_sandboxed_tests(
        code, tests[::-1], "bwrap", None, LIMITS, stop_at_failure=True
    )
    assert [r.failure_reason for r in found] == ["failed", "failed"]  # the second was not run
    code = "import time\ndef f(x): time.sleep(x)"
    tests = [{"test": "f(0)"}, {"test": "f(60)"}, {"test": "f(0)"}]
    found = sandbox.run_sandboxed_tests(code, tests, "bwrap", None, SHORT, stop_at_failure=False)
    assert [r.failure_reason for r in found] == ["", "time", "time"]


FORGERIES = {
    "an early sys.exit(0)": "import sys\nsys.exit(0)",
    "an early os._exit(0)": "import os\nos._exit(0)",
    "an exit in the function": "import sys\ndef f(x): sys.exit(0)",
    "os._exit in the function": "import os\ndef f(x): os._exit(0)",
    "an exit in a comparison": (
        "import os\nclass A:\n    def __eq__(s, o): os._exit(0)\ndef f(x): return A()"
    ),
    "a forged nonce": (
        "import os, json\nfor fd in range(64):\n    for line in (b'loaded\\n', b'token',"
        " json.dumps({'ended': 'x', 'results': [{'why': '', 'output': ''}]}).encode() + b'\\n'):\n"
        "        try: os.write(fd, line)\n        except OSError: pass\nos._exit(0)"
    ),
    "a forged token": (
        "import os\ndef f(x):\n    os.write(4, b'0' * 32)\n    os._exit(0)"  # the report's pipe
    ),
    "words of the harness": "print('loaded')\nimport os\ndef f(x): print('0' * 32); os._exit(0)",
    "replaced builtins": (
        "import builtins, sys, os, json\n"
        "for name in ('exec', 'compile', 'open', 'all', 'AssertionError', 'isinstance', 'len'):\n"
        "    setattr(builtins, name, lambda *a, **k: True)\n"
        "os.read = os.write = json.loads = lambda *a, **k: b''\n"
        "sys.excepthook = lambda *a: os._exit(0)\n"
        "def f(x): return 5"
    ),
    "builtins replaced while it runs": (
        "import builtins\ndef f(x):\n    builtins.all = builtins.len = lambda *_: True\n"
        "    return [5]"
    ),
    "an end at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 5",
    "a killed group": "import os\ndef f(x):\n    os.killpg(0, 9)",
}


@contained
@pytest.mark.parametrize("name", FORGERIES)
def test_what_ends_well_without_passing_has_failed(name: str) -> None:
    tests = [{"test": "found = f(2)\nassert found == 4 or all(found) and len(found) == 9"}]
    if name == "builtins replaced while it runs":
        tests = [{"test": "found = f(2)\nassert all(x == 4 for x in found)"}]
    assert why(FORGERIES[name], SHORT, tests) in ("failed", "time")


@contained
def test_the_harness_can_be_neither_read_nor_killed_nor_spoken_for() -> None:
    code = """
import os, signal
for path in ("/proc/1/environ", "/proc/1/mem", "/proc/1/fd/0", "/proc/1/fd/1"):
    for mode in ("rb", "r+b"):
        try:
            open(path, mode).read(1)
            print("opened", path)
        except OSError:
            pass
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGKILL):
    os.kill(1, number)
print("still here")
"""
    assert said(code) == "still here\n"


@contained
def test_a_case_cannot_find_what_was_wanted_of_it() -> None:
    # Its own process is a fresh one: nothing of the job is in its memory.
    seen = "import gc, sys\nprint([o for o in gc.get_objects() if isinstance(o, dict)"
    assert "nonce" not in said(f"{seen} and ('no' + 'nce') in o], sys.argv)")


# What it may not do


@contained
def test_a_fork_bomb_ends_and_so_does_a_bomb_of_children_that_ended() -> None:
    assert why("import os\nwhile True: os.fork()") == "processes"
    assert why("import os\nwhile True:\n    os.fork() or os._exit(0)") == "processes"
    threads = "import threading, time\nfor _ in range(9):\n"
    threads += "    threading.Thread(target=time.sleep, args=(9,)).start()\ntime.sleep(9)"
    assert why(threads) in ("processes", "failed")  # counted by us, or refused by the kernel


LARGE = "import mmap\nx = mmap.mmap(-1, 1 << 30)\ndef f(x): return 4"  # and never touched


@contained
def test_memory_is_limited_for_each_process_and_for_all() -> None:
    assert why(LARGE) == "failed"
    hogs = (
        "import os, time\nfor _ in range(3):\n    if not os.fork():\n        x = b'x' * (30 << 20)"
    )
    limits = dataclasses.replace(LIMITS, memory_mb=80)
    assert why(f"{hogs}\n        time.sleep(9)\ntime.sleep(9)", limits) == "memory"


@contained
def test_nothing_but_its_own_temporary_folder_can_be_written(tmp_path: Path) -> None:
    places = ["/", "/usr", "/etc", "/dev", "/proc", "/proc/sys/kernel", "/root", "/home", "/var"]
    places += [str(Path.home()), sys.prefix, str(tmp_path), str(Path(__file__).parent)]
    code = f"""
import os
for place in {places!r}:
    try:
        open(place + "/rloo_was_here", "w").close()
        print("wrote into", place)
    except OSError:
        pass
open("/tmp/here", "w").close()
print("done")
"""
    assert said(code) == "done\n"
    assert not list(tmp_path.iterdir())


@contained
def test_files_of_the_home_and_of_the_checkout_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("sentinel")
    kept = [str(tmp_path / "secret"), __file__, str(sandbox.HARNESS), "/etc/passwd", "/etc/shadow"]
    found = said(f"import os\nprint([p for p in {kept!r} if os.path.exists(p)])")
    assert found == "[]\n"


@contained
def test_the_environment_is_empty_also_where_another_process_has_one(monkeypatch) -> None:
    monkeypatch.setenv("RLOO_SENTINEL", "sentinel")
    code = "import glob, os\nprint({**os.environ})\nfor p in glob.glob('/proc/*/environ'):\n"
    found = said(
        f"{code}    try: print(open(p, 'rb').read())\n    except OSError: print('refused')"
    )
    assert "sentinel" not in found and "refused" in found


@contained
def test_there_is_no_network_not_even_this_machines_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), 1).close()
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)"
        assert why(f"{code}\ndef f(x): return 4") == "failed"


@contained
def test_a_program_that_ignores_signals_ends_in_time() -> None:
    code = (
        "import signal\nfor n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: pass"
    )
    before = time.monotonic()
    assert why(code, SHORT) == "time"
    assert time.monotonic() - before < 3


@contained
def test_children_that_were_left_behind_are_gone_afterwards() -> None:
    mark = f"{100000 + os.getpid()}.25"
    code = f"""
import os, subprocess
if not os.fork():
    os.setsid()
    if not os.fork():
        subprocess.Popen(["sleep", "{mark}"], start_new_session=True)
        os._exit(0)
    os._exit(0)
subprocess.Popen(["sleep", "{mark}"], start_new_session=True)
def f(x): return 4
"""
    seen = [{"test": "assert f(2) == 4"}, {"test": MARKED.format(mark=mark)}]
    assert why(code.replace("def f", "import time; time.sleep(0.1)\ndef f"), tests=seen) == ""
    assert why(code) == ""
    assert living(mark) == []


# The second test starts its own two: those of the first are not there any more.
MARKED = """
import glob
told = [open(p, "rb").read() for p in glob.glob("/proc/[0-9]*/cmdline")]
assert 1 <= sum(b"{mark}" in t and b"sleep" in t for t in told) <= 2, told
"""


@contained
def test_it_ends_with_the_process_that_asked() -> None:
    mark = f"{200000 + os.getpid()}.25"
    code = f"import os\nos.execvp('sleep', ['sleep', '{mark}'])"
    limits = "SandboxLimits(60.0, 96, 6, 2, 32)"
    source = (
        f"from rloo_cli.rewards.common.sandbox import *\nrun_sandboxed_tests({code!r}, "
        f"{DOUBLES!r}, 'bwrap', None,"
    )
    asks = subprocess.Popen([sys.executable, "-c", f"{source} {limits}, True)"])
    try:
        wait_for(lambda: living(mark) != [])
    finally:
        asks.send_signal(signal.SIGKILL)
        asks.wait()
    wait_for(lambda: living(mark) == [])


def wait_for(true) -> None:
    until = time.monotonic() + 10
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


@contained
def test_a_flood_of_output_is_cut_off_and_not_kept() -> None:
    flood = "import sys\nwhile True: sys.stdout.write('x' * 65536)"
    (found,) = sandbox.run_sandboxed_tests(
        flood, [{"stdin": "", "most": 1000}], "bwrap", None, LIMITS, stop_at_failure=True
    )
    assert found.failure_reason == "output" and found.output == ""
    noise = "import os\nfor fd in (1, 2): os.write(fd, b'x' * 9000)\ndef f(x): return 4"
    assert why(noise) == ""  # of a test it goes nowhere


def test_what_the_harness_says_is_never_kept_without_an_end() -> None:
    flood = [sys.executable, "-c", "while True: print('x' * 65536)"]
    said, _ = sandbox._run_harness(flood, "external", b"{}", "/tmp", 5.0, 100_000)
    assert len(said) < 300_000


@contained
def test_files_are_limited_each_and_together() -> None:
    assert why("open('/tmp/a', 'wb').write(b'x' * (3 << 20))\ndef f(x): return 4") == "failed"
    code = "for i in range(9):\n    open(f'/tmp/{i}', 'wb').write(b'x' * (1 << 20))\n"
    code += "def f(x): return 4"
    assert why(code) == "failed"
    assert why(code.replace("/tmp", "/dev/shm")) == "failed"
    nameless = "import os\nos.ftruncate(os.memfd_create('x'), 3 << 20)\ndef f(x): return 4"
    assert why(nameless) == "failed"
    many = "files = [open('/dev/null') for _ in range(99)]\ndef f(x): return 4"
    assert why(many) == "failed"


@contained
def test_no_further_namespace_can_be_made() -> None:
    code = "import ctypes\nprint(ctypes.CDLL(None).unshare(0x10000000))"  # CLONE_NEWUSER
    assert said(code) == "-1\n"


# Where it does not work


def test_without_bubblewrap_the_run_is_refused(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="not installed") as caught:
        sandbox.require_sandbox("bwrap", None, LIMITS)
    assert "apt-get install bubblewrap" in str(caught.value)


@pytest.mark.parametrize("script", ["echo 'no permission' >&2; exit 1", "exit 0", "cat"])
def test_a_bubblewrap_that_does_not_work_is_refused_and_nothing_runs(
    script: str, monkeypatch, tmp_path: Path
) -> None:
    (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(MachineError) as caught:
        sandbox.require_sandbox("bwrap", None, LIMITS)
    assert_refused(caught, 3, "no permission" if "echo" in script else "bwrap")


def test_a_command_of_ones_own_runs_the_harness() -> None:
    command = f"{shlex.quote(sys.executable)} -I {{harness}}"
    sandbox.require_sandbox("external", command, LIMITS)
    found = sandbox.run_sandboxed_tests(
        "def f(x): return 5", DOUBLES, "external", command, LIMITS, stop_at_failure=True
    )
    assert [r.failure_reason for r in found] == ["failed"]
    with pytest.raises(MachineError, match="podman"):
        sandbox.require_sandbox("external", "false", LIMITS)
    with pytest.raises(RuntimeError, match="no-such-command"):
        sandbox.run_sandboxed_tests(
            "", DOUBLES, "external", "no-such-command", LIMITS, stop_at_failure=True
        )


def test_without_a_sandbox_there_are_limits_and_an_empty_environment(monkeypatch) -> None:
    monkeypatch.setenv("RLOO_SENTINEL", "sentinel")
    unsafe = "unsafe_subprocess"
    assert why("def f(x): return x * 2", mode=unsafe) == ""
    assert why("import sys\nsys.exit(0)", mode=unsafe) == "failed"
    assert why("while True: pass", SHORT, mode=unsafe) == "time"
    assert why(LARGE, mode=unsafe) == "failed"
    inherited = "import os\nassert 'RLOO_SENTINEL' not in os.environ\ndef f(x): return 4"
    assert why(inherited, mode=unsafe) == ""
    mark = f"{300000 + os.getpid()}.25"
    left = f"import subprocess\nsubprocess.Popen(['sleep', '{mark}'], start_new_session=True)"
    assert why(f"{left}\ndef f(x): return 4", mode=unsafe) == ""
    assert living(mark) == []


def test_memory_files_without_a_name_are_counted_once() -> None:
    code = (
        "import os, sys\n"
        "held = [os.memfd_create('x') for _ in range(3)]\n"
        "for file in held + [os.dup(held[0])]:\n"
        "    os.pwrite(file, bytes(1 << 20), 0)\n"
        "print('written', flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-I", "-c", code], **pipes) as child:
        assert child.stdout is not None and child.stdout.readline() == b"written\n"
        assert sandbox_harness.memfd_bytes([child.pid, os.getpid()]) == 3 << 20
        child.kill()
    assert sandbox_harness.memfd_bytes([child.pid]) == 0


@contained
def test_memory_files_without_a_name_count_as_memory() -> None:
    code = (
        "import os, time\n"
        "held = [os.memfd_create('x') for _ in range(20)]\n"
        "for file in held:\n"
        "    os.write(file, bytes(2_000_000))\n"
        "time.sleep(0.5)\n"
        "def f(x): return 2 * x\n"
    )
    assert why(code, dataclasses.replace(LIMITS, memory_mb=48)) == "memory"
    assert why(code.replace("range(20)", "range(2)")) == ""


HOLDS_FILES = """
import os, resource, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
for _ in range(1100):
    os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
os.execv(sys.executable, [sys.executable, "-I", sys.argv[1]])
"""


def test_a_command_may_leave_the_harness_more_files_than_select_takes() -> None:
    command = shlex.join([sys.executable, "-I", "-c", HOLDS_FILES, "{harness}"])
    tests = [*DOUBLES, {"stdin": "", "most": 100}]
    limits = dataclasses.replace(LIMITS, memory_mb=1000)
    found = sandbox.run_sandboxed_tests(
        "def f(x): return x * 2", tests, "external", command, limits, stop_at_failure=False
    )
    assert [result.failure_reason for result in found] == ["", ""]

"""Programs that a model could write to get out of the sandbox, or past its limits: one table.

Each prints HARM where it managed what it tried, and has the endings that are right for it. A row of
`FORGED` fools a test instead, and must not pass. tests/rewards/test_sandbox.py has the sandbox's
promises one by one.
"""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from rloo_cli.rewards.common import sandbox
from rloo_cli.rewards.common.sandbox import SandboxLimits
from rloo_cli.utils.errors import MachineError

LIMITS = SandboxLimits(seconds=1.0, memory_mb=96, processes=6, file_mb=2, open_files=32)
LONG = SandboxLimits(seconds=5.0, memory_mb=64, processes=6, file_mb=2, open_files=32)
MARK = f"{400000 + os.getpid()}.25"  # the argument of a `sleep` that is left behind
ENDS_WELL = {""}
TRY = """
import os
def attempt(what, call):
    try:
        found = call()
    except BaseException:
        return
    if found is not False:
        print("HARM:", what, found)
"""

# Name -> (the program, how it may end).
PROGRAMS: dict[str, tuple[str, set[str]]] = {
    "a fork bomb": ("import os\nwhile True: os.fork()", {"processes"}),
    "a bomb of threads": (
        "import threading, time\nfor _ in range(99):\n"
        "    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\nprint('HARM')",
        {"processes", "failed"},
    ),
    "a memory hog": ("x = b'x' * (1 << 30)\nprint('HARM')", {"failed", "memory"}),
    "memory that no process holds": (
        """
import ctypes
c = ctypes.CDLL(None)
c.shmat.restype, c.shmdt.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
for n in range(40):
    place = c.shmat(c.shmget(0, 20 << 20, 0o1600), None, 0)
    if place in (None, 2**64 - 1):
        raise SystemExit(1)
    ctypes.memset(place, 1, 20 << 20)
    c.shmdt(place)
print("HARM")
""",
        {"memory"},
    ),
    "names of files without end": (
        "import os\nfor n in range(150_000): os.close(os.open(f'/tmp/{n}', os.O_CREAT))\n"
        "print('HARM')",
        {"memory"},
    ),
    "a full disk": (
        TRY
        + """
def fill():
    written = 0
    try:
        for n in range(64):
            with open(f"/tmp/{n}", "wb") as file:
                written += file.write(b"x" * (1 << 20))
    except OSError:
        pass
    return written > 4 << 20 and written
attempt("megabytes", fill)
""",
        ENDS_WELL,
    ),
    "a file in the home folder": (
        TRY
        + """
for place in ("HOME_FOLDER", "HERE", "/root", "/home", "/", "/usr/lib", "/etc", "/var/tmp"):
    attempt(place, lambda: open(place + "/pwned", "w").close())
""",
        ENDS_WELL,
    ),
    "a look at the environment": (
        TRY
        + """
import glob
for path in ["/proc/self/environ", *glob.glob("/proc/[0-9]*/environ")]:
    attempt(path, lambda: b"sentinel" in open(path, "rb").read())
attempt("os.environ", lambda: "RLOO_SENTINEL" in os.environ)
""",
        ENDS_WELL,
    ),
    "processes of others": (
        TRY
        + """
import glob
for path in glob.glob("/proc/[0-9]*/cmdline"):
    attempt(path, lambda: b"pytest" in open(path, "rb").read())
attempt("many processes", lambda: len(glob.glob("/proc/[0-9]*")) > 4)
""",
        ENDS_WELL,
    ),
    "a socket of the loopback": (
        TRY + "import socket\n"
        "attempt('tcp', lambda: socket.create_connection(('127.0.0.1', PORT), 0.3))",
        ENDS_WELL,
    ),
    "unix sockets, with a file and without": (
        TRY
        + """
import socket
for name in ("HERE/socket", "\\0ABSTRACT", "/run/dbus/system_bus_socket", "/var/run/docker.sock"):
    attempt(name, lambda: socket.socket(socket.AF_UNIX).connect(name))
""",
        ENDS_WELL,
    ),
    "signals that are ignored": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: pass",
        {"time"},
    ),
    "children that are left": (
        "import os, subprocess\nif not os.fork():\n    os.setsid()\n"
        f"    subprocess.Popen(['sleep', '{MARK}'], start_new_session=True)\n    os._exit(0)\n"
        f"subprocess.Popen(['sleep', '{MARK}'], start_new_session=True)",
        ENDS_WELL,
    ),
    "links out of the work folder": (
        TRY
        + """
for target in ("/etc/passwd", "/etc/shadow", "HERE/secret", "/proc/1/root/etc/passwd"):
    os.symlink(target, "/tmp/link")
    attempt(target, lambda: open("/tmp/link", "rb").read())
    os.unlink("/tmp/link")
os.symlink("HERE", "/tmp/link")
attempt("written", lambda: open("/tmp/link/pwned", "w"))
attempt("a hard link", lambda: os.link("/usr/bin/env", "/tmp/env"))
""",
        ENDS_WELL,
    ),
    "setuid": (
        TRY
        + """
import shutil, subprocess
for call in (os.setuid, os.setgid, os.seteuid):
    attempt(call.__name__, lambda: call(0))
shutil.copy("/bin/sh", "/tmp/sh")
attempt("a bit", lambda: os.chown("/tmp/sh", 0, 0) or os.chmod("/tmp/sh", 0o4755))
status = open("/proc/self/status").read()
attempt("new privileges", lambda: "NoNewPrivs:\\t1" not in status)
attempt("capabilities", lambda: "CapEff:\\t0000000000000000" not in status)
attempt("capabilities kept", lambda: "CapBnd:\\t0000000000000000" not in status)
""",
        ENDS_WELL,
    ),
    "ptrace, and the memory of the parent": (
        TRY
        + """
import ctypes
c = ctypes.CDLL(None, use_errno=True)
for request in (16, 0x4206):
    attempt(f"ptrace {request}", lambda: c.ptrace(request, os.getppid(), 0, 0) == 0)
attempt("memory", lambda: open(f"/proc/{os.getppid()}/mem", "rb").read(1))
for number in (0, 1, 2, 11, 12):
    attempt("a file of it", lambda: open(f"/proc/{os.getppid()}/fd/{number}", "rb"))
""",
        ENDS_WELL,
    ),
    "mounts, roots and namespaces": (
        TRY
        + """
import ctypes
c = ctypes.CDLL(None, use_errno=True)
attempt("mount", lambda: c.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0)
attempt("remount", lambda: c.mount(None, b"/", None, 32 | 4096, None) == 0)
attempt("chroot", lambda: os.chroot("/tmp"))
for flag in (0x10000000, 0x20000, 0x40000000):
    attempt(f"unshare {flag}", lambda: c.unshare(flag) == 0)
attempt("a device", lambda: os.mknod("/tmp/disk", 0o60666, os.makedev(8, 0)))
""",
        ENDS_WELL,
    ),
    "the terminal": (
        TRY
        + """
import fcntl
push_input = 0x5412  # TIOCSTI
attempt("a tty", lambda: fcntl.ioctl(os.open("/dev/tty", os.O_RDWR), push_input, b"x"))
""",
        ENDS_WELL,
    ),
    "much output": ("import os\nos.write(1, b'x' * (1 << 20))\nprint('HARM')", {"output"}),
    "output without an end or a newline": (
        "import sys\nwhile True: sys.stdout.write('x' * 4096)",
        {"output"},
    ),
    "signals to the parent": (
        TRY
        + """
for pid in (1, os.getppid(), -1):
    for number in (15, 19, 9) if pid > 0 else (15,):
        if pid == -1:
            import signal
            signal.signal(15, signal.SIG_IGN)
        try:
            os.kill(pid, number)
        except OSError:
            pass
print("still here")
""",
        ENDS_WELL,
    ),
    "the harness' own source": (
        TRY
        + """
import sys
attempt("written", lambda: open("/rloo_harness.py", "a"))
attempt("replaced", lambda: os.rename("/tmp/x", "/rloo_harness.py"))
attempt("removed", lambda: os.unlink("/rloo_harness.py"))
attempt("a pipe of the parent", lambda: [os.fstat(fd) for fd in range(3, 64) if opened(fd)] != [])
def opened(fd):
    try:
        return os.fstat(fd)
    except OSError:
        return None
attempt("the job", lambda: "nonce" in repr(sys.argv))
""",
        ENDS_WELL,
    ),
    "knobs of the kernel": (
        TRY
        + """
for name in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches",
             "/proc/irq/0/smp_affinity",
             "/proc/self/comm", "/sys/power/state", "/dev/mem", "/dev/kmsg", "/dev/sda"):
    for mode in ("r+b", "wb"):
        attempt(name, lambda: open(name, mode))
""",
        ENDS_WELL,
    ),
}  # fmt: skip

# Name -> code whose tests, `assert f(2) == 4` twice, must not pass: the first, or the second.
FORGED: dict[str, str] = {
    "an early exit": "import sys\nsys.exit(0)",
    "a forged nonce": (
        "import os, json\nfor fd in range(64):\n"
        "    for line in (b'loaded\\n', json.dumps({'ended': '0' * 32, 'results': [{'why': '', "
        "'output': ''}] * 2}).encode() + b'\\n'):\n"
        "        try: os.write(fd, line)\n        except OSError: pass\nos._exit(0)"
    ),
    "import hooks": (
        "import sys, builtins\nclass Hook:\n    def find_spec(self, *a): raise SystemExit(0)\n"
        "sys.meta_path.insert(0, Hook())\nbuiltins.__import__ = lambda *a: sys.exit(0)\n"
        "def f(x): return 5"
    ),
    "an end at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 5",
    "modules for the next test": (
        "import os\nfor name in ('json', 'os', 'sitecustomize', 'usercustomize', 'encodings'):\n"
        "    for folder in ('/tmp', os.getcwd(), '/tmp/.local/lib/python3/site-packages'):\n"
        "        os.makedirs(folder, exist_ok=True)\n"
        "        open(f'{folder}/{name}.py', 'w').write('import os; os._exit(0)')\n"
        "def f(x): return 5"
    ),
    "the tests unlinked": (
        "import os, shutil\nshutil.rmtree(os.getcwd())\nos._exit(0)\ndef f(x): return 4"
    ),
}


def refusal() -> str:
    """Why bubblewrap cannot run here, or ""."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    try:
        sandbox.require_sandbox("bwrap", None, LIMITS)
    except MachineError as error:
        return str(error)
    return ""


pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "it runs"),
]


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What a program tries to reach, by the word that stands for it in its code."""
    monkeypatch.setenv("RLOO_SENTINEL", "sentinel")
    (tmp_path / "secret").write_text("sentinel")
    abstract = f"rloo-test-{os.getpid()}"
    with ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for name in (str(tmp_path / "socket"), f"\0{abstract}"):
            listening = stack.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(name)
            listening.listen()
        yield {
            "HOME_FOLDER": str(Path.home()),
            "HERE": str(tmp_path),
            "PORT": str(tcp.getsockname()[1]),
            "ABSTRACT": abstract,
        }


def is_left_behind() -> bool:
    """Whether a process of this machine has the mark among its words."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if MARK in path.read_text().split("\0"):
                return True
        except OSError:
            continue
    return False


def test_there_are_twenty_programs_and_more() -> None:
    assert len(PROGRAMS) + len(FORGED) >= 20


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hostile_program_stays_inside(
    name: str, surroundings: dict[str, str], tmp_path: Path
) -> None:
    code, endings = PROGRAMS[name]
    for word, value in surroundings.items():
        code = code.replace(word, value)
    before = sorted(tmp_path.iterdir())
    # What is to end otherwise is not to be ended by the clock of a busy machine.
    limits = LONG if endings == {"memory"} else LIMITS
    limits = limits if "time" in endings else replace(limits, seconds=30.0)
    (found,) = sandbox.run_sandboxed_tests(
        code, [{"stdin": "", "most": 1 << 16}], "bwrap", None, limits, stop_at_failure=True
    )
    assert "HARM" not in found.output and found.failure_reason in endings, found
    assert sorted(tmp_path.iterdir()) == before and not is_left_behind()


@pytest.mark.parametrize("name", FORGED)
def test_a_hostile_program_passes_no_test(name: str) -> None:
    tests = [{"test": "import json\nassert f(2) == 4"}] * 2
    found = sandbox.run_sandboxed_tests(
        FORGED[name], tests, "bwrap", None, LIMITS, stop_at_failure=False
    )
    assert all(result.failure_reason for result in found), found


@pytest.mark.process
def test_the_programs_do_harm_where_nothing_holds_them(
    surroundings: dict[str, str], tmp_path: Path
) -> None:
    """The table would notice: without a sandbox, what can be reached is reached."""
    for name in ("a file in the home folder", "a socket of the loopback", "processes of others"):
        code = PROGRAMS[name][0].replace("HOME_FOLDER", str(tmp_path)).replace('"/var/tmp"', '""')
        code = code.replace('"/root", "/home", "/", "/usr/lib", "/etc", ', "")
        for word, value in surroundings.items():
            code = code.replace(word, value)
        (found,) = sandbox.run_sandboxed_tests(
            code, [{"stdin": "", "most": 1 << 16}], "unsafe_subprocess", None, LIMITS, True
        )
        assert "HARM" in found.output, name

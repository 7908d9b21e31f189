"""Runs a model's code against tests where it can do no harm, and reports which tests passed.

`bwrap` (bubblewrap) gives each completion its own namespaces: no network, its own processes,
a read-only system with only Python and the libraries that it needs, a private /tmp of limited
size, an empty environment, no capabilities, no further namespaces. The home folder and the
checkout are not visible. When the time is over, or the harness exits, the kernel kills every
process in it. rlimits hold each process (memory, CPU, file size, open files); the harness counts
processes and memory of all of them together every 20 ms, as the kernel does not count root's, and
also memory that no process holds: System V shared memory, file names.

Guaranteed: the harness (a process that the model's code can neither read nor write to)
reports a test as passed only with the nonce and, in a test of asserts, a token that is created for
it and sent after the code was loaded. So an exit with status 0, printed text, replaced builtins or
a killed harness all fail. Input/output tests are judged outside, and their expected output never
enters the sandbox. Not guaranteed: a test of asserts runs in the interpreter of the code it
tests. Code written against this very file can read the token out of its caller's frames; an object
can claim to be equal to everything; a library function that the code
replaced (math.isclose) stays replaced for the test. Check samples of a reward that rises too fast,
or use input/output tests. Kernel bugs are beyond what any namespace protects against.

`external` is a user command that must run sandbox_harness.py, with its input and output
connected. `unsafe_subprocess` has limits and an empty environment, and contains nothing.
"""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rloo_cli.utils import files
from rloo_cli.utils.child_process import start_child, stop_child
from rloo_cli.utils.errors import MachineError, Problem, refuse
from rloo_cli.utils.files import JsonObject

HARNESS = Path(__file__).with_name("sandbox_harness.py")
START_TIMEOUT_S = 30.0  # seconds a sandbox may take to start on a busy machine
HARNESS_GRACE_S = 3.0  # seconds the harness may be late
HARNESS_MOUNT_PATH = "/rloo_harness.py"
NOBODY_USER_ARGS = ["--uid", "65534", "--gid", "65534"]
BWRAP_ISOLATION_ARGS = [
    "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session",
    "--clearenv", "--cap-drop", "ALL", "--as-pid-1", *NOBODY_USER_ARGS,
]  # fmt: skip
SANDBOX_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "PATH": "/usr/bin:/bin",
}
SYSTEM_PATHS = ("/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives")
MB = 1 << 20
INSTALL_HINT = "apt-get install bubblewrap (dnf, pacman: the same name); it must be 0.8 or newer"


@dataclass(frozen=True)
class SandboxLimits:
    """The limits of one completion's tests, in total unless stated otherwise."""

    seconds: float
    memory_mb: int  # of each process, and of all of them
    processes: int  # and threads
    file_mb: int  # each file, and all of /tmp
    open_files: int  # of each process


@dataclass(frozen=True)
class SandboxTestResult:
    """How one test ended."""

    failure_reason: str  # "" or time, memory, processes, output, failed, killed
    output: str = ""  # what the program of a {stdin} test printed


def run_sandboxed_tests(
    code: str, tests: list[JsonObject], mode: str, command: str | None, limits: SandboxLimits,
    stop_at_failure: bool,
) -> list[SandboxTestResult]:  # fmt: skip
    """Run tests of one completion's code, and return the result of each.

    A test is {test: Python source} or {stdin: text, most: bytes of output to keep}. With
    `stop_at_failure` no test runs after the first failure. Tests that did not run get the
    reason of the last one that did. Raises RuntimeError if the sandbox itself does not start,
    which is not the fault of the code.
    """
    nonce = os.urandom(16).hex()
    kernel = tuple(int(n) for n in platform.release().split("-")[0].split(".")[:2])
    job = {
        "nonce": nonce,
        "code": code,
        "tests": tests,
        "stop": stop_at_failure,
        "seconds": limits.seconds,
        "memory": limits.memory_mb * MB,
        "processes": limits.processes,
        "file": limits.file_mb * MB,
        "open_files": limits.open_files,
        "own_user": mode == "bwrap" and kernel >= (5, 14),
        "own_namespaces": mode == "bwrap",
    }
    max_bytes = 1 << 16
    max_bytes += sum(6 * t.get("most", 0) + 100 for t in tests)  # JSON may need 6 for one
    harness_command, data = _sandbox_command(mode, command, limits), json.dumps(job).encode()
    with tempfile.TemporaryDirectory(prefix="rloo-code-") as folder:
        output, errors = _run_harness(
            harness_command, mode, data, folder, limits.seconds, max_bytes
        )
    lines = output.split(b"\n")
    if _parse_json_line(lines[0]).get("began") != nonce:
        last_error = errors.strip().splitlines()[-1:] or ["no output"]
        raise RuntimeError(f"the sandbox ({mode}) did not start: {last_error[0][:300]}")
    ended = _parse_json_line(lines[1]) if len(lines) > 1 else {}
    results = [SandboxTestResult("killed")]
    if ended.get("ended") == nonce:
        results = [SandboxTestResult(r["why"], r["output"]) for r in ended["results"]]
    not_run = SandboxTestResult(results[-1].failure_reason or "killed")
    return results + [not_run] * (len(tests) - len(results))


def _parse_json_line(line: bytes) -> JsonObject:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _sandbox_command(mode: str, command: str | None, limits: SandboxLimits) -> list[str]:
    if mode == "bwrap":
        return bwrap_command(limits)
    if mode == "external":
        return [w.replace("{harness}", str(HARNESS)) for w in shlex.split(command or "")]
    return [sys.executable, "-I", str(HARNESS)]


def bwrap_command(limits: SandboxLimits) -> list[str]:
    """The command line of bwrap that runs the harness in its own namespaces."""
    size = str(limits.file_mb * MB)
    # Temporary folders first: bound paths may lie below one of them.
    words = [shutil.which("bwrap") or "bwrap", *BWRAP_ISOLATION_ARGS]
    # To the kernel root in a sandbox is still root: it could write to /proc/sys.
    words += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev"]
    words += ["--size", str(MB), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    words += ["--size", size, "--tmpfs", "/tmp", "--ro-bind", "/usr", "/usr"]
    for path in SYSTEM_PATHS:
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            words += ["--ro-bind", path, path]
    for path in _python_folders():
        words += ["--ro-bind", path, path]
    words += ["--ro-bind", str(HARNESS), HARNESS_MOUNT_PATH, "--remount-ro", "/", "--chdir", "/tmp"]
    for name, value in SANDBOX_ENVIRONMENT.items():
        words += ["--setenv", name, value]
    return [*words, sys.executable, "-I", HARNESS_MOUNT_PATH]


def _python_folders() -> list[str]:
    """Folders outside /usr that this interpreter needs: its own, its environment's."""
    real = str(Path(os.path.realpath(sys.executable)).parents[1])
    prefixes = [sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix, real]
    folders = [f for p in prefixes for f in (p, os.path.realpath(p))]
    return [f for f in dict.fromkeys(folders) if f not in ("/", "/usr")]


def _run_harness(
    command: list[str], mode: str, job: bytes, folder: str, timeout_s: float, max_bytes: int
) -> tuple[bytes, str]:
    """Run the command on `job`, and end it. Returns (at most `max_bytes` of stdout, stderr)."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as errors:
        stdin.write(job)
        stdin.seek(0)
        # bwrap does not get our environment either: it clears the program's environment,
        # but keeps its own.
        environment = SANDBOX_ENVIRONMENT | {"HOME": folder, "TMPDIR": folder}
        environment = dict(os.environ) if mode == "external" else environment
        try:
            child = start_child(
                command, environment, inherit=False,
                stdin=stdin, stdout=subprocess.PIPE, stderr=errors, cwd=folder,
            )  # fmt: skip
        except OSError as error:
            return b"", f"{command[0]}: {error.strerror}"
        assert child.stdout is not None
        try:
            output = _read_output(child.stdout.fileno(), timeout_s, max_bytes)
        finally:
            # Processes inside bwrap end with it; those of a plain command are in its group.
            stop_child(child)
            child.stdout.close()
        errors.seek(0)
        return output, errors.read(4000).decode("utf-8", "replace")


def _read_output(stdout_fd: int, timeout_s: float, max_bytes: int) -> bytes:
    """Read until the end, `max_bytes` or `timeout_s`, which counts from the first line on."""
    said, until, began = b"", time.monotonic() + START_TIMEOUT_S, False
    while len(said) <= max_bytes and (left := until - time.monotonic()) > 0:
        if not files.wait_until_readable(stdout_fd, left):
            break
        part = os.read(stdout_fd, 1 << 16)
        if not part:
            break
        said += part
        if not began and b"\n" in said:
            began, until = True, time.monotonic() + timeout_s + HARNESS_GRACE_S
    return said


def require_sandbox(mode: str, command: str | None, limits: SandboxLimits) -> None:
    """Try the sandbox with two lines of code. Raises MachineError if it does not work."""
    if mode == "bwrap" and shutil.which("bwrap") is None:
        why = "sandbox=bwrap needs it to run model-written code"
        what = "bwrap (bubblewrap) is not installed"
        refuse("this machine", what, INSTALL_HINT, why, error=MachineError)
    test: JsonObject = {"test": "assert x == 1"}
    try:
        result = run_sandboxed_tests("x = 1", [test], mode, command, limits, True)[0]
    except RuntimeError as error:
        raise MachineError(_broken_sandbox_problem(mode, str(error))) from None
    if result.failure_reason:
        why = f"two lines of code did not pass: {result.failure_reason}"
        raise MachineError(_broken_sandbox_problem(mode, why))


def _broken_sandbox_problem(mode: str, why: str) -> Problem:
    fixes = {
        "bwrap": f"{INSTALL_HINT}; and the system must allow user namespaces (sysctl "
        "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)",
        "external": "command= a command that runs {harness} with python -I, stdin and stdout "
        "connected, e.g. podman run --rm -i --network none -v {harness}:/h.py:ro python:3.12 "
        "python -I /h.py",
    }
    what = f"the sandbox ({mode}) does not work here"
    return Problem(what, "this machine", why, fixes.get(mode, "higher memory_mb, time_s"))

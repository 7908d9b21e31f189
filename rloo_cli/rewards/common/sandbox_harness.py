"""Runs inside the sandbox: a model's code against tests, each test in a process of its own.

Standard library alone, so that any Python from 3.9 on can run this file by itself (`external`).
`supervise` reads one line of JSON, the job, and nothing of the model's runs in its process. For
each test it starts a fresh interpreter (exec, so that no memory of the job goes along):

    a case   runs the code as a program; its input is stdin, its output comes back to be judged
             outside, and what it should have been never enters the sandbox
    a test   (`check`, below) runs the code, says so, and only then is given the test's source and
             a token, random for this test, which it sends back once the test's last line ran

The supervisor alone has stdout and the nonce, and is not dumpable: a process of the same user may
neither read its memory nor open its pipes. `sandbox` says what this does and does not promise.
"""

import builtins
import ctypes
import fcntl
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

SUPERVISE_POLL_S = 0.02  # seconds between two looks at the processes
PAGE_BYTES = resource.getpagesize()
CONTROL_FD, REPORT_FD = 3, 4  # a test's pipes
SET_DUMPABLE, SET_CHILD_SUBREAPER = 4, 36  # prctl
JobDict = dict[str, Any]  # what `sandbox` sends, and what goes back
ProcessSizes = dict[int, tuple[int, int]]  # pid -> threads, pages in memory


def supervise_tests() -> None:
    """Reads the job, runs its tests in order, writes one line of JSON that has the nonce."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(SET_DUMPABLE, 0, 0, 0, 0) or prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process of a namespace gets no others
    job = json.loads(sys.stdin.buffer.read())
    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "solution.py")
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(job["code"])
    print(json.dumps({"began": job["nonce"]}), flush=True)  # from here on, blame the model's code
    deadline = time.monotonic() + job["seconds"]
    found = []
    for test in job["tests"]:
        result = run_one_test(job, path, test, deadline)
        found.append(result)
        clean = kill_descendants(deadline + 1)
        if not clean or (job["stop"] and result["why"]):
            break
    shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"ended": job["nonce"], "results": found}), flush=True)


def run_one_test(job: JobDict, path: str, test: JobDict, deadline: float) -> JobDict:
    """One test: {why: "" or how it failed, output: what a case printed}."""
    if time.monotonic() >= deadline:
        return {"why": "time", "output": ""}
    is_case, token = "stdin" in test, os.urandom(16).hex()
    asked = json.dumps({"token": token, "test": test.get("test")}).encode()
    give, out = open_high_pipe(), open_high_pipe()
    ask = (0, test, b"") if is_case else (give[1], None, asked)
    pid = os.fork()
    if pid == 0:
        try:
            exec_test(job, path, test, give[0], out[1])
        finally:
            os._exit(126)
    os.close(give[0])
    os.close(out[1])
    try:
        why, said = watch_test(job, pid, out[0], deadline, ask)
    finally:
        os.close(out[0])
        os.close(give[1])
    if is_case:
        return {"why": why, "output": said.decode("utf-8", "replace")}
    return {"why": why or ("" if said == b"loaded\n" + token.encode() else "failed"), "output": ""}


def open_high_pipe() -> tuple[int, int]:
    """A pipe whose ends are above those that a test's own have."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]


def exec_test(job: JobDict, path: str, test: JobDict, control: int, report: int) -> None:
    """In the new process: its limits, its three or five open files, and a fresh interpreter."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()
    os.nice(10)
    null = os.open(os.devnull, os.O_RDWR)
    case = "stdin" in test
    os.dup2(open_stdin_file(test["stdin"]) if case else null, 0)
    os.dup2(report if case else null, 1)
    os.dup2(null, 2)
    if not case:
        os.dup2(control, CONTROL_FD)
        os.dup2(report, REPORT_FD)
    os.closerange(3 if case else 5, 1 << 16)
    os.chdir(os.path.dirname(path))
    set_resource_limits(job)
    words = [sys.executable, "-I", path] if case else [sys.executable, "-I", __file__, path]
    os.execv(sys.executable, words)


def open_stdin_file(text: str) -> int:
    """A file without a name that holds a program's input."""
    file = os.memfd_create("stdin")
    with open(os.dup(file), "wb") as writer:
        writer.write(text.encode("utf-8", "surrogateescape"))
    os.lseek(file, 0, os.SEEK_SET)
    return file


def set_resource_limits(job: JobDict) -> None:
    """What the kernel holds each process to; it hands the limits on to its children."""
    seconds = int(job["seconds"]) + 1
    limits = {
        resource.RLIMIT_AS: job["memory"],
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: job["file"],
        resource.RLIMIT_NOFILE: job["open_files"],
        resource.RLIMIT_CORE: 0,
    }
    if job["own_user"]:  # elsewhere it would count the user's other processes too
        limits[resource.RLIMIT_NPROC] = job["processes"] + 2
    for which, most in limits.items():
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def watch_test(
    job: JobDict, pid: int, report_fd: int, deadline: float, question: Any
) -> tuple[str, bytes]:
    """Follows a test until it ends or has too much of something: (why, what it wrote)."""
    said, most = bytearray(), question[1]["most"] if question[1] else 100
    is_open, ended = True, None
    while True:
        if (
            is_open
            and select.select([report_fd], [], [], 0 if ended is not None else SUPERVISE_POLL_S)[0]
        ):
            part = os.read(report_fd, 1 << 16)
            is_open = bool(part)
            said += part
        elif ended is not None:  # and there is nothing more to read
            return ("failed" if ended else ""), bytes(said)
        elif not is_open:
            time.sleep(SUPERVISE_POLL_S / 4)
        if len(said) > most:
            return "output", b""
        if question[2] and said == b"loaded\n":
            send_to_test(question[0], question[2])
            question = (0, None, b"")
        if ended is None:
            if why := exceeded_limit(job, deadline):
                return why, b""
            ended = reap_children().get(pid)


def exceeded_limit(job: JobDict, deadline: float) -> str:
    """What the test has too much of, or ""."""
    found = descendant_processes()
    if sum(threads for threads, _ in found.values()) > job["processes"]:
        return "processes"
    used = sum(pages for _, pages in found.values()) * PAGE_BYTES
    if used + memfd_bytes(found) > job["memory"]:
        return "memory"
    return "time" if time.monotonic() > deadline else ""


def memfd_bytes(pids: Iterable[int]) -> int:
    """Bytes in the memory files (memfd) that these processes hold open: no mapping shows them."""
    sizes = {}
    for pid in pids:
        try:
            paths = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue  # it ended
        for path in paths:
            try:
                if os.readlink(path).startswith("/memfd:"):
                    facts = os.stat(path)
                    sizes[facts.st_ino] = facts.st_blocks * 512
            except OSError:
                continue  # it was closed
    return sum(sizes.values())


def reap_children() -> dict[int, int]:
    """The children that ended, with how; orphans of the model's code are children too."""
    found = {}
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found[ended[0]] = ended[1]
    except ChildProcessError:
        pass
    return found


def send_to_test(control_fd: int, data: bytes) -> None:
    """All of it, or less where the test does not read."""
    os.set_blocking(control_fd, False)
    data = len(data).to_bytes(8, "big") + data
    until = time.monotonic() + 1
    try:
        while data and time.monotonic() < until:
            if select.select([], [control_fd], [], SUPERVISE_POLL_S)[1]:
                data = data[os.write(control_fd, data[: 1 << 12]) :]
    except OSError:
        return


def descendant_processes() -> ProcessSizes:
    """Every process below this one, those that ended and were not waited for too."""
    parents, facts = {}, {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    words = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            parents[int(name)] = int(words[1])
            facts[int(name)] = (max(1, int(words[17])), int(words[21]))
    found, me = {}, os.getpid()
    for pid in facts:
        above = pid
        while above in parents and above != me:
            above = parents[above]
        if above == me and pid != me:
            found[pid] = facts[pid]
    return found


def kill_descendants(deadline: float) -> bool:
    """Kills everything below this process. False: some of it is left."""
    while left := descendant_processes():
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        reap_children()
        if time.monotonic() > deadline:
            return False
        time.sleep(SUPERVISE_POLL_S / 10)
    return True


def run_test_in_process(path: str) -> None:
    """In a test's own process: the code, then the test, in one interpreter.

    What is used after the model's code ran was taken before it, and the test sees Python's
    builtins as they were then, whatever became of the originals.
    """
    read, write, leave, run, translate = os.read, os.write, os._exit, exec, compile
    loads, whole, first = json.loads, int.from_bytes, dict(vars(builtins))
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        code = file.read()
    names: JobDict = {"__name__": "solution", "__builtins__": builtins}
    run(translate(code, "solution.py", "exec"), names)
    write(REPORT_FD, b"loaded\n")
    size = whole(read(CONTROL_FD, 8), "big")
    told = b""
    while len(told) < size and (part := read(CONTROL_FD, size - len(told))):
        told += part
    asked = loads(told)
    names["__builtins__"] = first
    run(translate(asked["test"], "test.py", "exec"), {**names})
    write(REPORT_FD, asked["token"].encode())
    leave(0)


if __name__ == "__main__":
    run_test_in_process(sys.argv[1]) if len(sys.argv) > 1 else supervise_tests()

"""Runs inside the sandbox: a model's code against tests, each test in its own process.

It imports only the standard library, so that any Python from 3.9 on can run this file alone
(`external`). `supervise_tests` reads one line of JSON, the job; none of the model's code runs in
its process. For each test it starts a fresh interpreter (exec, so that no memory of the job is
passed on):

    a case   runs the code as a program; its input is stdin, its output comes back to be judged
             outside, and the expected output never enters the sandbox
    a test   (`run_test_in_process`) runs the code, reports that, and only then receives the test's
             source and a random token, which it sends back once the test's last line ran

The supervisor alone has stdout and the nonce, and is not dumpable: a process of the same user may
neither read its memory nor open its pipes. sandbox.py says what this guarantees.
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

SUPERVISE_POLL_S = 0.02  # seconds between two checks of the processes
PAGE_BYTES = resource.getpagesize()
# Writable folders of the sandbox, and the kernel memory of an empty file.
PRIVATE_FOLDERS, INODE_BYTES = ("/tmp", "/dev/shm"), 1 << 10
# System V objects of the sandbox's own namespace: the columns to sum, and bytes of one.
SYSV_TABLES = (("shm", ("rss", "swap"), 1), ("msg", ("cbytes",), 1), ("sem", ("nsems",), 128))
CONTROL_FD, REPORT_FD = 3, 4  # a test's pipes
SET_DUMPABLE, SET_CHILD_SUBREAPER = 4, 36  # prctl
JobDict = dict[str, Any]  # JSON: a job, one of its tests, or a result
ProcessSizes = dict[int, tuple[int, int]]  # pid -> threads, pages in memory
TestInput = tuple[int, JobDict, bytes]  # pipe to the test, a case ({} for a test), data to send


def supervise_tests() -> None:
    """Read the job, run its tests in order, and write one line of JSON that holds the nonce."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(SET_DUMPABLE, 0, 0, 0, 0) or prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a namespace's first process ignores it anyway
    job = json.loads(sys.stdin.buffer.read())
    folder = tempfile.mkdtemp()
    path = os.path.join(folder, "solution.py")
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(job["code"])
    print(json.dumps({"began": job["nonce"]}), flush=True)  # failures after this are the model's
    deadline = time.monotonic() + job["seconds"]
    results = []
    for test in job["tests"]:
        result = run_one_test(job, path, test, deadline)
        results.append(result)
        clean = kill_descendants(deadline + 1, job["own_namespaces"])
        if not clean or (job["stop"] and result["why"]):
            break
    shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"ended": job["nonce"], "results": results}), flush=True)


def run_one_test(job: JobDict, path: str, test: JobDict, deadline: float) -> JobDict:
    """Run one test. Returns {why: "" or how it failed, output: what a case printed}."""
    if time.monotonic() >= deadline:
        return {"why": "time", "output": ""}
    is_case, token = "stdin" in test, os.urandom(16).hex()
    data = json.dumps({"token": token, "test": test.get("test")}).encode()
    control, report = open_high_pipe(), open_high_pipe()
    question = (0, test, b"") if is_case else (control[1], {}, data)
    pid = os.fork()
    if pid == 0:
        try:
            exec_test(job, path, test, control[0], report[1])
        finally:
            os._exit(126)
    os.close(control[0])
    os.close(report[1])
    try:
        why, said = watch_test(job, pid, report[0], deadline, question)
    finally:
        os.close(report[0])
        os.close(control[1])
    if is_case:
        return {"why": why, "output": said.decode("utf-8", "replace")}
    return {"why": why or ("" if said == b"loaded\n" + token.encode() else "failed"), "output": ""}


def open_high_pipe() -> tuple[int, int]:
    """Open a pipe whose descriptors are above those of a test's own pipes."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]


def exec_test(job: JobDict, path: str, test: JobDict, control: int, report: int) -> None:
    """In the new process: set its limits and its open files, and start a fresh interpreter."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.setsid()
    os.nice(10)
    null = os.open(os.devnull, os.O_RDWR)
    is_case = "stdin" in test
    os.dup2(open_stdin_file(test["stdin"]) if is_case else null, 0)
    os.dup2(report if is_case else null, 1)
    os.dup2(null, 2)
    if not is_case:
        os.dup2(control, CONTROL_FD)
        os.dup2(report, REPORT_FD)
    os.closerange(3 if is_case else 5, 1 << 16)
    os.chdir(os.path.dirname(path))
    set_resource_limits(job)
    command = [sys.executable, "-I", path] if is_case else [sys.executable, "-I", __file__, path]
    os.execv(sys.executable, command)


def open_stdin_file(text: str) -> int:
    """Open a nameless file that holds a program's input."""
    file = os.memfd_create("stdin")
    with open(os.dup(file), "wb") as writer:
        writer.write(text.encode("utf-8", "surrogateescape"))
    os.lseek(file, 0, os.SEEK_SET)
    return file


def set_resource_limits(job: JobDict) -> None:
    """Set the kernel's limits of each process, which its children inherit."""
    limits = {
        resource.RLIMIT_AS: job["memory"],
        resource.RLIMIT_CPU: int(job["seconds"]) + 1,
        resource.RLIMIT_FSIZE: job["file"],
        resource.RLIMIT_NOFILE: job["open_files"],
        resource.RLIMIT_CORE: 0,
    }
    if job["own_user"]:  # otherwise it counts the user's other processes too
        limits[resource.RLIMIT_NPROC] = job["processes"] + 2
    for which, most in limits.items():
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def watch_test(
    job: JobDict, pid: int, report_fd: int, deadline: float, question: TestInput
) -> tuple[str, bytes]:
    """Follow a test until it ends or exceeds a limit. Returns (why it failed, what it wrote)."""
    said, most = bytearray(), question[1]["most"] if question[1] else 100
    is_open, ended = True, None
    while True:
        wait_s = 0 if ended is not None else SUPERVISE_POLL_S
        if is_open and wait_for_pipe(report_fd, select.POLLIN, wait_s):
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
            question = (0, {}, b"")
        if ended is None:
            if why := exceeded_limit(job, deadline):
                return why, b""
            ended = reap_children().get(pid)


def wait_for_pipe(pipe: int, event: int, seconds: float) -> bool:
    """Whether a pipe can be read (POLLIN) or written (POLLOUT), or has ended, within the time.

    `select.select` takes no descriptor above 1023, and a command of the user's may leave more open.
    """
    waiting = select.poll()
    waiting.register(pipe, event)
    return bool(waiting.poll(1000 * seconds))


def exceeded_limit(job: JobDict, deadline: float) -> str:
    """The limit that the test exceeds: "processes", "memory", "time", or ""."""
    # Counting names comes first because it is fast: a fork bomb leaves this process little time.
    names = os.listdir("/proc") if job["own_namespaces"] else ()
    if sum(map(str.isdigit, names)) > job["processes"] + 1:
        return "processes"
    found = descendant_processes()
    if sum(threads for threads, _ in found.values()) > job["processes"]:
        return "processes"
    used = sum(pages for _, pages in found.values()) * PAGE_BYTES + memfd_bytes(found)
    if used + (namespace_bytes() if job["own_namespaces"] else 0) > job["memory"]:
        return "memory"
    return "time" if time.monotonic() > deadline else ""


def memfd_bytes(pids: Iterable[int]) -> int:
    """Bytes in memory files (memfd) that these processes hold open; their mappings lack them."""
    sizes = {}
    for pid in pids:
        try:
            paths = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue  # it ended
        for path in paths:
            try:
                if os.readlink(path).startswith("/memfd:"):
                    status = os.stat(path)
                    sizes[status.st_ino] = status.st_blocks * 512
            except OSError:
                continue  # it was closed
    return sum(sizes.values())


def namespace_bytes() -> int:
    """Bytes that no process holds: System V objects, and the inodes of the private folders.

    Both outlive the process that created them. Outside the sandbox's own namespaces, those of
    other programs would count.
    """
    used = 0
    for folder in PRIVATE_FOLDERS:
        status = os.statvfs(folder)
        used += (status.f_files - status.f_ffree) * INODE_BYTES
    for name, columns, size in SYSV_TABLES:
        try:
            with open(f"/proc/sysvipc/{name}", encoding="ascii") as file:
                head, *lines = (line.split() for line in file)
        except OSError:
            continue  # a kernel without System V objects
        indices = [head.index(column) for column in columns]
        used += size * sum(int(line[index]) for line in lines for index in indices)
    return used


def reap_children() -> dict[int, int]:
    """Wait for children that ended: pid -> status. Orphans of the model's code are children too."""
    statuses = {}
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = ended[1]
    except ChildProcessError:
        pass
    return statuses


def send_to_test(control_fd: int, data: bytes) -> None:
    """Send the data to a test for at most a second; a test that does not read gets less."""
    os.set_blocking(control_fd, False)
    data = len(data).to_bytes(8, "big") + data
    until = time.monotonic() + 1
    try:
        while data and time.monotonic() < until:
            if wait_for_pipe(control_fd, select.POLLOUT, SUPERVISE_POLL_S):
                data = data[os.write(control_fd, data[: 1 << 12]) :]
    except OSError:
        return


def descendant_processes() -> ProcessSizes:
    """Every process below this one, including zombies."""
    parents, sizes = {}, {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            parents[int(name)] = int(fields[1])
            sizes[int(name)] = (max(1, int(fields[17])), int(fields[21]))
    below, me = {}, os.getpid()
    for pid in sizes:
        ancestor = pid
        while ancestor in parents and ancestor != me:
            ancestor = parents[ancestor]
        if ancestor == me and pid != me:
            below[pid] = sizes[pid]
    return below


def kill_descendants(deadline: float, own_namespaces: bool) -> bool:
    """Kill every process below this one. Returns False if some are left at the deadline.

    In a namespace of their own the kernel ends all in one step (pid -1): none can fork meanwhile.
    """
    while left := descendant_processes():
        for pid in [-1] if own_namespaces else left:
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
    """In a test's own process: run the code, then the test, in one interpreter.

    Functions used after the model's code has run are looked up before it, and the test sees
    Python's builtins from before, even if the code replaced them.
    """
    read, write, leave, run, translate = os.read, os.write, os._exit, exec, compile
    loads, whole, first = json.loads, int.from_bytes, dict(vars(builtins))
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        code = file.read()
    names: JobDict = {"__name__": "solution", "__builtins__": builtins}
    run(translate(code, "solution.py", "exec"), names)
    write(REPORT_FD, b"loaded\n")
    size = whole(read(CONTROL_FD, 8), "big")
    data = b""
    while len(data) < size and (part := read(CONTROL_FD, size - len(data))):
        data += part
    question = loads(data)
    names["__builtins__"] = first
    run(translate(question["test"], "test.py", "exec"), {**names})
    write(REPORT_FD, question["token"].encode())
    leave(0)


if __name__ == "__main__":
    run_test_in_process(sys.argv[1]) if len(sys.argv) > 1 else supervise_tests()

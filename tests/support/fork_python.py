"""`python -m rloo_cli` and its workers as forks of a process that has imported everything: each
start costs a tenth of a second, and all else (processes, signals, exit codes) is as it really is;
but runs draw no curves.png (warm.py).

As a program it is that process: it says the path of the socket on which it listens, and ends when
the last of its leases is closed. In an interpreter that has `sitecustomize` from `fork_cases`,
`stand_in` runs before anything: what would be `rloo` or a worker asks for a fork instead, passes
signals on to it, and ends as it ends.
"""

import array
import contextlib
import importlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
WORKER = re.compile(
    r"from (rloo_cli\.(?:train|evaluation|train\.supervised)\.worker) import main\nmain\(\)$"
)


def ask(job: dict, fds: list[int]) -> socket.socket:  # type: ignore[type-arg]
    """Ask for a fork with these three open files; its pid comes as a line, then its code as one.

    Where the socket is closed before that, the fork is killed.
    """
    end = socket.socket(socket.AF_UNIX)
    end.connect(job["env"]["FORKS"])
    text = json.dumps(job).encode() + b"\n"
    given = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]
    sent = end.sendmsg([text], given)
    end.sendall(text[sent:])
    return end


def stand_in() -> None:
    """Be a fork's front, where this interpreter is one of ours; else nothing."""
    words = sys.orig_argv[1:]
    worker = WORKER.search(words[2]) if words[:2] == ["-P", "-c"] else None
    what = worker[1] if worker else ""
    what = "cli" if words[:3] == ["-P", "-m", "rloo_cli"] else what
    if not what or "FORKS" not in os.environ:
        return
    # The fork takes a copy of the pipe for signs of life: it marks its own end there.
    heartbeat = [int(n) for n in [os.environ.pop("RLOO_HEARTBEAT_FD", "")] if n]
    job = {"what": what, "words": words[3:], "cwd": os.getcwd(), "env": dict(os.environ)}
    with ask(job, [0, 1, 2, *heartbeat]) as end:
        said = end.makefile()
        pid = int(said.readline())
        for number in HEARD:
            signal.signal(number, lambda n, frame: os.kill(pid, n))
        code = int(said.readline() or 1)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _child(job: dict, fds: list[int]) -> None:  # type: ignore[type-arg]
    """Be that process."""
    os.setsid()
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    if fds[3:]:
        os.environ["RLOO_HEARTBEAT_FD"] = str(fds[3])
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    code = 1
    try:
        if job["what"] != "cli":
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            sys.argv = ["-c", *job["words"]]
            importlib.import_module(job["what"]).main()
        if "FAKE_TRIALS" in job["env"] and job["words"][:1] == ["train"]:
            import fake_trial

            fake_trial.main(job["words"])
        sys.argv = ["rloo", *job["words"]]
        from rloo_cli.cli import main as cli_main

        cli_main.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        import traceback

        traceback.print_exc()  # as Python does; a test may look for it
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Server:
    """Forks, and who asked for each."""

    def __init__(self, listening: socket.socket):
        self.listening = listening
        self.leases: list[socket.socket] = []
        self.ours: dict[int, socket.socket] = {}

    def accept(self) -> None:
        """Answer one that asks. Raises BlockingIOError when there is none."""
        end, _ = self.listening.accept()
        end.setblocking(True)
        text, given, _, _ = end.recvmsg(65536, socket.CMSG_SPACE(64))
        fds = array.array("i", b"".join(data for _, _, data in given)).tolist()
        while not text.endswith(b"\n"):
            text += end.recv(65536)
        job = json.loads(text)
        if job["what"] == "lease":
            self.leases.append(end)
            end.sendall(b"0")
        elif pid := os.fork():
            self.ours[pid] = end
            end.sendall(f"{pid}\n".encode())
        else:
            for other in (self.listening, end, *self.ours.values(), *self.leases):
                other.close()
            _child(job, fds)
        for fd in fds:
            os.close(fd)

    def look(self) -> bool:
        """Answer for forks that ended, kill those that nobody waits for; whether to go on."""
        for pid, end in self.ours.items():
            if _closed(end):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        while self.ours:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            end = self.ours.pop(pid)
            with contextlib.suppress(OSError):
                end.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            end.close()
        if not self.leases:
            return True  # nobody has come yet
        self.leases = [end for end in self.leases if not _closed(end)]
        return bool(self.leases)


def _closed(end: socket.socket) -> bool:
    try:
        return not end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def main() -> None:
    """Fork until nobody needs it any more; forks die with us."""
    import ctypes

    from warm import warm

    warm()
    with (
        tempfile.TemporaryDirectory(prefix="forks-") as root,  # a socket's path is short
        socket.socket(socket.AF_UNIX) as listening,
    ):
        listening.bind(f"{root}/socket")
        listening.listen()
        listening.setblocking(False)
        os.register_at_fork(after_in_child=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))
        print(f"{root}/socket", flush=True)
        server = Server(listening)
        while server.look():
            try:
                server.accept()
            except BlockingIOError:
                time.sleep(0.01)


if __name__ == "__main__":
    main()

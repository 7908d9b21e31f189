"""`python -m rloo_cli` and its workers as forks of a process that has imported everything: each
start costs a tenth of a second, and all else (processes, signals, exit codes) is as it really is;
but runs draw no curves.png, which takes longer than all their steps.

As a program it is that process: it listens on the socket FORKS. In an interpreter that has
`sitecustomize` from `sweep_cases`, `stand_in` runs before anything: what would be `rloo` or a
worker asks for a fork instead, passes signals on to it, and ends as it ends.
"""

import array
import contextlib
import json
import os
import signal
import socket
import sys
import time

HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
WORKER = "from rloo_cli.train.worker import main"


def stand_in() -> None:
    """Be a fork's front, where this interpreter is one of ours; else nothing."""
    words = sys.orig_argv[1:]
    what = "worker" if any(WORKER in word for word in words[:3]) else ""
    what = "cli" if words[:3] == ["-P", "-m", "rloo_cli"] else what
    if not what or "FORKS" not in os.environ:
        return
    job = {"what": what, "words": words[3:], "cwd": os.getcwd(), "env": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(os.environ["FORKS"])
        fds = array.array("i", [0, 1, 2]).tobytes()
        text = json.dumps(job).encode() + b"\n"
        sent = end.sendmsg([text], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        end.sendall(text[sent:])
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
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    code = 1
    try:
        if job["what"] == "worker":
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            sys.argv = ["-c", *job["words"]]
            from rloo_cli.train import worker

            worker.main()
        if "FAKE_MEMBERS" in job["env"] and job["words"][:1] == ["train"]:
            import fake_member

            fake_member.main(job["words"])
        sys.argv = ["rloo", *job["words"]]
        from rloo_cli.cli import main as cli_main

        cli_main.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _accept(listening: socket.socket, ours: dict[int, socket.socket]) -> None:
    end, _ = listening.accept()
    end.setblocking(True)
    text, given, _, _ = end.recvmsg(65536, socket.CMSG_SPACE(64))
    fds = array.array("i", b"".join(data for _, _, data in given)).tolist()
    while not text.endswith(b"\n"):
        text += end.recv(65536)
    if not (pid := os.fork()):
        for other in (listening, end, *ours.values()):
            other.close()
        _child(json.loads(text), fds)
    for fd in fds:
        os.close(fd)
    ours[pid] = end
    end.sendall(f"{pid}\n".encode())


def main() -> None:
    """Fork until we are killed; forks die with us."""
    import ctypes

    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it says on stdout that it took it
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import torch
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

    from rloo_cli.cli import main as cli_main  # noqa: F401
    from rloo_cli.cli import sweep  # noqa: F401
    from rloo_cli.config import registry
    from rloo_cli.reporting import curves

    for room in registry.ROOMS:
        for name in registry.names(room):
            registry.module(room, name)
    curves.draw = lambda *given: None  # type: ignore[assignment]
    torch.set_num_threads(1)
    ours: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(sys.argv[1])
        listening.listen()
        listening.setblocking(False)
        os.register_at_fork(after_in_child=lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL))
        print("ready", flush=True)
        while True:
            try:
                _accept(listening, ours)
            except BlockingIOError:
                time.sleep(0.01)
            while ours:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                end = ours.pop(pid)
                with contextlib.suppress(OSError):
                    end.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                end.close()


if __name__ == "__main__":
    main()

"""Forks a process for each caller, with the user's code imported already.

An environment has a process of its own, and a step may have hundreds of episodes: a fork takes a
millisecond or two, where a new Python takes half a second. It imports no torch. Argument 1 is the
control socket, argument 2 a pipe that closes when the run ends; the kernel then ends this process,
and with it all that it forked.

The run asks by one packet: `fork` with the caller's socket attached is answered with the pid,
`kill PID` is not answered. Pids are freed here, so that a kill never reaches another process.
"""

import gc
import os
import signal
import socket
import sys
import traceback

from rloo_cli.agents.processes.worker import serve_calls
from rloo_cli.config import registry
from rloo_cli.utils.child_process import die_with_pid, end_with_pipe, kill_group
from rloo_cli.utils.files import wait_until_readable
from rloo_cli.utils.message_socket import receive_pickled

POLL_S = 0.5
PACKET_BYTES = 64


def _fork_worker(control: socket.socket, caller: int) -> int:
    """Fork a process that serves the socket with this descriptor. -> its pid"""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()  # it is killed with everything that it starts
        die_with_pid(parent)
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        serve_calls(socket.socket(fileno=caller))
        code = 0
    finally:
        os._exit(code)


def _reap(children: set[int]) -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        children.discard(pid)
        kill_group(pid)  # what it started and left


def _answer_packets(control: socket.socket) -> None:
    children: set[int] = set()
    while True:
        ready = wait_until_readable(control, POLL_S)
        _reap(children)
        if not ready:
            continue
        packet, descriptors, _, _ = socket.recv_fds(control, PACKET_BYTES, 1)
        if not packet:
            return
        word, _, number = packet.decode().partition(" ")
        if word == "kill" and int(number) in children:
            kill_group(int(number))
        elif word == "fork" and descriptors:
            pid = _fork_worker(control, descriptors[0])
            children.add(pid)
            os.close(descriptors[0])
            control.send(str(pid).encode())


def main() -> None:
    """Import the user's code, and fork until the run closes the socket."""
    control, start = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    end_with_pipe(int(sys.argv[3]))
    folder, specs = receive_pickled(start)
    start.close()
    os.chdir(folder)
    for spec in specs:
        try:
            registry.load_code(spec)
        except BaseException:  # the run has imported it too; a call that needs it says this again
            traceback.print_exc()
    gc.freeze()  # so that collections in a fork do not copy what it shares with us
    _answer_packets(control)


if __name__ == "__main__":
    main()

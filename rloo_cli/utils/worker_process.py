"""The process that forks the workers of a pool (worker_pool.py), and what runs in a worker.

A fork takes a millisecond or two, a new Python half a second; it shares what has been imported.
Arguments: the descriptors of the control socket, of the socket with the pool's code, and of a pipe
that closes when the run ends; and the pool's name, for `ps`. When the pipe closes, the kernel ends
this process and its workers.

The run sends packets. `fork`, with a worker's socket and the file for its stack attached, returns
its pid. `end PID` kills a worker with everything it started, and returns its exit code; `kill PID`
does the same without an answer; `stack PID` makes it write its stack. Exited workers are reaped
here, so that a signal never reaches another process.
"""

import contextlib
import faulthandler
import gc
import os
import signal
import socket
import sys

from rloo_cli.utils.child_process import die_with_pid, end_with_pipe, kill_group
from rloo_cli.utils.files import wait_until_readable
from rloo_cli.utils.message_socket import MessageSocket, PeerGone
from rloo_cli.utils.worker_pool import WorkerCode

REAP_S = 0.5  # seconds between checks for exited workers
PACKET_BYTES = 64


class WorkerStarter:
    """Answers the packets of one pool."""

    def __init__(self, control: socket.socket, code: WorkerCode):
        self.control, self.code = control, code
        self.running: set[int] = set()
        self.exit_codes: dict[int, int] = {}  # of workers that exited by themselves, by pid

    def serve(self) -> None:
        """Answer until the run closes the socket, then kill every worker."""
        while True:
            ready = wait_until_readable(self.control, REAP_S)
            while self._reap(-1, os.WNOHANG):
                pass
            if not ready:
                continue
            packet, descriptors, _, _ = socket.recv_fds(self.control, PACKET_BYTES, 2)
            if not packet:
                break
            word, _, number = packet.decode().partition(" ")
            if word == "fork" and len(descriptors) == 2:
                self.control.send(str(self._fork(*descriptors)).encode())
            elif word == "end":
                self.control.send(str(self._end(int(number))).encode())
            elif int(number or 0) in self.running:
                self._signal(word, int(number))
        for pid in self.running:
            _kill(pid)

    def _fork(self, connection: int, stack: int) -> int:
        """Fork a worker that serves this socket. -> its pid"""
        starter = os.getpid()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                os.setsid()  # killed with everything that it starts
                die_with_pid(starter)
                self.control.close()
                faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
                _answer_messages(MessageSocket(socket.socket(fileno=connection)), self.code)
                code = 0
            finally:
                os._exit(code)
        self.running.add(pid)
        self.exit_codes.pop(pid, None)
        os.close(connection)
        os.close(stack)
        return pid

    def _end(self, pid: int) -> int | None:
        """Kill a worker. -> its exit code, negative for a signal; None if unknown"""
        if pid in self.running:
            _kill(pid)  # an exiting worker keeps its exit code
            self._reap(pid, 0)
        return self.exit_codes.pop(pid, None)

    def _signal(self, word: str, pid: int) -> None:
        if word == "kill":
            _kill(pid)
            self.running.discard(pid)  # its exit code is not needed
        else:
            os.kill(pid, signal.SIGUSR1)

    def _reap(self, pid: int, options: int) -> bool:
        """Note the exit of a worker, if one exited, and kill its leftover children."""
        try:
            pid, status = os.waitpid(pid, options)
        except ChildProcessError:
            return False
        if pid in self.running:
            self.running.discard(pid)
            self.exit_codes[pid] = os.waitstatus_to_exitcode(status)
        if pid:
            kill_group(pid)
        return bool(pid)


def _kill(pid: int) -> None:
    """Kill an unreaped worker, and its group, which may not exist yet."""
    os.kill(pid, signal.SIGKILL)
    kill_group(pid)


def _answer_messages(messages: MessageSocket, code: WorkerCode) -> None:
    """Answer messages until the other side closes the socket."""
    pid = os.getpid()
    with contextlib.suppress(PeerGone):
        code.start()
        while True:
            answer = code.answer(messages.receive_pickled())
            if os.getpid() != pid:  # this is a fork by user code
                os._exit(0)
            messages.send(answer)


def main() -> None:
    """Get the pool's code, and fork workers until the run closes the socket."""
    control, start = (socket.socket(fileno=int(word)) for word in sys.argv[1:3])
    end_with_pipe(int(sys.argv[3]))
    with MessageSocket(start) as messages:
        folder, code = messages.receive_pickled()
    os.chdir(folder)
    code.prepare()
    gc.freeze()  # so that garbage collection in a fork does not copy shared memory
    WorkerStarter(control, code).serve()


if __name__ == "__main__":
    main()

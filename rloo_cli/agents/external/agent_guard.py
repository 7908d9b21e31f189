"""Ends the agents of a killed run, and everything that they have started.

    python -I -S agent_guard.py PIPE ENTRY

The kernel closes PIPE, a descriptor, when the run ends for any reason. ENTRY is the beginning of
an environment entry that the run's agents have, and that all their children inherit. A run that
ends normally has ended its agents, and this process too. It imports only the standard library,
starts in hundredths of a second, and needs Linux to find processes.
"""

import os
import signal
import sys
import time

MOST_LOOKS = 50  # repeated, since a process may just be forking
PAUSE_S = 0.02


def processes_with_entry(entry: bytes) -> list[int]:
    """The pids of other processes whose environment has an entry that begins so."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                entries = file.read().split(b"\0")
        except OSError:  # gone, or of another user
            continue
        if any(each.startswith(entry) for each in entries):
            found.append(int(name))
    return found


def end_with_run(pipe: int, entry: bytes) -> None:
    """Wait until the pipe is closed, and kill every process with the entry."""
    while os.read(pipe, 1):
        pass
    for _ in range(MOST_LOOKS):
        found = processes_with_entry(entry)
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    end_with_run(int(sys.argv[1]), os.fsencode(sys.argv[2]))

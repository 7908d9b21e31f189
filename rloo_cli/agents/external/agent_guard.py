"""Ends the agents of a run that was killed, and all that they have started.

    python -I -S agent_guard.py PIPE ENTRY

The kernel closes PIPE, a descriptor, when the run ends, however it ends. ENTRY is how the entry of
the environment begins that the run's agents have, and with them all that they start. A run that
ends by itself has ended its agents, and this process too. It imports the standard library alone,
starts in hundredths of a second, and finds processes where the kernel is Linux.
"""

import os
import signal
import sys
import time

MOST_LOOKS = 50  # one that is just being forked is found at the next look
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
        except OSError:  # gone, or somebody else's
            continue
        if any(each.startswith(entry) for each in entries):
            found.append(int(name))
    return found


def end_with_run(pipe: int, entry: bytes) -> None:
    """Wait until the pipe is closed, and kill what has the entry."""
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

"""Stands in for `rloo_cli.train.worker`: a rank that ends as it is told, at once, without torch.

FAKE_RANKS is JSON: {"RANK": "wait" | "deaf" | "exit:CODE:SECONDS" | "leave:CODE:SECONDS" |
"signals" | "beats" | "kill:SECONDS"}. "leave" ends without the mark of a worker's own end.
Each writes who it is to FAKE_FOLDER/rank_R.json. As a program it is a launcher of such ranks.
"""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from rloo_cli.utils import heartbeat

NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "RLOO_STORE_FD", "GLOO_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip
HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def main() -> None:
    """Be that rank."""
    rank = os.environ.get("RANK", "0")
    plan = json.loads(os.environ["FAKE_RANKS"]).get(rank, "exit:0:0").split(":")
    facts: dict[str, object] = {"pid": os.getpid(), "words": sys.argv[1:], "heard": []}
    facts["env"] = {name: os.environ[name] for name in NAMES if name in os.environ}
    if "RLOO_STORE_FD" in os.environ:
        inherited = socket.socket(fileno=int(os.environ["RLOO_STORE_FD"]))
        facts["listens"] = list(inherited.getsockname())
    heard: list[int] = []

    def hear(number: int, frame: object) -> None:
        heard.append(number)

    if plan[0] == "beats":
        heartbeat.start_heartbeat()
    if plan[0] in ("wait", "signals", "beats"):
        for number in HEARD:
            signal.signal(number, hear)
    if plan[0] == "deaf":
        for number in HEARD:
            signal.signal(number, signal.SIG_IGN)
        facts["child"] = subprocess.Popen(["sleep", "300"]).pid
    _write(rank, facts)
    if plan[0] in ("exit", "leave"):
        time.sleep(float(plan[2]))
        if plan[0] == "exit":
            heartbeat.mark_end()
        os._exit(int(plan[1]))
    if plan[0] == "kill":
        time.sleep(float(plan[1]))
        os.kill(os.getpid(), signal.SIGKILL)
    while not heard:
        time.sleep(0.02)
    time.sleep(1 if plan[0] == "signals" else 0)
    _write(rank, facts | {"heard": heard})
    heartbeat.mark_end()
    os._exit(75)


def _write(rank: str, facts: dict[str, object]) -> None:
    path = Path(os.environ["FAKE_FOLDER"], f"rank_{rank}.json")
    path.with_suffix(".tmp").write_text(json.dumps(facts))
    path.with_suffix(".tmp").replace(path)


def launcher() -> None:
    """`python fake_rank.py COUNT [limits as JSON]`: start that many, and end as they do."""
    from rloo_cli.launch import processes

    limits = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    saving, other = limits.pop("busy", False), limits.pop("elsewhere", None)
    silence = limits.pop("silence", math.inf)
    for name, seconds in limits.items():
        setattr(processes, name, seconds)
    began = time.monotonic()
    watch = processes.ProcessCallbacks(
        is_saving=lambda: saving,
        poll_remote_failure=lambda: other if time.monotonic() - began > 0.5 else None,
        silence_timeout_s=silence,
    )
    starts = [processes.ProcessSpec({"RANK": str(i)}) for i in range(int(sys.argv[1]))]
    sys.exit(processes.run_processes("fake_rank", [], watch, starts, package=""))


if __name__ == "__main__":
    launcher()

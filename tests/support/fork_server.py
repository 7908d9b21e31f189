"""Runs workers as children of a process that has imported torch already: a second less each.

Reads one JSON line per run on its stdin ({"module", "words", "cwd", "env", "out", "ranks"}), forks
as many ranks, and answers with a line that has the exit code (-N: killed by signal N) of the one
that ended first of those that did not end with 0. It has no thread but its own.
"""

import json
import os
import socket
import sys

import rank_job
import torch

from rloo_cli.evaluation import worker as evaluation_worker
from rloo_cli.train import worker
from rloo_cli.train.supervised import worker as supervised_worker

MODULES = {
    "train.worker": worker,
    "evaluation.worker": evaluation_worker,
    "train.supervised.worker": supervised_worker,
    "rank_job": rank_job,
}


def child(job: dict, rank: dict) -> None:  # type: ignore[type-arg]
    """Be that process."""
    out = os.open(job["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(job["cwd"])
    os.environ.update({k: str(v) for k, v in rank.items()})
    os.environ.update(job["env"])
    sys.argv = [job["module"], *job["words"]]
    MODULES[job["module"]].main()


def main() -> None:
    """Answer until the line ends."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        for rank in ranks(job.get("ranks", 0)):
            if os.fork() == 0:
                child(job, rank)
        codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(job.get("ranks") or 1)]
        print(next((code for code in codes if code), 0), flush=True)


def ranks(count: int) -> list[dict]:  # type: ignore[type-arg]
    """What the environment of each rank says; of none where there is one process."""
    if not count:
        return [{}]
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it says on stdout that it took it
    import deepspeed  # noqa: F401  (once, not in each rank)

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    all_of = {
        "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",  # ranks that meet in another order are an error
    }  # fmt: skip
    return [{"RANK": n, "LOCAL_RANK": n, **all_of} for n in range(count)]


if __name__ == "__main__":
    main()

"""A launcher that is not rank 0's: another node's, or one of several that torchrun started.

It waits for rank 0's launcher to make the run's folder, starts its own ranks in it, and ends as
they end. What is said of the run, and what is written, is the other's business.
"""

import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rloo_cli.launch import preflight, nodes, processes, topology_store
from rloo_cli.utils.errors import MachineError, Problem
from rloo_cli.config.schema import RunConfig
from rloo_cli.config.rules_distributed import address
from rloo_cli.launch.topology import Place


def follow(run: RunConfig, place: Place) -> int:
    """Do our part of a run; its exit code. Raises RunError where we cannot take part."""
    root, name = Path(run.root), str(run.name)
    with nodes.following(root, name, place) as follower:
        preflight.check(run, here=place.on_node)
        word = follower.wait(run.distributed.timeout_s)
        if "code" in word:  # refused, or there was nothing to do: rank 0's launcher has said why
            follower.code = word["code"]
        else:
            follower.code = _join(root / name, place, word, follower.heard)
    return follower.code


def _join(
    folder: Path, place: Place, word: dict[str, Any], elsewhere: Callable[[], int | None]
) -> int:
    if word["total"] != place.total:
        why = f"on {word['host']} there are to be {word['total']} in all, on {platform.node()}"
        raise MachineError(
            Problem(
                "nodes do not agree how many processes train",
                "distributed.num_processes",
                f"{why} {place.total}: one per GPU, and the nodes have not as many",
                "distributed.num_processes=N",
            )
        )
    host, port = address(place.store) or word["store"] or ("", 0)
    env = word["env"] if word["host"] == platform.node() else {}
    starts = with_env(topology_store.starts(place, host, port, None), env)
    watch = processes.Watch(busy=saving(folder), elsewhere=elsewhere)
    words = [str(folder), str(word["attempt"]), word["checkpoint"]]
    return processes.run("worker", words, watch, starts)


def with_env(starts: list[processes.Start], env: Mapping[str, str]) -> list[processes.Start]:
    """The same processes, with more in their environment."""
    return [replace(start, env={**env, **start.env}) for start in starts]


def saving(folder: Path) -> Callable[[], bool]:
    """Whether a checkpoint is being written there."""
    return lambda: any(folder.glob(".tmp-*"))

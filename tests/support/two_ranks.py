"""Two ranks in one process, a thread each, that meet over gloo: for what needs no run around it."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo

from rloo_cli.distributed.world import World

LIMIT = timedelta(seconds=20)


def two_ranks(work: Callable[[World], Any]) -> list[Any]:
    """What `work` returns on each of two ranks. Raises what it raised, the first rank's first."""
    store, found, wrong = HashStore(), [None, None], [None, None]  # type: ignore[var-annotated]

    def be(rank: int) -> None:
        try:
            groups = _group(store, "all", rank), _group(store, "patient", rank)
            own = World(rank, 2, torch.device("cpu"), 2, *groups)
            found[rank] = work(own)
        except BaseException as error:
            wrong[rank] = error

    threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "the ranks wait for each other"
    for error in wrong:
        if error is not None:
            raise error
    return found


def _group(store: HashStore, name: str, rank: int) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = LIMIT
    return ProcessGroupGloo(PrefixStore(name, store), rank, 2, options)

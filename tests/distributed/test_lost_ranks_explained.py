"""A worker whose sibling is gone says so, where torch reports a broken connection."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rloo_cli.distributed.world import COLLECTIVE_ERRORS, is_rank_lost
from rloo_cli.evaluation import worker as evaluation_worker
from rloo_cli.train.supervised import worker as supervised_worker
from rloo_cli.utils import process_exit


def error_of_main(
    worker: Any, work: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> Exception:
    """What a worker's `main` raises when the function `work` meets a closed connection."""

    def broken(*_: object) -> None:
        raise RuntimeError(f"{COLLECTIVE_ERRORS[0]} [127.0.0.1]:4711")

    raised: list[Exception] = []

    def run_and_keep_error(work: Callable[[], object], *_: object) -> None:
        with pytest.raises(Exception) as caught:
            work()
        raised.append(caught.value)

    monkeypatch.setattr(worker, work, broken)
    monkeypatch.setattr(process_exit, "run_and_exit", run_and_keep_error)
    monkeypatch.setattr(sys, "argv", ["-c", *arguments])
    monkeypatch.setenv("WORLD_SIZE", "2")
    worker.main()
    return raised[0]


@pytest.mark.parametrize(
    ("worker", "work", "arguments"),
    [
        (evaluation_worker, "run_evaluation", ["runs/mine/eval/1"]),
        (supervised_worker, "run_supervised_training", ["runs/mine/sft", "sft"]),
        (supervised_worker, "run_supervised_training", ["runs/mine/rm", "reward_model"]),
    ],
    ids=["eval", "sft", "reward-model"],
)
def test_a_broken_connection_is_the_error_of_a_lost_rank(
    worker: Any, work: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_rank_lost(error_of_main(worker, work, arguments, monkeypatch))

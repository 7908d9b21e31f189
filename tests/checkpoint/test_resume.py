"""A run that is stopped and goes on ends as one that was left alone, bit for bit."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from resume_cases import attempt, differing, left, temporaries

from rloo_cli.checkpoint import manifest

# Every quarter of the byte tokens ends a completion: lengths and ways of ending differ.
ENDS = f"generation.stop_token_ids={[*range(10, 258, 16)]}".replace(" ", "")
LOUD = ("train.learning_rate=0.01", ENDS, "eval.every=2", "eval.max_samples=4")
SHAPES = {
    "one update": (),
    "two iterations, three mini-batches": (
        "algorithm.num_iterations=2", "algorithm.num_minibatches=3", "train.prompts_per_step=6",
    ),
    "no KL, resampling, sparse logging": (
        "algorithm.beta=0", "algorithm.zero_std_groups=resample", "logging.every=3",
        "logging.samples_every=2",
    ),
    "advantages normalized, KL only logged": (
        "algorithm.normalize_advantages=true", "algorithm.kl_in=none", "checkpoint.every=3",
    ),
    "epochs that end inside a step": ("data.max_samples=5", "checkpoint.every=2"),
}  # fmt: skip


def moody(completion_ids: Any, log_extra: Any, **_: Any) -> list[float | None]:
    """A score that draws from every global generator, and sometimes says nothing."""
    drawn = random.random() + float(np.random.rand()) + float(torch.rand(()))
    log_extra("drawn", [drawn] * len(completion_ids))
    return [None if ids[0] % 7 == 0 else drawn + len(set(ids)) % 5 for ids in completion_ids]


QUICK = ("two iterations, three mini-batches", "no KL, resampling, sparse logging")


@pytest.mark.slow_cases("no KL, resampling, sparse logging", "two iterations, three mini-batches")
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=name, marks=[] if name in QUICK else pytest.mark.slow)
        for name, words in SHAPES.items()
    ],
)
def test_a_run_stopped_anywhere_goes_on_as_if_it_had_not_been(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    words, looks = (*LOUD, *words), []
    assert attempt(tmp_path / "whole", *words, looks=looks, moody=moody)
    whole = left(tmp_path / "whole" / "smoke")
    times = len(looks)
    assert times > 60  # every token that is sampled, every micro-batch, every wait
    draw = random.Random(7)
    for i in range(3):
        root, stops = tmp_path / f"run{i}", 0
        # The last attempt is left alone.
        while not attempt(
            root,
            *words,
            stop_at=draw.randrange(1, times // 2) if stops < 4 else None,
            moody=moody,
        ):
            stops += 1
        run = root / "smoke"
        assert stops and not differing(whole, left(run)) and not temporaries(run)
        assert manifest.newest_checkpoint(run)[1] == []

"""overlap=stream against a real vLLM server: the bits of none, given the same tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import vllm_cases
from loop_cases import ENDS, alone, flat, timeless
from vllm_cases import Real

from rloo_cli.data.batch import Batch, Group, Rollout
from rloo_cli.generation import ignore_arrival
from rloo_cli.generation.common.rollouts import Rollouts
from rloo_cli.run import Run
from rloo_cli.train.loop import run_training_loop

pytestmark = pytest.mark.vllm
STEPS = 5
WORDS = (
    *vllm_cases.WORDS, ENDS, f"max_steps={STEPS}", "train.learning_rate=0.01", "algorithm.beta=0.1",
    "train.micro_batch_order=virtual_time", "train.prompts_per_step=6", "checkpoint.every=1000",
    "reward.digits.scope=group", "train.micro_batch_tokens=160",
)  # fmt: skip


def lines(run: Run) -> list[dict[str, Any]]:
    """The logged steps, without what clocks say and how the server fared."""
    rows = [timeless(row) for row in run.log.metrics_lines]
    return [{k: v for k, v in r.items() if not k.startswith(("overlap/", "vllm/"))} for r in rows]


def test_five_steps_have_the_bits_of_a_run_that_samples_first(
    server: Real, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLOO_SERVER_TOKEN", server.token)
    url = f"generation.server.base_url={server.url}"
    sampled: dict[int, list[Rollout]] = {}  # by the prompt's place in the order
    next_batch = Rollouts.next_batch

    def recording(self: Rollouts, *arguments: Any) -> Batch:
        batch = next_batch(self, *arguments)
        sampled.update({group.prompt_offset: group.rollouts for group in batch.groups})
        return batch

    run = alone(tmp_path, *WORDS, url, "generation.overlap=stream", "name=stream", noise=0.0)
    with mock.patch.object(Rollouts, "next_batch", recording):
        run_training_loop(run)
    run.generator.close()
    assert all(row["overlap/begun_anew"] == 0 for row in run.log.metrics_lines)

    def play(
        groups: list[Group], seeds: list[list[int]],
        arrived: Callable[[int], None] = ignore_arrival, **_: Any,
    ) -> None:  # fmt: skip
        for i, group in enumerate(groups):
            group.rollouts = sampled[group.prompt_offset]
            assert [rollout.seed for rollout in group.rollouts] == seeds[i]
            arrived(i)

    other = alone(tmp_path, *WORDS, url, "name=none", noise=0.0)
    with mock.patch.object(other.generator, "generate", play):
        run_training_loop(other)
    other.generator.close()
    assert torch.equal(flat(run), flat(other)) and lines(run) == lines(other)

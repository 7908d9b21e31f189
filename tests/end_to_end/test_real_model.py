"""A real language model through every sampler and every layout of processes, three steps each.

What the trainer takes for the log-probability of a sampled token is what the sampler says, and the
gradient of the packed batch is that of its rows, each alone in a plain forward.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from cli_cases import Rloo, surroundings
from loop_cases import alone, apart, gradient, leave_one_out, row_logp, sampled, updated

pytestmark = pytest.mark.slow

SHORT = (
    "max_steps=3", "train.prompts_per_step=4", "algorithm.num_generations=4",
    "generation.max_completion_length=8", "data.eval_split=null", "checkpoint.every=0",
    "+reward.length={type: length_chars, weight: 0.01}", "logging.samples=0",
)  # fmt: skip
TWO_RANKS = ("distributed.num_processes=2",)
WAYS = {
    "transformers": (),
    "LoRA": ("lora=default", "train.learning_rate=1e-4"),
    "ddp": ("distributed=ddp", *TWO_RANKS),
    "zero2": ("distributed=zero2", *TWO_RANKS),
    "vllm_server": ("generation=vllm_server", "generation.server.kv_cache_gb=1"),
    "vllm_colocate": ("generation=vllm_colocate", "generation.colocate.kv_cache_gb=1"),
}
VLLM = [pytest.param(name, marks=pytest.mark.vllm) for name in WAYS if "vllm" in name]


@pytest.mark.parametrize("way", [*(n for n in WAYS if "vllm" not in n), *VLLM])
def test_a_real_model_is_trained_three_steps(
    way: str, smollm2_folder: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rloo = Rloo(tmp_path, surroundings(tmp_path_factory.getbasetemp()))
    words = ("+recipe=smollm2_arithmetic", f"model.path={smollm2_folder}", *SHORT, *WAYS[way])
    done = rloo("train", *words, timeout=900)
    assert done.code == 0, done.said
    folder = tmp_path / "runs" / "smollm2_arithmetic"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "step_time" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(math.isfinite(row["grad_norm"]) and row["grad_norm"] > 0 for row in steps)
    if "vllm" in way:
        assert max(row["sampling/logp_diff_max"] for row in steps) < 1e-3
        assert [row["weight_version"] for row in steps if "weight_version" in row] in (
            [],
            [0, 1, 2],
        )


def test_the_gradient_of_a_real_batch_is_that_of_its_rows_alone(
    smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"model.path={smollm2_folder}", "data=arithmetic", "algorithm.beta=0.0"]
    words += ["train.prompts_per_step=3", "algorithm.num_generations=4", "train.max_grad_norm=null"]
    words += ["generation.max_completion_length=8", "reward=length_chars"]
    run = alone(tmp_path, *words)
    batch = sampled(run)
    advantages = leave_one_out(batch.score.tolist())
    expected = torch.zeros(sum(w.numel() for w in run.policy.model.parameters()))
    for p, row in enumerate(advantages):
        for k, a in enumerate(row):
            loss = -a * row_logp(run.policy, batch, p, k).sum() / batch.score.numel()
            expected += gradient(run, loss)
    kept: list[torch.Tensor] = []

    def keep(*_: object) -> None:
        weights = run.policy.model.parameters()
        kept.append(torch.cat([w.grad.reshape(-1) for w in weights if w.grad is not None]))

    monkeypatch.setattr(run.optimizer, "step", keep)
    updated(run, batch)
    assert apart(kept[0], expected) < 1e-4

"""The benchmark's own side of `rloo` takes steps as `rloo train` does."""

import sys
from dataclasses import replace
from pathlib import Path

import torch

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import side_rloo  # noqa: E402
import sides  # noqa: E402
import toys  # noqa: E402
from shapes import SHAPES  # noqa: E402

TINY = replace(
    SHAPES["W1"], hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, mlp=64,
    prompt=(8, 12), completion=(4, 4), k=2, prompts=2,
)  # fmt: skip


def test_a_side_trains_on_the_completions_that_it_recorded_and_then_takes_a_step(
    tmp_path: Path,
) -> None:
    toys.write(TINY, tmp_path, 1)
    side = side_rloo.Side(side_rloo.build(TINY, tmp_path, 1))
    rows = side.record()["rows"]
    assert len(rows) == TINY.batch and all(len(ids) == 4 for _, ids in rows)
    gradient = tmp_path / "gradient.pt"
    trained = side.obey({"do": "train", "gradient": str(gradient)})
    assert gradient.exists() and torch.load(gradient, weights_only=True)
    assert trained["computed"] > 0 and side.run.state.updates == 1
    counted = side.obey({"do": "step", "count": True})
    assert side.run.state.updates == 2 and side.run.state.step == 1
    assert counted["gflop"] > 0 and "gflop" not in side.obey({"do": "step"})


def test_the_count_of_a_step_knows_the_products_of_attention_on_a_cpu() -> None:
    watch, q = sides.Watch(), torch.ones(1, 2, 5, 16, requires_grad=True)
    watch.start(count=True)
    (q[0, 0] @ torch.ones(16, 3)).sum()
    attention = torch.nn.functional.scaled_dot_product_attention
    attention(q, q, q).sum().backward()
    attention(q, q, q, is_causal=True).sum().backward()
    product = 2 * 2 * 5 * 5 * 16  # one of the attention's seven: two forward, five backward
    assert watch.read()["gflop"] * 1e9 == 2 * 5 * 16 * 3 + 7 * product * 1.5  # half, if causal

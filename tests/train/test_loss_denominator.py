"""What an update's loss is divided by: the completions that its sum has."""

from pathlib import Path
from typing import Any

import pytest
from loop_cases import ENDS, alone, sampled

from rloo_cli.train.minibatches import forwarded_completions, plan_updates


def some(completion_ids: Any, **_: Any) -> list[float | None]:
    return [None if i % 3 == 0 else float(len(ids)) for i, ids in enumerate(completion_ids)]


@pytest.mark.parametrize(("where", "unscored"), [("loss", True), ("reward", False)])
def test_a_valid_denominator_counts_the_completions_whose_kl_is_in_the_loss(
    where: str, unscored: bool, tmp_path: Path
) -> None:
    words = ("algorithm.loss_denominator=valid", f"algorithm.kl_in={where}", "algorithm.beta=0.1")
    more = ("algorithm.kl_estimator=k2", "algorithm.mask_truncated_completions=true")
    run = alone(tmp_path, ENDS, *words, *(more if unscored else more[1:]), rewards={"some": some})
    batch = sampled(run)
    (plan,) = plan_updates(run, batch, 0)
    summed = int(forwarded_completions(run, batch).sum())
    assert plan.denominator == summed < batch.score.numel()
    left_out = ~batch.scorable & ~batch.masked
    assert left_out.any() and bool((forwarded_completions(run, batch) & left_out).any()) is unscored

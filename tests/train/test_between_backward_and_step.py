"""What the GPU waits for between an update's last backward pass and its optimizer step.

Every number that the host asks for there is a wait, and every list that it builds. A mode of torch
stands in for the GPU: it hears each call that would copy from the device.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_cases import ENDS, flat, sampled, updated
from loop_cases import alone as make
from torch.overrides import TorchFunctionMode

from rloo_cli.run import Run
from rloo_cli.train import guards
from rloo_cli.utils.errors import NumbersError

COPIES = ("cpu", "tolist", "item", "numpy", "__float__", "__int__", "__bool__", "__iter__")
FROM_SCORES = "algorithm.beta=0"  # advantages are known before the update
WITH_KL = "algorithm.beta=0.1"
NORMALISED = "algorithm.normalize_advantages=true"


class Copies(TorchFunctionMode):
    """Notes the elements of every tensor that is copied to the host while `on`."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.sizes = False, []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.on and getattr(func, "__name__", "") in COPIES:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def copies_before_the_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all that is copied between the last backward pass and the optimizer step."""
    copies, backward, step = Copies(), run.engine.backward, run.optimizer.step

    def heard_backward(loss: Any, is_last: bool) -> None:
        backward(loss, is_last)
        copies.on = is_last

    def heard_step(norm: Any) -> None:
        copies.on = False
        step(norm)

    monkeypatch.setattr(run.engine, "backward", heard_backward)
    monkeypatch.setattr(run.optimizer, "step", heard_step)
    batch = sampled(run)
    with copies:
        updated(run, batch)
    assert run.state.updates == 1
    assert all(len(group.old_logp or []) == 4 for group in batch.groups)
    return copies.sizes


@pytest.mark.parametrize("words", [(FROM_SCORES,), (WITH_KL,)], ids=["by scores", "with a KL"])
@pytest.mark.parametrize("tokens", [10_000, 30])
def test_a_few_numbers_are_copied_however_many_tokens_and_micro_batches_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], tokens: int
) -> None:
    words = (*words, f"train.micro_batch_tokens={tokens}", "train.forward_all=true")
    sizes = copies_before_the_step(make(tmp_path, ENDS, *words), monkeypatch)
    assert len(sizes) < 10 and max(sizes) <= 3


def test_normalising_with_a_kl_needs_the_whole_step_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = copies_before_the_step(make(tmp_path, ENDS, WITH_KL, NORMALISED), monkeypatch)
    assert max(sizes) > 3


@pytest.mark.parametrize("words", [
    (FROM_SCORES,), (WITH_KL,), (FROM_SCORES, NORMALISED), (WITH_KL, NORMALISED),
])  # fmt: skip
def test_storing_the_results_later_changes_neither_weights_nor_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    found = []
    for name in ("late", "early"):
        run = make(tmp_path, ENDS, f"name={name}", *words)
        batch = sampled(run)
        if name == "early":
            monkeypatch.setattr(guards, "are_passes_sound", lambda *_: False)
        updated(run, batch)
        columns = [batch.reward, batch.advantage, batch.usable, batch.kl]
        found.append([flat(run), *columns, *(x for g in batch.groups for x in g.old_logp or [])])
    assert len(found[0]) > 10
    for late, early in zip(*found, strict=True):
        assert (late is early is None) or torch.equal(late.nan_to_num(9.0), early.nan_to_num(9.0))


def test_a_kl_that_is_not_finite_is_found_before_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path, ENDS, WITH_KL)
    assert run.reference is not None
    whole, before = run.reference.frozen_logp, flat(run)

    def without_numbers(micro_batch: Any) -> Any:
        found = whole(micro_batch)
        return found._replace(logp=torch.full_like(found.logp, float("nan")))

    monkeypatch.setattr(run.reference, "frozen_logp", without_numbers)
    with pytest.raises(NumbersError, match="reward"):
        updated(run, sampled(run))
    assert torch.equal(flat(run), before)


def test_a_gradient_that_is_not_finite_leaves_a_batch_with_its_log_probabilities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path, ENDS, WITH_KL)
    monkeypatch.setattr(run.optimizer, "grad_norm", lambda factor: torch.tensor(float("nan")))
    with pytest.raises(NumbersError, match="gradient norm nan"):
        updated(run, sampled(run))
    (rows,) = run.folder.glob("debug/*/rows.jsonl")
    row = json.loads(rows.read_text().splitlines()[0])
    assert row["old_logp"] and row["ref_logp"]

"""Rows on which nothing depends are not forwarded, and the step is that with all of them.

Also what a micro-batch may not do: wait for the device, or change what is logged.
"""

import sys

import pytest
import torch
from loop_cases import ENDS, PLAIN, apart, digits, flat, sampled, step
from loop_cases import alone as make
from test_fast_path import KL, MASKED, NONE, NORMALISED, A, agree, spied
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from rloo_cli.data.packing import LAYOUTS
from rloo_cli.train import step as train_step

pytestmark = pytest.mark.wide

FORWARDED = ["reward", "grad_norm", "loss", "policy_loss", "advantages/mean", "advantages/std"]


def some_missing(completion_ids, **named):
    """Without a score: all of group 0, three of group 1, one of group 2."""
    return [
        None if i < 4 or i in (5, 6, 7, 9) else score
        for i, score in enumerate(digits(completion_ids, **named))
    ]


def two_flat(completion_ids, **named):
    """Equal scores in groups 1 and 2, and in group 3 where it has any."""
    return [
        0.1 + 0.2 if 4 <= i < 12 else None if i == 13 else score
        for i, score in enumerate(digits(completion_ids, **named))
    ]


def constant(completion_ids, **_):
    return [0.3] * len(completion_ids)


def shaped_flat(completion_ids, **named):
    """Unequal scores above 1, which clipping makes equal, in groups 0 and 1."""
    return [2 + i if i < 8 else s for i, s in enumerate(digits(completion_ids, **named))]


DROPPED = {  # words, reward, and which of (group, row, masked) are forwarded
    "truncated": ([KL, MASKED], digits, lambda p, k, masked: not masked),
    "truncated, without KL": ([NONE, MASKED], digits, lambda p, k, masked: not masked),
    "no score": ([KL], some_missing, lambda p, k, masked: p == 3 or (p == 2 and k != 1)),
    "equal scores": ([NONE], two_flat, lambda p, k, masked: p == 0 or (p == 3 and k != 1)),
    "equal after clipping": (
        [NONE, f"{A}reward_clip_range=[-9.0,1.0]"], shaped_flat, lambda p, k, masked: p > 1
    ),
    "all of it": (
        [NONE, MASKED], two_flat,
        lambda p, k, masked: not masked and (p == 0 or (p == 3 and k != 1)),
    ),
    "equal scores, KL in the reward": ([KL], two_flat, lambda p, k, masked: (p, k) != (3, 1)),
    "equal scores, KL in the loss": (
        [KL, f"{A}kl_in=loss", f"{A}kl_estimator=k3"], two_flat, lambda p, k, masked: True
    ),
    "equal scores, normalized over the siblings": (
        [NONE, NORMALISED, f"{A}advantage_scale=loo_std"], two_flat,
        lambda p, k, masked: (p, k) != (3, 1),
    ),
    "equal scores, the step's mean": (
        [NONE, f"{A}baseline=batch_mean"], two_flat, lambda p, k, masked: (p, k) != (3, 1)
    ),
}  # fmt: skip


def both(folder, words, reward):
    """Runs of the same step that forward what is needed, and everything."""
    runs = [
        make(folder, ENDS, "data.shuffle=false", *words, *more, rewards={"given": reward})
        for more in ([], ["train.forward_all=true"])
    ]
    return runs


@pytest.mark.slow_but(
    "truncated-True",
    "no score-True",
    "equal after clipping-False",
    "equal scores, KL in the reward-True",
    "equal scores, the step's mean-True",
)
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("kind", DROPPED)
def test_rows_on_which_nothing_depends_are_not_forwarded_and_nothing_changes(
    tmp_path, kind, normalized
):
    words, reward, needed = DROPPED[kind]
    words = [*PLAIN, *words, *([NORMALISED] if normalized else [])]
    run, plain = both(tmp_path, words, reward)
    batch, seen, all_seen = sampled(run), spied(run), spied(plain)
    expected = {
        (p, k) for p in range(4) for k in range(4) if needed(p, k, bool(batch.masked[p, k]))
    }
    moved, row, _ = step(run, batch)
    other, again, twin = step(plain)
    found = [(i, k) for micro in seen for i, ks in micro.group_slices for k in ks]
    assert sorted(set(found)) == sorted(expected)
    assert sum(len(micro.target) for micro in all_seen[-1:]) == int(
        twin.rollout_values("length").sum()
    )
    assert apart(moved, other) < 1e-5 and float(moved.norm()) > 0
    assert torch.allclose(batch.advantage[~batch.masked], twin.advantage[~batch.masked], atol=1e-4)
    agree(row, again, *FORWARDED, exact=1e-4)


@pytest.mark.slow_cases("packed")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_of_dropped_rows_are_in_no_layout(tmp_path, layout):
    run, plain = both(tmp_path, [*PLAIN, NONE, f"train.layout={layout}"], two_flat)
    seen, all_seen = spied(run), spied(plain)
    moved, _, batch = step(run)
    other, _, _ = step(plain)
    length, kept = (
        batch.rollout_values("length"),
        [(0, k) for k in range(4)] + [(3, k) for k in (0, 2, 3)],
    )
    assert sum(len(m.target) for m in seen) == sum(int(length[p, k]) for p, k in kept)
    assert sum(m.input_ids.numel() for m in seen) < 0.6 * sum(m.input_ids.numel() for m in all_seen)
    assert apart(moved, other) < 1e-5


@pytest.mark.parametrize("kl", [NONE, KL])
def test_a_step_of_flat_groups_is_an_optimizer_step_like_any_other(tmp_path, kl):
    calls = []

    def first_only(completion_ids, **named):
        calls.append(len(completion_ids))
        return digits(completion_ids) if len(calls) in (1, 3) else constant(completion_ids)

    words = [kl, "train.learning_rate=1e-3", "max_steps=2", "train.lr_scheduler=constant"]
    ends = []
    for more in ([], ["train.forward_all=true"]):
        run = make(tmp_path, ENDS, *words, *more, rewards={"first": first_only})
        step(run)
        before, seen = flat(run), spied(run)
        moved, row, _ = step(run)
        assert run.state.updates == 2 and row["frac_reward_zero_std"] == 1.0
        assert bool(seen) is (bool(more) or kl == KL)
        if kl == NONE:
            assert row["loss"] == row["grad_norm"] == row["policy_loss"] == 0.0
        state = run.optimizer.inner.state.values()
        moments = torch.cat([s[n].flatten() for n in ("exp_avg", "exp_avg_sq") for s in state])
        ends.append((moved, moments, {int(s["step"]) for s in state}))
        assert float((flat(run) - before).norm()) > 0  # on its momentum
    (moved, moments, steps), (other, again, others) = ends
    assert steps == others == {2}
    assert apart(moved, other) < 1e-3 and apart(moments, again) < 1e-5


def test_a_step_in_which_no_row_has_a_score_makes_no_update(tmp_path):
    calls = []

    def none_at_first(completion_ids, **_):
        calls.append(1)
        return [None] * len(completion_ids)

    run = make(tmp_path, ENDS, NONE, rewards={"none": none_at_first})
    batch, seen = sampled(run), spied(run)
    moved, _, _ = step(run, batch)
    assert not seen and run.state.updates == 0 and float(moved.norm()) == 0.0


READS = {
    "item",
    "tolist",
    "numpy",
    "cpu",
    "nonzero",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
}
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")


class Called(TorchFunctionMode):
    """Notes every method that asks a tensor for numbers."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in READS:
            self.found.append(function.__name__)
        return function(*args, **(kwargs or {}))


class Ran(TorchDispatchMode):
    """Notes every operation whose answer, or whose shape, the host would have to wait for."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.partition("::")[2]
        masks = any(
            isinstance(t, torch.Tensor) and t.dtype == torch.bool
            for given in args
            if isinstance(given, list | tuple)
            for t in given
        )
        if name.startswith(WAITS) or (name.startswith("index") and masks):
            self.found.append(name)
        if name == "repeat_interleave" and (kwargs or {}).get("output_size") is None:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


KINDS = {
    "KL": [KL],
    "without KL": [NONE],
    "normalized": [KL, NORMALISED],
    "masked, corrected": [KL, MASKED, f"{A}correction.mode=truncate"],
    "KL in the loss": [KL, f"{A}kl_in=loss", f"{A}kl_estimator=k3"],
    "KL to go": [KL, f"{A}kl_credit=to_go", f"{A}kl_in_baseline=false", f"{A}ratio_level=token"],
    "two passes": [KL, f"{A}num_iterations=2"],
    "tokens": [KL, f"{A}ratio_level=token", f"{A}loss_agg=token_mean"],
    "checkpointed": [KL, "model.gradient_checkpointing=true"],
}


@pytest.mark.slow_but("KL", "two passes")
@pytest.mark.parametrize("kind", KINDS)
def test_a_micro_batch_once_laid_out_never_waits_for_the_device(tmp_path, monkeypatch, kind):
    run = make(tmp_path, *PLAIN, ENDS, *KINDS[kind], "train.micro_batch_tokens=100")
    found, open_, pack, backward = [], [], run.policy.pack, train_step.backward_micro_batch

    def packed(*given):
        micro = pack(*given)
        if sys._getframe(1).f_code.co_name.startswith("update_"):  # others may wait
            for mode in (Called(found), Ran(found)):
                open_.append(mode.__enter__())
        return micro

    def watched(*given):
        try:
            return backward(*given)
        finally:
            assert len(open_) == 2
            while open_:
                open_.pop().__exit__(None, None, None)

    run.policy.pack = packed
    monkeypatch.setattr(train_step, "backward_micro_batch", watched)
    _, row, _ = step(run)
    assert found == [] and row["grad_norm"] > 0


@pytest.mark.parametrize("kl", [NONE, KL])
def test_what_is_logged_does_not_depend_on_the_number_of_micro_batches(tmp_path, kl):
    words = [*PLAIN, ENDS, kl, MASKED, f"{A}correction.mode=truncate"]
    rows = []
    for budget, several in ((100000, False), (60, True)):
        run = make(tmp_path, *words, f"train.micro_batch_tokens={budget}")
        seen = spied(run)
        rows.append(step(run)[1])
        assert (len(seen) > 2) is several
    assert {"loss", "entropy", "grad_norm", "ratio/max", "sampling/ess"} <= rows[0].keys()
    assert ("kl" in rows[0]) is (kl == KL) and rows[0].keys() == rows[1].keys()
    agree(*rows, rel=1e-5)

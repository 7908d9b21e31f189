"""A step the fast way is the step the plain way: real runs, however they are cut and laid out."""

import pytest
import torch
from loop_cases import ENDS, EXACT, PLAIN, apart, digits, sampled, step
from loop_cases import alone as make

from rloo_cli.data import bin_packing
from rloo_cli.data.packing import LAYOUTS
from rloo_cli.train import minibatches

A = "algorithm."
KL, NONE, NORMALISED = f"{A}beta=0.3", f"{A}beta=0", f"{A}normalize_advantages=true"
MASKED = f"{A}mask_truncated_completions=true"
PLAINLY = ["train.old_logp=separate", "train.layout=padded", "train.forward_all=true"]
CLOCKS = ("time/", "perf/", "step_time", "eps")
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def agree(row, other, *names, rel=1e-4, exact=2e-5):
    """Two rows of metrics, in these names, or in all that are no clock's."""
    shared = [n for n in row.keys() & other.keys() if not n.startswith(CLOCKS) and "/time" not in n]
    for name in names or shared:
        assert row[name] == pytest.approx(other[name], rel=rel, abs=exact), name


def spied(run):
    """The micro-batches that the policy lays out from now on."""
    found, pack = [], run.policy.pack

    def note(*given):
        found.append(pack(*given))
        return found[-1]

    run.policy.pack = note
    return found


def several(words, cuts, **options):
    """The same step cut in several ways: moves, rows of metrics and numbers of micro-batches."""
    for cut in cuts:
        run = make(*words, cut, **options)
        micros = spied(run)
        moved, row, _ = step(run)
        yield moved, row, len(micros)


BUDGETS = [f"train.micro_batch_tokens={n}" for n in (100000, 100, 64, 24)]


@pytest.mark.slow_but("algorithm.beta=0-shared", "algorithm.beta=0.3-padded")
@layouts
@pytest.mark.parametrize("kl", [NONE, KL])
def test_no_budget_of_a_micro_batch_changes_the_update(tmp_path, layout, kl):
    words = [tmp_path, *PLAIN, ENDS, kl, f"train.layout={layout}"]
    (moved, row, count), *others = several(words, BUDGETS if layout == "shared" else BUDGETS[::3])
    assert count == 1 and float(moved.norm()) > 0 and "time/old_logp" not in row
    counts = [count for _, _, count in others]
    assert counts == sorted(counts) and counts[-1] >= (15 if kl == NONE else 15 + 1)
    for other, again, _ in others:
        assert apart(other, moved) < EXACT
        agree(again, row, "loss", "policy_loss", "grad_norm", "reward", "entropy", "ratio/max")


@pytest.mark.parametrize(("kl", "apart_"), [(NONE, False), (KL, True)])
def test_a_group_over_the_budget_is_split_and_takes_a_separate_pass_for_its_kl(
    tmp_path, kl, apart_
):
    for budget, splits in ((100, False), (64, True)):
        words = ["train.layout=shared", f"train.micro_batch_tokens={budget}"]
        run = make(tmp_path, *PLAIN, ENDS, kl, *words)
        batch = sampled(run)
        (plan,) = minibatches.plan_updates(run, batch, 0)
        assert (
            run.forward_plan.separate is None
            and minibatches.keeps_groups_whole([plan]) is not splits
        )
        _, row, _ = step(run, batch)
        assert ("time/old_logp" in row) is (splits and apart_)


@pytest.mark.parametrize("kl", [NONE, KL])
def test_no_order_of_micro_batches_changes_the_update(tmp_path, monkeypatch, kl):
    words = [tmp_path, *PLAIN, ENDS, kl, NORMALISED, "train.layout=shared"]
    ((moved, row, _),) = several(words, ["train.micro_batch_tokens=100000"])
    inner = bin_packing.pack_micro_batches
    for turn in (1, 3):

        def turned(*given, turn=turn):
            (found,) = inner(*given)
            return [found[turn:] + found[:turn]]

        monkeypatch.setattr(bin_packing, "pack_micro_batches", turned)
        ((other, again, count),) = several(words, ["train.micro_batch_tokens=90"])
        assert count == 4 and apart(other, moved) < EXACT
        agree(again, row, exact=5e-5)


@pytest.mark.parametrize("kl", [NONE, KL])
def test_every_layout_gives_the_same_update(tmp_path, kl):
    words = [tmp_path, *PLAIN, ENDS, kl, MASKED]
    found = list(several(words, [f"train.layout={layout}" for layout in ("auto", *LAYOUTS)]))
    (moved, row, _), *others = found
    for other, again, _ in others:
        assert apart(other, moved) < 2e-5
        agree(again, row, exact=1e-4)


VIOLATED = {
    "several optimizer steps": [f"{A}num_minibatches=2", KL],
    "dropout may be on": ["model.disable_dropout=false", KL],
    "every group's KL": [f"{A}advantage_scale=batch", KL],
    "train.old_logp=separate": ["train.old_logp=separate", KL],
}
SCALES = {  # what breaks C3 beside normalizing
    "no baseline": [f"{A}baseline=none"],
    "the step's mean": [f"{A}baseline=batch_mean"],
    "divided by the step's std": [f"{A}advantage_scale=batch"],
    "divided by the siblings' std": [f"{A}advantage_scale=loo_std"],
    "KL beside the baseline": [f"{A}kl_in_baseline=false"],
}
VIOLATED |= {f"every group's KL: {k}": [NORMALISED, KL, *words] for k, words in SCALES.items()}


@pytest.mark.slow_but(
    "several optimizer steps",
    "every group's KL: no baseline",
    "every group's KL: KL beside the baseline",
)
@pytest.mark.parametrize("why", VIOLATED)
def test_a_condition_that_does_not_hold_takes_a_separate_pass_and_the_plain_gradient(tmp_path, why):
    run = make(tmp_path, *PLAIN, ENDS, *VIOLATED[why])
    plain = make(tmp_path, *PLAIN, ENDS, *VIOLATED[why], *PLAINLY)
    assert why.partition(":")[0] in run.forward_plan.separate
    assert (run.policy.layout, plain.policy.layout) == ("shared", "padded")
    moved, row, _ = step(run)
    expected, other, _ = step(plain)
    assert apart(moved, expected) < 1e-5
    assert "time/old_logp" in row and "time/old_logp" in other
    agree(row, other, exact=1e-4)


FUSED = {
    "normalized": [NORMALISED],
    "normalized, group std": [NORMALISED, f"{A}advantage_scale=group"],
    "normalized, clipped": [NORMALISED, "train.max_grad_norm=0.5"],
    "normalized, masked": [NORMALISED, MASKED],
    "normalized, two passes": [NORMALISED, f"{A}num_iterations=2"],
    "normalized, clipped scores": [NORMALISED, f"{A}reward_clip_range=[-1.0,1.0]"],
    "normalized, KL only logged": [NORMALISED, f"{A}kl_in=none"],
    "normalized, without KL": [NORMALISED, NONE],
}


def sometimes(completion_ids, **named):
    """No score for most of the first group and one of the third."""
    found = digits(completion_ids, **named)
    return [None if i in (0, 1, 2, 9) else score for i, score in enumerate(found)]


SOME = ["normalized", "normalized, group std", "normalized, masked"]


@pytest.mark.slow_but(
    "normalized-False",
    "normalized, masked-False",
    "normalized, without KL-False",
    "normalized, masked-True",
)
@pytest.mark.parametrize(
    ("kind", "some"), [*((k, False) for k in FUSED), *((k, True) for k in SOME)]
)
def test_normalising_is_one_factor_on_the_gradient_of_the_fused_way(tmp_path, kind, some):
    rewards = {"sometimes": sometimes} if some else None
    words = [*PLAIN, ENDS, KL, *FUSED[kind], "train.micro_batch_tokens=100"]
    run = make(tmp_path, *words, rewards=rewards)
    plain = make(tmp_path, *words, *PLAINLY, rewards=rewards)
    assert run.forward_plan.separate is None and plain.forward_plan.separate
    moved, row, batch = step(run)
    expected, other, twin = step(plain)
    assert "time/old_logp" not in row and "time/old_logp" in other
    assert apart(moved, expected) < 1e-5 * run.state.updates
    assert torch.equal(batch.usable, twin.usable)
    assert torch.allclose(batch.advantage, twin.advantage, atol=2e-4)
    names = ["loss", "policy_loss", "grad_norm", "grad_clip_fraction"]
    agree(row, other, *names, *(n for n in row if n.startswith("advantages/")), exact=1e-4)


@pytest.mark.parametrize("layout", ["auto", "padded"])
def test_one_line_says_the_layout_and_the_head_that_are_used(tmp_path, capsys, layout):
    run = make(tmp_path, KL, f"train.layout={layout}")
    (line,) = [text for text in capsys.readouterr().out.splitlines() if "rows are" in text]
    assert f"rows are {run.layout_choice}" in line and run.policy.layout == run.layout_choice.layout
    assert str(run.layout_choice) == ("padded" if layout == "padded" else "shared") + ", head fused"
    assert run.reference.layout == run.policy.layout

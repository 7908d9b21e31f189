"""The ledger: what each draw's fate is, and that none is lost over epochs, resumes and restarts."""

import json
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as some
from ledger_audit import audit_ledger
from ledger_cases import K, batch, lines, prompts, six, write
from loop_cases import digits
from resume_cases import attempt

from rloo_cli.data import order
from rloo_cli.reporting.prompt_ledger import LEDGER_FILE, PROMPT_FATES, PromptLedger
from rloo_cli.train.loop import run_training_loop
from rloo_cli.utils.errors import DataError


def fates(folder):
    """Fate -> places, over all lines."""
    found = lines(folder)
    return {f: [p for line in found for p in line.get(f, [])] for f in PROMPT_FATES}


def rows(folder):
    """The row of every draw, in order."""
    return [row for line in lines(folder) for row in line.get("rows", [])]


# Real runs.


def test_over_epoch_edges_every_prompt_is_trained_on_once_an_epoch(tmp_path):
    run = six(tmp_path, steps=9)
    run_training_loop(run)
    found, drawn = lines(run.folder), rows(run.folder)
    assert [line["step"] for line in found] == list(range(10))
    assert [line["place"] for line in found[1:]] == list(range(0, 36, 4))
    epochs = [[0], [0, 1], [1], [2], [2, 3], [3], [4], [4, 5], [5]]
    assert [line["epochs"] for line in found[1:]] == epochs
    for epoch in range(6):
        assert sorted(drawn[6 * epoch : 6 * epoch + 6]) == list(range(6))
    assert fates(run.folder)["trained"] == list(range(36))
    account = audit_ledger(run.folder)
    assert account.prompt_offset == run.state.place == 36 and account.fates == {"trained": 36}


def test_the_rows_are_those_of_the_prompts_that_were_really_sampled(tmp_path):
    run = six(tmp_path, steps=3)
    run_training_loop(run)
    drawn = {}
    for path in sorted(run.folder.glob("samples/step_*.jsonl")):
        drawn |= {s["draw"]: s["prompt"] for s in map(json.loads, path.read_text().splitlines())}
    assert [drawn[p] for p in range(12)] == [run.prompts.prompts[row] for row in rows(run.folder)]


def test_rows_that_were_filtered_are_in_the_header_and_never_drawn(tmp_path):
    run = six(tmp_path, "data.max_samples=12", "data.max_prompt_length=40", steps=6)
    left_out = [i for i, n in enumerate(run.prompts.unfiltered_lengths) if n > 40]
    assert 0 < len(left_out) < 6
    run_training_loop(run)
    header = lines(run.folder)[0]
    assert header["filtered"] == left_out and header["data_rows"] == 12
    assert header["prompts"] == 12 - len(left_out) == len(run.prompts)
    assert {*rows(run.folder)} == {*range(12)} - {*left_out}
    audit_ledger(run.folder)


def flat_unless(varied):
    """Scores that differ inside the groups for which `varied` says so, counted in each call."""

    def score(completion_ids, **_):
        return [s if varied(i // 4) else 1.0 for i, s in enumerate(digits(completion_ids))]

    return {"some": score}


@pytest.mark.parametrize(("how", "met"), [("drop", "dropped"), ("keep", "trained")])
def test_flat_groups_are_dropped_where_the_config_says_so_and_only_there(tmp_path, how, met):
    words = [f"algorithm.zero_std_groups={how}"]
    run = six(tmp_path, *words, rewards=flat_unless(lambda i: i != 1))
    run_training_loop(run)
    first, second = lines(run.folder)[1:]
    assert 1 in first[met] and 5 in second[met]
    assert len(first["trained"]) == len(second["trained"]) == (3 if how == "drop" else 4)


def test_replaced_draws_are_resampled_and_what_the_last_round_left_flat_is_dropped(tmp_path):
    words = ["algorithm.zero_std_groups=resample", "algorithm.max_resample=2"]
    run = six(tmp_path, *words, rewards=flat_unless(lambda i: i == 0))  # one of each round
    run_training_loop(run)
    first, second = lines(run.folder)[1:]
    assert first["draws"] == 4 + 3 + 2 and first["trained"] == [0, 4, 7]
    assert first["resampled"] == [1, 2, 3, 5, 6] and first["dropped"] == [8]
    assert second["place"] == 9 and second["epochs"] == [1, 2]
    assert audit_ledger(run.folder).fates == {"trained": 6, "resampled": 10, "dropped": 2}


@pytest.mark.parametrize("how", ["keep", "drop"])
def test_a_prompt_with_fewer_than_two_scores_is_unscorable_dropped_or_not(tmp_path, how):
    def score(completion_ids, **_):  # 4, 0, 1 and 2 scores
        keep = [4, 0, 1, 2]
        scores = range(len(completion_ids))  # no two alike
        return [float(i) if i % 4 < keep[i // 4] else None for i in scores]

    run = six(tmp_path, f"algorithm.zero_std_groups={how}", steps=1, rewards={"some": score})
    run_training_loop(run)
    line = lines(run.folder)[1]
    assert line["unscorable"] == [1, 2] and line["trained"] == [0, 3]


@pytest.mark.parametrize(("how", "met"), [("true", "masked"), ("drop", "unscorable")])
def test_truncated_completions_mask_a_prompt_or_take_its_scores(tmp_path, how, met):
    run = six(tmp_path, f"algorithm.mask_truncated_completions={how}", steps=1)
    first = run.generator.generate

    def generate(groups, seeds, **how):  # all of the first prompt are cut off, three of the second
        first(groups, seeds, **how)
        for index, rollout in enumerate(r for g in groups for r in g.rollouts):
            rollout.terminated = index % 16 >= 7

    run.generator.generate = generate
    run_training_loop(run)
    line = lines(run.folder)[1]
    wanted = [0] if how == "true" else [0, 1]  # a masked score still is a sibling's baseline
    assert line[met] == wanted and line["trained"] == [p for p in range(4) if p not in wanted]


def test_draws_of_an_update_that_was_not_made_are_skipped(tmp_path):
    run = six(tmp_path, "train.on_nonfinite=skip", steps=3)
    made, weight = [], next(iter(run.policy.model.parameters()))

    def poison(gradient):
        made.append(0)
        return gradient * float("nan") if len(made) == 2 else gradient

    weight.register_hook(poison)
    run_training_loop(run)
    found = fates(run.folder)
    assert found["skipped"] == [4, 5, 6, 7]
    assert found["trained"] == [*range(4), *range(8, 12)]
    assert [line["updates"] for line in lines(run.folder)[1:]] == [1, 0, 1]


def test_several_updates_of_a_step_are_counted(tmp_path):
    run = six(tmp_path, "algorithm.num_iterations=2", "algorithm.num_minibatches=2")
    run_training_loop(run)
    assert [line["updates"] for line in lines(run.folder)[1:]] == [4, 4]
    audit_ledger(run.folder)


WHOLE = ("data.max_samples=6", "checkpoint.every=2", "algorithm.zero_std_groups=resample")
WHOLE = (*WHOLE, "data.eval_split=null")


def some_flat(completion_ids, **_):
    """Some groups have one score only, whatever batch they are in."""
    return [len({*ids}) // 6 for ids in completion_ids]


@pytest.mark.slow
def test_a_run_that_is_stopped_and_goes_on_has_the_ledger_of_one_that_was_not(tmp_path):
    (tmp_path / "whole").mkdir()
    looks = []
    assert attempt(tmp_path / "whole", *WHOLE, looks=looks, some_flat=some_flat)
    whole = tmp_path / "whole" / "smoke"
    account = audit_ledger(whole)  # run.json's step, place and updates agree
    assert account.fates["resampled"] and account.prompt_offset > 18
    for stop_at in (len(looks) // 2, len(looks) - 2):
        root = tmp_path / f"stopped_{stop_at}"
        assert not attempt(root, *WHOLE, stop_at=stop_at, some_flat=some_flat)
        if (root / "smoke" / LEDGER_FILE).is_file():
            audit_ledger(root / "smoke")
        assert attempt(root, *WHOLE, some_flat=some_flat)
        assert audit_ledger(root / "smoke") == account
        assert (root / "smoke" / LEDGER_FILE).read_bytes() == (whole / LEDGER_FILE).read_bytes()


# Steps made up, without a model.


def test_each_fate_is_told_from_the_others(tmp_path):
    said = ["trained", "unscorable", "dropped", "masked", "half", "resampled"]
    write(tmp_path, [said])
    wanted = {f: [i for i, s in enumerate(said) if s == f] for f in PROMPT_FATES}
    assert fates(tmp_path) == wanted | {"trained": [0, 4]}


def test_a_prompt_with_one_completion_needs_one_score(tmp_path):
    write(tmp_path, [["trained", "unscorable"]], k=1)
    assert fates(tmp_path)["trained"] == [0] and fates(tmp_path)["unscorable"] == [1]


def test_a_row_that_an_algorithm_can_use_without_siblings_is_trained_on(tmp_path):
    found, ledger = prompts(), PromptLedger(tmp_path)
    ledger.open(found, K, 0, 0)
    made = batch(found, 0, 0, ["unscorable"])
    made.usable = made.scorable.clone()
    ledger.step(made, 0, 1)
    assert fates(tmp_path)["trained"] == [0]


def test_completions_without_a_token_are_not_in_the_loss(tmp_path):
    found, ledger = prompts(), PromptLedger(tmp_path)
    ledger.open(found, K, 0, 0)
    made = batch(found, 0, 0, ["trained", "trained"])
    for rollout in made.groups[0].rollouts:
        rollout.mask = [0, 0]
    ledger.step(made, 0, 1)
    assert fates(tmp_path)["masked"] == [0] and fates(tmp_path)["trained"] == [1]


def test_where_only_some_updates_were_made_the_others_prompts_are_skipped(tmp_path):
    found, ledger = prompts(), PromptLedger(tmp_path)
    ledger.open(found, K, 0, 0)
    ledger.step(batch(found, 0, 0, ["trained"] * 4), 0, 1, updated_groups={1, 2})
    assert fates(tmp_path)["skipped"] == [0, 3] and fates(tmp_path)["trained"] == [1, 2]


KEPT = ["trained", "half", "dropped", "unscorable", "masked"]


@some.composite
def a_step(draw):
    """Fates of a step's draws: the last round is not replaced, and an update is for all or none."""
    said = draw(some.lists(some.sampled_from([*KEPT, "resampled"]), max_size=11))
    said.append(draw(some.sampled_from(KEPT)))
    if draw(some.integers(0, 3)) == 0:
        said = ["skipped" if fate in ("trained", "half") else fate for fate in said]
    return said


@pytest.mark.wide
@given(
    n=some.integers(1, 9),
    filtered=some.sets(some.integers(0, 12), max_size=4),
    shuffle=some.booleans(),
    steps=some.lists(a_step(), max_size=8),
    cuts=some.lists(some.integers(0, 8), max_size=3),
)
@effort(max_examples=150, deadline=None)
def test_whatever_happens_every_draw_has_one_fate_and_a_resumed_ledger_is_the_same(
    n, filtered, shuffle, steps, cuts
):
    filtered = sorted(filtered)
    filtered = filtered if not filtered or filtered[-1] < n + len(filtered) else []
    found = prompts(n, filtered, shuffle=shuffle)
    with tempfile.TemporaryDirectory() as where:
        whole = write(_folder(where, "whole"), steps, found)
        total = sum(map(len, steps))
        got = fates(whole)
        assert sorted(p for places in got.values() for p in places) == list(range(total))
        said = Counter("trained" if s == "half" else s for step in steps for s in step)
        assert {f: len(places) for f, places in got.items() if places} == said
        drawn = rows(whole)
        for epoch in range(total // n):
            assert sorted(drawn[epoch * n : epoch * n + n]) == found.example_numbers
        assert audit_ledger(whole).fates == said

        again = _resumed(_folder(where, "again"), steps, found, cuts)
        assert (again / LEDGER_FILE).read_bytes() == (whole / LEDGER_FILE).read_bytes()


def _folder(where, name):
    folder = Path(where, name)
    folder.mkdir()
    return folder


def _resumed(folder, steps, found, cuts):
    """Write the steps, going back to after `cut` steps for every cut, as a resumed run does."""
    places = [sum(map(len, steps[:i])) for i in range(len(steps) + 1)]
    ledger, lengths, at = PromptLedger(folder), {}, 0
    ledger.open(found, K, 0, 0)
    lengths[0] = (folder / LEDGER_FILE).stat().st_size
    for goal in [*(c for c in cuts if c <= len(steps)), len(steps)]:
        back = min(goal, at)
        if cuts:
            with (folder / LEDGER_FILE).open("ab") as file:
                file.truncate(lengths[back])
            ledger = PromptLedger(folder)
            ledger.open(found, K, places[back], back)
            at = back
        while at < len(steps):
            made = batch(found, at, places[at], steps[at])
            ledger.step(made, places[at], int("skipped" not in steps[at]))
            at += 1
            lengths[at] = (folder / LEDGER_FILE).stat().st_size
    return folder


# Going on.


STEPS = [["trained"] * 4, ["trained", "resampled", "dropped"], ["trained"] * 4]


def test_a_run_that_begins_elsewhere_says_where(tmp_path):
    found, ledger = prompts(), PromptLedger(tmp_path)
    ledger.open(found, K, 9, 3)
    ledger.step(batch(found, 3, 9, ["trained"] * 5), 9, 1)
    account = audit_ledger(tmp_path)
    assert account.first_position == (3, 9) and (account.steps, account.prompt_offset) == (4, 14)


@pytest.mark.parametrize(("step", "start"), [(2, 8), (3, 12), (4, 11), (0, 0)])
def test_a_ledger_that_ends_elsewhere_than_the_run_goes_on_is_refused(tmp_path, step, start):
    write(tmp_path, STEPS)  # it ends after step 3, place 11
    before = (tmp_path / LEDGER_FILE).read_bytes()
    with pytest.raises(DataError) as caught:
        PromptLedger(tmp_path).open(prompts(), K, start, step)
    assert caught.value.code == 4 and "after step 3, place 11" in str(caught.value)
    assert f"after step {step}, place {start}" in str(caught.value)
    assert (tmp_path / LEDGER_FILE).read_bytes() == before


def test_half_a_line_at_the_end_is_refused_when_the_run_goes_on(tmp_path):
    write(tmp_path, STEPS)
    text = (tmp_path / LEDGER_FILE).read_bytes()
    for cut in (text[:-1], text[:-9], text + b'{"st'):
        (tmp_path / LEDGER_FILE).write_bytes(cut)
        with pytest.raises(DataError, match="cut off"):
            PromptLedger(tmp_path).open(prompts(), K, 11, 3)


def test_opening_again_writes_nothing_and_an_empty_file_gets_its_header(tmp_path):
    write(tmp_path, STEPS)
    before = (tmp_path / LEDGER_FILE).read_bytes()
    PromptLedger(tmp_path).open(prompts(), K, 11, 3)
    assert (tmp_path / LEDGER_FILE).read_bytes() == before
    (tmp_path / LEDGER_FILE).write_bytes(b"")
    PromptLedger(tmp_path).open(prompts(), K, 0, 0)
    assert (tmp_path / LEDGER_FILE).read_bytes() == before.split(b"\n")[0] + b"\n"


@pytest.mark.parametrize(
    "other", [prompts(seed=4), prompts(5), prompts(fingerprint="new"), prompts(shuffle=False),
              prompts(6, [2])]
)  # fmt: skip
def test_another_order_that_was_allowed_gets_a_header_of_its_own(tmp_path, other):
    write(tmp_path, STEPS)
    ledger = PromptLedger(tmp_path)
    ledger.open(other, K, 11, 3)
    ledger.step(batch(other, 3, 11, ["trained"] * 4), 11, 1)
    found = lines(tmp_path)
    assert [i for i, line in enumerate(found) if "ledger" in line] == [0, 4]
    assert found[4]["step"] == 3 and found[4]["place"] == 11
    assert audit_ledger(tmp_path).fates.total() == 15


def test_epochs_before_and_after_another_order_are_not_taken_together(tmp_path):
    write(tmp_path, [["trained"] * 7], prompts(5))  # epoch 1 has begun
    ledger, grown = PromptLedger(tmp_path), prompts(9, fingerprint="grown")
    ledger.open(grown, K, 7, 1)
    ledger.step(batch(grown, 1, 7, ["trained"] * 12), 7, 1)  # its own epoch 1 is over
    assert audit_ledger(tmp_path).fates == {"trained": 19}


# What a step that is not what it should be is told.


def opened(folder):
    ledger = PromptLedger(folder)
    ledger.open(prompts(), K, 0, 0)
    return ledger


def test_a_step_that_is_left_out_or_written_twice_is_a_bug(tmp_path):
    ledger, found = opened(tmp_path), prompts()
    for step, start in ((1, 4), (0, 4), (1, 0)):
        with pytest.raises(RuntimeError, match="step 0, place 0"):
            ledger.step(batch(found, step, start, ["trained"]), start, 1)
    ledger.step(batch(found, 0, 0, ["trained"] * 2), 0, 1)
    with pytest.raises(RuntimeError, match="step 1, place 2"):
        ledger.step(batch(found, 0, 0, ["trained"] * 2), 0, 1)
    assert len(lines(tmp_path)) == 2


def test_a_prompt_that_is_not_the_one_at_its_place_is_a_bug(tmp_path):
    ledger, found = opened(tmp_path), prompts()
    made = batch(found, 0, 0, ["trained"] * 3)
    made.groups[1].prompt_ids = made.groups[2].prompt_ids
    with pytest.raises(RuntimeError, match="draw 1 "):
        ledger.step(made, 0, 1)
    made = batch(found, 0, 0, ["trained"] * 3)
    made.groups[1].prompt_offset = 3
    with pytest.raises(RuntimeError, match="draw 3 "):
        ledger.step(made, 0, 1)
    assert len(lines(tmp_path)) == 1


def test_a_draw_that_is_there_twice_is_a_bug(tmp_path):
    ledger, found = opened(tmp_path), prompts()
    made = batch(found, 0, 0, ["trained"] * 3)
    made.groups[2] = made.groups[1]
    with pytest.raises(RuntimeError, match="twice"):
        ledger.step(made, 0, 1)


def test_the_order_of_the_ledger_is_the_order_of_the_prompts():
    found = prompts(7)
    for start in range(30):
        index = order.prompt_index_at(start, 7, 3, "data", True)
        assert found.index_at(start) == index and found.groups_at(start, 1)[0].prompt_ids == [index]

"""Sampling masks as they are kept: in parts, in records, in checkpoints, in episodes."""

from pathlib import Path

import pytest
import torch
from assert_refused import assert_refused

from rloo_cli.data import rollout_files
from rloo_cli.data.batch import Batch, Group, Rollout, Turn
from rloo_cli.data.rollout_record import read_rollout_record, write_rollout_record
from rloo_cli.data.sampling_mask import (
    ID_BYTES,
    SamplingMask,
    join_masks,
    mask_metrics,
    split_mask,
)
from rloo_cli.utils.errors import DataError, GenerationError


def mask(*kept: list[int]) -> SamplingMask:
    return SamplingMask.from_lists(kept)


def made_batch() -> Batch:
    """Two groups of two completions, of one token and of two."""
    rows = [Rollout([5, 6][: 1 + i % 2], "", "stop", True, i, 0) for i in range(4)]
    groups = [Group(7, {}, "p", [1, 2, 3], rows[:2]), Group(9, {}, "q", [4], rows[2:])]
    table, yes = torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.bool)
    tables = (table[None].clone(), table, table.clone(), yes, ~yes)
    return Batch(0, groups, ["a"], *tables, [0], 2)


def masked_batch() -> Batch:
    """The batch of the record's tests, each token chosen from itself and some others."""
    batch = made_batch()
    for group in batch.groups:
        for k, rollout in enumerate(group.rollouts):
            rollout.sampling_mask = mask(*([i, *range(10, 10 + k)] for i in rollout.completion_ids))
    return batch


def test_masks_are_joined_sliced_and_split_again() -> None:
    first, second = mask([1, 2, 3], [4]), mask([5, 6])
    joined = join_masks([first, None, second], [2, 2, 1])
    assert joined is not None and len(joined) == 5
    assert split_mask(joined, [2, 2, 1]) == [first, None, second]
    assert join_masks([None, None], [1, 2]) is None
    assert first.slice_tokens(1, 2) == mask([4]) and first.slice_tokens(0, 1) == mask([1, 2, 3])
    assert joined.num_bytes == ID_BYTES * (6 + 5) and ID_BYTES == 4


@pytest.mark.parametrize(
    ("tokens", "key"), [([2], "masks of 2"), ([9, 4], "token 0"), ([2, 5], "token 1")]
)
def test_a_mask_that_does_not_fit_its_tokens_is_refused(
    tokens: list[int], key: str, sentence
) -> None:
    kept = mask([1, 2, 3], [4])
    kept.check_tokens([2, 4], 3)
    with pytest.raises(GenerationError) as caught:
        kept.check_tokens(tokens, 3)
    assert_refused(caught, 6, key)
    assert_refused(caught, 6, "generation.return_sampling_mask")
    sentence(caught)


def test_a_mask_of_more_ids_than_the_limit_names_the_keys(sentence) -> None:
    with pytest.raises(GenerationError) as caught:
        mask([1, 2, 3], [4]).check_tokens([2, 4], 2)
    assert_refused(caught, 6, "3", fix="generation.max_sampling_mask_ids=4")
    sentence(caught)


def test_a_record_holds_the_masks_and_an_older_version_refuses_it(tmp_path: Path) -> None:
    write_rollout_record(tmp_path, batch := masked_batch(), {})
    record = read_rollout_record(tmp_path, 1)
    assert [g.rollouts for g in record.batch.groups] == [g.rollouts for g in batch.groups]
    assert record.head["format"] == rollout_files.MASK_FORMAT > rollout_files.EPISODE_FORMAT
    assert record.head["sampling_mask"] and not record.head["episodes"]


def test_a_newer_record_than_this_version_reads_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rollout_record(tmp_path, masked_batch(), {})
    monkeypatch.setattr(rollout_files, "RECORD_FORMAT", rollout_files.EPISODE_FORMAT)
    with pytest.raises(DataError, match="cannot read"):
        read_rollout_record(tmp_path, 1)


def test_a_record_without_masks_is_as_it_was(tmp_path: Path) -> None:
    write_rollout_record(tmp_path, made_batch(), {})
    head = read_rollout_record(tmp_path, 1).head
    assert head["format"] == rollout_files.ROW_FORMAT
    assert "sampling_mask" not in head and "episodes" not in head


def test_an_episode_has_the_masks_of_its_turns_and_a_record_gives_them_back(tmp_path: Path) -> None:
    turns = [
        Turn([], [5, 6], [-1.0, -2.0], "a", "stop", 0, sampling_mask=mask([5, 9], [6])),
        Turn([7, 8], [9], [-0.5], "b", "stop", 0, sampling_mask=mask([3, 9])),
    ]
    batch = masked_batch()
    for rollout in batch.groups[0].rollouts + batch.groups[1].rollouts:
        rollout.turns, rollout.sampling_mask = [], None
        rollout.failed = "its environment"
    batch.groups[0].rollouts[1] = Rollout.from_turns(turns, True, 3)
    assert batch.groups[0].rollouts[1].sampling_mask == mask([5, 9], [6], [3, 9])
    write_rollout_record(tmp_path, batch, {})
    record = read_rollout_record(tmp_path, 1)
    found = record.batch.groups[0].rollouts[1]
    assert found.sampling_mask == mask([5, 9], [6], [3, 9])
    assert found.turns is not None
    assert [t.sampling_mask for t in found.turns] == [t.sampling_mask for t in turns]
    assert record.batch.groups[0].rollouts[0].sampling_mask is None
    assert record.head["episodes"]


def test_an_episode_of_which_one_turn_has_no_mask_has_none() -> None:
    turns = [
        Turn([], [5], [-1.0], "a", "stop", 0, sampling_mask=mask([5, 9])),
        Turn([7], [9], [-0.5], "b", "stop", 0),
    ]
    assert Rollout.from_turns(turns, True, 3).sampling_mask is None


def test_the_metrics_say_how_many_ids_and_bytes_a_token_has() -> None:
    masks = [r.sampling_mask for group in masked_batch().groups for r in group.rollouts]
    found = mask_metrics(masks)  # completions of 1, 2, 1, 2 tokens: of 1; 2, 2; 1; 2, 2 ids
    assert found == {
        "sampling/mask_ids/mean": 10 / 6, "sampling/mask_ids/max": 2.0,
        "sampling/mask_bytes": 4 * (10 + 6) / 6,
    }  # fmt: skip
    assert mask_metrics([None, SamplingMask()]) == {}

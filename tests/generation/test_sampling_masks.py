"""generation.return_sampling_mask: the ids that each token was chosen from travel with it."""

from itertools import chain
from threading import Event
from unittest import mock

import generation_cases
import pytest
import torch
from generation_cases import EOS, PROMPTS, SEEDS, WORDS, ids, sample

from rloo_cli.data.batch import Group
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.data.sampling_mask import SamplingMask
from rloo_cli.generation.common.open_groups import (
    OpenCompletion,
    OpenGroup,
    dump_groups,
    load_groups,
)
from rloo_cli.generation.hf import sampling
from rloo_cli.generation.hf.generator import TransformersGenerator
from rloo_cli.policy.model import Policy
from rloo_cli.utils.errors import GenerationError

FILTERS = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.05},
    "typical_p": {"kwargs": {"typical_p": 0.8}},
    "all, and no early end": {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "min_tokens": 6},
}


def masks(**changes):
    return {"return_sampling_mask": True, "temperature": 0.7, **changes}


def lists(mask):
    """The ids of each token."""
    return [[*part] for part in torch.tensor(mask.ids).split(mask.counts.tolist())]


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_a_mask_has_the_ids_that_were_let_through_and_makes_the_trainer_agree(filters):
    model = generation_cases.make()
    source = generation_cases.generator(model, **masks(**filters))
    groups = [Group(i, {}, "", prompt) for i, prompt in enumerate(PROMPTS)]
    source.generate(groups, SEEDS)
    process = sampling.logits_processors(source.config, {EOS}, 0, greedy=False)
    sizes = set()
    for group in groups:
        for rollout in group.rollouts:
            rows = generation_cases.processed(model, group.prompt_ids, rollout.completion_ids)
            for index, kept in enumerate(lists(rollout.sampling_mask)):
                so_far = torch.tensor([rollout.completion_ids[:index]], dtype=torch.long)
                if filters.get("min_tokens", 0) > index:
                    assert EOS not in kept
                scores = process(so_far, rows[index : index + 1].float())
                assert kept == (scores[0] > -torch.inf).nonzero().flatten().tolist()
                sizes.add(len(kept))
    assert len(sizes) > 1 or filters == {"top_k": 5}
    assert max(sizes) < WORDS
    policy = Policy(model, 0.7)
    micro_batch = policy.pack(groups, whole_group_slices(groups, range(len(groups))))
    gap = policy.frozen_logp(micro_batch).logp - micro_batch.behaviour_logp
    assert gap.abs().max() < 1e-4
    micro_batch.kept = None  # what the trainer said before: the whole vocabulary's
    assert (policy.frozen_logp(micro_batch).logp - micro_batch.behaviour_logp).abs().max() > 0.05


def test_masks_change_no_token():
    model = generation_cases.make()
    with_masks, without = (
        sample(generation_cases.generator(model, **masks(top_p=0.8, **more)), PROMPTS, SEEDS)
        for more in ({}, {"return_sampling_mask": False})
    )
    assert ids(with_masks) == ids(without)
    pairs = zip(chain(*with_masks), chain(*without), strict=True)
    assert all(a.behaviour_logp == b.behaviour_logp and not b.sampling_mask for a, b in pairs)


def test_greedy_answers_and_those_at_another_temperature_have_no_mask():
    source = generation_cases.generator(generation_cases.make(), **masks(top_p=0.8))
    assert all(not r.sampling_mask for group in sample(source, PROMPTS, SEEDS, True) for r in group)
    groups = [Group(i, {}, "", prompt) for i, prompt in enumerate(PROMPTS)]
    source.generate(groups, SEEDS, temperature=0.9)
    assert all(not r.sampling_mask for group in groups for r in group.rollouts)


def test_without_a_filter_nothing_is_kept():
    source = generation_cases.generator(generation_cases.make(), **masks())
    assert all(not r.sampling_mask for group in sample(source, PROMPTS, SEEDS) for r in group)


def test_a_top_p_that_keeps_more_ids_than_the_limit_stops_the_run():
    model = generation_cases.make()
    allowed = max(
        max(r.sampling_mask.counts)
        for group in sample(generation_cases.generator(model, **masks(top_p=0.8)), PROMPTS, SEEDS)
        for r in group
    )
    for most, refused in ((allowed, False), (allowed - 1, True)):
        settings = masks(top_p=0.8, max_sampling_mask_ids=most)
        source = generation_cases.generator(model, **settings)
        if not refused:
            sample(source, PROMPTS, SEEDS)
            continue
        with pytest.raises(GenerationError) as caught:
            sample(source, PROMPTS, SEEDS)
        said = str(caught.value)
        assert f"was chosen from {allowed}" in said and "max_sampling_mask_ids is" in said
        assert f"generation.top_k={most}" in said


class Prompts:
    """The prompts that a checkpoint's groups are read again from."""

    def groups_at(self, offset, count):
        return [Group(offset, {}, "", PROMPTS[offset])]


def test_a_completion_that_goes_on_keeps_the_masks_of_both_parts_also_through_a_checkpoint():
    model, stop = generation_cases.make(), Event()
    source = generation_cases.generator(model, **masks(top_p=0.8), ignore_eos=True)
    groups = [
        OpenGroup(Group(i, {}, "", PROMPTS[i]), [OpenCompletion(s) for s in SEEDS[i]], 0)
        for i in range(2)
    ]
    record = TransformersGenerator._record

    def stop_after_four(self, sequences, *rest):
        record(self, sequences, *rest)
        if len(sequences[0].completion_ids) == 4:
            stop.set()

    with mock.patch.object(TransformersGenerator, "_record", stop_after_four):
        source.extend(groups, lambda group: None, stop)
    assert all(0 < len(c.ids) < 12 for group in groups for c in group.completions)
    groups = load_groups(*dump_groups(groups), Prompts())
    source.version = 1
    source.extend(groups, lambda group: None, Event())
    policy = Policy(model, 0.7)
    for group in groups:
        group.group.rollouts = [c.to_rollout(source.stop_rule) for c in group.completions]
        assert all(
            len(r.sampling_mask) == len(r.completion_ids) == 12 for r in group.group.rollouts
        )
    done = [group.group for group in groups]
    micro_batch = policy.pack(done, whole_group_slices(done, range(len(done))))
    assert (policy.frozen_logp(micro_batch).logp - micro_batch.behaviour_logp).abs().max() < 1e-4


def test_a_part_without_a_mask_leaves_the_whole_completion_without_one():
    completion = OpenCompletion(1)
    completion.add_tokens([5], [-1.0], 0, None)
    completion.add_tokens([6], [-1.0], 1, None, SamplingMask.from_lists([[6, 7]]))
    assert completion.sampling_mask is None
    completion = OpenCompletion(1)
    completion.add_tokens([5], [-1.0], 0, None, SamplingMask.from_lists([[5, 7]]))
    completion.add_tokens([], [], 1, None)
    assert completion.sampling_mask == SamplingMask.from_lists([[5, 7]])
    completion.add_tokens([6], [-1.0], 1, None)
    assert completion.sampling_mask is None

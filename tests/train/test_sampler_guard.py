"""Log-probabilities of the sampler that are not the trainer's stop a run before it learns."""

import pytest
import torch
from loop_cases import ENDS, flat, sampled, updated
from loop_cases import alone as make

from rloo_cli.utils.errors import GenerationError

pytestmark = pytest.mark.wide


def shifted(batch, by, groups=None):
    """The batch, whose sampler was off by `by` nats on every token of these groups."""
    chosen = batch.groups if groups is None else [batch.groups[i] for i in groups]
    for group in chosen:
        for rollout in group.rollouts:
            rollout.behaviour_logp = [x + by for x in rollout.behaviour_logp]
    return batch


@pytest.mark.parametrize("words", [[], ["algorithm.num_iterations=2"]], ids=["one", "two"])
def test_a_sampler_with_other_weights_stops_the_run_before_anything_moved(tmp_path, words):
    run = make(tmp_path, ENDS, *words)
    run.generator.load(run.policy, run.state.updates)
    before = flat(run)
    with pytest.raises(GenerationError) as caught:
        updated(run, shifted(sampled(run), 0.1))
    said = str(caught.value)
    assert caught.value.code == 6 and "step 1" in said and "nothing was updated" in said
    assert "differ by 0.1 nats" in said and "at most 0.02" in said
    assert torch.equal(flat(run), before) and run.state.updates == 0


def test_one_completion_that_is_far_off_is_named(tmp_path):
    run = make(tmp_path, ENDS)
    batch = sampled(run)
    rollout = batch.groups[2].rollouts[1]
    rollout.behaviour_logp = [x - 5 for x in rollout.behaviour_logp]
    with pytest.raises(
        GenerationError, match=f"completion 1 of draw {batch.groups[2].prompt_offset}: 5"
    ):
        updated(run, batch)


@pytest.mark.parametrize("by", [0.0, 0.01, -0.01])
def test_a_difference_of_numerics_passes(tmp_path, by):
    run = make(tmp_path, ENDS)
    before = flat(run)
    updated(run, shifted(sampled(run), by))
    assert run.state.updates == 1 and not torch.equal(flat(run), before)


def test_later_iterations_over_a_batch_are_compared_with_its_own_weights(tmp_path):
    run = make(tmp_path, ENDS, "algorithm.num_iterations=3", "train.learning_rate=0.05")
    updated(run, sampled(run))
    assert run.state.updates == 3


@pytest.mark.slow_but(
    "auto-generation.top_p=0.9",
    "auto-generation.min_tokens=2",
    "separate-generation.top_p=0.9",
    "separate-generation.min_tokens=2",
)
@pytest.mark.parametrize(
    "words",
    [
        ["generation.top_p=0.9"], ["generation.top_k=50"], ["generation.min_p=0.01"],
        ["generation.repetition_penalty=1.1"], ["generation.min_tokens=2"],
    ],
    ids=lambda words: words[0],
)  # fmt: skip
@pytest.mark.parametrize("old_logp", ["auto", "separate"])  # compared on the device, or not
def test_with_what_bends_the_distribution_they_are_not_compared(tmp_path, words, old_logp):
    run = make(tmp_path, ENDS, *words, f"train.old_logp={old_logp}")
    updated(run, shifted(sampled(run), 1.0))
    assert run.state.updates == 1


def test_in_bfloat16_more_is_numerics(tmp_path):
    run = make(tmp_path, ENDS, "model.dtype=bfloat16")
    updated(run, shifted(sampled(run), 0.1))
    assert run.state.updates == 1
    with pytest.raises(GenerationError, match=r"at most 0\.4"):
        updated(run, shifted(sampled(run), 0.6))


def test_a_backend_that_tells_none_is_not_compared(tmp_path):
    run = make(tmp_path, ENDS)
    batch = sampled(run)
    for group in batch.groups:
        for rollout in group.rollouts:
            rollout.behaviour_logp = None
    updated(run, batch)
    assert run.state.updates == 1

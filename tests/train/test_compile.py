"""train.compile: compiled layers compute what plain ones do, and the sampler leaves them alone."""

import copy
import os
from pathlib import Path
from typing import Any
from unittest import mock

import generation_cases
import loop_cases
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.distributed import gather
from rloo_cli.policy import layouts
from rloo_cli.policy.model import Policy


def groups(more: int) -> list[Group]:
    """Two groups of three completions, all longer by `more`."""

    def rollout(length: int, seed: int) -> Rollout:
        drawn = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, 128, (length,), generator=drawn).tolist()
        return Rollout(ids, "", "length", False, 0, 0)

    return [
        Group(i, {}, "", list(range(3, 9 + i)), [rollout(3 + i + k + more, k) for k in range(3)])
        for i in range(2)
    ]


def gradients(policy: Policy, more: int) -> list[torch.Tensor]:
    """Log-probabilities and every gradient of their sum."""
    policy.model.zero_grad()
    batch = groups(more)
    logp = policy.logp(policy.pack(batch, whole_group_slices(batch, range(2)))).logp
    logp.sum().backward()
    return [logp.detach(), *(p.grad.clone() for p in policy.model.parameters())]


@pytest.mark.slow
def test_compiled_layers_have_the_gradients_of_plain_ones_for_rows_of_any_number() -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
    )  # fmt: skip
    policy = Policy(Qwen3ForCausalLM(config), 1.0)
    assert layouts.choose_policy_layout(policy, "shared", 64).layout == "shared"
    plain = [gradients(policy, more) for more in (0, 3, 9)]
    for layer in gather.decoder_layers(policy.model):
        layer.compile(dynamic=True)
    for more, expected in zip((0, 3, 9), plain, strict=True):
        for found, known in zip(gradients(policy, more), expected, strict=True):
            assert torch.allclose(found, known, atol=1e-5)


def test_the_sampler_runs_layers_uncompiled_though_they_are_compiled() -> None:
    model = copy.deepcopy(generation_cases.make())
    expected = generation_cases.ids(sampled(model))

    def compiled(*_: Any, **__: Any) -> None:
        raise AssertionError("the sampler ran a compiled layer")

    for layer in gather.decoder_layers(model):
        layer._compiled_call_impl = compiled
    assert generation_cases.ids(sampled(model)) == expected
    with pytest.raises(AssertionError, match="ran a compiled layer"):
        model(torch.tensor([[5, 6]]))


def sampled(model: Any) -> Any:
    """Completions by the sampler that trains the same layers."""
    sampler = generation_cases.generator(model)
    return generation_cases.sample(sampler, generation_cases.PROMPTS, generation_cases.SEEDS)


@pytest.mark.slow
def test_a_run_with_compiled_layers_makes_the_update_of_a_plain_one(tmp_path: Path) -> None:
    moved, layers = [], []
    for word in ("train.compile=false", "train.compile=true"):
        with mock.patch.dict(os.environ, RLOO_CACHE=loop_cases.cache()):
            run = loop_cases.alone(tmp_path, *loop_cases.PLAIN, word, f"name=run{len(moved)}")
        layers.append(gather.decoder_layers(run.policy.model)[0]._compiled_call_impl)
        run.generator.load(run.policy, 0)
        moved.append(loop_cases.step(run)[0])
    assert layers[0] is None and layers[1] is not None
    assert moved[0].norm() > 0 and loop_cases.apart(moved[1], moved[0]) < 1e-4

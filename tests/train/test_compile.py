"""train.compile: compiled layers compute what plain ones do, and who may have them."""

import loop_cases
import pytest
import torch
from assert_refused import assert_refused
from transformers import Qwen3Config, Qwen3ForCausalLM

from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.distributed import gather
from rloo_cli.policy import layouts
from rloo_cli.policy.model import Policy
from rloo_cli.utils.errors import ConfigError


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


def test_a_sampler_that_uses_the_same_layers_is_refused(sentence) -> None:
    with pytest.raises(ConfigError) as refused:
        loop_cases.checked((), ("train.compile=true",))
    assert_refused(refused, 2, "train.compile", fix="generation=vllm_server")
    sentence(refused)
    loop_cases.checked((), ("train.compile=true", "generation=vllm_server"))

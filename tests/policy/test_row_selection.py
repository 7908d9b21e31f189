"""The row that all completions of a prompt begin at: its gradient is added in float32."""

import layout_cases
import pytest
import torch
from layout_cases import laid
from policy_cases import WORDS, fresh, rollout
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForSequenceClassification

from rloo_cli.data.batch import Group
from rloo_cli.data.sampling_mask import SamplingMask
from rloo_cli.policy import shared_attention
from rloo_cli.policy.fused_head import token_logp
from rloo_cli.policy.row_selection import SUM_COLUMNS, add_row_gradients, select_rows
from rloo_cli.policy.value import ValueModel

PROMPT, SIBLINGS, TOKEN = [3, 7, 5, 9], 512, 11
CPU = torch.device("cpu")


class GpuSums(TorchDispatchMode):
    """`index_add` as on a GPU: in the dtype of its tensors. A CPU's adds in float32."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.index_add, torch.ops.aten.index_add_):
            total, _, index, source = args
            return total.index_put_((index,), source, accumulate=True)  # `total` is a fresh one
        return function(*args, **(kwargs or {}))


def siblings(masked=False):
    """One prompt with many completions of the same single token, whose gradients are equal."""
    group = Group(0, {}, "", PROMPT, [rollout([TOKEN]) for _ in range(SIBLINGS)])
    for each in group.rollouts if masked else ():
        each.sampling_mask = SamplingMask.from_lists([[TOKEN, TOKEN + 1, TOKEN + 2]])
    return [group]


def states_of(model):
    """The hidden states of each forward pass from now on, which keep their gradients."""
    seen = []

    def keep(_, __, out):
        out[0].retain_grad()
        seen.append(out[0])

    model.base_model.register_forward_hook(keep)
    return seen


def last_row(states):
    """The gradient of the prompt's last row, the predicting row of every completion. (h,)"""
    return states[0].grad[0, len(PROMPT) - 1].double()


def error(found, exact):
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("head", ["fused", "plain", "kept"])
def test_the_gradient_of_a_prompts_last_row_is_that_of_float64(head):
    model = fresh("qwen3").bfloat16()
    policy = layout_cases.policy("qwen3", "shared", fused=head != "plain", model=model)
    states = states_of(model)
    with GpuSums():
        policy.logp(laid(siblings(masked=head == "kept"), "shared")).logp.sum().backward()
    row = states[0].detach()[0, len(PROMPT) - 1].double().requires_grad_()
    logits = model.get_output_embeddings().weight.detach().double() @ row / policy.temperature
    ids = [TOKEN, TOKEN + 1, TOKEN + 2] if head == "kept" else list(range(WORDS))
    (SIBLINGS * logits[ids].log_softmax(0)[ids.index(TOKEN)]).backward()
    # One rounding; with the model's own head its products, which are bfloat16, are rounded too.
    assert error(last_row(states), row.grad) < (0.01 if head == "plain" else 2**-8)


def test_the_gradient_of_that_row_under_a_value_model_is_that_of_float64():
    config = fresh("qwen3").config
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config).bfloat16()
    value_model, states = ValueModel(model, CPU), states_of(model)
    value_model.layout = "shared"
    shared_attention.install_shared_attention(model)
    micro_batch = value_model.pack(siblings(), [(0, tuple(range(SIBLINGS)))])
    with GpuSums():
        value_model.values(micro_batch).sum().backward()
    exact = SIBLINGS * model.score.weight.detach().double()[0]
    assert error(last_row(states), exact) < 2**-8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_selected_rows_have_the_values_and_gradients_of_indexing(dtype):
    draw = torch.Generator().manual_seed(0)
    width = SUM_COLUMNS + 3
    states = torch.randn(6, width, generator=draw).to(dtype).requires_grad_()
    index, g = torch.tensor([4, 1, 1, 5, 1]), torch.randn(5, width, generator=draw).to(dtype)
    rows = select_rows(states, index)
    rows.backward(g)
    exact = torch.zeros(6, width, dtype=torch.float64).index_add_(0, index, g.double())
    assert torch.equal(rows, states[index]) and states.grad.dtype == dtype
    assert torch.equal(states.grad, exact.to(dtype)) or error(states.grad.double(), exact) < 1e-7
    wide = select_rows(states, index, torch.float32)
    assert wide.dtype == torch.float32 and torch.equal(wide, states[index].float())


def test_without_rows_every_gradient_is_zero():
    found = add_row_gradients(torch.zeros(0, 5), torch.zeros(0).long(), 3, torch.bfloat16)
    assert found.shape == (3, 5) and found.dtype == torch.bfloat16 and not found.any()


@pytest.mark.parametrize("keep_bytes", [0, 2**30], ids=["again", "kept"])
def test_the_head_on_rows_by_index_is_the_head_on_these_rows(keep_bytes):
    draw = torch.Generator().manual_seed(1)
    states, weight = torch.randn(9, 24, generator=draw), torch.randn(300, 24, generator=draw)
    index, target = torch.tensor([8, 2, 2, 0, 5, 2, 2]), torch.arange(7)
    g, found = torch.randn(7, generator=draw), []
    for by_index in (True, False):
        given = [t.clone().requires_grad_() for t in (states, weight)]
        rows = given[0] if by_index else given[0][index]
        row_index = index if by_index else None
        words = {"tile_logits": 256, "keep_bytes": keep_bytes, "want_entropy": True}
        logp, entropy = token_logp(rows, given[1], target, row_index=row_index, **words)
        (logp * g).sum().backward()
        found.append([logp, entropy, *(t.grad for t in given)])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)

"""Attention for the layout `shared`, in which a prompt occurs once for its K completions.

There are two passes of flash attention: every prompt and completion as a separate document,
causal; then a group's completions together over their prompt, without a mask. The two are merged by
their log-sum-exps. No keys are copied, there is no [T, T] mask, and a prompt's keys are read once
for its group. This is exact: a flash backward recomputes P = exp(S - lse) and needs only
rowsum(do * o), so given the merged output and lse, each pass yields its share of the gradients
(cascade attention, as in FlashInfer, arXiv 2501.01005; the backward as in ring attention, arXiv
2310.01889).

transformers calls the function by its name in `AttentionInterface`. There is no mask function with
that name, so the model builds no mask and passes the plan to each layer among its arguments, where
gradient checkpointing keeps it. Once installed, a forward without a plan is an error, never a stock
attention over a shared prompt: that would be silently wrong. `native_attention` restores the
model's own attention inside a context.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from rloo_cli.data.packing import SharedLayout
from rloo_cli.policy.flash_kernels import (
    prompt_attention_pass,
    select_flash_kernels,
    self_attention_pass,
)
from rloo_cli.policy.vision import language_modules

SHARED_ATTENTION_NAME = "rloo_shared"
SHARED_LAYOUT_ARGUMENT = "rloo_plan"  # the argument of a model's forward


class SharedAttentionError(RuntimeError):
    """The model requests an attention feature that the shared layout does not support."""


@torch.compiler.disable  # each micro-batch has another plan
def shared_layout_attention(
    module: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: (1, H, T, D), (1, G, T, D) twice -> (1, T, H, D).

    Raises SharedAttentionError for a call without a plan, or with a mask, dropout, a window, a cap
    or a sink.
    """
    plan: SharedLayout | None = kwargs.get(SHARED_LAYOUT_ARGUMENT)
    if plan is None:
        raise SharedAttentionError("called without a plan: these are not shared rows")
    odd = [n for n in ("softcap", "s_aux") if kwargs.get(n) is not None]
    window = kwargs.get("sliding_window")  # a window of the longest sequence has no effect
    odd += ["sliding_window"] if window is not None and window < plan.max_seqlen else []
    odd += ["dropout"] if kwargs.get("dropout") else []
    odd += ["attention_mask"] if attention_mask is not None else []
    if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        odd.append("heads of unequal sizes")
    if odd or query.shape[0] != 1 or query.shape[2] != sum(plan.segment_lengths):
        wanted = ", ".join(odd) or f"queries of shape {tuple(query.shape)}"
        raise SharedAttentionError(f"it requests {wanted}")
    plan.attention_calls[0] += 1
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    out: Tensor = CascadeAttention.apply(q, k, v, plan, float(scale))
    return out[None], None


AttentionInterface.register(SHARED_ATTENTION_NAME, shared_layout_attention)


class CascadeAttention(torch.autograd.Function):
    """Attention over one packed micro-batch: (T, H, D), (T, G, D) twice -> (T, H, D)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: SharedLayout, scale: float
    ) -> Tensor:
        n = plan.prompt_tokens
        flash = select_flash_kernels(q)
        out, lse = flash.forward(q, k, v, self_attention_pass(plan), scale)
        if n < len(q):
            over_prompt = flash.forward(q[n:], k[:n], v[:n], prompt_attention_pass(plan), scale)
            prompt_out, prompt_lse = over_prompt
            merged = torch.logaddexp(lse[n:], prompt_lse)
            own_share, prompt_share = (lse[n:] - merged).exp_(), (prompt_lse - merged).exp_()
            out[n:] = own_share[..., None] * out[n:] + prompt_share[..., None] * prompt_out
            lse[n:] = merged
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        plan, scale, n = ctx.plan, ctx.scale, ctx.plan.prompt_tokens
        flash = select_flash_kernels(q)
        dq, dk, dv = flash.backward(grad, q, k, v, out, lse, self_attention_pass(plan), scale)
        if n < len(q):
            parts = (grad[n:], q[n:], k[:n], v[:n], out[n:], lse[n:])
            more = flash.backward(*parts, prompt_attention_pass(plan), scale)
            dq[n:] += more[0]
            dk[:n] += more[1]
            dv[:n] += more[2]
        return dq, dk, dv, None, None


def install_shared_attention(model: PreTrainedModel) -> None:
    """Give a model our attention; from then on its forward needs a plan."""
    if not has_shared_attention(model):
        model.rloo_native = [(c, c._attn_implementation) for c in _configs(model)]
        _set_attention_names([(c, SHARED_ATTENTION_NAME) for c, _ in model.rloo_native])


def uninstall_shared_attention(model: PreTrainedModel) -> None:
    """Give the model its own attention back, if it has ours."""
    if has_shared_attention(model):
        _set_attention_names(model.rloo_native)
        del model.rloo_native


def has_shared_attention(model: PreTrainedModel) -> bool:
    """Whether the model has our attention."""
    return hasattr(model, "rloo_native")


@contextmanager
def native_attention(model: PreTrainedModel, attention: str | None = None) -> Iterator[None]:
    """Let the model use its own attention inside, or the one with that name."""
    before = [(c, c._attn_implementation) for c in _configs(model)]
    native = getattr(model, "rloo_native", [])
    _set_attention_names([(c, attention) for c, _ in before] if attention else native)
    try:
        yield
    finally:
        _set_attention_names(before)


def _set_attention_names(names: list[tuple[PretrainedConfig, str]]) -> None:
    for config, name in names:
        config._attn_implementation_internal = name  # the public setter changes sub-configs too


def _configs(model: PreTrainedModel) -> list[PretrainedConfig]:
    """The configs that the model's layers read, each once."""
    modules = language_modules(model)  # a vision tower keeps its own attention
    configs = {id(c): c for m in modules if (c := getattr(m, "config", None)) is not None}
    return [c for c in configs.values() if hasattr(c, "_attn_implementation")]

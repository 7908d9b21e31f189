"""Attention for rows in which a prompt stands once for its K completions (layout `shared`).

Two passes of flash attention: every prompt and completion as a document of its own, causal; then
a group's completions together over their prompt, without a mask. The two are merged by their
log-sum-exps. No keys are copied, there is no [T, T] mask, and a prompt's keys are read once for
its group. Exact: a flash backward recomputes P = exp(S - lse) and needs only rowsum(do * o), so
given the merged output and lse, each pass yields its share of the gradients (cascade attention,
as in FlashInfer, arXiv 2501.01005; the backward as in ring attention, arXiv 2310.01889).

transformers calls the function by its name in `AttentionInterface`. There is no mask function of
that name, so the model builds no mask and hands the plan down to each layer among its arguments,
where gradient checkpointing keeps it. Once installed, a forward without a plan is an error, never
a stock attention over shared rows: that would be wrong without a word. `native` gives the model
its own attention back for a while.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from rloo_cli.data.packing import Shared
from rloo_cli.policy.flash_kernels import kernels, over_prompts, own

NAME = "rloo_shared"
PLAN = "rloo_plan"  # the argument of a model's forward


class NotShared(RuntimeError):
    """This model asks its attention for something that shared rows do not have."""


@torch.compiler.disable  # the plan is another one for each micro-batch
def attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """transformers' attention function: (1, H, T, D), (1, G, T, D) twice -> (1, T, H, D).

    Raises NotShared for a call without a plan, or with a mask, dropout, window, cap or sink.
    """
    plan: Shared | None = given.get(PLAN)
    if plan is None:
        raise NotShared("called without a plan: these are no shared rows")
    odd = [n for n in ("softcap", "s_aux") if given.get(n) is not None]
    window = given.get("sliding_window")  # one that holds every row does nothing
    odd += ["sliding_window"] if window is not None and window < plan.longest else []
    odd += ["dropout"] if given.get("dropout") else []
    odd += ["attention_mask"] if attention_mask is not None else []
    if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        odd.append("heads of unequal sizes")
    if odd or query.shape[0] != 1 or query.shape[2] != sum(plan.segments):
        raise NotShared(f"it asks for {', '.join(odd) or f'rows of {tuple(query.shape)}'}")
    plan.calls[0] += 1
    scale = given.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    out: Tensor = Cascade.apply(q, k, v, plan, float(scale))
    return out[None], None


AttentionInterface.register(NAME, attention)


class Cascade(torch.autograd.Function):
    """(T, H, D), (T, G, D) twice -> (T, H, D): attention over one shared row."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Shared, scale: float) -> Tensor:
        n = plan.prompt_rows
        flash = kernels(q)
        out, lse = flash.forward(q, k, v, own(plan), scale)
        if n < len(q):
            across, its = flash.forward(q[n:], k[:n], v[:n], over_prompts(plan), scale)
            merged = torch.logaddexp(lse[n:], its)
            ours, theirs = (lse[n:] - merged).exp_(), (its - merged).exp_()
            out[n:] = ours[..., None] * out[n:] + theirs[..., None] * across
            lse[n:] = merged
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        plan, scale, n = ctx.plan, ctx.scale, ctx.plan.prompt_rows
        flash = kernels(q)
        dq, dk, dv = flash.backward(grad, q, k, v, out, lse, own(plan), scale)
        if n < len(q):
            rows = (grad[n:], q[n:], k[:n], v[:n], out[n:], lse[n:])
            more = flash.backward(*rows, over_prompts(plan), scale)
            dq[n:] += more[0]
            dk[:n] += more[1]
            dv[:n] += more[2]
        return dq, dk, dv, None, None


def install(model: Any) -> None:
    """Give a model our attention: from now on its forward needs a plan."""
    if not installed(model):
        model.rloo_native = [(c, c._attn_implementation) for c in _configs(model)]
        _put([(c, NAME) for c, _ in model.rloo_native])


def uninstall(model: Any) -> None:
    """The model's own attention again; nothing where it has it."""
    if installed(model):
        _put(model.rloo_native)
        del model.rloo_native


def installed(model: Any) -> bool:
    """Whether the model has our attention."""
    return hasattr(model, "rloo_native")


@contextmanager
def native(model: Any, name: str | None = None) -> Iterator[None]:
    """The model's own attention inside, or the one of that name; what it had before after it."""
    before = [(c, c._attn_implementation) for c in _configs(model)]
    _put(getattr(model, "rloo_native", []) if name is None else [(c, name) for c, _ in before])
    try:
        yield
    finally:
        _put(before)


def _put(names: list[tuple[Any, str]]) -> None:
    for config, name in names:
        config._attn_implementation_internal = name  # the public setter changes sub-configs too


def _configs(model: Any) -> list[Any]:
    """The configs that the model's layers read, each once."""
    found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    return [c for c in found.values() if hasattr(c, "_attn_implementation")]

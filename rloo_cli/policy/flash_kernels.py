"""Flash attention over segments of one packed sequence, forward and backward, on each device type.

It calls the aten kernels below torch's public functions, because the kernels return the log-sum-exp
and take a merged one back (`shared_attention.CascadeAttention`); the public functions have no
gradient for it.
"""

from collections.abc import Iterator
from itertools import accumulate, groupby

import torch
from torch import Tensor

from rloo_cli.data.packing import SharedLayout

AttentionResult = tuple[Tensor, Tensor]  # (T, H, D), and its log-sum-exp (T, H)


def select_flash_kernels(q: Tensor) -> "type[_CudaKernels | _CpuKernels | _EagerKernels]":
    """The kernels for these queries. On CUDA flash attention takes half precision only."""
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16):
        return _CudaKernels
    return _CpuKernels if q.device.type == "cpu" else _EagerKernels


class AttentionPass:
    """One call of flash attention over segments: the bounds of queries and of keys."""

    def __init__(
        self,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        q_lengths: list[int],
        k_lengths: list[int],
        causal: bool,
    ) -> None:
        self.cu_seqlens_q, self.cu_seqlens_k = cu_seqlens_q, cu_seqlens_k
        self.q_lengths, self.k_lengths, self.causal = q_lengths, k_lengths, causal


def self_attention_pass(plan: SharedLayout) -> AttentionPass:
    """The pass in which each prompt and each completion attends to itself."""
    lengths = plan.segment_lengths
    return AttentionPass(plan.cu_seqlens, plan.cu_seqlens, lengths, lengths, True)


def prompt_attention_pass(plan: SharedLayout) -> AttentionPass:
    """The pass in which a group's completions attend to their prompt."""
    bounds = plan.cu_seqlens_group, plan.cu_seqlens_prompt
    return AttentionPass(*bounds, plan.group_lengths, plan.prompt_lengths, False)


class _CudaKernels:
    """Torch's variable-length kernels. The aten op's log-sum-exp is (H, total)."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, p: AttentionPass, scale: float) -> AttentionResult:
        bounds = p.cu_seqlens_q, p.cu_seqlens_k
        longest = _rounded_max_length(p.q_lengths), _rounded_max_length(p.k_lengths)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *bounds, *longest, 0.0, p.causal, False, scale=scale
        )
        return out, lse.transpose(0, 1).contiguous()

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, p: AttentionPass,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        none = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the state of a dropout of 0
        bounds = p.cu_seqlens_q, p.cu_seqlens_k
        longest = _rounded_max_length(p.q_lengths), _rounded_max_length(p.k_lengths)
        grad, lse = grad.contiguous(), lse.transpose(0, 1).contiguous()
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, *bounds, *longest, 0.0, p.causal, none, none, scale=scale
        )


class _CpuKernels:
    """Torch's flash kernels for the CPU, with one call per run of segments of equal length."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, p: AttentionPass, scale: float) -> AttentionResult:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=_accumulation_dtype(q))
        for (a, b, rows), (c, d, keys) in _equal_length_runs(p):
            o, segment_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _split_segments(q[a:b], rows),
                _split_segments(k[c:d], keys),
                _split_segments(v[c:d], keys),
                0.0,
                p.causal,
                scale=scale,
            )
            _split_segments(out[a:b], rows).copy_(o)
            lse[a:b].view(-1, rows, q.shape[1]).copy_(segment_lse.transpose(1, 2))
        return out, lse

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, p: AttentionPass,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
        for (a, b, rows), (c, d, keys) in _equal_length_runs(p):
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _split_segments(grad[a:b], rows),
                _split_segments(q[a:b], rows),
                _split_segments(k[c:d], keys),
                _split_segments(v[c:d], keys),
                _split_segments(out[a:b], rows),
                lse[a:b].view(-1, rows, q.shape[1]).transpose(1, 2),
                0.0,
                p.causal,
                scale=scale,
            )
            _split_segments(grads[0][a:b], rows).copy_(dq)
            _split_segments(grads[1][c:d], keys).copy_(dk)
            _split_segments(grads[2][c:d], keys).copy_(dv)
        return grads[0], grads[1], grads[2]


class _EagerKernels:
    """Attention segment by segment, for a device without a flash kernel.

    It keeps nothing of size [T, T], only the scores of one segment at a time.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, p: AttentionPass, scale: float) -> AttentionResult:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=_accumulation_dtype(q))
        for (a, b, rows), (c, d, keys) in _equal_length_runs(p):
            scores = _attention_scores(
                _split_segments(q[a:b], rows), _split_segments(k[c:d], keys), p.causal, scale
            )
            segment_lse = scores.logsumexp(-1)
            values = _repeat_kv_heads(_split_segments(v[c:d], keys), q.shape[1])
            o = (scores - segment_lse[..., None]).exp() @ values.to(scores.dtype)
            _split_segments(out[a:b], rows).copy_(o)
            lse[a:b].view(-1, rows, q.shape[1]).copy_(segment_lse.transpose(1, 2))
        return out, lse

    @staticmethod
    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, p: AttentionPass,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        grads = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
        wide, heads = _accumulation_dtype(q), q.shape[1]
        for (a, b, rows), (c, d, keys) in _equal_length_runs(p):
            queries = _split_segments(q[a:b], rows)
            segment_lse = lse[a:b].view(-1, rows, heads).transpose(1, 2)
            do, o = (_split_segments(t[a:b], rows).to(wide) for t in (grad, out))
            repeated_keys = _repeat_kv_heads(_split_segments(k[c:d], keys), heads).to(wide)
            values = _repeat_kv_heads(_split_segments(v[c:d], keys), heads).to(wide)
            scores = _attention_scores(queries, repeated_keys, p.causal, scale)
            share = (scores - segment_lse[..., None]).exp()
            ds = share * (do @ values.mT - (do * o).sum(-1, keepdim=True)) * scale
            _split_segments(grads[0][a:b], rows).copy_(ds @ repeated_keys)
            for to, each in ((grads[1], ds.mT @ queries.to(wide)), (grads[2], share.mT @ do)):
                by_group = each.unflatten(1, (k.shape[1], heads // k.shape[1]))
                _split_segments(to[c:d], keys).copy_(by_group.sum(2))
        return grads[0], grads[1], grads[2]


def _attention_scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """(n, H, L, D), (n, G, M, D) -> (n, H, L, M), at least float32"""
    dtype = _accumulation_dtype(q)
    scores = q.to(dtype) @ _repeat_kv_heads(k, q.shape[1]).to(dtype).mT * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _repeat_kv_heads(keys: Tensor, heads: int) -> Tensor:
    """Repeat each key and value head for every query head of its group."""
    return keys.repeat_interleave(heads // keys.shape[1], dim=1)


def _equal_length_runs(
    p: AttentionPass,
) -> Iterator[tuple[tuple[int, int, int], tuple[int, int, int]]]:
    """Runs of segments of equal lengths: (start, end, length) of their queries and keys."""
    pairs = list(zip(p.q_lengths, p.k_lengths, strict=True))
    q_starts, k_starts = accumulate(p.q_lengths, initial=0), accumulate(p.k_lengths, initial=0)
    starts = list(zip(q_starts, k_starts, strict=True))
    done = 0
    for (rows, keys), run in groupby(pairs):
        (a, c), done = starts[done], done + len(list(run))
        if rows and keys:
            b, d = starts[done]
            yield (a, b, rows), (c, d, keys)


def _split_segments(tokens: Tensor, length: int) -> Tensor:
    """(n * length, H, D) -> (n, H, length, D), a view"""
    return tokens.view(-1, length, *tokens.shape[1:]).transpose(1, 2)


def _accumulation_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _rounded_max_length(lengths: list[int]) -> int:
    """The largest length, rounded up: few different bounds mean few plans of the kernel."""
    return -(-max(lengths) // 128) * 128

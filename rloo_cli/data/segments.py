"""Sums over segments, and log-probabilities of targets.

Everything per token is a flat column (N,); `segment_ids` (N,) names the segment, of n, that a token
belongs to. A segment without tokens sums to 0. Tensor methods only, so that importing this imports
no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def segment_sum(values: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Sum of each segment's tokens. (N,), (N,) -> (n,)"""
    return values.new_zeros(num_segments).index_add(0, segment_ids, values)


def segment_positions(segment_ids: Tensor, num_segments: int) -> Tensor:
    """The index of each token within its segment, from 0; segments lie in order. (N,) -> (N,)"""
    counts = segment_ids.new_zeros(num_segments).index_add(
        0, segment_ids, segment_ids.new_ones(segment_ids.shape)
    )
    starts = counts.cumsum(0) - counts
    return segment_ids.new_ones(segment_ids.shape).cumsum(0) - 1 - starts[segment_ids]


def segment_mean(values: Tensor, mask: Tensor, segment_ids: Tensor, num_segments: int) -> Tensor:
    """Mean over each segment's unmasked tokens; 0 without any. (N,), (N,), (N,) -> (n,)"""
    count = segment_sum(mask, segment_ids, num_segments).clamp(min=1)
    return segment_sum(values * mask, segment_ids, num_segments) / count


def target_logprobs(logits: Tensor, target: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature) at the targets, in float32. (N, V), (N,) -> (N,)"""
    scaled = logits.float() / temperature
    picked = scaled.gather(-1, target[:, None]).squeeze(-1)
    return picked - scaled.logsumexp(-1)


def token_entropy(logits: Tensor, temperature: float) -> Tensor:
    """Entropy of softmax(logits / temperature), in nats and float32. (N, V) -> (N,)"""
    logp = (logits.float() / temperature).log_softmax(-1)
    return -(logp.exp() * logp).sum(-1)

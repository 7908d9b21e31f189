"""From terms per token or per completion to one number per update (docs/OBJECTIVES.md, Loss types).

A mean over an update is a sum over its micro-batches divided once by a number known beforehand,
never a mean of means: so the loss and its gradient do not depend on how the update was cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rloo_cli.config.schema import Frozen, key
from rloo_cli.data.segments import segment_sum

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.data.packing import MicroBatch


class Config(Frozen):
    loss_agg: (
        Literal["sequence_sum", "sequence_mean", "token_mean", "constant", "token_mean_local"]
        | None
    ) = key(
        "Mean over completions of token sums or of token means; mean over tokens; token sum over"
        " N * max_completion_length; mean over micro-batches of token means (to compare only);"
        " null = by loss_type"
    )
    entropy_coef: float = key("Weight of the tokens' mean entropy, subtracted from the loss", ge=0)
    loss_denominator: Literal["all", "valid"] = key(
        "Completions counted in N: every one, or those that the loss sees: not masked, in scorable"
        " groups (with kl_in=loss and opd also those without a score)"
    )


def aggregate_loss(term: Tensor, micro_batch: MicroBatch, config: Config) -> Tensor:
    """A micro-batch's share of the update's sum, before the division by `update_denominator`.

    A term per completion counts once under sequence_sum and sequence_mean, and otherwise once for
    each of its unmasked tokens; a completion without unmasked tokens never counts.
    (N,) or (S,) -> ()
    """
    count = segment_sum(micro_batch.mask, micro_batch.sequence_ids, micro_batch.num_sequences)
    by_token = term.shape == micro_batch.mask.shape
    if config.loss_agg == "sequence_sum" and not by_token:
        return (term * (count > 0)).sum()
    term = micro_batch.mask * (term if by_token else term[micro_batch.sequence_ids])
    if config.loss_agg == "sequence_mean":
        return (term / count.clamp(min=1)[micro_batch.sequence_ids]).sum()
    if config.loss_agg == "token_mean_local":
        return term.sum() / count.sum().clamp(min=1)
    return term.sum()


def update_denominator(
    config: Config,
    num_sequences: int,
    num_tokens: int,
    num_micro_batches: int,
    max_completion_length: int,
) -> float:
    """The number that the update's sum is divided by; 1 instead of 0.

    Sequences and tokens are counted over the whole update, on all ranks (with
    loss_denominator=valid the caller counts only those that the loss sees).
    """
    by_agg = {
        "sequence_sum": num_sequences,
        "sequence_mean": num_sequences,
        "token_mean": num_tokens,
        "constant": num_sequences * max_completion_length,
        "token_mean_local": num_micro_batches,
    }
    return float(max(by_agg[str(config.loss_agg)], 1))

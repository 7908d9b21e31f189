"""The tokens of a few completions of a step, each with its numbers: for strips of `rloo report`.

`samples/` has one line for each completion. `logging.token_samples` of a file's lines have the
field `tokens` too: those with the largest and the smallest advantages, because they move the
policy most.
"""

import math
from collections.abc import Callable
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING

from rloo_cli.data.batch import Batch
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_FIELD = "token_strip"
DecodeToken = Callable[[int], str]


def add_token_strips(
    samples: list[JsonObject],
    batch: Batch,
    count: int,
    num_updates: int,
    decode_token: DecodeToken,
) -> None:
    """Add the field `tokens` to `count` of a batch's samples, which are P * K in order.

    `num_updates`: optimizer updates before this step, to compute the sampler's lag.
    """
    if batch.advantage is None or count < 1:
        return
    k, flat = batch.advantage.shape[1], batch.advantage.reshape(-1).tolist()
    trained = [p * k + j for p in batch.active for j in range(k) if batch.scorable[p, j]]
    ranked = sorted(trained, key=lambda index: -flat[index])
    ends = chain.from_iterable(zip_longest(ranked, reversed(ranked)))  # first, last, second, ...
    for index in islice(dict.fromkeys(ends), count):
        found = token_record(batch, index // k, index % k, num_updates, decode_token)
        samples[index][TOKEN_FIELD] = found


def token_record(
    batch: Batch, p: int, k: int, num_updates: int, decode_token: DecodeToken
) -> JsonObject:
    """The tokens of completion k of group p, and a list of numbers for each; None = not computed.

    logp is the policy's at the beginning of the step, sampler_logp the sampler's own, ref_logp the
    reference's; advantage is there if each token has its own.
    """
    group, rollout = batch.groups[p], batch.groups[p].rollouts[k]
    columns: dict[str, list[float] | None] = {
        "logp": _column(group.old_logp, k),
        "sampler_logp": rollout.behaviour_logp,
        "ref_logp": _column(group.ref_logp, k),
        "advantage": _column(group.advantage, k),
    }
    record: JsonObject = {
        "text": [decode_token(token) for token in rollout.completion_ids],
        "lag": num_updates - rollout.weight_version,
    }
    if rollout.version_spans is not None:  # `lag` is that of the first tokens
        record["lags"] = [num_updates - version for version in rollout.token_versions]
    record |= {name: _rounded(values) for name, values in columns.items() if values is not None}
    if rollout.mask is not None:
        record["mask"] = list(rollout.mask)
    return record


def _column(columns: "list[Tensor] | None", k: int) -> list[float] | None:
    if columns is None:
        return None
    values: list[float] = columns[k].tolist()
    return values


def _rounded(values: list[float]) -> list[float | None]:
    """Five significant digits, enough for a colour; None for values that are not finite."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values]

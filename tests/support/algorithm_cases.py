"""Builds configs and micro-batches for the tests of the algorithms' arithmetic, in float64."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from hook_calls import rloo
from torch import Tensor

from rloo_cli.data.packing import MicroBatch

YAML = Path(__file__).parents[2] / "conf" / "algorithm" / "rloo.yaml"
Rows = Sequence[Sequence[float]]


def config(**keys: Any) -> Any:
    """conf/algorithm/rloo.yaml with some keys changed and correction resolved."""
    values = yaml.safe_load(YAML.read_text()) | keys
    return rloo.resolved(rloo.Config(**values), "transformers")


def corrected(level: str, mode: str, cap: float = 3.0, floor: float = 0.0, **keys: Any) -> Any:
    rule = {"level": level, "mode": mode, "cap": float(cap), "floor": float(floor)}
    rule |= {"geometric_range": None} | keys.pop("rule", {})
    return config(correction=rule, **keys)


def column(rows: Rows) -> Tensor:
    """Ragged rows -> (N,) float64."""
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


def micro(lengths: Sequence[int], mask: Tensor | None = None, behaviour: Any = None) -> MicroBatch:
    """S rows of these lengths; only what the loss looks at is filled in."""
    n, empty = sum(lengths), torch.zeros(len(lengths), 1, dtype=torch.long)
    return MicroBatch(
        group_slices=[(0, tuple(range(len(lengths))))],
        completion_index=torch.arange(len(lengths)),
        input_ids=empty,
        position_ids=empty,
        attention_mask=empty,
        logit_index=torch.zeros(n, dtype=torch.long),
        target=torch.zeros(n, dtype=torch.long),
        sequence_ids=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        mask=torch.ones(n) if mask is None else mask,
        group_lengths=[(1, list(lengths))],
        behaviour_logp=behaviour,
    )


def table(rows: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Scores of one group or of several, None = unscorable -> score (P, K), scorable (P, K)."""
    groups = rows if rows and isinstance(rows[0], list) else [rows]
    filled = [[float("nan") if x is None else x for x in g] for g in groups]
    raw = torch.tensor(filled, dtype=torch.float64)
    return raw.nan_to_num(0.0), ~raw.isnan()


def advantages(rows: Sequence[Any], kl: Sequence[Any] | None = None, **keys: Any) -> Tensor:
    """(P, K) advantages of scores."""
    score, scorable = table(rows)
    pull = None if kl is None else torch.tensor(kl, dtype=torch.float64).reshape(score.shape)
    return rloo.advantages(score, pull, scorable, config(**keys)).advantage


def row_gradient(gradient: Tensor, m: MicroBatch) -> Tensor:
    """The gradient at the first token of each row."""
    first = [int((m.sequence_ids == s).nonzero()[0]) for s in range(m.num_sequences)]
    return gradient[first]

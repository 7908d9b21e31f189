"""Completions in the making, and the batch they are decoded in.

Rows are padded on the left, so that all of them continue at the same place. What is padding is
known from `pad`, a count, and never from an id.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rloo_cli.generation.hf.sampling import uniforms
from rloo_cli.generation.transformers import Config

SHARE = 0.25  # of a GPU's memory, for keys and values


@dataclass
class Row:
    """One completion in the making."""

    group: int  # place in the call's groups
    prompt: list[int]
    seed: int
    ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    reason: str | None = None  # why it ended; None = it has not


@dataclass
class State:
    """The R rows in the batch. W = the longest prompt, L = max_completion_length."""

    rows: list[Row]
    width: int  # W
    seen: Tensor  # (R, W + L) ids; padding repeats the row's own first id
    pad: Tensor  # (R, 1) places of padding on the left
    uniforms: Tensor  # (R, L)
    cache: Any = None

    @classmethod
    def of(cls, rows: list[Row], length: int, device: torch.device) -> "State":
        """Rows that have no token yet; `length` = L."""
        width = max(len(row.prompt) for row in rows)
        pad = [width - len(row.prompt) for row in rows]
        # The repetition penalty looks at all of `seen`: padding may only repeat what is there.
        ids = [r.prompt[:1] * p + r.prompt + [0] * length for r, p in zip(rows, pad, strict=True)]
        return cls(
            rows=rows,
            width=width,
            seen=torch.tensor(ids, device=device),
            pad=torch.tensor(pad, device=device)[:, None],
            uniforms=uniforms([row.seed for row in rows], length).to(device),
        )

    def mask(self, end: int) -> Tensor:
        """1 on every place before `end` that is not padding. (R, end)"""
        return (torch.arange(end, device=self.pad.device) >= self.pad).long()

    def positions(self, start: int, end: int) -> Tensor:
        """Counted from each prompt's first token; 0 on padding. (R, end - start)"""
        return (torch.arange(start, end, device=self.pad.device) - self.pad).clamp(min=0)

    def keep(self, alive: list[int]) -> None:
        """Drop every other row."""
        index = torch.tensor(alive, device=self.pad.device)
        self.rows = [self.rows[r] for r in alive]
        self.seen, self.pad = self.seen[index], self.pad[index]
        self.uniforms = self.uniforms[index]
        self.cache.batch_select_indices(index)


def firsts(rows: list[Row]) -> list[int]:
    """Where each group begins; its rows are neighbours."""
    return [r for r, row in enumerate(rows) if r == 0 or row.group != rows[r - 1].group]


def places_that_fit(config: Config, model: Any, device: torch.device) -> int | None:
    """Places of a batch whose keys and values are decoded at once: as the key says, on a GPU else
    as many as a quarter of its memory holds; None = no limit.

    Of the GPU's whole memory, not of what is free: a run that is resumed has the same batches.
    """
    given = config.transformers.batch_tokens
    of_model = model.config.get_text_config()
    heads = getattr(of_model, "num_attention_heads", None)
    if given is not None or device.type != "cuda" or not heads:
        return given
    width = getattr(of_model, "head_dim", None) or of_model.hidden_size // heads
    kept = 2 * of_model.num_hidden_layers * width
    kept *= getattr(of_model, "num_key_value_heads", None) or heads
    each = kept * next(model.parameters()).element_size()
    return int(SHARE * torch.cuda.get_device_properties(device).total_memory / each)


def split(rows: list[Row], config: Config, most: int | None) -> Iterator[list[Row]]:
    """Batches of at most `most` padded places, siblings together where they fit.

    Longest prompts first, so that equal lengths meet and memory peaks at the start. A row that is
    too long for any batch has its own.
    """
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: -len(row.prompt)):  # stable: siblings stay together
        width = len(batch[0].prompt if batch else row.prompt)
        places = (len(batch) + 1) * (width + config.max_completion_length)
        if batch and most is not None and places > most:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch

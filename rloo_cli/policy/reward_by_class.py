"""Scores by a sequence classifier's own class, where its head reads more than the last token.

Encoders (BERT's pooler), encoder-decoders (T5's EOS) and heads that rloo does not know. Rows are
padded on the right where that changes nothing, else they go one by one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

BY_CLASS, ALONE = "padded, by its own class", "one by one, by its own class"
NO_TOKEN = -1  # for padding: some classes refuse None
SAME = 1e-3, 0.05  # of the largest score: how far two ways may differ, exact and rounded


class ByClass:
    """A sequence classifier's forward. `pad`, `eos`: its tokenizer's ids."""

    def __init__(self, model: Any, device: torch.device, pad: int, eos: int | None) -> None:
        self.model, self.device, self.pad, self.eos = model, device, pad, eos

    def scores(self, rows: Sequence[list[int]], size: int) -> list[float]:
        """The score of each row, `size` rows of like lengths a forward. (B,)

        A row alone has no padding at all: a class that looks for the pad id would take an EOS of
        the same id at the row's end for it.
        """
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))  # like lengths pad little
        found = [0.0] * len(rows)
        for start in range(0, len(order), size):
            chosen = order[start : start + size]
            values = self._forward([rows[i] for i in chosen], NO_TOKEN if size == 1 else self.pad)
            for i, value in zip(chosen, values, strict=True):
                found[i] = value
        return found

    def pads(self, rows: Sequence[list[int]]) -> bool:
        """Whether right padding leaves the numbers of these rows, of unequal lengths, as they are.

        They are given an EOS at their end, where some classes read.
        """
        if self.pad == self.eos:
            return False
        end = [] if self.eos is None else [self.eos]
        plain = [[t for t in row if t not in (self.pad, self.eos)] + end for row in rows]
        try:
            truth = torch.tensor(self.scores(plain, 1))
            gap = (torch.tensor(self.scores(plain, len(plain))) - truth).abs().max()
        except Exception:  # then rows alone will say what is wrong
            return False
        exact = next(self.model.parameters()).dtype is torch.float32
        return bool(gap <= SAME[0 if exact else 1] * truth.abs().max())

    def _forward(self, rows: Sequence[list[int]], pad: int) -> list[float]:
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[self.pad] * (width - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        given = {"input_ids": ids.to(self.device), "attention_mask": mask.to(self.device)}
        with _padding(self.model, pad):
            logits = self.model(**given).logits
        values: list[float] = logits.float().reshape(len(rows)).tolist()
        return values


@contextmanager
def _padding(model: Any, pad: int) -> Iterator[None]:
    """The class takes this id for padding."""
    configs = [model.config, model.config.get_text_config()]
    before = [getattr(c, "pad_token_id", None) for c in configs]
    for config in configs:
        config.pad_token_id = pad
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.pad_token_id = value

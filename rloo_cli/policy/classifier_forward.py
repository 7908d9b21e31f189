"""Scores by a sequence classifier's own class, where its head reads more than the last token.

Encoders (BERT's pooler), encoder-decoders (T5's EOS) and heads that rloo does not know. Rows are
padded on the right where that changes nothing, else they go one by one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

PADDED_BY_CLASS, SINGLE_BY_CLASS = "padded, by its own class", "one by one, by its own class"
NO_PAD_TOKEN = -1  # for padding: some classes refuse None
MAX_RELATIVE_DIFFERENCE = (
    1e-3,
    0.05,
)  # of the largest score: how far two ways may differ, exact and rounded


class ClassifierForward:
    """A sequence classifier's forward. `pad`, `eos`: its tokenizer's ids."""

    def __init__(
        self, model: Any, device: torch.device, pad_token_id: int, eos_token_id: int | None
    ) -> None:
        self.model, self.device, self.pad_token_id, self.eos_token_id = (
            model,
            device,
            pad_token_id,
            eos_token_id,
        )

    def scores(self, sequences: Sequence[list[int]], batch_size: int) -> list[float]:
        """The score of each row, `size` rows of like lengths a forward. (B,)

        A row alone has no padding at all: a class that looks for the pad id would take an EOS of
        the same id at the row's end for it.
        """
        order = sorted(
            range(len(sequences)), key=lambda i: len(sequences[i])
        )  # like lengths pad little
        found = [0.0] * len(sequences)
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            values = self._forward(
                [sequences[i] for i in chosen],
                NO_PAD_TOKEN if batch_size == 1 else self.pad_token_id,
            )
            for i, value in zip(chosen, values, strict=True):
                found[i] = value
        return found

    def padding_is_exact(self, sequences: Sequence[list[int]]) -> bool:
        """Whether right padding leaves the numbers of these rows, of unequal lengths, as they are.

        They are given an EOS at their end, where some classes read.
        """
        if self.pad_token_id == self.eos_token_id:
            return False
        end = [] if self.eos_token_id is None else [self.eos_token_id]
        plain = [
            [t for t in row if t not in (self.pad_token_id, self.eos_token_id)] + end
            for row in sequences
        ]
        try:
            truth = torch.tensor(self.scores(plain, 1))
            gap = (torch.tensor(self.scores(plain, len(plain))) - truth).abs().max()
        except Exception:  # then rows alone will say what is wrong
            return False
        exact = next(self.model.parameters()).dtype is torch.float32
        return bool(gap <= MAX_RELATIVE_DIFFERENCE[0 if exact else 1] * truth.abs().max())

    def _forward(self, sequences: Sequence[list[int]], pad_token_id: int) -> list[float]:
        width = max(map(len, sequences))
        ids = torch.tensor([[*row, *[self.pad_token_id] * (width - len(row))] for row in sequences])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in sequences])
        given = {"input_ids": ids.to(self.device), "attention_mask": mask.to(self.device)}
        with _with_pad_token(self.model, pad_token_id):
            logits = self.model(**given).logits
        values: list[float] = logits.float().reshape(len(sequences)).tolist()
        return values


@contextmanager
def _with_pad_token(model: Any, pad_token_id: int) -> Iterator[None]:
    """The class takes this id for padding."""
    configs = [model.config, model.config.get_text_config()]
    before = [getattr(c, "pad_token_id", None) for c in configs]
    for config in configs:
        config.pad_token_id = pad_token_id
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.pad_token_id = value

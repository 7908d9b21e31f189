"""Scores by a sequence classifier's own class, if its head reads more than the last token.

These are encoders (BERT's pooler), encoder-decoders (T5's EOS) and unknown heads.
Sequences are padded on the right if that changes nothing; else they are scored one by one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

PADDED_BY_CLASS, SINGLE_BY_CLASS = "padded, by its own class", "one by one, by its own class"
NO_PAD_TOKEN = -1  # for padding: some classes reject None
# Allowed difference of two ways to compute scores, relative to the largest: in float32, else.
MAX_RELATIVE_DIFFERENCE = (1e-3, 0.05)


class ClassifierForward:
    """A sequence classifier's forward pass. The token ids are those of its tokenizer."""

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        pad_token_id: int,
        eos_token_id: int | None,
    ) -> None:
        self.model, self.device = model, device
        self.pad_token_id, self.eos_token_id = pad_token_id, eos_token_id

    def scores(self, sequences: Sequence[list[int]], batch_size: int) -> list[float]:
        """The score of each sequence, `batch_size` of similar lengths per forward. -> (B,)

        A single sequence is not padded at all: a class that looks for the pad id would take an EOS
        of the same id at the sequence's end for padding.
        """
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
        scores = [0.0] * len(sequences)
        pad_token_id = NO_PAD_TOKEN if batch_size == 1 else self.pad_token_id
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            values = self._forward([sequences[i] for i in chosen], pad_token_id)
            for i, value in zip(chosen, values, strict=True):
                scores[i] = value
        return scores

    def padding_is_exact(self, sequences: Sequence[list[int]]) -> bool:
        """Whether right padding leaves these sequences' scores, of unequal lengths, unchanged.

        An EOS is added to each, since some classes read there.
        """
        if self.pad_token_id == self.eos_token_id:
            return False
        end = [] if self.eos_token_id is None else [self.eos_token_id]
        special = (self.pad_token_id, self.eos_token_id)
        plain = [[t for t in sequence if t not in special] + end for sequence in sequences]
        try:
            truth = torch.tensor(self.scores(plain, 1))
            gap = (torch.tensor(self.scores(plain, len(plain))) - truth).abs().max()
        except Exception:  # scoring one by one will raise the error
            return False
        exact = next(self.model.parameters()).dtype is torch.float32
        return bool(gap <= MAX_RELATIVE_DIFFERENCE[0 if exact else 1] * truth.abs().max())

    def _forward(self, sequences: Sequence[list[int]], pad_token_id: int) -> list[float]:
        width = max(map(len, sequences))
        ids = torch.tensor([[*s, *[self.pad_token_id] * (width - len(s))] for s in sequences])
        mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences])
        inputs = {"input_ids": ids.to(self.device), "attention_mask": mask.to(self.device)}
        with _with_pad_token(self.model, pad_token_id):
            logits = self.model(**inputs).logits
        return logits.float().reshape(len(sequences)).tolist()


@contextmanager
def _with_pad_token(model: PreTrainedModel, pad_token_id: int) -> Iterator[None]:
    """Set the pad token id in the model's configs inside."""
    configs = [model.config, model.config.get_text_config()]
    before = [getattr(c, "pad_token_id", None) for c in configs]
    for config in configs:
        config.pad_token_id = pad_token_id
    try:
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.pad_token_id = value

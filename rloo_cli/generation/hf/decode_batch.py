"""Completions in the making, and the batch they are decoded in.

Rows are padded on the left, so that all of them continue at the same place. What is padding is
known from `pad`, a count, and never from an id.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rloo_cli.generation.hf.sampling import seeded_uniforms
from rloo_cli.generation.transformers import Config

KV_CACHE_SHARE = 0.25  # of a GPU's memory, for keys and values


@dataclass
class DecodeSequence:
    """One completion in the making."""

    group_index: int  # place in the call's groups
    prompt_ids: list[int]
    seed: int
    completion_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    finish_reason: str | None = None  # why it ended; None = it has not


@dataclass
class DecodeBatch:
    """The R rows in the batch. W = the longest prompt, L = max_completion_length."""

    sequences: list[DecodeSequence]
    prompt_width: int  # W
    input_ids: Tensor  # (R, W + L) ids; padding repeats the row's own first id
    num_padding: Tensor  # (R, 1) places of padding on the left
    uniforms: Tensor  # (R, L)
    cache: Any = None

    @classmethod
    def from_sequences(
        cls, sequences: list[DecodeSequence], max_completion_length: int, device: torch.device
    ) -> "DecodeBatch":
        """Rows that have no token yet; `length` = L."""
        width = max(len(row.prompt_ids) for row in sequences)
        pad = [width - len(row.prompt_ids) for row in sequences]
        # The repetition penalty looks at all of `seen`: padding may only repeat what is there.
        ids = [
            r.prompt_ids[:1] * p + r.prompt_ids + [0] * max_completion_length
            for r, p in zip(sequences, pad, strict=True)
        ]
        return cls(
            sequences=sequences,
            prompt_width=width,
            input_ids=torch.tensor(ids, device=device),
            num_padding=torch.tensor(pad, device=device)[:, None],
            uniforms=seeded_uniforms([row.seed for row in sequences], max_completion_length).to(
                device
            ),
        )

    def attention_mask(self, end: int) -> Tensor:
        """1 on every place before `end` that is not padding. (R, end)"""
        return (torch.arange(end, device=self.num_padding.device) >= self.num_padding).long()

    def position_ids(self, start: int, end: int) -> Tensor:
        """Counted from each prompt's first token; 0 on padding. (R, end - start)"""
        return (torch.arange(start, end, device=self.num_padding.device) - self.num_padding).clamp(
            min=0
        )

    def keep_sequences(self, indices: list[int]) -> None:
        """Drop every other row."""
        index = torch.tensor(indices, device=self.num_padding.device)
        self.sequences = [self.sequences[r] for r in indices]
        self.input_ids, self.num_padding = self.input_ids[index], self.num_padding[index]
        self.uniforms = self.uniforms[index]
        self.cache.batch_select_indices(index)


def group_starts(sequences: list[DecodeSequence]) -> list[int]:
    """Where each group begins; its rows are neighbours."""
    return [
        r
        for r, row in enumerate(sequences)
        if r == 0 or row.group_index != sequences[r - 1].group_index
    ]


def max_decode_tokens(config: Config, model: Any, device: torch.device) -> int | None:
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
    return int(KV_CACHE_SHARE * torch.cuda.get_device_properties(device).total_memory / each)


def split_decode_batches(
    sequences: list[DecodeSequence], config: Config, max_tokens: int | None
) -> Iterator[list[DecodeSequence]]:
    """Batches of at most `most` padded places, siblings together where they fit.

    Longest prompts first, so that equal lengths meet and memory peaks at the start. A row that is
    too long for any batch has its own.
    """
    batch: list[DecodeSequence] = []
    for row in sorted(
        sequences, key=lambda row: -len(row.prompt_ids)
    ):  # stable: siblings stay together
        width = len(batch[0].prompt_ids if batch else row.prompt_ids)
        places = (len(batch) + 1) * (width + config.max_completion_length)
        if batch and max_tokens is not None and places > max_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch

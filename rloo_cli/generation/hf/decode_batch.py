"""Unfinished completions, and the batch they are decoded in.

Sequences are padded on the left, so that all continue at the same position. Padding is known from
`num_padding`, a count, and never from an id.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rloo_cli.data.media import (
    Media,
    MediaInputs,
    axis_positions,
    media_of_rows,
    parts_of,
    vision_of,
)
from rloo_cli.data.sampling_mask import SamplingMask
from rloo_cli.generation.hf.sampling import seeded_uniforms
from rloo_cli.generation.transformers import Config

KV_CACHE_SHARE = 0.25  # of a GPU's memory, for keys and values


@dataclass
class DecodeSequence:
    """One completion that is being sampled."""

    group_index: int  # index in the groups of the call
    prompt_ids: list[int]  # read before the first token sampled here
    seed: int
    completion_ids: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    finish_reason: str | None = None  # None = unfinished
    kept_ids: list[int] = field(default_factory=list)  # the completion's own ids in `prompt_ids`
    sampling_mask: SamplingMask | None = None  # of completion_ids; None = not kept
    media: Media | None = None  # the prompt's images
    max_tokens: int | None = None  # of the whole completion; None = max_completion_length
    matcher: Any = None  # of `grammar`, with structured outputs
    num_matched: int = 0  # ids that it has read

    @property
    def all_ids(self) -> list[int]:
        """The whole completion's ids."""
        return self.kept_ids + self.completion_ids if self.kept_ids else self.completion_ids

    @property
    def padding_id(self) -> int:
        """An id of its own prompt, but no image placeholder."""
        image = None if self.media is None else self.media.vision.image_token_id
        return next((i for i in self.prompt_ids if i != image), 0)

    @property
    def position_shift(self) -> int:
        """How far its positions exceed its number of tokens: an image takes fewer positions."""
        return 0 if self.media is None else self.media.position_shift


@dataclass
class DecodeBatch:
    """The R sequences of a batch. W = the longest prompt, L = max_completion_length."""

    sequences: list[DecodeSequence]
    prompt_width: int  # W
    input_ids: Tensor  # (R, W + L) ids; padding repeats the sequence's own first id
    num_padding: Tensor  # (R, 1) tokens of padding on the left
    uniforms: Tensor  # (R, L)
    position_shift: Tensor  # (R, 1) what is added to the positions of completions
    cache: Any = None  # a SharedPrefixCache, or what the model returns as past_key_values

    @classmethod
    def from_sequences(
        cls, sequences: list[DecodeSequence], max_completion_length: int, device: torch.device
    ) -> "DecodeBatch":
        """A batch of sequences that have no completion token yet."""
        width = max(len(s.prompt_ids) for s in sequences)
        padding = [width - len(s.prompt_ids) for s in sequences]
        # The repetition penalty counts every id: padding may only repeat an id of the prompt.
        ids = [
            [s.padding_id] * n + s.prompt_ids + [0] * max_completion_length
            for s, n in zip(sequences, padding, strict=True)
        ]
        return cls(
            sequences=sequences,
            prompt_width=width,
            input_ids=torch.tensor(ids, device=device),
            num_padding=torch.tensor(padding, device=device)[:, None],
            uniforms=seeded_uniforms([s.seed for s in sequences], max_completion_length).to(device),
            position_shift=torch.tensor([[s.position_shift] for s in sequences], device=device),
        )

    def attention_mask(self, end: int) -> Tensor:
        """1 on every position before `end` that is not padding. (R, end)"""
        return (torch.arange(end, device=self.num_padding.device) >= self.num_padding).long()

    def position_ids(self, start: int, end: int) -> Tensor:
        """Positions counted from each prompt's first token; 0 on padding. (R, end - start)

        Those of a completion continue after its prompt's images, whose own are `prompt_images`'.
        """
        positions = torch.arange(start, end, device=self.num_padding.device)
        positions = (positions - self.num_padding).clamp(min=0)
        return positions if start < self.prompt_width else positions + self.position_shift

    def prompt_images(self) -> tuple[Tensor, MediaInputs | None]:
        """The positions of the prompts, and their images, one prompt in each row.

        (R, W), or (3, R, W) on several axes; without images the plain positions, and None
        """
        plain = self.position_ids(0, self.prompt_width)
        ids = self.input_ids[:, : self.prompt_width].cpu()
        media = [s.media for s in self.sequences]
        shown = media_of_rows([*map(parts_of, media)], vision_of(media), ids)
        if shown is None:
            return plain, None
        axes = torch.stack(axis_positions(media, list(plain.cpu())), 1).to(plain.device)
        return axes[0] if len(axes) == 1 else axes, shown.move_to(plain.device)

    def keep_sequences(self, indices: list[int]) -> None:
        """Drop every other sequence."""
        index = torch.tensor(indices, device=self.num_padding.device)
        self.sequences = [self.sequences[i] for i in indices]
        self.input_ids, self.num_padding = self.input_ids[index], self.num_padding[index]
        self.uniforms, self.position_shift = self.uniforms[index], self.position_shift[index]
        self.cache.batch_select_indices(index)


def group_starts(sequences: list[DecodeSequence]) -> list[int]:
    """The index of each group's first sequence; sequences of a group are neighbours."""
    groups = [sequence.group_index for sequence in sequences]
    return [i for i, group in enumerate(groups) if i == 0 or group != groups[i - 1]]


def max_decode_tokens(config: Config, model: PreTrainedModel, device: torch.device) -> int | None:
    """The most tokens, padding included, in one batch: `batch_tokens`, else on a GPU as many as a
    quarter of its memory holds keys and values of; None = no limit. A prompt stored once for all
    of its completions counts once (`split_decode_batches`).

    All of the GPU's memory counts, not only the free part: a resumed run must get the same batches.
    """
    batch_tokens = config.transformers.batch_tokens
    model_config = model.config.get_text_config()
    heads = getattr(model_config, "num_attention_heads", None)
    if batch_tokens is not None or device.type != "cuda" or not heads:
        return batch_tokens
    width = getattr(model_config, "head_dim", None) or model_config.hidden_size // heads
    numbers = 2 * model_config.num_hidden_layers * width  # of keys and values, for each token
    numbers *= getattr(model_config, "num_key_value_heads", None) or heads
    bytes_per_token = numbers * next(model.parameters()).element_size()
    memory = torch.cuda.get_device_properties(device).total_memory
    return int(KV_CACHE_SHARE * memory / bytes_per_token)


def split_decode_batches(
    sequences: list[DecodeSequence],
    config: Config,
    max_tokens: int | None,
    prompts_kept_once: bool = False,
) -> Iterator[list[DecodeSequence]]:
    """Batches of at most `max_tokens` tokens, padding included, siblings together where they fit.

    `prompts_kept_once`: a group's prompt counts once, and each group counts as many completions as
    the batch's largest, which is what a `SharedPrefixCache` holds. Longest prompts come first,
    so that equal lengths share a batch and memory peaks at the start. A sequence that is too long
    for any batch gets its own.
    """
    batch: list[DecodeSequence] = []
    sizes: Counter[int] = Counter()  # completions per group; with K prompts each counts alone
    # The sort is stable: siblings stay together.
    ordered = sorted(sequences, key=lambda sequence: -len(sequence.prompt_ids))
    for number, sequence in enumerate(ordered):
        width = len(batch[0].prompt_ids if batch else sequence.prompt_ids)
        group = sequence.group_index if prompts_kept_once else number
        sizes[group] += 1
        num_tokens = len(sizes) * (width + max(sizes.values()) * config.max_completion_length)
        if batch and max_tokens is not None and num_tokens > max_tokens:
            yield batch
            batch, sizes = [], Counter([group])
        batch.append(sequence)
    if batch:
        yield batch

"""Decoding with transformers' own attention and cache: the way of every model.

The prompts of a batch are padded on the left and prefilled once per group; the cache is then
repeated for the group's completions.
"""

import inspect
import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

from rloo_cli.generation.hf.decode_batch import DecodeBatch, DecodeSequence, group_starts
from rloo_cli.generation.hf.kv_cache import SharedPrefixCache
from rloo_cli.utils.errors import GenerationError

log = logging.getLogger(__name__)


class RepeatedPrefix:
    """Prefill, then a token at a time, with the model as it is."""

    def __init__(self, model: Any):
        self.model = model
        self.has_warned = False
        # Only the last place of a prompt is sampled from; its other logits would be the largest
        # tensor of the whole step.
        known = inspect.signature(model.forward).parameters
        self.last_logits_kwargs = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

    def decoding_attention(self) -> AbstractContextManager[None]:
        """What has to hold while a batch is decoded: nothing."""
        return nullcontext()

    def prefill(
        self, sequences: list[DecodeSequence], max_completion_length: int
    ) -> tuple[DecodeBatch, Tensor]:
        """Run each group's prompt once. Returns the state of all rows and the logits (R, V)."""
        device = next(self.model.parameters()).device
        starts = group_starts(sequences)
        first = DecodeBatch.from_sequences(
            [sequences[r] for r in starts], max_completion_length, device
        )
        logits = self._run_model(first, 0, first.prompt_width)
        if len(starts) == len(sequences):
            return first, logits
        state = DecodeBatch.from_sequences(sequences, max_completion_length, device)
        if can_select_sequences(first.cache):
            places = {sequences[r].group_index: place for place, r in enumerate(starts)}
            owner = torch.tensor(
                [places[row.group_index] for row in sequences], device=logits.device
            )
            state.cache = first.cache
            state.cache.batch_select_indices(owner)
            return state, logits[owner]
        if not self.has_warned:
            self.has_warned = True
            name = type(self.model).__name__
            log.warning("%s: its cache cannot be repeated; each sibling is prefilled", name)
        return state, self._run_model(state, 0, state.prompt_width)

    def forward(self, batch: DecodeBatch, end: int) -> Tensor:
        """Run the token before place `end` of every row. Returns its logits (R, V)."""
        return self._run_model(batch, end - 1, end)

    def _run_model(self, batch: DecodeBatch, start: int, end: int) -> Tensor:
        """Run places start..end-1 after the cache. Returns the last place's logits (R, V)."""
        out = self.model(
            input_ids=batch.input_ids[:, start:end],
            attention_mask=batch.attention_mask(end),
            position_ids=batch.position_ids(start, end),
            past_key_values=batch.cache,
            use_cache=True,
            **self.last_logits_kwargs,
        )
        batch.cache = getattr(out, "past_key_values", None)
        if batch.cache is None:
            raise GenerationError(f"{type(self.model).__name__} returns no past_key_values")
        logits: Tensor = out.logits[:, -1]
        return logits.float()


def can_select_sequences(cache: Any) -> bool:
    """Rows of this cache can be picked and repeated. A layer of linear attention inherits the
    method from DynamicLayer, but it would leave the recurrent state as it was."""
    return isinstance(cache, SharedPrefixCache) or (
        isinstance(cache, DynamicCache)
        and all(
            isinstance(layer, DynamicLayer)
            and not isinstance(layer, LinearAttentionCacheLayerMixin)
            for layer in cache.layers
        )
    )

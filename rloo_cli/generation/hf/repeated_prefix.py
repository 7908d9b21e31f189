"""Decoding with transformers' own attention and cache, which works for every model.

The prompts of a batch are padded on the left and prefilled once per group; the cache is then
repeated for the group's completions.
"""

import inspect
import logging
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

from rloo_cli.generation.hf.decode_batch import DecodeBatch, DecodeSequence, group_starts
from rloo_cli.generation.hf.kv_cache import SharedPrefixCache
from rloo_cli.policy.vision import media_arguments
from rloo_cli.utils.errors import GenerationError

log = logging.getLogger(__name__)


class RepeatedPrefix:
    """Prefills and decodes with the model's own attention."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.has_warned = False
        # Only the last position of a prompt is sampled from; logits of all positions would be the
        # largest tensor of the whole step.
        parameters = inspect.signature(model.forward).parameters
        self.last_logits_kwargs = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def decoding_attention(self) -> AbstractContextManager[None]:
        """A context that changes nothing: the model keeps its attention."""
        return nullcontext()

    def prefill(
        self, sequences: list[DecodeSequence], max_completion_length: int
    ) -> tuple[DecodeBatch, Tensor]:
        """Run each group's prompt once. Returns the whole batch and its logits (R, V)."""
        device = next(self.model.parameters()).device
        first_ones = [sequences[i] for i in group_starts(sequences)]
        prompts = DecodeBatch.from_sequences(first_ones, max_completion_length, device)
        logits = self._run_prompts(prompts)
        if len(first_ones) == len(sequences):
            return prompts, logits
        batch = DecodeBatch.from_sequences(sequences, max_completion_length, device)
        if can_select_sequences(prompts.cache):
            row_of_group = {s.group_index: row for row, s in enumerate(first_ones)}
            rows = [row_of_group[s.group_index] for s in sequences]
            index = torch.tensor(rows, device=logits.device)
            batch.cache = prompts.cache
            batch.cache.batch_select_indices(index)
            return batch, logits[index]
        if not self.has_warned:
            self.has_warned = True
            name = type(self.model).__name__
            log.warning("%s: its cache cannot be repeated; each sibling is prefilled", name)
        return batch, self._run_prompts(batch)

    def forward(self, batch: DecodeBatch, end: int) -> Tensor:
        """Run the token before position `end` of every sequence. Returns its logits (R, V)."""
        return self._run_model(batch, end - 1, end)

    def _run_prompts(self, batch: DecodeBatch) -> Tensor:
        """Run the prompts, with their images. Returns the logits of their last tokens (R, V)."""
        positions, media = batch.prompt_images()
        shown = {} if media is None else media_arguments(self.model, media)
        return self._run_model(batch, 0, batch.prompt_width, position_ids=positions, **shown)

    def _run_model(self, batch: DecodeBatch, start: int, end: int, **inputs: object) -> Tensor:
        """Run positions start..end-1 after the cache. Returns the logits of the last one (R, V)."""
        if "position_ids" not in inputs:
            inputs["position_ids"] = batch.position_ids(start, end)
        out = self.model(
            input_ids=batch.input_ids[:, start:end],
            attention_mask=batch.attention_mask(end),
            past_key_values=batch.cache,
            use_cache=True,
            **inputs,
            **self.last_logits_kwargs,
        )
        batch.cache = getattr(out, "past_key_values", None)
        if batch.cache is None:
            raise GenerationError(f"{type(self.model).__name__} returns no past_key_values")
        logits: Tensor = out.logits[:, -1]
        return logits.float()


def can_select_sequences(cache: object) -> bool:
    """Whether sequences of this cache can be selected and repeated. A layer of linear attention
    inherits the method from DynamicLayer, but it would leave the recurrent state unchanged."""
    if not isinstance(cache, DynamicCache):
        return isinstance(cache, SharedPrefixCache)
    recurrent = LinearAttentionCacheLayerMixin
    return all(isinstance(x, DynamicLayer) and not isinstance(x, recurrent) for x in cache.layers)

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

from rloo_cli.generation.hf.decode_batch import Row, State, firsts
from rloo_cli.generation.hf.kv_cache import Kept
from rloo_cli.utils.errors import GenerationError

log = logging.getLogger(__name__)


class Plain:
    """Prefill, then a token at a time, with the model as it is."""

    def __init__(self, model: Any):
        self.model = model
        self.told = False
        # Only the last place of a prompt is sampled from; its other logits would be the largest
        # tensor of the whole step.
        known = inspect.signature(model.forward).parameters
        self.last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

    def holding(self) -> AbstractContextManager[None]:
        """What has to hold while a batch is decoded: nothing."""
        return nullcontext()

    def prefill(self, rows: list[Row], length: int) -> tuple[State, Tensor]:
        """Run each group's prompt once. Returns the state of all rows and the logits (R, V)."""
        device = next(self.model.parameters()).device
        starts = firsts(rows)
        first = State.of([rows[r] for r in starts], length, device)
        logits = self._run(first, 0, first.width)
        if len(starts) == len(rows):
            return first, logits
        state = State.of(rows, length, device)
        if selectable(first.cache):
            places = {rows[r].group: place for place, r in enumerate(starts)}
            owner = torch.tensor([places[row.group] for row in rows], device=logits.device)
            state.cache = first.cache
            state.cache.batch_select_indices(owner)
            return state, logits[owner]
        if not self.told:
            self.told = True
            name = type(self.model).__name__
            log.warning("%s: its cache cannot be repeated; each sibling is prefilled", name)
        return state, self._run(state, 0, state.width)

    def forward(self, state: State, end: int) -> Tensor:
        """Run the token before place `end` of every row. Returns its logits (R, V)."""
        return self._run(state, end - 1, end)

    def _run(self, state: State, start: int, end: int) -> Tensor:
        """Run places start..end-1 after the cache. Returns the last place's logits (R, V)."""
        out = self.model(
            input_ids=state.seen[:, start:end],
            attention_mask=state.mask(end),
            position_ids=state.positions(start, end),
            past_key_values=state.cache,
            use_cache=True,
            **self.last_only,
        )
        state.cache = getattr(out, "past_key_values", None)
        if state.cache is None:
            raise GenerationError(f"{type(self.model).__name__} returns no past_key_values")
        logits: Tensor = out.logits[:, -1]
        return logits.float()


def selectable(cache: Any) -> bool:
    """Rows of this cache can be picked and repeated. A layer of linear attention inherits the
    method from DynamicLayer, but it would leave the recurrent state as it was."""
    return isinstance(cache, Kept) or (
        isinstance(cache, DynamicCache)
        and all(
            isinstance(layer, DynamicLayer)
            and not isinstance(layer, LinearAttentionCacheLayerMixin)
            for layer in cache.layers
        )
    )

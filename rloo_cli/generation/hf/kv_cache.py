"""Keys and values of a batch being decoded: of each prompt once, of each completion its own.

transformers' caches hold one row per completion, so a prompt's keys are stored K times and read K
times per token. Here an attention function of our own, registered under `NAME`, gets the queries of
all siblings and reads their prompt's keys in one matrix product. No mask function has that name, so
transformers builds none and hands whatever keyword arguments the model was called with down to it:
that is how `Kept` reaches it.

Letters: R rows (completions that are still in the batch), G groups, K the most rows of a group,
S = G * K slots, H heads, J heads of keys and values, D their size, W the longest prompt,
t tokens that each row has. Rows of a group are neighbours; a group with fewer than K rows repeats
one of them in its empty slots, and what comes out there is not looked at.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "rloo_decode"
FIRST = 64  # places for completions at the start; they double when full


class UnsharedError(Exception):
    """The model did not do with its attention what a shared prompt needs."""


@dataclass
class Layer:
    """What one layer keeps. Prompts are padded with zeros on the right."""

    prompt_key: Tensor  # (G, J, W, D)
    prompt_value: Tensor
    key: Tensor  # (G, J, K, places, D)
    value: Tensor


class Kept:
    """Keys and values of a batch: `lengths` of its G prompts, `counts` of rows of each.

    `most`: tokens a completion may have.
    """

    def __init__(self, lengths: list[int], counts: list[int], most: int, device: torch.device):
        self.lengths = lengths
        self.most = most
        self.device = device
        self.layers: list[Layer] = []
        self.tokens = 0  # t
        self.calls = 0  # of the attention function, in this forward
        self.prompts = True  # this forward is that of the prompts
        self.slots = max(counts)  # K
        self.where = [g * self.slots + k for g, count in enumerate(counts) for k in range(count)]
        self._arrange()

    def start(self, prompts: bool) -> None:
        """A forward begins: of all prompts in one row, or of one more token of each row."""
        self.prompts = prompts
        self.calls = 0

    def end(self, layers: int) -> None:
        """A forward is over. Raises UnsharedError unless every layer asked once."""
        if self.calls != layers:
            raise UnsharedError(f"{self.calls} calls of our attention, for {layers} layers")
        if self.prompts:
            self.pad = self._pad()
        else:
            self.tokens += 1

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of one layer. (B, H, n, D), (B, J, n, D) twice -> (B, n, H, D)

        B, n are 1, all prompts' tokens, then R, 1. Raises UnsharedError for a layer out of turn.
        """
        if layer != self.calls:
            raise UnsharedError(f"layer {layer} asked for attention as number {self.calls}")
        self.calls += 1
        if self.prompts:
            return self._prompts(q, k, v, scale)
        return self._token(self.layers[layer], q, k, v, scale)

    def _prompts(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Each prompt sees itself. What it computed is kept."""
        parts = [x.split(self.lengths, dim=2) for x in (q, k, v)]
        repeat = q.shape[1] // k.shape[1]
        shape = (len(self.lengths), k.shape[1], max(self.lengths))
        key, value = (x.new_zeros(*shape, x.shape[-1]) for x in (k, v))
        out = []
        for g, (one, keys, values) in enumerate(zip(*parts, strict=True)):
            key[g, :, : keys.shape[2]] = keys[0]
            value[g, :, : keys.shape[2]] = values[0]
            # Heads repeated here: with `enable_gqa` the CPU's kernel takes half as long again.
            keys, values = (x.repeat_interleave(repeat, 1) for x in (keys, values))
            out.append(scaled_dot_product_attention(one, keys, values, is_causal=True, scale=scale))
        places = (shape[0], shape[1], self.slots, min(FIRST, self.most))
        own = (x.new_empty(*places, x.shape[-1]) for x in (k, v))
        self.layers.append(Layer(key, value, *own))
        return torch.cat(out, 2).transpose(1, 2)

    def _token(self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Each row sees its prompt and itself: one softmax over both."""
        t = self.tokens + 1
        if self.fill is not None:
            q, k, v = q[self.fill], k[self.fill], v[self.fill]
        if t > layer.key.shape[3]:
            self._grow(layer)
        groups, heads, width, size = layer.prompt_key.shape
        repeat, blocks = q.shape[1] // heads, groups * heads
        layer.key[:, :, :, t - 1] = k.reshape(groups, self.slots, heads, -1).transpose(1, 2)
        layer.value[:, :, :, t - 1] = v.reshape(groups, self.slots, heads, -1).transpose(1, 2)
        # Slots beside the heads they share keys with: (G, J, K * repeat, D)
        q = q.reshape(groups, self.slots, heads, repeat, size).transpose(1, 2)
        q = q.reshape(blocks, self.slots * repeat, size)
        own_q = q.reshape(blocks * self.slots, repeat, size)
        own_key = layer.key.flatten(0, 2)[:, :t].transpose(1, 2)
        to_prompt = torch.baddbmm(
            self.pad, q, layer.prompt_key.flatten(0, 1).transpose(1, 2), alpha=scale
        )
        to_own = torch.bmm(own_q, own_key).mul_(scale)
        scores = torch.cat([to_prompt.view(len(own_q), repeat, width), to_own], -1)
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        of_prompt = weights[..., :width].view(blocks, self.slots * repeat, width)
        out = torch.bmm(of_prompt, layer.prompt_value.flatten(0, 1))
        out = out.view(len(own_q), repeat, -1).baddbmm_(
            weights[..., width:], layer.value.flatten(0, 2)[:, :t]
        )
        out = out.view(groups, heads, self.slots, repeat, -1).transpose(1, 2)
        out = out.reshape(groups * self.slots, 1, heads * repeat, -1)
        return out if self.taken is None else out[self.taken]

    def _grow(self, layer: Layer) -> None:
        for name in ("key", "value"):
            old = getattr(layer, name)
            places = min(2 * old.shape[3], self.most)
            new = old.new_empty(*old.shape[:3], places, old.shape[4])
            new[:, :, :, : old.shape[3]] = old
            setattr(layer, name, new)

    def batch_select_indices(self, index: Tensor) -> None:
        """Keep these rows, in order; a group without any goes. The name is that of transformers'
        caches."""
        live: dict[int, list[int]] = {}  # group -> slots in it
        for row in index.tolist():
            group, slot = divmod(self.where[row], self.slots)
            live.setdefault(group, []).append(slot)
        most = max(len(slots) for slots in live.values())
        groups = torch.tensor(list(live), device=self.device)
        chosen = [slots + slots[:1] * (most - len(slots)) for slots in live.values()]
        slots = torch.tensor(chosen, device=self.device)  # (G, K)
        self.lengths = [self.lengths[g] for g in live]
        width = max(self.lengths)
        for layer in self.layers:
            layer.prompt_key = layer.prompt_key[groups, :, :width]
            layer.prompt_value = layer.prompt_value[groups, :, :width]
            layer.key = layer.key.transpose(1, 2)[groups[:, None], slots].transpose(1, 2)
            layer.value = layer.value.transpose(1, 2)[groups[:, None], slots].transpose(1, 2)
            layer.key, layer.value = layer.key.contiguous(), layer.value.contiguous()
        self.slots = most
        self.where = [g * most + k for g, own in enumerate(live.values()) for k in range(len(own))]
        self._arrange()
        self.pad = self._pad()

    def _arrange(self) -> None:
        """Where the rows go, if not every slot has one."""
        self.fill: Tensor | None = None  # (S,) the row in each slot
        self.taken: Tensor | None = None  # (R,) the slot of each row
        if len(self.where) < len(self.lengths) * self.slots:
            first: dict[int, int] = {}
            for row, slot in enumerate(self.where):
                first.setdefault(slot // self.slots, row)
            rows = {slot: row for row, slot in enumerate(self.where)}
            every = range(len(self.lengths) * self.slots)
            fill = [rows.get(slot, first[slot // self.slots]) for slot in every]
            self.fill = torch.tensor(fill, device=self.device)
            self.taken = torch.tensor(self.where, device=self.device)

    def _pad(self) -> Tensor:
        """What is added to the scores of prompts: nothing, or -inf on padding. (G * J, 1, W)"""
        key = self.layers[0].prompt_key
        lengths = torch.tensor(self.lengths, device=self.device)[:, None]
        beyond = torch.arange(key.shape[2], device=self.device) >= lengths
        pad = key.new_zeros(beyond.shape).masked_fill_(beyond, float("-inf"))
        return pad.repeat_interleave(key.shape[1], 0)[:, None]


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    kept: Kept | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What a model's layers call in place of their own attention: `Kept.attend`.

    Raises UnsharedError when `kept` did not arrive, or with it what we do not do.
    """
    if kept is None:
        raise UnsharedError("its layers do not pass arguments on to their attention")
    if attention_mask is not None:
        raise UnsharedError("it makes a mask of its own")
    odd = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if odd or others.get("dropout"):
        raise UnsharedError(f"its attention has {', '.join(odd) or 'dropout'}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return kept.attend(module.layer_idx, query, key, value, scale), None


AttentionInterface.register(NAME, attention)

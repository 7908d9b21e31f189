"""Keys and values of a decoding batch: each prompt's once, and each completion's.

transformers' caches hold one row per completion, so a prompt's keys are stored K times and read K
times per token. Our attention function, registered under DECODE_ATTENTION_NAME, has the
queries of all siblings and reads their prompt's keys in one matrix product. No mask function has
that name, so transformers builds none; it passes the keyword arguments of the model's call on to
the attention function, which is how `SharedPrefixCache` reaches it.

Letters: R completions still in the batch, G groups, K the most completions of a group,
S = G * K slots, H heads, J heads of keys and values, D their size, W the longest prompt, t tokens
per completion so far. Completions of a group are neighbours; a group with fewer than K of them
repeats one in its empty slots, whose output is ignored.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

DECODE_ATTENTION_NAME = "rloo_decode"
INITIAL_KV_POSITIONS = 64  # token positions for completions at the start; they double when full


class SharedPrefixError(Exception):
    """The model calls its attention in a way that does not support a shared prompt."""


@dataclass
class LayerCache:
    """The keys and values of one layer. Prompts are padded with zeros on the right."""

    prompt_key: Tensor  # (G, J, W, D)
    prompt_value: Tensor  # (G, J, W, D)
    key: Tensor  # (G, J, K, positions, D)
    value: Tensor  # (G, J, K, positions, D)


class SharedPrefixCache:
    """Keys and values of a batch of G prompts, with `group_sizes` completions of each."""

    def __init__(
        self,
        prompt_lengths: list[int],
        group_sizes: list[int],
        max_completion_length: int,
        device: torch.device,
    ):
        self.prompt_lengths = prompt_lengths
        self.max_completion_length = max_completion_length
        self.device = device
        self.layers: list[LayerCache] = []
        self.num_decoded = 0  # t
        self.attention_calls = 0  # of the attention function, in this forward
        self.is_prefill = True  # this forward is that of the prompts
        self._assign_slots(group_sizes)

    def begin_forward(self, is_prefill: bool) -> None:
        """Begin a forward: of all prompts in one row, or of one more token of each completion."""
        self.is_prefill = is_prefill
        self.attention_calls = 0

    def end_forward(self, num_layers: int) -> None:
        """End a forward. Raises SharedPrefixError unless every layer called its attention once."""
        if self.attention_calls != num_layers:
            raise SharedPrefixError(
                f"{self.attention_calls} calls of our attention, for {num_layers} layers"
            )
        if self.is_prefill:
            self.padding_mask = self._make_padding_mask()
        else:
            self.num_decoded += 1

    def attend(self, layer: int | None, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of one layer. (B, H, n, D), (B, J, n, D) twice -> (B, n, H, D)

        B, n are 1, all prompts' tokens, then R, 1. Raises SharedPrefixError where layers do not
        call it in their order.
        """
        if layer != self.attention_calls:
            message = f"layer {layer} called attention as number {self.attention_calls}"
            raise SharedPrefixError(message)
        self.attention_calls += 1
        if self.is_prefill:
            return self._attend_prefill(q, k, v, scale)
        return self._attend_decode(self.layers[layer], q, k, v, scale)

    def _attend_prefill(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Let each prompt attend to itself, and keep its keys and values."""
        parts = [x.split(self.prompt_lengths, dim=2) for x in (q, k, v)]
        repeat = q.shape[1] // k.shape[1]
        shape = (len(self.prompt_lengths), k.shape[1], max(self.prompt_lengths))
        key, value = (x.new_zeros(*shape, x.shape[-1]) for x in (k, v))
        out = []
        for g, (one, keys, values) in enumerate(zip(*parts, strict=True)):
            key[g, :, : keys.shape[2]] = keys[0]
            value[g, :, : keys.shape[2]] = values[0]
            # Heads are repeated here: with `enable_gqa` the CPU's kernel takes 1.5 times as long.
            keys, values = (x.repeat_interleave(repeat, 1) for x in (keys, values))
            out.append(scaled_dot_product_attention(one, keys, values, is_causal=True, scale=scale))
        positions = min(INITIAL_KV_POSITIONS, self.max_completion_length)
        slots = (*shape[:2], self.slots_per_group, positions)
        completion_kv = (x.new_empty(*slots, x.shape[-1]) for x in (k, v))
        self.layers.append(LayerCache(key, value, *completion_kv))
        return torch.cat(out, 2).transpose(1, 2)

    def _attend_decode(
        self, layer: LayerCache, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        """Let each completion attend to its prompt and itself: one softmax over both."""
        t, slots = self.num_decoded + 1, self.slots_per_group
        if self.sequence_of_slot is not None:
            q, k, v = q[self.sequence_of_slot], k[self.sequence_of_slot], v[self.sequence_of_slot]
        if t > layer.key.shape[3]:
            self._grow_layer(layer)
        groups, heads, width, size = layer.prompt_key.shape
        repeat, blocks = q.shape[1] // heads, groups * heads
        layer.key[:, :, :, t - 1] = k.reshape(groups, slots, heads, -1).transpose(1, 2)
        layer.value[:, :, :, t - 1] = v.reshape(groups, slots, heads, -1).transpose(1, 2)
        # Slots beside the heads they share keys with: (G, J, K * repeat, D)
        q = q.reshape(groups, slots, heads, repeat, size).transpose(1, 2)
        q = q.reshape(blocks, slots * repeat, size)
        slot_q = q.reshape(blocks * slots, repeat, size)
        slot_key = layer.key.flatten(0, 2)[:, :t].transpose(1, 2)
        prompt_key = layer.prompt_key.flatten(0, 1).transpose(1, 2)
        to_prompt = torch.baddbmm(self.padding_mask, q, prompt_key, alpha=scale)
        to_completion = torch.bmm(slot_q, slot_key).mul_(scale)
        scores = torch.cat([to_prompt.view(len(slot_q), repeat, width), to_completion], -1)
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
        of_prompt = weights[..., :width].view(blocks, slots * repeat, width)
        out = torch.bmm(of_prompt, layer.prompt_value.flatten(0, 1)).view(len(slot_q), repeat, -1)
        out = out.baddbmm_(weights[..., width:], layer.value.flatten(0, 2)[:, :t])
        out = out.view(groups, heads, slots, repeat, -1).transpose(1, 2)
        out = out.reshape(groups * slots, 1, heads * repeat, -1)
        return out if self.used_slots is None else out[self.used_slots]

    def _grow_layer(self, layer: LayerCache) -> None:
        for name in ("key", "value"):
            old = getattr(layer, name)
            positions = min(2 * old.shape[3], self.max_completion_length)
            new = old.new_empty(*old.shape[:3], positions, old.shape[4])
            new[:, :, :, : old.shape[3]] = old
            setattr(layer, name, new)

    def batch_select_indices(self, index: Tensor) -> None:
        """Keep these completions, in order, and drop groups without any.

        The name is that of the method in transformers' caches.
        """
        live: dict[int, list[int]] = {}  # group -> slots in it
        for i in index.tolist():
            group, slot = divmod(self.slot_of_sequence[i], self.slots_per_group)
            live.setdefault(group, []).append(slot)
        most = max(len(slots) for slots in live.values())
        groups = torch.tensor(list(live), device=self.device)
        filled = [slots + slots[:1] * (most - len(slots)) for slots in live.values()]
        slots = torch.tensor(filled, device=self.device)  # (G, K)
        self.prompt_lengths = [self.prompt_lengths[g] for g in live]
        width = max(self.prompt_lengths)
        for layer in self.layers:
            layer.prompt_key = layer.prompt_key[groups, :, :width]
            layer.prompt_value = layer.prompt_value[groups, :, :width]
            layer.key = layer.key.transpose(1, 2)[groups[:, None], slots].transpose(1, 2)
            layer.value = layer.value.transpose(1, 2)[groups[:, None], slots].transpose(1, 2)
            layer.key, layer.value = layer.key.contiguous(), layer.value.contiguous()
        self._assign_slots([len(slots) for slots in live.values()])
        self.padding_mask = self._make_padding_mask()

    def _assign_slots(self, group_sizes: list[int]) -> None:
        """Put the completions into slots; where some stay empty, repeat a group's first one."""
        k = self.slots_per_group = max(group_sizes)
        self.slot_of_sequence = [g * k + i for g, n in enumerate(group_sizes) for i in range(n)]
        self.sequence_of_slot: Tensor | None = None  # (S,) the completion in each slot
        self.used_slots: Tensor | None = None  # (R,) the slot of each completion
        if len(self.slot_of_sequence) < len(group_sizes) * k:
            sequence_in = {slot: i for i, slot in enumerate(self.slot_of_sequence)}
            fill = [
                sequence_in.get(s, sequence_in[s // k * k]) for s in range(len(group_sizes) * k)
            ]
            self.sequence_of_slot = torch.tensor(fill, device=self.device)
            self.used_slots = torch.tensor(self.slot_of_sequence, device=self.device)

    def _make_padding_mask(self) -> Tensor:
        """The additive mask of prompt scores: 0, or -inf on padding. (G * J, 1, W)"""
        key = self.layers[0].prompt_key
        lengths = torch.tensor(self.prompt_lengths, device=self.device)[:, None]
        beyond = torch.arange(key.shape[2], device=self.device) >= lengths
        pad = key.new_zeros(beyond.shape).masked_fill_(beyond, float("-inf"))
        return pad.repeat_interleave(key.shape[1], 0)[:, None]


def shared_prefix_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    prefix_cache: SharedPrefixCache | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """`SharedPrefixCache.attend`, which a model's layers call instead of their own attention.

    Raises SharedPrefixError without `prefix_cache`, and for unsupported attention features.
    """
    if prefix_cache is None:
        raise SharedPrefixError("its layers do not pass arguments on to their attention")
    if attention_mask is not None:
        raise SharedPrefixError("it makes its own mask")
    odd = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if odd or kwargs.get("dropout"):
        raise SharedPrefixError(f"its attention has {', '.join(odd) or 'dropout'}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int | None = getattr(module, "layer_idx", None)
    return prefix_cache.attend(layer, query, key, value, scale), None


AttentionInterface.register(DECODE_ATTENTION_NAME, shared_prefix_attention)

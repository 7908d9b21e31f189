"""A reward model's scores: one number per sequence, read at its last token.

A decoder reads sequences as the policy does: those of a group that begin alike are computed with
their common prefix once (`packing`), in the layout that `layouts` finds right for it by the same
three checks. Here the hidden states at the last token are compared, which is stricter than
comparing one number. Before that, head and backbone must compute the scores of the model's own
class; an encoder, whose head reads elsewhere, fails that and is scored by its class, on padded
sequences if padding changes nothing and one by one if it does. The last token is found by its
position: a class looks for the pad id, which may also be the EOS at the end of a sequence.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rloo_cli.data import bin_packing
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.bin_packing import PackingItem
from rloo_cli.data.packing import (
    LAYOUTS,
    GroupSlice,
    MicroBatch,
    pack_micro_batch,
    whole_group_slices,
)
from rloo_cli.policy import layouts, shared_attention
from rloo_cli.policy.classifier_forward import (
    MAX_RELATIVE_DIFFERENCE,
    PADDED_BY_CLASS,
    SINGLE_BY_CLASS,
    ClassifierForward,
)
from rloo_cli.policy.model import forward_inputs, position_ids_support
from rloo_cli.policy.token_budget import MAX_USEFUL_TOKENS

SCORE_HEAD_NAMES = ("score", "classifier", "classification_head", "v_head")


class RewardModelScorer:
    """A sequence classifier with one label, on its device or, with `offload`, moved there.

    The token ids are those of its tokenizer. `batch_size`: sequences of a padded forward.
    `max_tokens`: tokens of a packed forward; None = as many as the device can use well.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        pad_token_id: int,
        eos_token_id: int | None,
        batch_size: int,
        offload: bool = False,
        max_tokens: int | None = None,
    ) -> None:
        self.model, self.device, self.batch_size = model, device, batch_size
        self.by_class = ClassifierForward(model, device, pad_token_id, eos_token_id)
        useful_tokens = MAX_USEFUL_TOKENS.get(device.type, MAX_USEFUL_TOKENS["cuda"])
        self.max_tokens = max_tokens or useful_tokens
        self.head = find_score_head(model)
        self.names_position_ids, self.takes_position_ids = position_ids_support(model.base_model)
        self.layout, self.why = SINGLE_BY_CLASS, ""
        weights = {name: tensor.data for name, tensor in _parameters_and_buffers(model)}
        self.cpu_weights = weights if offload else None
        self.lock = threading.Lock()  # a call that timed out may still be running
        if self.head is not None:  # the last sum decides between two nearly equal sequences
            self.head.float()
            self.head.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))
        if not offload:
            model.to(device)

    def choose_layout(self, max_length: int | None) -> str:
        """Find the layout that computes the class's own numbers. -> a line with the layout and why

        `max_length`: the most tokens of a sequence; None if unknown.
        """
        with self.on_device(), torch.no_grad():
            why = self._why_not_by_head()
            if why is None:
                probe, reasons = RewardLayoutProbe(self), []
                for layout in LAYOUTS:
                    try:
                        reason = layouts.try_layout(self, layout, max_length, probe)
                    except Exception as error:  # only the last layout, padded, raises
                        reason = f"{type(error).__name__}: {error!s:.150}"
                    if reason is None:
                        break
                    reasons.append(f"not {layout}: {reason}")
                if len(reasons) < len(LAYOUTS):
                    self.why = "; ".join(reasons)
                    return self.layout_text
                why = reasons[-1]
            prompts = [group.prompt_ids for group in layouts.probe_groups(self)]
            pads = self.by_class.padding_is_exact(prompts)
            self.layout, self.why = (PADDED_BY_CLASS if pads else SINGLE_BY_CLASS), why
        return self.layout_text

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, without the head."""
        return next(self.model.base_model.parameters()).dtype

    @property
    def max_positions(self) -> int | None:
        """The most tokens of a sequence; None if the config does not say."""
        length = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return length if length and length > 0 else None  # XLNet's config has -1

    @property
    def layout_text(self) -> str:
        """The layout, and why the model has no better one."""
        return self.layout + (f" ({self.why})" if self.why else "")

    def score(
        self, sequences: Sequence[list[int]], group_of_sequence: Sequence[int]
    ) -> list[float]:
        """The score of each sequence of ids, in float32. -> (B,)

        `group_of_sequence`: the group of each. Raises ValueError for a sequence without a token.
        """
        if not all(sequences):
            index = [*map(bool, sequences)].index(False)
            raise ValueError(f"sequence {index} has no token to read")
        with self.lock, self.on_device(), torch.no_grad():
            if self.layout in (PADDED_BY_CLASS, SINGLE_BY_CLASS):
                size = 1 if self.layout == SINGLE_BY_CLASS else self.batch_size
                return self.by_class.scores(sequences, size)
            return self._score_packed(sequences, group_of_sequence)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the weights on the device inside; with `offload` they are in CPU memory otherwise.

        They never change, so leaving drops the device's copy.
        """
        if self.cpu_weights is None:
            yield
            return
        for name, tensor in _parameters_and_buffers(self.model):
            tensor.data = self.cpu_weights[name].to(self.device)
        try:
            yield
        finally:
            for name, tensor in _parameters_and_buffers(self.model):
                tensor.data = self.cpu_weights[name]

    # By backbone and head

    def hidden(self, micro_batch: MicroBatch) -> Tensor:
        """The hidden state at the last token of each sequence. -> (S, h)

        `_group_by_prefix` gave each sequence one token more.
        """
        states = self.model.base_model(**forward_inputs(micro_batch, self.takes_position_ids))[0]
        lengths = [n for _, completions in micro_batch.group_lengths for n in completions]
        ends = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        return states.reshape(-1, states.shape[-1])[micro_batch.logit_index[ends]]

    def _score_packed(
        self, sequences: Sequence[list[int]], group_of_sequence: Sequence[int]
    ) -> list[float]:
        groups, indices = _group_by_prefix(sequences, group_of_sequence)
        scores = [0.0] * len(sequences)
        for parts in _split_micro_batches(groups, self.layout, self.batch_size, self.max_tokens):
            batch = pack_micro_batch(groups, parts, device=self.device, layout=self.layout)
            assert self.head is not None
            values = self.head(self.hidden(batch)).squeeze(-1).tolist()
            for (i, k), value in zip([(i, k) for i, ks in parts for k in ks], values, strict=True):
                scores[indices[i][k]] = value
        return scores

    def _why_not_by_head(self) -> str | None:
        """Why the class's score differs from the head's value at the last hidden state, or None."""
        if self.head is None:
            return "an unknown kind of head"
        try:
            groups = layouts.probe_groups(self)
            sequences = [g.prompt_ids + r.completion_ids for g in groups for r in g.rollouts]
            truth = torch.tensor(self.by_class.scores(sequences, 1))
            states = torch.cat([self.last_hidden_state(sequence) for sequence in sequences])
            ours = self.head(states).squeeze(-1).cpu()
        except Exception as error:  # an encoder-decoder, or another kind of backbone
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:150]}"
        exact = self.dtype is torch.float32
        gap = float((ours - truth).abs().max() / truth.abs().max().clamp_min(1e-12))
        if gap <= MAX_RELATIVE_DIFFERENCE[0 if exact else 1]:
            return None
        return "its class does not read the last token"

    def last_hidden_state(self, sequence: list[int]) -> Tensor:
        """The last hidden state of a sequence alone, by the plain backbone. -> (1, h)"""
        ids = torch.tensor([sequence], device=self.device)
        return self.model.base_model(input_ids=ids, use_cache=False)[0][:, -1]


class RewardLayoutProbe(layouts.LayoutProbe):
    """The hidden state at the last token of each of the probe's sequences. (S, h)"""

    mismatch_text = "hidden states are off by {:.2g}"

    def values_alone(self, attention: str | None = None) -> Tensor:
        """The last hidden state of each sequence alone, by this `attention`. -> (S, h)"""
        sequences = [g.prompt_ids + r.completion_ids for g in self.groups for r in g.rollouts]
        with shared_attention.native_attention(self.policy.model, attention):
            return torch.cat([self.policy.last_hidden_state(ids) for ids in sequences]).double()

    def layout_values(self, layout: str) -> Tensor:
        """The last hidden states in this layout. -> (S, h)"""
        sequences = [g.prompt_ids + r.completion_ids for g in self.groups for r in g.rollouts]
        owners = [i for i, g in enumerate(self.groups) for _ in g.rollouts]
        groups, _ = _group_by_prefix(sequences, owners)
        parts = whole_group_slices(groups, range(len(groups)))
        batch = pack_micro_batch(groups, parts, device=self.policy.device, layout=layout)
        states = self.policy.hidden(batch).double()
        layouts.check_attention_calls(self.policy.model, batch)
        return states

    def differences(self, values: Tensor) -> Tensor:
        """The distance of each state from that of its sequence alone, by its norm. -> (S,)"""
        return (values - self.expected).norm(dim=-1) / self.expected.norm(dim=-1).clamp_min(1e-12)


def find_score_head(model: PreTrainedModel) -> torch.nn.Module | None:
    """The module that maps a hidden state to a score; None if no known name is found."""
    modules = (getattr(model, name, None) for name in SCORE_HEAD_NAMES)
    return next((module for module in modules if isinstance(module, torch.nn.Module)), None)


def _group_by_prefix(
    sequences: Sequence[list[int]], group_of_sequence: Sequence[int]
) -> tuple[list[Group], list[list[int]]]:
    """Split the sequences of a group into their common prefix, as a prompt, and completions.

    A completion gets one id more than it has: `packing` leaves out the last one, which predicts
    nothing, and points at the position before it, the sequence's last token. -> groups, and for
    each group the indices of the sequences of its completions
    """
    by_owner: dict[int, list[int]] = {}
    for i, owner in enumerate(group_of_sequence):
        by_owner.setdefault(owner, []).append(i)
    groups: list[Group] = []
    indices: list[list[int]] = []
    for members in by_owner.values():
        columns = zip(*(sequences[i] for i in members), strict=False)
        same = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
        for chosen in [members] if same else [[i] for i in members]:
            first = same or len(sequences[chosen[0]])
            ends = [Rollout([*sequences[i][first:], 0], "", "stop", True, 0, 0) for i in chosen]
            groups.append(Group(len(groups), {}, "", sequences[chosen[0]][:first], ends))
            indices.append(chosen)
    return groups, indices


def _split_micro_batches(
    groups: Sequence[Group], layout: str, batch_size: int, max_tokens: int
) -> list[list[GroupSlice]]:
    """The sequences of each forward: `batch_size` of like lengths, or `max_tokens` tokens."""
    whole = whole_group_slices(groups, range(len(groups)))
    if layout == "padded":
        singles: list[GroupSlice] = [(i, (k,)) for i, ks in whole for k in ks]
        singles.sort(key=lambda part: sum(_slice_lengths(groups, part)))
        return [singles[n : n + batch_size] for n in range(0, len(singles), batch_size)]
    items = []
    for part in whole:
        prompt, *completions = _slice_lengths(groups, part)
        for cut in bin_packing.split_group(part, prompt, completions, max_tokens, layout):
            prompt, *completions_left = _slice_lengths(groups, cut)
            tokens = bin_packing.forward_tokens(prompt, completions_left, layout)
            longest = prompt + max(completions_left)
            items.append(PackingItem(cut, tokens, float(tokens), longest))
    return bin_packing.pack_micro_batches(items, max_tokens)[0]


def _slice_lengths(groups: Sequence[Group], group_slice: GroupSlice) -> list[int]:
    """Tokens of a group slice's prompt, and of each of its completions."""
    i, ks = group_slice
    ends = [len(groups[i].rollouts[k].completion_ids) for k in ks]
    return [len(groups[i].prompt_ids), *ends]


def _parameters_and_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()

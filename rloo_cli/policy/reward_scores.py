"""A reward model's scores: one number per row, read at the row's last token.

A decoder reads rows as the policy does: rows of a group that begin alike are computed with their
beginning once (`packing`), in the layout that `levels` finds right for it by the same three gates.
Here the comparison is of the hidden state at the last token, a stronger one than of one number.
Before that, head and backbone must give what the model's own class gives; an encoder, whose head
reads elsewhere, fails that and goes through its class, on right-padded rows where padding changes
nothing and one by one where it does. The last token is found by its place: a class looks for the
pad id, which may also be the EOS at the end of a row.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

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
from rloo_cli.policy.memory import MAX_USEFUL_TOKENS
from rloo_cli.policy.model import forward_inputs, position_ids_support

SCORE_HEAD_NAMES = ("score", "classifier", "classification_head", "v_head")


class RewardModelScorer:
    """A sequence classifier with one label, on its device or, with `offload`, there when asked.

    `pad`, `eos`: its tokenizer's ids. `batch_size`: rows of a forward that pads. `tokens`: places
    of a forward that packs; None = as many as are of use on the device.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        pad_token_id: int,
        eos_token_id: int | None,
        batch_size: int,
        offload: bool = False,
        max_tokens: int | None = None,
    ) -> None:
        self.model, self.device, self.batch_size = model, device, batch_size
        self.by_class = ClassifierForward(model, device, pad_token_id, eos_token_id)
        self.max_tokens = max_tokens or MAX_USEFUL_TOKENS.get(
            device.type, MAX_USEFUL_TOKENS["cuda"]
        )
        self.head = find_score_head(model)
        self.names_position_ids, self.takes_position_ids = position_ids_support(model.base_model)
        self.layout, self.why = SINGLE_BY_CLASS, ""
        self.cpu_weights = (
            {n: t.data for n, t in _parameters_and_buffers(model)} if offload else None
        )
        self.lock = threading.Lock()  # a call that ran out of time may still be at work
        if self.head is not None:  # the last sum decides between two rows that are nearly equal
            self.head.float()
            self.head.register_forward_pre_hook(lambda _, given: (given[0].float(), *given[1:]))
        if not offload:
            model.to(device)

    def choose_layout(self, max_length: int | None) -> str:
        """Find the layout that gives the class's own numbers; a line that says which, and why.

        `longest`: the most tokens of a row, None = not known.
        """
        with self.on_device(), torch.no_grad():
            why = self._why_not_by_head()
            if why is None:
                probe, reasons = RewardLayoutProbe(self), []
                for layout in LAYOUTS:
                    try:
                        reason = layouts.try_layout(self, layout, max_length, probe)
                    except Exception as error:  # of padded rows, the last
                        reason = f"{type(error).__name__}: {error!s:.150}"
                    if reason is None:
                        break
                    reasons.append(f"not {layout}: {reason}")
                if len(reasons) < len(LAYOUTS):
                    self.why = "; ".join(reasons)
                    return self.layout_text
                why = reasons[-1]
            pads = self.by_class.padding_is_exact(
                [g.prompt_ids for g in layouts.probe_groups(self)]
            )
            self.layout, self.why = (PADDED_BY_CLASS if pads else SINGLE_BY_CLASS), why
        return self.layout_text

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, the head's aside."""
        found: torch.dtype = next(self.model.base_model.parameters()).dtype
        return found

    @property
    def max_positions(self) -> int | None:
        """The most tokens of a row, as far as the model says."""
        found = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return found if found and found > 0 else None  # XLNet says -1

    @property
    def layout_text(self) -> str:
        """The layout, and what kept the model from better ones."""
        return self.layout + (f" ({self.why})" if self.why else "")

    def score(
        self, sequences: Sequence[list[int]], group_of_sequence: Sequence[int]
    ) -> list[float]:
        """The score of each row of ids, in float32. `owners`: the group of each row. (B,)

        Raises ValueError for a row without a token.
        """
        if not all(sequences):
            raise ValueError(f"row {[*map(bool, sequences)].index(False)} has no token to read")
        with self.lock, self.on_device(), torch.no_grad():
            if self.layout in (PADDED_BY_CLASS, SINGLE_BY_CLASS):
                size = 1 if self.layout == SINGLE_BY_CLASS else self.batch_size
                return self.by_class.scores(sequences, size)
            return self._score_packed(sequences, group_of_sequence)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The weights on the device inside; after it, with `offload`, only in CPU memory.

        They never change: going home is dropping the device's copy.
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
        """The hidden state at the last token of each row; `_groups` gave it one more. -> (S, h)"""
        states = self.model.base_model(**forward_inputs(micro_batch, self.takes_position_ids))[0]
        counts = torch.tensor(
            [n for _, own in micro_batch.group_lengths for n in own], device=self.device
        )
        found: Tensor = states.reshape(-1, states.shape[-1])[
            micro_batch.logit_index[counts.cumsum(0) - 1]
        ]
        return found

    def _score_packed(
        self, sequences: Sequence[list[int]], group_of_sequence: Sequence[int]
    ) -> list[float]:
        groups, places = _group_by_prefix(sequences, group_of_sequence)
        found = [0.0] * len(sequences)
        for parts in _split_micro_batches(groups, self.layout, self.batch_size, self.max_tokens):
            micro = pack_micro_batch(groups, parts, device=self.device, layout=self.layout)
            assert self.head is not None
            values = self.head(self.hidden(micro)).squeeze(-1).tolist()
            for (i, k), value in zip([(i, k) for i, ks in parts for k in ks], values, strict=True):
                found[places[i][k]] = value
        return found

    def _why_not_by_head(self) -> str | None:
        """Why the class's own number is not the head's of the last hidden state, if it is not."""
        if self.head is None:
            return "a head that rloo does not know"
        try:
            rows = [
                g.prompt_ids + r.completion_ids
                for g in layouts.probe_groups(self)
                for r in g.rollouts
            ]
            truth = torch.tensor(self.by_class.scores(rows, 1))
            states = torch.cat([self.last_hidden_state(row) for row in rows])
            ours = self.head(states).squeeze(-1).cpu()
        except Exception as error:  # a backbone that answers in another form, an encoder-decoder
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:150]}"
        exact = self.dtype is torch.float32
        gap = float((ours - truth).abs().max() / truth.abs().max().clamp_min(1e-12))
        if gap <= MAX_RELATIVE_DIFFERENCE[0 if exact else 1]:
            return None
        return "its class does not read the last token"

    def last_hidden_state(self, sequence: list[int]) -> Tensor:
        """The last hidden state of a row alone, by the plain backbone. -> (1, h)"""
        ids = torch.tensor([sequence], device=self.device)
        found: Tensor = self.model.base_model(input_ids=ids, use_cache=False)[0][:, -1]
        return found


class RewardLayoutProbe(layouts.LayoutProbe):
    """What the backbone says of the last token of each of the probe's rows. (S, h)"""

    mismatch_text = "hidden states are off by {:.2g}"

    def values_alone(self, attention: str | None = None) -> Tensor:
        """The last hidden state of each row by itself, `name`: by that attention. -> (S, h)"""
        rows = [g.prompt_ids + r.completion_ids for g in self.groups for r in g.rollouts]
        with shared_attention.native_attention(self.policy.model, attention):
            return torch.cat([self.policy.last_hidden_state(row) for row in rows]).double()

    def layout_values(self, layout: str) -> Tensor:
        """The same in rows of this layout. -> (S, h)"""
        rows = [g.prompt_ids + r.completion_ids for g in self.groups for r in g.rollouts]
        owners = [i for i, g in enumerate(self.groups) for _ in g.rollouts]
        groups, _ = _group_by_prefix(rows, owners)
        parts = whole_group_slices(groups, range(len(groups)))
        micro = pack_micro_batch(groups, parts, device=self.policy.device, layout=layout)
        found: Tensor = self.policy.hidden(micro).double()
        layouts.check_attention_calls(self.policy.model, micro)
        return found

    def differences(self, values: Tensor) -> Tensor:
        """Distance from the truth, relative to its length. -> (S,)"""
        return (values - self.expected).norm(dim=-1) / self.expected.norm(dim=-1).clamp_min(1e-12)


def find_score_head(model: Any) -> Any:
    """The module that makes a score of a hidden state; None where no name is known."""
    found = (getattr(model, name, None) for name in SCORE_HEAD_NAMES)
    return next((module for module in found if isinstance(module, torch.nn.Module)), None)


def _group_by_prefix(
    sequences: Sequence[list[int]], group_of_sequence: Sequence[int]
) -> tuple[list[Group], list[list[int]]]:
    """Rows of one owner as a prompt, all that they begin alike with, and completions of it.

    A completion gets one id more than it has: `packing` leaves out each last one, which predicts
    nothing, and points at the place before it, which is the row's last token. -> groups, and the
    rows that each group's completions are.
    """
    by_owner: dict[int, list[int]] = {}
    for i, owner in enumerate(group_of_sequence):
        by_owner.setdefault(owner, []).append(i)
    groups: list[Group] = []
    places: list[list[int]] = []
    for own in by_owner.values():
        alike = zip(*(sequences[i] for i in own), strict=False)
        same = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, alike))
        for chosen in [own] if same else [[i] for i in own]:
            first = same or len(sequences[chosen[0]])
            ends = [Rollout([*sequences[i][first:], 0], "", "stop", True, 0, 0) for i in chosen]
            groups.append(Group(len(groups), {}, "", sequences[chosen[0]][:first], ends))
            places.append(chosen)
    return groups, places


def _split_micro_batches(
    groups: Sequence[Group], layout: str, batch_size: int, max_tokens: int
) -> list[list[GroupSlice]]:
    """What shares a forward: `batch_size` rows of like lengths, or so many `tokens`."""
    pieces = whole_group_slices(groups, range(len(groups)))
    if layout == "padded":
        singles: list[GroupSlice] = [(i, (k,)) for i, ks in pieces for k in ks]
        singles.sort(key=lambda part: sum(_slice_lengths(groups, part)))
        return [singles[n : n + batch_size] for n in range(0, len(singles), batch_size)]
    items = []
    for part in pieces:
        prompt, *own = _slice_lengths(groups, part)
        for cut in bin_packing.split_group(part, prompt, own, max_tokens, layout):
            prompt, *kept = _slice_lengths(groups, cut)
            places = bin_packing.forward_tokens(prompt, kept, layout)
            items.append(PackingItem(cut, places, float(places), prompt + max(kept)))
    return bin_packing.pack_micro_batches(items, max_tokens)[0]


def _slice_lengths(groups: Sequence[Group], group_slice: GroupSlice) -> list[int]:
    """Tokens of a part's prompt, and of each of its completions."""
    i, ks = group_slice
    ends = [len(groups[i].rollouts[k].completion_ids) for k in ks]
    return [len(groups[i].prompt_ids), *ends]


def _parameters_and_buffers(model: Any) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()

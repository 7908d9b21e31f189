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
from rloo_cli.data.bin_packing import Item
from rloo_cli.data.packing import LAYOUTS, Micro, Part, pack, whole
from rloo_cli.policy import layouts, shared_attention
from rloo_cli.policy.memory import MOST
from rloo_cli.policy.model import inputs, positions
from rloo_cli.policy.reward_by_class import ALONE, BY_CLASS, SAME, ByClass

HEADS = ("score", "classifier", "classification_head", "v_head")


class ScoreModel:
    """A sequence classifier with one label, on its device or, with `offload`, there when asked.

    `pad`, `eos`: its tokenizer's ids. `batch_size`: rows of a forward that pads. `tokens`: places
    of a forward that packs; None = as many as are of use on the device.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        pad: int,
        eos: int | None,
        batch_size: int,
        offload: bool = False,
        tokens: int | None = None,
    ) -> None:
        self.model, self.device, self.batch_size = model, device, batch_size
        self.by_class = ByClass(model, device, pad, eos)
        self.tokens = tokens or MOST.get(device.type, MOST["cuda"])
        self.head = head_of(model)
        self.names_positions, self.takes_positions = positions(model.base_model)
        self.layout, self.why = ALONE, ""
        self.at_home = {n: t.data for n, t in _tensors(model)} if offload else None
        self.lock = threading.Lock()  # a call that ran out of time may still be at work
        if self.head is not None:  # the last sum decides between two rows that are nearly equal
            self.head.float()
            self.head.register_forward_pre_hook(lambda _, given: (given[0].float(), *given[1:]))
        if not offload:
            model.to(device)

    def settle(self, longest: int | None) -> str:
        """Find the layout that gives the class's own numbers; a line that says which, and why.

        `longest`: the most tokens of a row, None = not known.
        """
        with self.there(), torch.no_grad():
            why = self._why_not_by_head()
            if why is None:
                probe, reasons = Probe(self), []
                for layout in LAYOUTS:
                    try:
                        reason = layouts.attempt(self, layout, longest, probe)
                    except Exception as error:  # of padded rows, the last
                        reason = f"{type(error).__name__}: {error!s:.150}"
                    if reason is None:
                        break
                    reasons.append(f"not {layout}: {reason}")
                if len(reasons) < len(LAYOUTS):
                    self.why = "; ".join(reasons)
                    return self.said
                why = reasons[-1]
            pads = self.by_class.pads([g.prompt_ids for g in layouts.probes(self)])
            self.layout, self.why = (BY_CLASS if pads else ALONE), why
        return self.said

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, the head's aside."""
        found: torch.dtype = next(self.model.base_model.parameters()).dtype
        return found

    @property
    def positions(self) -> int | None:
        """The most tokens of a row, as far as the model says."""
        found = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return found if found and found > 0 else None  # XLNet says -1

    @property
    def said(self) -> str:
        """The layout, and what kept the model from better ones."""
        return self.layout + (f" ({self.why})" if self.why else "")

    def score(self, rows: Sequence[list[int]], owners: Sequence[int]) -> list[float]:
        """The score of each row of ids, in float32. `owners`: the group of each row. (B,)

        Raises ValueError for a row without a token.
        """
        if not all(rows):
            raise ValueError(f"row {[*map(bool, rows)].index(False)} has no token to read")
        with self.lock, self.there(), torch.no_grad():
            if self.layout in (BY_CLASS, ALONE):
                size = 1 if self.layout == ALONE else self.batch_size
                return self.by_class.scores(rows, size)
            return self._laid(rows, owners)

    @contextmanager
    def there(self) -> Iterator[None]:
        """The weights on the device inside; after it, with `offload`, only in CPU memory.

        They never change: going home is dropping the device's copy.
        """
        if self.at_home is None:
            yield
            return
        for name, tensor in _tensors(self.model):
            tensor.data = self.at_home[name].to(self.device)
        try:
            yield
        finally:
            for name, tensor in _tensors(self.model):
                tensor.data = self.at_home[name]

    # By backbone and head

    def hidden(self, micro: Micro) -> Tensor:
        """The hidden state at the last token of each row; `_groups` gave it one more. -> (S, h)"""
        states = self.model.base_model(**inputs(micro, self.takes_positions))[0]
        counts = torch.tensor([n for _, own in micro.sizes for n in own], device=self.device)
        found: Tensor = states.reshape(-1, states.shape[-1])[micro.source[counts.cumsum(0) - 1]]
        return found

    def _laid(self, rows: Sequence[list[int]], owners: Sequence[int]) -> list[float]:
        groups, places = _groups(rows, owners)
        found = [0.0] * len(rows)
        for parts in _micros(groups, self.layout, self.batch_size, self.tokens):
            micro = pack(groups, parts, device=self.device, layout=self.layout)
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
                g.prompt_ids + r.completion_ids for g in layouts.probes(self) for r in g.rollouts
            ]
            truth = torch.tensor(self.by_class.scores(rows, 1))
            states = torch.cat([self.last(row) for row in rows])
            ours = self.head(states).squeeze(-1).cpu()
        except Exception as error:  # a backbone that answers in another form, an encoder-decoder
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:150]}"
        exact = self.dtype is torch.float32
        gap = float((ours - truth).abs().max() / truth.abs().max().clamp_min(1e-12))
        if gap <= SAME[0 if exact else 1]:
            return None
        return "its class does not read the last token"

    def last(self, row: list[int]) -> Tensor:
        """The last hidden state of a row alone, by the plain backbone. -> (1, h)"""
        ids = torch.tensor([row], device=self.device)
        found: Tensor = self.model.base_model(input_ids=ids, use_cache=False)[0][:, -1]
        return found


class Probe(layouts.Probe):
    """What the backbone says of the last token of each of the probe's rows. (S, h)"""

    off = "hidden states are off by {:.2g}"

    def alone(self, name: str | None = None) -> Tensor:
        """The last hidden state of each row by itself, `name`: by that attention. -> (S, h)"""
        rows = [g.prompt_ids + r.completion_ids for g in self.groups for r in g.rollouts]
        with shared_attention.native(self.policy.model, name):
            return torch.cat([self.policy.last(row) for row in rows]).double()

    def sums(self, layout: str) -> Tensor:
        """The same in rows of this layout. -> (S, h)"""
        rows = [g.prompt_ids + r.completion_ids for g in self.groups for r in g.rollouts]
        owners = [i for i, g in enumerate(self.groups) for _ in g.rollouts]
        groups, _ = _groups(rows, owners)
        parts = whole(groups, range(len(groups)))
        micro = pack(groups, parts, device=self.policy.device, layout=layout)
        found: Tensor = self.policy.hidden(micro).double()
        layouts.count_calls(self.policy.model, micro)
        return found

    def gap(self, found: Tensor) -> Tensor:
        """Distance from the truth, relative to its length. -> (S,)"""
        return (found - self.truth).norm(dim=-1) / self.truth.norm(dim=-1).clamp_min(1e-12)


def head_of(model: Any) -> Any:
    """The module that makes a score of a hidden state; None where no name is known."""
    found = (getattr(model, name, None) for name in HEADS)
    return next((module for module in found if isinstance(module, torch.nn.Module)), None)


def _groups(
    rows: Sequence[list[int]], owners: Sequence[int]
) -> tuple[list[Group], list[list[int]]]:
    """Rows of one owner as a prompt, all that they begin alike with, and completions of it.

    A completion gets one id more than it has: `packing` leaves out each last one, which predicts
    nothing, and points at the place before it, which is the row's last token. -> groups, and the
    rows that each group's completions are.
    """
    by_owner: dict[int, list[int]] = {}
    for i, owner in enumerate(owners):
        by_owner.setdefault(owner, []).append(i)
    groups: list[Group] = []
    places: list[list[int]] = []
    for own in by_owner.values():
        alike = zip(*(rows[i] for i in own), strict=False)
        same = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, alike))
        for chosen in [own] if same else [[i] for i in own]:
            first = same or len(rows[chosen[0]])
            ends = [Rollout([*rows[i][first:], 0], "", "stop", True, 0, 0) for i in chosen]
            groups.append(Group(len(groups), {}, "", rows[chosen[0]][:first], ends))
            places.append(chosen)
    return groups, places


def _micros(groups: Sequence[Group], layout: str, batch_size: int, tokens: int) -> list[list[Part]]:
    """What shares a forward: `batch_size` rows of like lengths, or so many `tokens`."""
    pieces = whole(groups, range(len(groups)))
    if layout == "padded":
        singles: list[Part] = [(i, (k,)) for i, ks in pieces for k in ks]
        singles.sort(key=lambda part: sum(_lengths(groups, part)))
        return [singles[n : n + batch_size] for n in range(0, len(singles), batch_size)]
    items = []
    for part in pieces:
        prompt, *own = _lengths(groups, part)
        for cut in bin_packing.split(part, prompt, own, tokens, layout):
            prompt, *kept = _lengths(groups, cut)
            places = bin_packing.rows_of(prompt, kept, layout)
            items.append(Item(cut, places, float(places), prompt + max(kept)))
    return bin_packing.bins(items, tokens)[0]


def _lengths(groups: Sequence[Group], part: Part) -> list[int]:
    """Tokens of a part's prompt, and of each of its completions."""
    i, ks = part
    ends = [len(groups[i].rollouts[k].completion_ids) for k in ks]
    return [len(groups[i].prompt_ids), *ends]


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()

"""Lays groups out for one forward pass, and stores its results on the groups.

All three layouts give the same numbers. `shared`: one sequence of whole groups,
all prompts first, then all completions, so that a prompt is computed once for its K completions; it
needs our attention (`policy/shared_attention.py`). `packed`: one sequence, the prompt repeated
before each completion; a model that separates documents by positions can compute it unchanged.
`padded`: right-padded sequences with a mask, for every other model. The columns of a `MicroBatch`
are the same in every layout.

An episode may have several rows (`Rollout.row_starts`). Each further row is a separate sequence
that does not attend to the first; the tokens of all rows count as one completion's.

Only sampled tokens are predicted: tokens of a tool or an environment are in the sequence to be
attended to. S counts completions here, and N their sampled tokens; data/batch.py has S tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from rloo_cli.data.batch import Group, Rollout, Value
from rloo_cli.data.episode_media import row_media
from rloo_cli.data.media import MediaInputs, axis_positions, media_of_rows, parts_of, vision_of
from rloo_cli.data.sampling_mask import SamplingMask
from rloo_cli.data.vision_processor import VisionProcessor

# Attributes with one number per token, of groups and of micro-batches.
TOKEN_COLUMNS = ("old_logp", "kl_logp", "ref_logp", "value", "entropy", "advantage", "returns")
LAYOUTS = ("shared", "packed", "padded")

GroupSlice = tuple[int, tuple[int, ...]]  # a group's index in the step, and those of completions
Sequences = list[tuple[list[int], Rollout]]  # the prompt's ids, and the completion


@dataclass
class SharedLayout:
    """Where the prompts and completions of n groups are in a `shared` sequence.

    It is built once per micro-batch, on the device, and never changed: backward passes read it
    again. Bounds are cumulative and begin with 0, as variable-length attention kernels expect.
    """

    cu_seqlens: Tensor  # (n + S + 1,) int32, every prompt and completion
    cu_seqlens_prompt: Tensor  # (n + 1,) int32
    cu_seqlens_group: Tensor  # (n + 1,) int32, groups' completions, counted from the first one
    segment_lengths: list[int]  # lengths: n prompts, S completions
    group_lengths: list[int]  # lengths of the groups' completions together
    prompt_tokens: int
    max_seqlen: int  # positions: the longest prompt with its completion
    attention_calls: list[int] = field(default_factory=lambda: [0])  # how often attention ran

    @property
    def prompt_lengths(self) -> list[int]:
        """Lengths of the prompts."""
        return self.segment_lengths[: len(self.group_lengths)]


@dataclass
class KeptIds:
    """The ids that each of a micro-batch's N sampled tokens was chosen from, M in total."""

    ids: Tensor  # (M,) token after token
    token: Tensor  # (M,) the token, of N, that each belongs to
    target_index: Tensor  # (N,) index in `ids` of the token itself
    used: Tensor = field(init=False)  # (U,) the distinct ids, in order
    used_index: Tensor = field(init=False)  # (M,) index in `used` of each of `ids`

    def __post_init__(self) -> None:
        # Computed here, on the CPU: on a GPU the host would wait for the number of ids.
        occurs = torch.bincount(self.ids) > 0
        self.used = occurs.nonzero().squeeze(-1)
        self.used_index = occurs.cumsum(0)[self.ids] - 1


@dataclass
class MicroBatch:
    """S completions of some groups, laid out for one forward pass; N of their tokens were sampled.

    Completions that need no forward are not in it (`minibatches.forwarded_completions`).
    """

    group_slices: list[GroupSlice]
    completion_index: Tensor  # (S,) index of each completion in its groups' flat (groups, K) table
    input_ids: Tensor  # (1, R), or (S, L) padded
    position_ids: Tensor  # (1, R), or (S, L) padded; (3, ...) with images on three axes
    attention_mask: Tensor | None  # (S, L), from lengths, never from the pad id; padded only
    logit_index: Tensor  # (N,) flattened position whose logits predict each sampled token
    target: Tensor  # (N,) the token
    sequence_ids: Tensor  # (N,) which of the S completions it belongs to
    mask: Tensor  # (N,) float, 1 = trained on, 0 = sampled but left out of the loss
    group_lengths: list[tuple[int, list[int]]]  # tokens of each prompt, and of its completions
    shared_layout: SharedLayout | None = None  # of layout shared
    behaviour_logp: Tensor | None = None  # (N,), NaN where the sampler gave none
    old_logp: Tensor | None = None  # (N,)
    kl_logp: Tensor | None = None  # (N,) old_logp at the KL's temperature; None = the same
    ref_logp: Tensor | None = None  # (N,)
    value: Tensor | None = None  # (N,) the value model's at rollout time
    entropy: Tensor | None = None  # (N,) the policy's that sampled, for top_entropy_quantile
    advantage: Tensor | None = None  # (N,) where every token has its own
    returns: Tensor | None = None  # (N,) what the value model is fitted to
    kept: KeptIds | None = None  # None = each token was sampled from the whole vocabulary
    media: MediaInputs | None = None  # images of its prompts

    @property
    def group_indices(self) -> list[int]:
        """The indices of its groups in the step."""
        return [i for i, _ in self.group_slices]

    @property
    def padding_tokens(self) -> int:
        """Positions that hold no token."""
        if self.attention_mask is None:
            return 0
        tokens = sum(p * len(lengths) + sum(lengths) for p, lengths in self.group_lengths)
        return self.input_ids.numel() - tokens

    @property
    def kl_old_logp(self) -> Tensor:
        """The log-probabilities that the KL is measured from. (N,)"""
        old = self.old_logp if self.kl_logp is None else self.kl_logp
        assert old is not None, "old_logp is not computed yet"
        return old

    @property
    def num_sequences(self) -> int:
        """The number of completions, S."""
        return self.completion_index.shape[0]


def whole_group_slices(groups: Sequence[Group], group_indices: Sequence[int]) -> list[GroupSlice]:
    """Slices that hold all completions of these groups."""
    return [(i, tuple(range(len(groups[i].rollouts)))) for i in group_indices]


def pack_micro_batch(
    groups: Sequence[Group],
    group_slices: Sequence[GroupSlice],
    masked: Tensor | None = None,
    device: torch.device | str = "cpu",
    layout: str = "padded",
    with_images: bool = False,
    vision: VisionProcessor | None = None,
) -> MicroBatch:
    """Lay some completions of `groups` out for a forward pass.

    `masked` (P, K) bool: completions that get `mask` 0, as `Batch.masked`.
    `with_images`: show the rows' images; a text-only model reads tokens. `vision`: for episodes'.
    """
    pairs = [(groups[i].prompt_ids, groups[i].rollouts[k]) for i, ks in group_slices for k in ks]
    counts = torch.tensor([r.length for _, r in pairs])
    sequence = torch.repeat_interleave(torch.arange(len(pairs)), counts)
    mask = torch.ones(int(counts.sum()), dtype=torch.float32)
    if masked is not None:
        out = torch.stack([masked[i, k] for i, ks in group_slices for k in ks])
        mask *= (~out)[sequence]
    shared, media = None, None
    if layout == "shared":
        ids, positions, attention, source, shared = _shared_layout(groups, group_slices, pairs)
    else:
        lay_out = _packed_layout if layout == "packed" else _padded_layout
        ids, positions, attention, source = lay_out(pairs)
    sampled = [m for _, r in pairs for m in (r.mask or [1] * len(r.completion_ids))]
    source = source if all(sampled) else source[torch.tensor(sampled, dtype=torch.bool)]
    if with_images:
        positions, media = _add_images(groups, group_slices, ids, positions, shared, vision)
    micro_batch = MicroBatch(
        group_slices=list(group_slices),
        completion_index=_completion_index(groups, group_slices),
        input_ids=ids,
        position_ids=positions,
        attention_mask=attention,
        logit_index=source,
        target=torch.tensor([i for _, r in pairs for i in r.sampled_ids]),
        sequence_ids=sequence,
        mask=mask,
        group_lengths=_group_lengths(groups, group_slices),
        shared_layout=shared,
        behaviour_logp=_behaviour_column(pairs),
        kept=_kept_ids([r for _, r in pairs]),
        media=media,
        **{n: _column([(getattr(groups[i], n), ks) for i, ks in group_slices])
           for n in TOKEN_COLUMNS},
    )  # fmt: skip
    return _move_to_device(micro_batch, device)


def _completion_index(groups: Sequence[Group], group_slices: Sequence[GroupSlice]) -> Tensor:
    """Each completion's index among all completions of these groups. (S,)"""
    size = len(groups[group_slices[0][0]].rollouts) if group_slices else 0
    return torch.tensor([n * size + k for n, (_, ks) in enumerate(group_slices) for k in ks])


def _group_lengths(
    groups: Sequence[Group], group_slices: Sequence[GroupSlice]
) -> list[tuple[int, list[int]]]:
    """Tokens of each group's prompt, and of its completions."""
    return [
        (len(groups[i].prompt_ids), [len(groups[i].rollouts[k].completion_ids) for k in ks])
        for i, ks in group_slices
    ]


def _move_to_device(micro_batch: MicroBatch, device: torch.device | str) -> MicroBatch:
    for holder in (micro_batch, micro_batch.shared_layout, micro_batch.kept):
        for name, value in list(vars(holder).items()) if holder is not None else ():
            if isinstance(value, Tensor):
                setattr(holder, name, value.to(device, non_blocking=True))
    if micro_batch.media is not None:
        micro_batch.media = micro_batch.media.move_to(device)
    return micro_batch


def _add_images(
    groups: Sequence[Group], group_slices: Sequence[GroupSlice], ids: Tensor, positions: Tensor,
    shared: SharedLayout | None, vision: VisionProcessor | None,
) -> tuple[Tensor, MediaInputs | None]:  # fmt: skip
    """The positions of rows with images, and the images; positions and None without any.

    A prompt's images are shown once if it occurs once, and in each row otherwise; an episode's own
    images, in its own row.
    """
    prompts = [groups[i].media for i, _ in group_slices]
    media = [
        row_media(groups[i], groups[i].rollouts[k], vision) for i, ks in group_slices for k in ks
    ]
    if (found_vision := vision_of([*prompts, *media])) is None:
        return positions, None
    shown = [parts_of(one) for one in media]
    if shared is not None:
        own = [
            parts[len(parts_of(prompt)) :]
            for parts, prompt in zip(shown, _of_rows(prompts, group_slices), strict=True)
        ]
        media, shown = [*prompts, *media], [*map(parts_of, prompts), *own]
        parts = list(torch.split(positions[0], shared.segment_lengths))
    elif len(positions) == len(media):  # padded, or one row packed
        parts = list(positions)
    else:
        lengths = [
            len(groups[i].prompt_ids) + len(groups[i].rollouts[k].completion_ids) - 1
            for i, ks in group_slices
            for k in ks
        ]
        parts = list(torch.split(positions[0], lengths))
    found = axis_positions(media, parts)
    axes = torch.stack(found, 1) if len(positions) == len(media) else torch.cat(found, 1)[:, None]
    if len(axes) > 1 and shared is None and len(positions) < len(media):
        axes = torch.cat([positions[None], axes])  # the first axis separates packed rows
    return axes[0] if len(axes) == 1 else axes, media_of_rows(shown, found_vision, ids)


def _of_rows(values: Sequence[Value], group_slices: Sequence[GroupSlice]) -> list[Value]:
    """A value of each slice, for each of its completions."""
    return [v for v, (_, ks) in zip(values, group_slices, strict=True) for _ in ks]


def store_column(
    column: Tensor | None, group_slices: Sequence[GroupSlice], groups: Sequence[Group], name: str
) -> None:
    """Store a (N,) column of a micro-batch on its groups, as the attribute `name`.

    Completions that were not forwarded get NaN.
    """
    if column is None:
        return
    lengths = [groups[i].rollouts[k].length for i, ks in group_slices for k in ks]
    values = iter(torch.split(column.detach().cpu(), lengths))
    for i, ks in group_slices:
        if getattr(groups[i], name) is None:
            blank = [column.new_full((r.length,), float("nan"), device="cpu")
                     for r in groups[i].rollouts]  # fmt: skip
            setattr(groups[i], name, blank)
        for k in ks:
            getattr(groups[i], name)[k] = next(values)


def _episode_rows(rollout: Rollout) -> list[list[int]]:
    """The ids of a completion's rows: the one that continues the group's prompt, then others."""
    bounds = pairwise([0, *rollout.row_starts, len(rollout.completion_ids)])
    return [rollout.completion_ids[begin:end] for begin, end in bounds]


def _further_rows(rollout: Rollout) -> list[tuple[list[int], list[int]]]:
    """A completion's other rows, each as (ids before its first sampled token, ids from it on)."""
    found = []
    for start, row in zip(rollout.row_starts, _episode_rows(rollout)[1:], strict=True):
        assert rollout.mask is not None, "an episode has a mask"
        prompt_length = rollout.mask[start : start + len(row)].index(1)
        found.append((row[:prompt_length], row[prompt_length:]))
    return found


def _shared_layout(
    groups: Sequence[Group], group_slices: Sequence[GroupSlice], pairs: Sequences
) -> tuple[Tensor, Tensor, None, Tensor, SharedLayout]:
    """All prompts, then all completions without their last token, which predicts nothing.

    A further row of an episode is a prompt with one completion, after all others.
    """
    prompts = [groups[i].prompt_ids for i, _ in group_slices]
    owner = [n for n, (_, ks) in enumerate(group_slices) for _ in ks]
    completions = [_episode_rows(r)[0] for _, r in pairs]
    pair_rows = [[s] for s in range(len(pairs))]  # the rows of each pair among the completions
    for s, (_, rollout) in enumerate(pairs):
        for prompt, predicted in _further_rows(rollout):
            owner.append(len(prompts))
            pair_rows[s].append(len(completions))
            prompts.append(prompt)
            completions.append(predicted)
    p, c = [len(ids) for ids in prompts], [len(ids) - 1 for ids in completions]
    first = list(accumulate(c, initial=sum(p)))  # where each completion begins
    ends = list(accumulate(p))
    ids = [i for prompt in prompts for i in prompt]
    ids += [i for completion in completions for i in completion[:-1]]
    positions = [torch.arange(n) for n in p]
    positions += [p[owner[s]] + torch.arange(n) for s, n in enumerate(c)]
    predictors = [
        torch.cat([torch.tensor([ends[owner[s]] - 1]), first[s] + torch.arange(n)])
        for s, n in enumerate(c)
    ]
    source = []
    for own, *further in pair_rows:
        source.append(predictors[own])
        for row in further:  # zeros for the prompt of a further row: its mask leaves them out
            unpredicted = torch.zeros(p[owner[row]], dtype=torch.long)
            source += [unpredicted, predictors[row]]
    group_lengths = [0] * len(prompts)
    for s, n in enumerate(c):
        group_lengths[owner[s]] += n
    longest = max(p[owner[s]] + n for s, n in enumerate(c))
    layout = SharedLayout(
        _cumulative_lengths(p + c), _cumulative_lengths(p), _cumulative_lengths(group_lengths),
        p + c, group_lengths, sum(p), longest,
    )  # fmt: skip
    return torch.tensor([ids]), torch.cat(positions)[None], None, torch.cat(source), layout


def _sequences(pairs: Sequences) -> list[tuple[list[int], list[int]]]:
    """(prompt, completion) of every row; a further row is all completion, its prompt masked.

    The mask also leaves out a row's first id, which was not sampled and has no token before it.
    """
    return [
        ([] if number else prompt, row)
        for prompt, rollout in pairs
        for number, row in enumerate(_episode_rows(rollout))
    ]


def sampled_positions(prompt_ids: list[int], rollout: Rollout) -> list[tuple[list[int], list[int]]]:
    """A completion's rows, each as (ids with its prompt, indices of the sampled ones)."""
    mask = rollout.mask or [1] * len(rollout.completion_ids)
    rows, offset = [], 0
    for read, row in _sequences([(prompt_ids, rollout)]):
        own_mask = mask[offset : offset + len(row)]
        rows.append(([*read, *row], [len(read) + n for n, own in enumerate(own_mask) if own]))
        offset += len(row)
    return rows


def _packed_layout(pairs: Sequences) -> tuple[Tensor, Tensor, None, Tensor]:
    """Prompt and completion, one document after the other; the last token predicts nothing."""
    rows = _sequences(pairs)
    documents = [prompt + row[:-1] for prompt, row in rows]
    starts = list(accumulate((len(document) for document in documents), initial=0))
    ids = torch.tensor([[i for document in documents for i in document]])
    positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
    spans = [
        starts[s] + len(prompt) - 1 + torch.arange(len(row)) for s, (prompt, row) in enumerate(rows)
    ]
    return ids, positions, None, torch.cat(spans)


def _padded_layout(pairs: Sequences) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One sequence for each completion, padded on the right."""
    rows = _sequences(pairs)
    sequences = [prompt + row for prompt, row in rows]
    lengths = [len(ids) for ids in sequences]
    width = max(lengths)
    padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in sequences])
    positions = torch.arange(width)
    attention = (positions < torch.tensor(lengths)[:, None]).long()
    spans = [
        s * width + len(prompt) - 1 + torch.arange(len(row)) for s, (prompt, row) in enumerate(rows)
    ]
    return padded, positions * attention, attention, torch.cat(spans)


def _cumulative_lengths(lengths: list[int]) -> Tensor:
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)


def _kept_ids(rollouts: list[Rollout]) -> KeptIds | None:
    """The sampling masks of completions; None where they have none.

    They were checked on arrival by `SamplingMask.check_tokens`; a run keeps all or none.
    """
    if all(rollout.sampling_mask is None for rollout in rollouts):
        return None
    joined = SamplingMask()
    for rollout in rollouts:
        mask = rollout.sampling_mask
        if mask is None and rollout.failed is not None:  # no loss: its placeholder was not sampled
            mask = SamplingMask.from_lists([i] for i in rollout.sampled_ids)
        assert mask is not None, "a completion has no sampling mask, but others have one"
        joined.append_mask(mask)
    counts, ids = (torch.from_numpy(np.array(part)).long() for part in (joined.counts, joined.ids))
    target = torch.tensor([i for rollout in rollouts for i in rollout.sampled_ids])
    token = torch.repeat_interleave(torch.arange(len(counts)), counts)
    target_index = (ids == target[token]).nonzero().squeeze(-1)
    each_token = torch.arange(len(target))
    assert torch.equal(token[target_index], each_token), "a token is not in its own sampling mask"
    return KeptIds(ids, token, target_index)


def _behaviour_column(pairs: Sequences) -> Tensor | None:
    if all(r.behaviour_logp is None for _, r in pairs):
        return None
    nan = float("nan")
    flat = [x for _, r in pairs for x in (r.sampled_logp or [nan] * r.length)]
    return torch.tensor(flat, dtype=torch.float32)


def _column(parts: list[tuple[list[Tensor] | None, tuple[int, ...]]]) -> Tensor | None:
    if any(column is None for column, _ in parts):
        return None
    return torch.cat([column[k] for column, ks in parts if column is not None for k in ks])

"""Writes and reads the whole batch of a step: all inputs and results of its training.

One file per step (`rollout_files`): tensors in safetensors, and everything else as one
JSON text among them; nothing is pickled. A file is written completely or not at all, and carries a
digest of its content. Numbers are kept bit for bit: a column is stored in 32 bits only if all
its values survive that. Of episodes it keeps every turn, the mask of the policy's own tokens, the
environment's messages and rewards, and why a row has failed.
"""

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rloo_cli.data import rollout_files
from rloo_cli.data.batch import (
    ADVANTAGE_TENSORS,
    BATCH_TENSORS,
    OPTIONAL_BATCH_TENSORS,
    Batch,
    Group,
)
from rloo_cli.data.packing import TOKEN_COLUMNS
from rloo_cli.data.rollout_files import (
    CHECK_KEY,
    EPISODE_FORMAT,
    HEAD_KEY,
    MASK_FORMAT,
    ROW_FORMAT,
    content_digest,
    head_check,
)
from rloo_cli.data.rollout_values import dump_rollout, load_rollout, sampled_lengths
from rloo_cli.data.sampling_mask import mask_tensors, read_mask_tensors
from rloo_cli.utils.files import JsonObject, write_whole_file

TEXTS = "texts"  # the tensor that holds the JSON text
TYPE_KEY, VALUE_KEY = "~type", "~value"  # for column values that JSON lacks
# How values of these types are written and read.
VALUE_TYPES: dict[str, tuple[type, Callable[[Any], str], Callable[[str], object]]] = {
    "datetime": (datetime, lambda v: v.isoformat(), datetime.fromisoformat),
    "date": (date, lambda v: v.isoformat(), date.fromisoformat),
    "time": (time, lambda v: v.isoformat(), time.fromisoformat),
    "decimal": (Decimal, str, Decimal),
    "bytes": (bytes, lambda v: base64.b64encode(v).decode(), base64.b64decode),
}
LOST_TYPE = "lost"  # any other type, stored only as text


@dataclass
class RecordedStep:
    """One step as it was trained."""

    head: JsonObject  # its run and step, and how it was computed (docs/inspect.md)
    batch: Batch  # with the log-probabilities and advantages of its updates

    @property
    def step(self) -> int:
        """The step, counted from 1."""
        return int(self.head["step"])

    @property
    def lost_columns(self) -> list[str]:
        """Data columns with values that could not be kept."""
        rows = [g.example for g in self.batch.groups]
        return sorted({n for row in rows for n, v in row.items() if isinstance(v, LostValue)})


class LostValue(str):
    """The text of a value that a record cannot hold."""


def write_rollout_record(folder: Path, batch: Batch, facts: Mapping[str, object]) -> Path:
    """Write a finished step to the run in `folder`. -> the file

    `facts`: plain values for the head.
    """
    tensors = {n: t.detach().cpu().contiguous() for n, t in _batch_tensors(batch).items()}
    rollouts = [r for g in batch.groups for r in g.rollouts]
    turns = [turn for r in rollouts for turn in r.turns or []]
    episodes = any(r.turns is not None for r in rollouts)
    has_masks = any(r.sampling_mask is not None for r in rollouts)
    head = {
        "format": MASK_FORMAT if has_masks else EPISODE_FORMAT if episodes else ROW_FORMAT,
        **({"sampling_mask": True, "episodes": episodes} if has_masks else {}),
        **facts,
        "step": batch.step + 1,
        "draws": batch.draws,
        "prompts": len(batch.groups),
        "num_generations": batch.score.shape[1],
        "rewards": batch.names,
        "longest_prompt": max(len(g.prompt_ids) for g in batch.groups),
        "longest_completion": max(len(r.completion_ids) for r in rollouts),
        "tokens": sum(len(r.completion_ids) for r in rollouts),
        "most_turns": max(len(r.turns or []) for r in rollouts),
        "longest_turn": max((len(turn.sampled_ids) for turn in turns), default=0),
        "digest": _tensor_digest(tensors),
    }
    checked = head | {CHECK_KEY: head_check(head)}
    data = save(tensors, {HEAD_KEY: json.dumps(checked)})
    path = rollout_files.rollout_path(folder, batch.step + 1)
    write_whole_file(path, data)
    return path


def _tensor_digest(tensors: dict[str, Tensor]) -> str:
    def data(tensor: Tensor) -> bytes:
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return content_digest((name, data(tensors[name])) for name in sorted(tensors))


def _batch_tensors(batch: Batch) -> dict[str, Tensor]:
    rollouts = [r for g in batch.groups for r in g.rollouts]
    tensors = {f"batch/{name}": getattr(batch, name) for name in BATCH_TENSORS}
    for name in (*ADVANTAGE_TENSORS, *OPTIONAL_BATCH_TENSORS, "reward_weights"):
        if (table := getattr(batch, name)) is not None:
            tensors[f"batch/{name}"] = table
    prompts = [g.prompt_ids for g in batch.groups]
    for name, lists in (("prompt", prompts), ("completion", [r.completion_ids for r in rollouts])):
        tensors[f"{name}_ids"] = torch.tensor([i for ids in lists for i in ids], dtype=torch.int32)
        tensors[f"{name}_lengths"] = torch.tensor([len(ids) for ids in lists], dtype=torch.int32)
    logps = [r.behaviour_logp for r in rollouts]
    if all(logp is not None for logp in logps):
        tensors["behaviour_logp"] = _smallest_exact([x for logp in logps for x in logp or []])
    tensors |= mask_tensors([r.sampling_mask for r in rollouts], [r.length for r in rollouts])
    for name in TOKEN_COLUMNS:  # groups that were not trained on have None
        columns = [t for g in batch.groups for t in getattr(g, name) or []]
        if columns:
            tensors[f"column/{name}"] = torch.cat(columns)
    texts = json.dumps(_batch_texts(batch), default=_encode_value).encode("ascii")
    tensors[TEXTS] = torch.frombuffer(bytearray(texts), dtype=torch.uint8)
    return tensors


def _smallest_exact(values: list[float]) -> Tensor:
    """Numbers in 32 bits if that loses nothing, else in 64."""
    wide = torch.tensor(values, dtype=torch.float64)
    narrow = wide.float()
    return narrow if torch.equal(narrow.double().nan_to_num(), wide.nan_to_num()) else wide


def _batch_texts(batch: Batch) -> JsonObject:
    return {
        "batch": batch.plain_values,
        "extras": batch.extras,
        "groups": [
            {
                "draw": group.prompt_offset,
                "prompt": group.prompt,
                "example": group.example,
                "columns": [n for n in TOKEN_COLUMNS if getattr(group, n) is not None],
                "rollouts": [dump_rollout(r) for r in group.rollouts],
            }
            for group in batch.groups
        ],
    }


def _encode_value(value: object) -> JsonObject:
    for name, (kind, write, _) in VALUE_TYPES.items():
        if isinstance(value, kind):
            return {TYPE_KEY: name, VALUE_KEY: write(value)}
    return {TYPE_KEY: LOST_TYPE, VALUE_KEY: repr(value)[:200]}


def _decode_value(values: JsonObject) -> object:
    if values.keys() != {TYPE_KEY, VALUE_KEY}:
        return values
    name, text = values[TYPE_KEY], values[VALUE_KEY]
    return VALUE_TYPES[name][2](text) if name in VALUE_TYPES else LostValue(text)


def read_rollout_record(folder: Path, step: int) -> RecordedStep:
    """Read a step, counted from 1, of the run in `folder`.

    Raises DataError for a file that is missing or damaged.
    """
    path = rollout_files.rollout_path(folder, step)
    head = rollout_files.read_rollout_head(path)
    try:
        tensors = load(path.read_bytes())
        if _tensor_digest(tensors) != head["digest"]:
            raise ValueError("its content has changed (the digest differs)")
        texts = json.loads(
            tensors.pop(TEXTS).numpy().tobytes().decode("ascii"), object_hook=_decode_value
        )
        return RecordedStep(head, _rebuild_batch(tensors, texts))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise rollout_files.damaged_record(path, f"{type(error).__name__}: {error}") from None


def _rebuild_batch(tensors: dict[str, Tensor], texts: JsonObject) -> Batch:
    def cut(name: str, lengths: Tensor) -> list[Tensor]:
        return list(torch.split(tensors[name], lengths.tolist()))

    lengths, k = tensors["completion_lengths"], tensors["batch/score"].shape[1]
    ids = [t.tolist() for t in cut("completion_ids", lengths)]
    logps: list[list[float] | None] = [None] * len(ids)
    if "behaviour_logp" in tensors:
        logps = [t.tolist() for t in cut("behaviour_logp", lengths)]
    saved = [r for g in texts["groups"] for r in g["rollouts"]]
    masks = read_mask_tensors(tensors, sampled_lengths(lengths.tolist(), saved))
    rollouts = [load_rollout(*parts) for parts in zip(ids, logps, saved, masks, strict=True)]
    prompts = [t.tolist() for t in cut("prompt_ids", tensors["prompt_lengths"])]
    groups = [
        Group(g["draw"], g["example"], g["prompt"], prompt, rollouts[p * k : p * k + k])
        for p, (g, prompt) in enumerate(zip(texts["groups"], prompts, strict=True))
    ]
    for name in TOKEN_COLUMNS:
        if f"column/{name}" not in tensors:
            continue
        having = [g for g, entry in zip(groups, texts["groups"], strict=True)
                  if name in entry["columns"]]  # fmt: skip
        sizes = torch.tensor([r.length for g in having for r in g.rollouts])
        parts = iter(cut(f"column/{name}", sizes))
        for group in having:
            setattr(group, name, [next(parts) for _ in range(k)])
    tables = (*BATCH_TENSORS, *ADVANTAGE_TENSORS, *OPTIONAL_BATCH_TENSORS, "reward_weights")
    columns: JsonObject = {name: tensors.get(f"batch/{name}") for name in tables}
    return Batch(groups=groups, extras=texts["extras"], **columns, **texts["batch"])


def without_updates(batch: Batch) -> Batch:
    """A copy of a batch from before its updates: only sampled and scored."""
    blank: JsonObject = dict.fromkeys(TOKEN_COLUMNS)
    groups = [replace(group, **blank) for group in batch.groups]
    unknown: JsonObject = dict.fromkeys(ADVANTAGE_TENSORS)
    return replace(batch, groups=groups, norm_skipped=False, updated=[], **unknown)

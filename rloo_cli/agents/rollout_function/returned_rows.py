"""Checks what a user function returned: one dict, whose lists have an entry per row."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rloo_cli.agents.rollout_function.turn_sampler import wrong_ids
from rloo_cli.utils.errors import GenerationError, refuse
from rloo_cli.utils.files import JsonObject

NEEDED = ("prompt_ids", "completion_ids", "logprobs")
MASKS = ("env_mask", "tool_mask")  # the second is TRL's internal name
# Fields that the function returns for every episode, besides those that the user names.
OWN_FIELDS = (*NEEDED, *MASKS, "logprob_token_ids")
# Rounding may put a certain token's log-probability a little above zero.
ROUNDING = 1e-6


@dataclass(frozen=True)
class ReturnedRow:
    """One episode, as the function returned it."""

    prompt_ids: list[int]
    completion_ids: list[int]  # T
    logprobs: list[float]  # T; ignored for the environment's tokens
    mask: list[int]  # T, 1 = the policy's own
    columns: JsonObject  # field -> value, for rewards


class RowProblem(ValueError):
    """A fault in the returned value."""


def check_returned(
    returned: object, num_rows: int, vocab_size: int, fields: Sequence[str], spec: str
) -> list[ReturnedRow]:
    """The rows that the function `spec` returned. Raises GenerationError, which names the fault.

    `fields`: those that the config names; each must be present.
    """
    try:
        return _read_rows(returned, num_rows, vocab_size, fields)
    except RowProblem as problem:
        why = "it must return a dict of prompt_ids, completion_ids and logprobs, and env_mask if"
        why += " some tokens are not the policy's, with one list per prompt (docs/agents.md)"
        what = f"{spec} returned an invalid value: {problem}"
        fix = 'return {"prompt_ids": [...], "completion_ids": [...], "logprobs": [...]}'
        refuse("agent.rollout", what, fix, why, error=GenerationError)


def _read_rows(
    returned: object, num_rows: int, vocab_size: int, fields: Sequence[str]
) -> list[ReturnedRow]:
    if not isinstance(returned, dict):
        raise RowProblem(f"it is a {type(returned).__name__}, not a dict")
    if missing := [name for name in NEEDED if name not in returned]:
        raise RowProblem(f"{missing[0]} is missing; it has {', '.join(map(str, returned))}")
    masks = [name for name in MASKS if returned.get(name) is not None]
    if len(masks) > 1:
        raise RowProblem("both env_mask and tool_mask are given, which mean the same")
    own = {n: _one_per_row(returned[n], n, num_rows) for n in (*NEEDED, *masks)}
    columns = _read_fields(returned, num_rows, fields)
    rows = []
    for i in range(num_rows):
        prompt = _read_ids(own["prompt_ids"][i], f"prompt_ids[{i}]", vocab_size)
        ids = _read_ids(own["completion_ids"][i], f"completion_ids[{i}]", vocab_size)
        mask = [1] * len(ids)
        if masks:
            mask = _read_mask(own[masks[0]][i], f"{masks[0]}[{i}]", len(ids))
        logps = _read_logprobs(own["logprobs"][i], f"logprobs[{i}]", mask)
        rows.append(ReturnedRow(prompt, ids, logps, mask, {n: v[i] for n, v in columns.items()}))
    return rows


def _as_list(value: Any, name: str) -> list[Any]:
    """A list; arrays and tensors become one."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple):
        raise RowProblem(f"{name} is a {type(value).__name__}, not a list: {value!r:.80}")
    return list(value)


def _one_per_row(value: object, name: str, num_rows: int) -> list[Any]:
    values = _as_list(value, name)
    if len(values) != num_rows:
        raise RowProblem(f"{name} has {len(values)} entries for {num_rows} prompts")
    return values


def _read_ids(value: object, name: str, vocab_size: int) -> list[int]:
    ids = _as_list(value, name)
    if not ids:
        raise RowProblem(f"{name} is empty")
    if problem := wrong_ids(ids, vocab_size):
        raise RowProblem(f"{name}: {problem}")
    return ids


def _read_mask(value: object, name: str, length: int) -> list[int]:
    mask = _as_list(value, name)
    if len(mask) != length:
        raise RowProblem(f"{name} has {len(mask)} entries for {length} completion_ids")
    if wrong := [m for m in mask if m not in (0, 1)]:
        raise RowProblem(f"{name} has {wrong[0]!r:.80}; 1 = a token of the policy, 0 = another")
    if not any(mask):
        raise RowProblem(f"{name} has no 1: the policy sampled nothing in this row")
    return [int(m) for m in mask]


def _read_logprobs(value: object, name: str, mask: Sequence[int]) -> list[float]:
    logps = _as_list(value, name)
    if len(logps) != len(mask):
        raise RowProblem(f"{name} has {len(logps)} entries for {len(mask)} completion_ids")
    for index, (logp, own) in enumerate(zip(logps, mask, strict=True)):
        if not own:
            continue
        if isinstance(logp, bool) or not isinstance(logp, int | float):
            raise RowProblem(f"{name}[{index}] is not a number: {logp!r:.80}")
        if not math.isfinite(logp) or logp > ROUNDING:
            what = "a log-probability must be finite and at most 0"
            raise RowProblem(f"{name}[{index}] is {logp}; {what}")
    return [float(logp) if own else 0.0 for logp, own in zip(logps, mask, strict=True)]


def _read_fields(
    returned: dict[Any, Any], num_rows: int, fields: Sequence[str]
) -> dict[str, list[Any]]:
    """The fields for rewards; a value that is not a list applies to every row, as in TRL."""
    found = {str(n): v for n, v in returned.items() if n not in OWN_FIELDS}
    if unknown := sorted(found.keys() - {*fields}):
        names = ", ".join([*fields, *unknown])
        raise RowProblem(f"agent.fields does not name {unknown[0]}: agent.fields=[{names}]")
    if missing := [name for name in fields if name not in found]:
        raise RowProblem(f"{missing[0]} is missing, which agent.fields names")
    columns = {}
    for name, value in found.items():
        plain = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(plain, list | tuple):
            plain = [v.tolist() if hasattr(v, "tolist") else v for v in plain]
            plain = _one_per_row(plain, name, num_rows)
        else:
            plain = [plain] * num_rows
        try:
            json.dumps(plain)
        except (TypeError, ValueError) as error:
            raise RowProblem(f"{name} cannot be recorded as JSON: {error}") from None
        columns[name] = plain
    return columns

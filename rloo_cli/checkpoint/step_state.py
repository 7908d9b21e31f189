"""The batch of a step that is not done yet, as a checkpoint keeps it: tensors and plain values."""

from typing import Any

import torch
from torch import Tensor

from rloo_cli.data.batch import Batch, Group, Rollout
from rloo_cli.data.packing import TOKEN_COLUMNS
from rloo_cli.data.prompts import Prompts
from rloo_cli.reporting.update_metrics import UpdateMetrics
from rloo_cli.run import StepProgress

BATCH_TENSORS = ("raw", "score", "shaped", "scorable", "masked")  # of a batch, always there
ADVANTAGE_TENSORS = ("kl", "reward", "advantage", "usable")  # there once advantages are known
OPTIONAL_BATCH_TENSORS = ("greedy", "plain")  # of a batch, where its algorithm has it
BATCH_VALUES = ("step", "names", "active", "draws", "norm_skipped", "updated")
ROLLOUT_FIELDS = ("text", "finish_reason", "terminated", "seed", "weight_version")


def dump_step(
    step_progress: StepProgress, update_metrics: UpdateMetrics | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A cycle as of its last mark, as tensors and plain values. `safe`: those of all ranks."""
    batch, update_metrics = step_progress.batch, update_metrics or step_progress.marked_updates
    tensors = {f"batch/{name}": getattr(batch, name) for name in BATCH_TENSORS}
    tensors |= {
        f"batch/{n}": t for n in OPTIONAL_BATCH_TENSORS if (t := getattr(batch, n)) is not None
    }
    rollouts = [r for g in batch.groups for r in g.rollouts]
    tensors["ids"] = torch.tensor([i for r in rollouts for i in r.completion_ids])
    said = [r.behaviour_logp for r in rollouts]
    if all(s is not None for s in said):
        tensors["behaviour_logp"] = torch.tensor(
            [x for s in said for x in s or []], dtype=torch.float64
        )
    if step_progress.prepared:
        found = {f"batch/{n}": getattr(batch, n) for n in ADVANTAGE_TENSORS}
        tensors |= {n: v for n, v in found.items() if v is not None}
        for name in TOKEN_COLUMNS:
            columns = [getattr(g, name) for g in batch.groups]
            # Groups that are not trained on have none.
            flat = [t for c in columns for t in c or []]
            if flat:
                tensors[f"column/{name}"] = torch.cat(flat)
    tensors |= {f"updates/{n}": v for n, v in update_metrics.dump().items()}
    plain = {
        "prepared": step_progress.prepared,
        "iteration": step_progress.iteration,
        "done": step_progress.done,
        "work": dict(update_metrics.work),
        "batch": {
            **{n: getattr(batch, n) for n in BATCH_VALUES},
            "facts": {k: v for k, v in batch.facts.items() if v == v and abs(v) != float("inf")},
            "extras": batch.extras,
            "notes": batch.notes,
        },
        "groups": [_dump_group(group) for group in batch.groups],
    }
    return {n: t.detach().cpu().contiguous() for n, t in tensors.items()}, plain


def _dump_group(group: Group) -> dict[str, Any]:
    return {
        "draw": group.prompt_offset,
        "columns": [n for n in TOKEN_COLUMNS if getattr(group, n) is not None],
        "rollouts": [
            {n: getattr(r, n) for n in ROLLOUT_FIELDS}
            | {"length": len(r.completion_ids), "mask": r.mask}
            for r in group.rollouts
        ],
    }


def load_step(tensors: dict[str, Tensor], plain: dict[str, Any], prompts: Prompts) -> StepProgress:
    """What `dump` gave -> the cycle. The prompts are drawn again, nothing is sampled."""
    tensors = dict(tensors)
    values, k = plain["batch"], tensors["batch/score"].shape[1]
    groups = [prompts.groups_at(g["draw"], 1)[0] for g in plain["groups"]]
    told = [r for g in plain["groups"] for r in g["rollouts"]]
    lengths = [r["length"] for r in told]
    ids = [t.tolist() for t in torch.split(tensors["ids"], lengths)]
    said: list[Any] = [None] * len(told)
    if "behaviour_logp" in tensors:
        said = [t.tolist() for t in torch.split(tensors["behaviour_logp"], lengths)]
    rollouts = [
        Rollout(ids[i], behaviour_logp=said[i], mask=r["mask"], **{n: r[n] for n in ROLLOUT_FIELDS})
        for i, r in enumerate(told)
    ]
    for p, group in enumerate(groups):
        group.rollouts = rollouts[p * k : p * k + k]
    for name in TOKEN_COLUMNS if plain["prepared"] else ():
        if f"column/{name}" in tensors:
            having = [p for p, g in enumerate(plain["groups"]) if name in g["columns"]]
            sizes = [len(r.completion_ids) for p in having for r in groups[p].rollouts]
            parts = iter(torch.split(tensors[f"column/{name}"], sizes))
            for p in having:
                setattr(groups[p], name, [next(parts) for _ in range(k)])
    tables: dict[str, Any] = {n: tensors[f"batch/{n}"] for n in BATCH_TENSORS}
    tables |= {n: tensors.get(f"batch/{n}") for n in (*ADVANTAGE_TENSORS, *OPTIONAL_BATCH_TENSORS)}
    batch = Batch(groups=groups, **tables, **values)
    updates = UpdateMetrics.from_tensors(
        {n.partition("/")[2]: t for n, t in tensors.items() if n.startswith("updates/")},
        plain["work"],
    )
    position = {n: plain[n] for n in ("prepared", "iteration", "done")}
    return StepProgress(batch, updates, marked_updates=updates.copy(), **position)

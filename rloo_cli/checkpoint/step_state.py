"""The batch of an unfinished step, as a checkpoint stores it: tensors and plain values."""

import torch
from torch import Tensor

from rloo_cli.data.batch import (
    ADVANTAGE_TENSORS,
    BATCH_TENSORS,
    OPTIONAL_BATCH_TENSORS,
    Batch,
    Group,
)
from rloo_cli.data.packing import TOKEN_COLUMNS
from rloo_cli.data.prompts import Prompts
from rloo_cli.data.rollout_values import dump_rollout, load_rollout, sampled_lengths
from rloo_cli.data.sampling_mask import mask_tensors, read_mask_tensors
from rloo_cli.reporting.update_metrics import UpdateMetrics
from rloo_cli.run import StepProgress
from rloo_cli.utils.files import JsonObject


def dump_step(
    step_progress: StepProgress, update_metrics: UpdateMetrics | None = None
) -> tuple[dict[str, Tensor], JsonObject]:
    """The step as of its last mark, as named tensors and plain values.

    `update_metrics`: those summed over all ranks; None for those of this process.
    """
    batch, update_metrics = step_progress.batch, update_metrics or step_progress.marked_updates
    tensors = {f"batch/{name}": getattr(batch, name) for name in BATCH_TENSORS}
    tensors |= {
        f"batch/{n}": t for n in OPTIONAL_BATCH_TENSORS if (t := getattr(batch, n)) is not None
    }
    rollouts = [r for g in batch.groups for r in g.rollouts]
    tensors["ids"] = torch.tensor([i for r in rollouts for i in r.completion_ids])
    logps = [r.behaviour_logp for r in rollouts]
    if all(logp is not None for logp in logps):
        flat_logp = [x for logp in logps for x in logp or []]
        tensors["behaviour_logp"] = torch.tensor(flat_logp, dtype=torch.float64)
    tensors |= mask_tensors([r.sampling_mask for r in rollouts], [r.length for r in rollouts])
    if step_progress.prepared:
        tensors |= {
            f"batch/{n}": t for n in ADVANTAGE_TENSORS if (t := getattr(batch, n)) is not None
        }
        for name in TOKEN_COLUMNS:
            # Groups that are not trained on have None instead of a list.
            columns = [t for g in batch.groups for t in getattr(g, name) or []]
            if columns:
                tensors[f"column/{name}"] = torch.cat(columns)
    tensors |= {f"updates/{n}": v for n, v in update_metrics.dump().items()}
    plain = {
        "prepared": step_progress.prepared,
        "iteration": step_progress.iteration,
        "done": step_progress.done,
        "work": dict(update_metrics.work),
        "batch": {
            **batch.plain_values,
            "facts": {k: v for k, v in batch.facts.items() if v == v and abs(v) != float("inf")},
            "fact_counts": batch.fact_counts,
            "extras": batch.extras,
            "notes": batch.notes,
        },
        "groups": [_dump_group(group) for group in batch.groups],
    }
    return {n: t.detach().cpu().contiguous() for n, t in tensors.items()}, plain


def _dump_group(group: Group) -> JsonObject:
    return {
        "draw": group.prompt_offset,
        "columns": [n for n in TOKEN_COLUMNS if getattr(group, n) is not None],
        "rollouts": [dump_rollout(r) | {"length": len(r.completion_ids)} for r in group.rollouts],
    }


def load_step(tensors: dict[str, Tensor], plain: JsonObject, prompts: Prompts) -> StepProgress:
    """Rebuild the step that `dump_step` saved. Prompts are read again; nothing is sampled."""
    values, k = plain["batch"], tensors["batch/score"].shape[1]
    groups = [prompts.groups_at(g["draw"], 1)[0] for g in plain["groups"]]
    saved = [r for g in plain["groups"] for r in g["rollouts"]]
    lengths = [r["length"] for r in saved]
    ids = [t.tolist() for t in torch.split(tensors["ids"], lengths)]
    logps: list[list[float] | None] = [None] * len(saved)
    if "behaviour_logp" in tensors:
        logps = [t.tolist() for t in torch.split(tensors["behaviour_logp"], lengths)]
    masks = read_mask_tensors(tensors, sampled_lengths(lengths, saved))
    rollouts = [load_rollout(*parts) for parts in zip(ids, logps, saved, masks, strict=True)]
    for p, group in enumerate(groups):
        group.take_rollouts(rollouts[p * k : p * k + k])
    for name in TOKEN_COLUMNS if plain["prepared"] else ():
        if f"column/{name}" in tensors:
            with_column = [p for p, g in enumerate(plain["groups"]) if name in g["columns"]]
            sizes = [r.length for p in with_column for r in groups[p].rollouts]
            parts = iter(torch.split(tensors[f"column/{name}"], sizes))
            for p in with_column:
                setattr(groups[p], name, [next(parts) for _ in range(k)])
    tables: JsonObject = {n: tensors[f"batch/{n}"] for n in BATCH_TENSORS}
    tables |= {n: tensors.get(f"batch/{n}") for n in (*ADVANTAGE_TENSORS, *OPTIONAL_BATCH_TENSORS)}
    batch = Batch(groups=groups, **tables, **values)
    sums = {n.partition("/")[2]: t for n, t in tensors.items() if n.startswith("updates/")}
    updates = UpdateMetrics.from_tensors(sums, plain["work"])
    position = {n: plain[n] for n in ("prepared", "iteration", "done")}
    return StepProgress(batch, updates, marked_updates=updates.copy(), **position)

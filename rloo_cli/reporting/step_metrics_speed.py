"""How fast a step was: per second, of its time, and of what the device can do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rloo_cli.data.packing import LAYOUTS
from rloo_cli.data.batch import Batch

if TYPE_CHECKING:
    from rloo_cli.distributed.world import World
    from rloo_cli.reporting.update_metrics import Updates

Row = dict[str, float]

# Dense bfloat16 FLOP/s by the makers' data sheets; of another device nothing is said.
PEAK = {
    "B200": 2250e12, "H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12,
    "A800": 312e12, "L40S": 362e12, "L4": 121e12, "A10": 125e12, "RTX 4090": 165e12,
}  # fmt: skip
TRAINED = ("update", "reference", "old_logp", "value")  # phases whose FLOP `Updates.did` counts


def speed(batch: Batch, updates: Updates, row: Row, layout: str, passes: int, world: World) -> Row:
    """Metrics perf/* and memory/* of a step whose seconds `row` has.

    layout: of the policy's forward pass. passes: over the batch (num_iterations).

    perf/mfu: FLOP of rows that were really computed, padding and recomputation left out, over
    what the device could have done in the seconds of the train phase.
    """
    seconds = row["step_time"]
    rollouts = [(g, r) for g in batch.groups for r in g.rollouts]
    tokens = sum(len(g.prompt_ids) + r.length for g, r in rollouts)
    waited = sum(row.get(f"time/{phase}", 0.0) for phase in ("data", "generation", "reward"))
    found = {
        "perf/completions_per_s": len(rollouts) / seconds,
        "perf/tokens_per_s": tokens / seconds,
        "perf/rollout_wait_frac": waited / seconds,
        "perf/level": float(LAYOUTS.index(layout)),
    }
    work = updates.work
    if "rows" in work:
        found["perf/rows"] = work["rows"]
        found["perf/padding_frac"] = work["padding"] / work["rows"]
    found["perf/forwarded_frac"] = work.get("completions", 0.0) / (len(rollouts) * passes)
    if world.device.type == "cuda":
        found["perf/tokens_per_s_per_gpu"] = tokens / seconds / world.size
        found["memory/peak_gb"] = torch.cuda.max_memory_allocated(world.device) / 1e9
        found["memory/reserved_gb"] = torch.cuda.memory_reserved(world.device) / 1e9
        busy = sum(row.get(f"time/{phase}", 0.0) for phase in TRAINED)
        if (most := peak(torch.cuda.get_device_name(world.device))) and busy:
            found["perf/mfu"] = work.get("flop", 0.0) / busy / most / world.size
    return found


def peak(name: str) -> float | None:
    """FLOP/s of a device by its name."""
    return next((flops for key, flops in PEAK.items() if key in name), None)

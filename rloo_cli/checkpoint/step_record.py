"""Records a finished step's rollouts, for `rloo replay` (docs/inspect.md)."""

from importlib import metadata

import torch

from rloo_cli.data import rollout_files, rollout_record
from rloo_cli.data.batch import Batch
from rloo_cli.data.fingerprint import tokenizer_digest
from rloo_cli.reporting.update_metrics import UpdateMetrics
from rloo_cli.run import Run
from rloo_cli.utils.files import JsonObject

# Of forward passes; they determine a step's micro-batches.
RECORDED_LIMITS = ("tokens", "no_grad_tokens", "completions", "no_grad_completions")


def record_rollouts(run: Run, batch: Batch, updates: UpdateMetrics) -> None:
    """Record a step that was just trained, if it is due; its counters have not advanced yet.

    Rank 0 writes the whole step, since every rank has all groups: one file, complete or missing.
    """
    settings, step = run.config.logging, run.state.step + 1
    if not settings.rollouts_every or step % settings.rollouts_every or not run.world.is_main:
        return
    with run.clock.phase("save"):
        rollout_record.write_rollout_record(run.folder, batch, _record_head(run, updates))
        rollout_files.prune_rollout_files(run.folder, settings.rollouts_keep_last)


def _record_head(run: Run, updates: UpdateMetrics) -> JsonObject:
    """The record's head: its run, what rewards saw of the training, and results of the updates."""
    state = run.state.dump() | {"updates": run.state.updates - updates.num_updates}
    del state["entropy_control"]  # its value at the step's start is not known here
    return {
        "state": state,  # when the step began
        "num_steps": run.num_steps,
        "num_prompts": len(run.prompts),
        "updates": {name: list(values) for name, values in updates.scalars.items()},
        "seed": run.config.seed,
        "shuffle": run.prompts.shuffle,
        "conversational": run.prompts.conversational,
        "fingerprint": run.prompts.fingerprint,
        "tokenizer": tokenizer_digest(run.tokenizer),
        "vocab_size": run.policy.vocab_size,
        "backend": run.config.generation.backend,
        "attempt": run.attempt,
        **({} if run.tools is None else {"tools": run.tools.to_json()}),
        "computed_on": {
            "device": run.world.device.type,
            "dtype": str(run.policy.dtype).removeprefix("torch."),
            "ranks": run.world.size,
            "threads": torch.get_num_threads(),
            "torch": metadata.version("torch"),
            "rloo": metadata.version("rloo-cli"),
        },
        "limits": {name: getattr(run.forward_limits, name) for name in RECORDED_LIMITS},
    }

"""Trainer and engine are asked for the same log-probabilities, on prompts of the data.

Done before an engine's first completion is used, and again after it was lost. Beyond the tolerance
something is wrong that no version label can tell; what it usually is stands in the error.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.generation.vllm.engine import EngineCompletion
from rloo_cli.utils.errors import GenerationError, Problem

PARITY_PROMPTS, PARITY_TOKENS = 8, 16
PARITY_CAUSES = (
    "other weights; another dtype; raw instead of processed log-probabilities; text that was"
    " tokenised again; two BOS tokens"
)


def check_parity(
    groups: Sequence[Group], completions: Sequence[EngineCompletion], policy: Any, tolerance: float
) -> float:
    """Rms difference of answers[i] to the prompt of groups[i], in nats per token.

    Raises GenerationError beyond `tolerance`.
    """
    probes = [
        Group(g.prompt_offset, g.example, g.prompt, g.prompt_ids, [_probe_rollout(a)])
        for g, a in zip(groups, completions, strict=True)
    ]
    micro = policy.pack(probes, whole_group_slices(probes, range(len(probes))))
    ours = policy.frozen_logp(micro).logp.float()
    theirs = micro.behaviour_logp
    assert theirs is not None
    found = rms_difference(ours, theirs)
    if not found <= tolerance:
        worst = int((ours - theirs).abs().nan_to_num(torch.inf).argmax())
        raise GenerationError(
            Problem(
                "trainer and engine disagree about the same tokens",
                f"{len(probes)} prompts, {micro.target.numel()} tokens",
                f"rms {found:.4g} nats, expected at most {tolerance:g}; the worst token:"
                f" {float(ours[worst]):.5f} here, {float(theirs[worst]):.5f} there",
                f"look for, in this order: {PARITY_CAUSES}",
            )
        )
    return found


def rms_difference(ours: Tensor, theirs: Tensor) -> float:
    """Root of the mean squared difference. (N,), (N,)"""
    return float((ours - theirs).double().square().mean().sqrt())


def _probe_rollout(completion: EngineCompletion) -> Rollout:
    return Rollout(
        completion.ids,
        "",
        completion.finish_reason,
        False,
        0,
        0,
        behaviour_logp=list(completion.logp),
    )

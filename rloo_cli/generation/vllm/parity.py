"""The parity check: trainer and engine compute the same log-probabilities on prompts of the data.

It runs before an engine's first completion is used, and again after an engine was lost. Beyond
the tolerance something is wrong that no version label shows; the error lists the usual causes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.generation.vllm.engine import EngineCompletion
from rloo_cli.policy.model import Policy
from rloo_cli.utils.errors import GenerationError, refuse

PARITY_PROMPTS, PARITY_TOKENS = 8, 16
PARITY_CAUSES = (
    "other weights; another dtype; raw instead of processed log-probabilities; text that was"
    " tokenized again; two BOS tokens"
)


def check_parity(
    groups: Sequence[Group], completions: Sequence[EngineCompletion], policy: Policy,
    tolerance: float,
) -> float:  # fmt: skip
    """The rms difference of the log-probabilities of trainer and engine, in nats per token.

    `completions[i]` is the engine's for the prompt of `groups[i]`. Raises GenerationError if the
    difference is above `tolerance`, or is NaN.
    """
    probes = [
        Group(
            g.prompt_offset, g.example, g.prompt, g.prompt_ids, [_probe_rollout(a)], media=g.media
        )
        for g, a in zip(groups, completions, strict=True)
    ]
    micro_batch = policy.pack(probes, whole_group_slices(probes, range(len(probes))))
    ours = policy.frozen_logp(micro_batch).logp.float()
    theirs = micro_batch.behaviour_logp
    assert theirs is not None
    found = rms_difference(ours, theirs)
    if not found <= tolerance:
        worst = int((ours - theirs).abs().nan_to_num(torch.inf).argmax())
        what = "trainer and engine compute different log-probabilities for the same tokens"
        where = f"{len(probes)} prompts, {micro_batch.target.numel()} tokens"
        why = (
            f"rms {found:.4g} nats, expected at most {tolerance:g}; the worst token:"
            f" {float(ours[worst]):.5f} here, {float(theirs[worst]):.5f} there"
        )
        fix = f"look for, in this order: {PARITY_CAUSES}"
        refuse(where, what, fix, why, error=GenerationError)
    return found


def rms_difference(ours: Tensor, theirs: Tensor) -> float:
    """The root of the mean squared difference of two tensors. (N,), (N,)"""
    return float((ours - theirs).double().square().mean().sqrt())


def _probe_rollout(completion: EngineCompletion) -> Rollout:
    ids, logp = completion.ids, list(completion.logp)
    mask = completion.sampling_mask
    reason = completion.finish_reason
    return Rollout(ids, "", reason, False, 0, 0, behaviour_logp=logp, sampling_mask=mask)

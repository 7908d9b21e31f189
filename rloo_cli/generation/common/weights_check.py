"""Checks that the sampler had the trainer's weights, by log-probabilities of the same tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rloo_cli.config.rules_sampling import inexact_settings
from rloo_cli.config.schema import GenerationConfig
from rloo_cli.data.batch import Rollout
from rloo_cli.data.pass_results import ForwardPass
from rloo_cli.utils.errors import GenerationError, refuse


@dataclass(frozen=True)
class TokenLogprobs:
    """The trainer's log-probabilities of a completion that has the sampler's."""

    prompt_offset: int
    completion_index: int  # within its group
    trainer_logp: Tensor  # (S,), or of the last of its tokens alone
    rollout: Rollout

    @property
    def sampler_logp(self) -> list[float] | None:
        """The sampler's log-probabilities of the same tokens."""
        logp = self.rollout.sampled_logp
        return None if logp is None else logp[len(logp) - len(self.trainer_logp) :]


@torch.no_grad()
def sum_squared_gaps(passes: Sequence[ForwardPass], device: torch.device) -> Tensor:
    """How far the passes' log-probabilities are from the sampler's: sums that stay on the device.

    -> (3,) float64: squared differences, tokens known to both, completions without a finite KL
    """
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    known = [m for p in passes if (m := p.micro_batch).behaviour_logp is not None]
    ours, theirs = [m.old_logp for m in known], [m.behaviour_logp for m in known]
    if known:
        gap = torch.cat(ours).double() - torch.cat(theirs)  # type: ignore[arg-type]
        sums[0], sums[1] = gap.square().nan_to_num(0.0).sum(), (~gap.isnan()).sum()
    if kls := [p.kl for p in passes if p.kl is not None]:
        sums[2] = (~torch.cat(kls).isfinite()).sum()
    return sums


def check_same_weights(
    step: int, completions: Sequence[TokenLogprobs], generation: GenerationConfig, tolerance: float
) -> None:
    """Raise GenerationError (exit 6) if the two differ by more than rounding explains.

    `step` counts from 0. `tolerance`: rms nats per token. With top_p and other filters they cannot
    be compared unless the sampler reported the kept ids (generation.return_sampling_mask).
    """
    if inexact_settings(generation):
        return
    compared = [(c, logp) for c in completions if (logp := c.sampler_logp) is not None]
    if not compared:
        return
    # All at once: one by one takes longer than the update on a GPU.
    ours = torch.cat([c.trainer_logp for c, _ in compared]).double()
    flat = [x for _, logp in compared for x in logp]
    theirs = torch.tensor(flat, dtype=torch.float64).to(ours.device)
    gap = (ours - theirs).abs().nan_to_num(0.0)
    count = int((~ours.isnan() & ~theirs.isnan()).sum())
    rms = math.sqrt(float(gap.square().sum()) / count) if count else 0.0
    if rms <= tolerance:
        return
    lengths = torch.tensor([len(logp) for _, logp in compared])
    worst, _ = compared[int(torch.searchsorted(lengths.cumsum(0), int(gap.argmax()), right=True))]
    where = f"completion {worst.completion_index} of draw {worst.prompt_offset}"
    versions = sorted({c.rollout.last_version for c, _ in compared})
    why = (
        f"log-probabilities differ by {rms:.4g} nats (rms of {count} tokens), expected at most"
        f" {tolerance:g}; most in {where}: {float(gap.max()):.4g}; their label is"
        f" version {', '.join(map(str, versions))}"
    )
    fix = "check whether another client changed the server's weights"
    if generation.samples_here:
        cause = "this model's decoding with a cache differs from its forward pass"
        fix = f"{cause}: use generation=vllm_server, or another model"
    what = f"step {step + 1}: the sampler had other weights than the trainer"
    refuse("nothing was updated", what, fix, why, error=GenerationError)

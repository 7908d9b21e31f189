"""What a batch's updates need beforehand: the other log-probabilities, KL, reward, advantage.

Where the policy still is the sampler (`Run.fused`), its own numbers of the training forward are
the old ones, and only the reference's are computed here.
"""

import torch
from torch import Tensor

from rloo_cli import stop
from rloo_cli.minibatches import slices
from rloo_cli.parts import Run
from rloo_cli.rollout import Batch, Micro, pack, unpack
from rloo_cli.updates import Updates


@torch.no_grad()
def prepare(run: Run, batch: Batch, updates: Updates) -> None:
    """What must be known before the first update: ref_logp, and old_logp where it is not free."""
    passes = [("reference", run.reference, "ref_logp")] if run.reference else []
    passes += [] if run.fused else [("old_logp", run.policy, "old_logp")]
    for phase, model, name in passes:
        with run.clock.phase(phase):
            for index in slices(batch.active, run.no_grad_groups):
                stop.check()
                micro = pack(batch.groups, index, batch.masked, run.world.device)
                found = model.frozen_logp(micro)
                unpack(found.logp, micro, batch.groups, name)
                if model is run.policy:
                    unpack(found.kl_logp, micro, batch.groups, "kl_logp")
    if not run.fused and batch.active:
        parts = slices(batch.active, run.no_grad_groups)
        micros = (pack(batch.groups, i, batch.masked, run.world.device) for i in parts)
        kl = [k for m in micros if (k := measure(run, m, updates)) is not None]
        advantages(run, batch, batch.active, torch.cat(kl) if kl else None)


def measure(run: Run, micro: Micro, updates: Updates) -> Tensor | None:
    """KL of each sequence to the reference, in float64 on the CPU. -> (S,) or None"""
    kl, ref = None, micro.ref_logp
    if ref is not None:
        kl = run.algorithm.sequence_kl(micro.kl_old, ref, micro, run.config.algorithm)
    updates.sampled(micro, kl)
    return None if kl is None else kl.detach().double().cpu()


def advantages(run: Run, batch: Batch, index: list[int], kl: Tensor | None) -> None:
    """Fill in reward and advantage of these groups. kl (groups*K,) or None"""
    score, rows = batch.shaped[index], batch.scorable[index]
    kl = None if kl is None else kl.view_as(score)
    batch.settle(index, kl, run.algorithm.advantages(score, kl, rows, run.config.algorithm))

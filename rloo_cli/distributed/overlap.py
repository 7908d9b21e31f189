"""Sums of gradients over ranks that have a copy of the model each, begun while backward still runs.

Gradients lie in buckets, in an order that is the same on all ranks: those of the last parameters
first, as backward completes them. In the last micro-batch of an update a bucket is sent as soon as
all its gradients are whole and the buckets before it are sent; `finish` sends the rest and waits.
So ranks may have unequal numbers of micro-batches, or none: whatever one of them sends early, the
others send in the same order, at the latest in `finish`.

A gradient is whole when its hook has fired, which torch calls once in a backward pass, after the
last addition. Passes within a pass (reentrant checkpointing) make a hook fire several times: the
first backward pass of a run shows which, and those gradients wait for the pass to end.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rloo_cli.distributed.world import World

BUCKET_BYTES = 64 * 2**20  # bytes of gradients that are summed at once


class GradientReducer:
    """Gradients of `weights`, summed where they lie, of float32 `masters` in float32.

    `apart`: those of a second model, whose backward passes come before the policy's own in each
    micro-batch. `group`: the ranks; None = torch's default group. `size`: of a bucket, in bytes.
    """

    def __init__(
        self,
        world: World,
        weights: Sequence[Tensor],
        masters: Sequence[Tensor],
        value_parameters: Collection[nn.Parameter] = (),
        group: Any = None,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self.world, self.weights, self.masters = world, weights, masters
        self.group: Any = dist.group.WORLD if group is None else group
        others = {id(p) for p in value_parameters}
        self.value_indices = [i for i, w in enumerate(weights) if id(w) in others]
        policy = [i for i, w in enumerate(weights) if id(w) not in others]
        parts = [self.value_indices[::-1], policy[::-1]]
        self.buckets = [
            b for part in parts for b in _split_into_buckets(part, masters, bucket_bytes)
        ]
        self.bucket_of_gradient = {
            i: number for number, bucket in enumerate(self.buckets) for i in bucket
        }
        # torch's DETAIL lets every call wait for the other ranks, which may still be elsewhere.
        self.can_overlap = dist.get_debug_level() != dist.DebugLevel.DETAIL
        self.multi_fire_gradients: set[int] = set()  # gradients that come in parts
        self.has_seen_backward = False  # whether a backward pass has shown which
        self.hook_calls: Counter[int] = Counter()  # in this pass
        self._reset_update()
        for i, weight in enumerate(weights):
            weight.register_post_accumulate_grad_hook(self._make_hook(i))

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """One backward pass; `last`: nothing of the update comes after it on this rank."""
        self.hook_calls.clear()
        if is_last:
            self.in_last_micro_batch = True
            self._mark_ready(self.value_indices)
            self.hooks_active = self.has_seen_backward
        try:
            loss.backward()
        finally:
            self.hooks_active = False
        self.has_seen_backward = True
        if is_last:
            self._mark_ready(range(len(self.weights)))

    def skip_micro_batch(self, is_last: bool) -> None:
        """This rank has nothing in a micro-batch that others have; `last`: of the update."""
        if is_last:
            self.in_last_micro_batch = True
            self._mark_ready(range(len(self.weights)))

    @torch.no_grad()
    def finalize_reduce(self, masters: Sequence[Tensor]) -> None:
        """All ranks: the gradients are summed when this returns, in place.

        One that only some ranks have counts as 0 on the others; one that none has stays None.
        """
        try:
            have = [float(self._gradient_owner(i).grad is not None) for i in range(len(masters))]
            wanted = self.world.sum(torch.tensor(have)).tolist()
            for bucket in self.buckets[self.num_buckets_sent :]:
                some = [i for i in bucket if wanted[i]]
                for master in (self._gradient_owner(i) for i in some):
                    if master.grad is None:
                        master.grad = torch.zeros_like(master)
                self._start_all_reduce(some)
            for work in self.pending_works:
                work.wait()
        finally:
            self._reset_update()

    def abort_reduce(self) -> None:
        """All ranks: end what is under way in an update that is given up."""
        if self.in_last_micro_batch:
            self.finalize_reduce(self.masters)

    def _reset_update(self) -> None:
        self.in_last_micro_batch = (
            False  # the last micro-batch of the update: what may be sent, may be now
        )
        self.hooks_active = False  # to hooks, which say that a gradient is whole
        self.ready_gradients: set[int] = set()
        self.missing_per_bucket = [
            len(bucket) for bucket in self.buckets
        ]  # gradients that are not whole
        self.num_buckets_sent = 0  # buckets
        self.pending_works: list[Any] = []

    def _make_hook(self, i: int) -> Callable[[Tensor], None]:
        def fire(weight: Tensor) -> None:
            self.hook_calls[i] += 1
            if self.bucket_of_gradient[i] < self.num_buckets_sent:
                raise RuntimeError("a gradient came in parts, and was sent before it was whole")
            if self.hook_calls[i] > 1:
                self.multi_fire_gradients.add(i)
                self._mark_not_ready(i)
            elif self.hooks_active and i not in self.multi_fire_gradients:
                self._mark_ready([i])

        return fire

    def _mark_not_ready(self, i: int) -> None:
        if i in self.ready_gradients:
            self.ready_gradients.discard(i)
            self.missing_per_bucket[self.bucket_of_gradient[i]] += 1

    def _mark_ready(self, indices: Collection[int]) -> None:
        """Nothing is added to these any more; send what is complete."""
        for i in indices:
            grad = self.weights[i].grad
            if (
                i not in self.ready_gradients
                and grad is not None
                and grad.dtype == self.masters[i].dtype
            ):
                self.ready_gradients.add(i)
                self.missing_per_bucket[self.bucket_of_gradient[i]] -= 1
        while (
            self.can_overlap
            and self.num_buckets_sent < len(self.buckets)
            and not self.missing_per_bucket[self.num_buckets_sent]
        ):
            self._start_all_reduce(self.buckets[self.num_buckets_sent])
            self.num_buckets_sent += 1

    def _gradient_owner(self, i: int) -> Tensor:
        """What the gradient hangs on: the weight, until `grad_norm` moves it to the master."""
        return self.masters[i] if self.weights[i].grad is None else self.weights[i]

    def _start_all_reduce(self, bucket: Sequence[int]) -> None:
        """Begin to sum these gradients, as they lie: no copy of a bucket is made here."""
        gradients = []
        for owner in map(self._gradient_owner, bucket):
            assert owner.grad is not None
            if not owner.grad.is_contiguous():
                owner.grad = owner.grad.contiguous()
            gradients.append(owner.grad)
        if gradients:
            options = dist.AllreduceCoalescedOptions()
            options.asyncOp = True
            self.pending_works.append(self.group.allreduce_coalesced(gradients, options))


def _split_into_buckets(
    order: Sequence[int], masters: Sequence[Tensor], bucket_bytes: int
) -> Iterator[list[int]]:
    """Runs of one dtype that fill a bucket; a larger one is alone."""
    run: list[int] = []
    for i in order:
        there = sum(masters[j].nbytes for j in run)
        other = bool(run) and masters[i].dtype != masters[run[0]].dtype
        if run and (other or there + masters[i].nbytes > bucket_bytes):
            yield run
            run = []
        run.append(i)
    if run:
        yield run

"""Sums gradients over the ranks of `ddp`, starting while the backward pass is still running.

Gradients lie in buckets, in an order that is the same on all ranks: those of the last parameters
first, as backward completes them. In the last micro-batch of an update a bucket is sent as soon as
all its gradients are complete and the buckets before it are sent; `finalize_reduce` sends the rest
and waits. So ranks may have unequal numbers of micro-batches, or none: whatever one of them sends
early, the others send in the same order, at the latest in `finalize_reduce`.

A gradient is complete when its hook has fired, which torch calls once in a backward pass, after the
last addition. Passes within a pass (reentrant checkpointing) make a hook fire several times: the
first backward pass of a run shows for which gradients, and those wait for the pass to end.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rloo_cli.distributed.world import World

BUCKET_BYTES = 64 * 2**20  # bytes of gradients that are summed at once


class GradientReducer:
    """Sums the gradients of `weights` in place, those of float32 `masters` in float32.

    `value_parameters`: of the value model, whose backward passes come before the policy's in each
    micro-batch. `group`: the ranks; None = torch's default group.
    """

    def __init__(
        self,
        world: World,
        weights: Sequence[Tensor],
        masters: Sequence[Tensor],
        value_parameters: Collection[nn.Parameter] = (),
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self.world, self.weights, self.masters = world, weights, masters
        group = group or dist.group.WORLD
        assert group is not None
        self.group = group
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
        # torch's DETAIL makes every call wait for the other ranks, which may still be elsewhere.
        self.can_overlap = dist.get_debug_level() != dist.DebugLevel.DETAIL
        self.multi_fire_gradients: set[int] = set()  # gradients that come in parts
        self.has_seen_backward = False  # whether a backward pass has shown which
        self.hook_calls: Counter[int] = Counter()  # in this pass
        self._reset_update()
        for i, weight in enumerate(weights):
            weight.register_post_accumulate_grad_hook(self._make_hook(i))

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Run one backward pass. `is_last`: it is the update's last on this rank."""
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
        """Record that this rank has no micro-batch when others have one."""
        if is_last:
            self.in_last_micro_batch = True
            self._mark_ready(range(len(self.weights)))

    @torch.no_grad()
    def finalize_reduce(self, masters: Sequence[Tensor]) -> None:
        """Sum the gradients, in place. All ranks call it together.

        One that only some ranks have counts as 0 on the others; one that no rank has stays None.
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
        """Cancel the sums of an abandoned update. All ranks call it together."""
        if self.in_last_micro_batch:
            self.finalize_reduce(self.masters)

    def _reset_update(self) -> None:
        self.in_last_micro_batch = False  # of the update: complete buckets may be sent
        self.hooks_active = False  # a hook's call means that its gradient is complete
        self.ready_gradients: set[int] = set()
        self.missing_per_bucket = [len(bucket) for bucket in self.buckets]  # incomplete gradients
        self.num_buckets_sent = 0  # buckets
        self.pending_works: list[dist.Work] = []

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
        """Mark these gradients as complete, and send the buckets that are."""
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
        """The tensor with the gradient: the weight, until `grad_norm` moves it to the master."""
        return self.masters[i] if self.weights[i].grad is None else self.weights[i]

    def _start_all_reduce(self, bucket: Sequence[int]) -> None:
        """Begin to sum these gradients in place, without copying them to a bucket."""
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
    """Split the order into buckets of one dtype; a gradient above the size has its own."""
    run: list[int] = []
    for i in order:
        filled = sum(masters[j].nbytes for j in run)
        other = bool(run) and masters[i].dtype != masters[run[0]].dtype
        if run and (other or filled + masters[i].nbytes > bucket_bytes):
            yield run
            run = []
        run.append(i)
    if run:
        yield run

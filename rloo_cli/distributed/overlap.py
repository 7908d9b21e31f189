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

BUCKET = 64 * 2**20  # bytes of gradients that are summed at once


class Reduction:
    """Gradients of `weights`, summed where they lie, of float32 `masters` in float32.

    `apart`: those of a second model, whose backward passes come before the policy's own in each
    micro-batch. `group`: the ranks; None = torch's default group. `size`: of a bucket, in bytes.
    """

    def __init__(
        self,
        world: World,
        weights: Sequence[Tensor],
        masters: Sequence[Tensor],
        apart: Collection[nn.Parameter] = (),
        group: Any = None,
        size: int = BUCKET,
    ):
        self.world, self.weights, self.masters = world, weights, masters
        self.group: Any = dist.group.WORLD if group is None else group
        others = {id(p) for p in apart}
        self.apart = [i for i, w in enumerate(weights) if id(w) in others]
        policy = [i for i, w in enumerate(weights) if id(w) not in others]
        parts = [self.apart[::-1], policy[::-1]]
        self.buckets = [b for part in parts for b in _buckets(part, masters, size)]
        self.place = {i: number for number, bucket in enumerate(self.buckets) for i in bucket}
        # torch's DETAIL lets every call wait for the other ranks, which may still be elsewhere.
        self.early = dist.get_debug_level() != dist.DebugLevel.DETAIL
        self.several: set[int] = set()  # gradients that come in parts
        self.known = False  # whether a backward pass has shown which
        self.fired: Counter[int] = Counter()  # in this pass
        self._forget()
        for i, weight in enumerate(weights):
            weight.register_post_accumulate_grad_hook(self._hook(i))

    def backward(self, loss: Tensor, last: bool) -> None:
        """One backward pass; `last`: nothing of the update comes after it on this rank."""
        self.fired.clear()
        if last:
            self.entered = True
            self._are_whole(self.apart)
            self.listening = self.known
        try:
            loss.backward()
        finally:
            self.listening = False
        self.known = True
        if last:
            self._are_whole(range(len(self.weights)))

    def nothing(self, last: bool) -> None:
        """This rank has nothing in a micro-batch that others have; `last`: of the update."""
        if last:
            self.entered = True
            self._are_whole(range(len(self.weights)))

    @torch.no_grad()
    def finish(self, masters: Sequence[Tensor]) -> None:
        """All ranks: the gradients are summed when this returns, in place.

        One that only some ranks have counts as 0 on the others; one that none has stays None.
        """
        try:
            have = [float(self._owner(i).grad is not None) for i in range(len(masters))]
            wanted = self.world.sum(torch.tensor(have)).tolist()
            for bucket in self.buckets[self.sent :]:
                some = [i for i in bucket if wanted[i]]
                for master in (self._owner(i) for i in some):
                    if master.grad is None:
                        master.grad = torch.zeros_like(master)
                self._send(some)
            for work in self.works:
                work.wait()
        finally:
            self._forget()

    def drop(self) -> None:
        """All ranks: end what is under way in an update that is given up."""
        if self.entered:
            self.finish(self.masters)

    def _forget(self) -> None:
        self.entered = False  # the last micro-batch of the update: what may be sent, may be now
        self.listening = False  # to hooks, which say that a gradient is whole
        self.whole: set[int] = set()
        self.missing = [len(bucket) for bucket in self.buckets]  # gradients that are not whole
        self.sent = 0  # buckets
        self.works: list[Any] = []

    def _hook(self, i: int) -> Callable[[Tensor], None]:
        def fire(weight: Tensor) -> None:
            self.fired[i] += 1
            if self.place[i] < self.sent:
                raise RuntimeError("a gradient came in parts, and was sent before it was whole")
            if self.fired[i] > 1:
                self.several.add(i)
                self._is_not_whole(i)
            elif self.listening and i not in self.several:
                self._are_whole([i])

        return fire

    def _is_not_whole(self, i: int) -> None:
        if i in self.whole:
            self.whole.discard(i)
            self.missing[self.place[i]] += 1

    def _are_whole(self, among: Collection[int]) -> None:
        """Nothing is added to these any more; send what is complete."""
        for i in among:
            grad = self.weights[i].grad
            if i not in self.whole and grad is not None and grad.dtype == self.masters[i].dtype:
                self.whole.add(i)
                self.missing[self.place[i]] -= 1
        while self.early and self.sent < len(self.buckets) and not self.missing[self.sent]:
            self._send(self.buckets[self.sent])
            self.sent += 1

    def _owner(self, i: int) -> Tensor:
        """What the gradient hangs on: the weight, until `grad_norm` moves it to the master."""
        return self.masters[i] if self.weights[i].grad is None else self.weights[i]

    def _send(self, bucket: Sequence[int]) -> None:
        """Begin to sum these gradients, as they lie: no copy of a bucket is made here."""
        gradients = []
        for owner in map(self._owner, bucket):
            assert owner.grad is not None
            if not owner.grad.is_contiguous():
                owner.grad = owner.grad.contiguous()
            gradients.append(owner.grad)
        if gradients:
            options = dist.AllreduceCoalescedOptions()
            options.asyncOp = True
            self.works.append(self.group.allreduce_coalesced(gradients, options))


def _buckets(order: Sequence[int], masters: Sequence[Tensor], size: int) -> Iterator[list[int]]:
    """Runs of one dtype that fill a bucket; a larger one is alone."""
    run: list[int] = []
    for i in order:
        there = sum(masters[j].nbytes for j in run)
        other = bool(run) and masters[i].dtype != masters[run[0]].dtype
        if run and (other or there + masters[i].nbytes > size):
            yield run
            run = []
        run.append(i)
    if run:
        yield run

"""The plan of an update whose batch is still being sampled (generation.overlap=stream).

It has the micro-batches that `minibatches.plan_updates` makes of the whole batch with
train.micro_batch_order=virtual_time, one after the other as they become known. What a plan knows of
the whole batch (what the loss is divided by) it knows after the last of them.
"""

from collections.abc import Iterator
from typing import Any

from rloo_cli.data.batch import Batch
from rloo_cli.data.packing import GroupSlice
from rloo_cli.train import minibatches
from rloo_cli.train.minibatches import UpdatePlan
from rloo_cli.utils.errors import NumbersError, Problem


class StreamedPlan(UpdatePlan):
    """An update's plan while its batch is not whole. `run`: it has a stream that is open."""

    def __init__(self, run: Any, batch: Batch):
        super().__init__([[]], run.world.rank, [], 0, 1, 1.0, True)
        self.run, self.batch = run, batch

    def iter_micro_batches(self) -> Iterator[tuple[list[GroupSlice], bool]]:
        """Micro-batches as they become known, and whether each is the last.

        Raises StreamCut, with the batch whole, where a group does not fit into one of them and its
        advantages need all of its completions.
        """
        run, batch = self.run, self.batch
        k = run.config.algorithm.num_generations
        filler = run.forward_limits.make_filler(run.policy.layout, k, grad=True)
        filled: list[list[GroupSlice]] = []
        for group_index in run.stream.iter_groups(batch, self._check_stop):
            forwarded = minibatches.forwarded_completions(run, batch)[group_index]
            chosen = forwarded.nonzero().flatten().tolist()
            items = filler.group_items(batch.groups, group_index, chosen)
            if len(items) > 1 and not run.forward_plan.by_scores:
                run.stream.cut(batch, self._check_stop)
            for item in items:
                if full := filler.add_item(item):
                    filled.append(full)
                    yield full, False
        run.stream.complete(batch, self._check_stop)
        if run.step_progress is not None:  # rewards drew from the global generators until now
            run.step_progress.rng = run.stream.rng_after
        last = filler.take_rest()
        (plan,) = minibatches.plan_updates(run, batch, 0)
        if plan.micro_batches != filled + [last] * bool(last):
            what = f"step {batch.step + 1} was trained on other micro-batches than those of its"
            what += " whole batch"
            why = "generation.overlap=stream and none have to train on the same ones"
            fix = "generation.overlap=none; and please report it, with the run's config.yaml"
            raise NumbersError(Problem(what, "generation.overlap=stream", why, fix))
        vars(self).update(vars(plan))
        if last:
            yield last, True

    def _check_stop(self) -> None:
        self.run.world.check_stop(frequent=True)

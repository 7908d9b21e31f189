"""The loop of `rloo sft` and `rloo reward-model`: examples in a seeded order, AdamW, metrics.

An `Objective` defines an example and its loss. The schedule is a linear warm-up and a linear decay
to 0. Examples of like length share a batch, so that little is padded; the order of batches is still
random, and the same on any number of ranks, of which each takes a share of every batch. There are
no checkpoints: these trainings are short, and a stopped one starts again.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rloo_cli.config.schema import TrainConfig, TrainingConfig
from rloo_cli.data.order import IndexArray
from rloo_cli.distributed.engine import ParallelEngine
from rloo_cli.distributed.optimizer import Optimizer, TrainingOptimizer, warmup_note
from rloo_cli.distributed.world import World
from rloo_cli.train.supervised.parallel import Objective, TrainedModule, distribute_module
from rloo_cli.utils.errors import NumbersError, Problem
from rloo_cli.utils.files import JsonObject

SORT_WINDOW = 16  # batches whose examples are sorted by length together
MetricsObject = JsonObject
R = TypeVar("R")


class SupervisedTrainer(Generic[R]):
    """One training: `train` does it, `evaluate_loss` measures it."""

    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective[R],
        settings: TrainingConfig,
        seed: int,
        write_metrics: Callable[[MetricsObject], None] = lambda line: None,
        spread: tuple[ParallelEngine, TrainedModule] | None = None,
    ):
        """`write_metrics` takes each line of metrics. `spread`: how the model lies on the ranks, of
        which each takes its share of a batch; None = this process trains alone."""
        self.model, self.objective, self.settings = model, objective, settings
        self.seed, self.write_metrics = seed, write_metrics
        self.engine: ParallelEngine | None = None
        self.module = TrainedModule(model, model.device)
        if spread is not None:
            self.engine, self.module = spread
        self.world = World(0, 1, model.device) if self.engine is None else self.engine.world
        self.optimizer: TrainingOptimizer | None = None

    def distribute(self, num_examples: int) -> None:
        """Distribute the model over the ranks, and build the optimizer for so many examples.

        A sharded model has no weights before.
        """
        steps = self._count_steps(num_examples)
        note = warmup_note(optimizer_config(self.settings), steps)
        if note and self.world.is_main:
            print(f"note: {note}")
        if self.engine is None:
            self.optimizer = Optimizer(self.model, optimizer_config(self.settings), steps)
        else:
            self.optimizer = distribute_module(self.engine, self.module, steps)

    def _count_steps(self, num_examples: int) -> int:
        return math.ceil(self.settings.epochs * num_examples / self.settings.batch_size)

    def train(self, examples: Sequence[R], lengths: IndexArray | None = None) -> int:
        """Train. -> the number of optimizer steps. Raises NumbersError, Stopped.

        `lengths`: tokens of each example, if they are known.
        """
        if self.optimizer is None:
            self.distribute(len(examples))
        assert self.optimizer is not None
        optimizer, size = self.optimizer, self.settings.batch_size
        steps = self._count_steps(len(examples))
        if lengths is None:
            lengths = np.array([self.objective.length(example) for example in examples])
        self.model.train()
        sums: MetricsObject = {"units": 0}
        began = time.monotonic()
        batches = batch_order(lengths, size, self.seed)
        for step, indices in zip(range(1, steps + 1), batches, strict=False):
            self.world.check_stop(frequent=True)
            rate = optimizer.learning_rate
            metrics = self._optimizer_step(optimizer, step, [examples[i] for i in indices])
            sums = {name: sums.get(name, 0) + value for name, value in metrics.items()}
            if step % self.settings.log_every == 0 or step == steps:
                head = {"step": step, "steps": steps, "epoch": step * size / len(examples)}
                tail = {"learning_rate": rate, "seconds": time.monotonic() - began}
                self.write_metrics(head | _mean_metrics(sums) | tail)
                sums = {}
        return steps

    def _optimizer_step(
        self, optimizer: TrainingOptimizer, step: int, examples: Sequence[R]
    ) -> MetricsObject:
        """Take one optimizer step. -> sums of loss, counts, examples and other metrics"""
        units = sum(map(self.objective.loss_count, examples))
        sums: MetricsObject = {"loss": 0.0}
        parts = self._rank_parts(examples, self.settings.micro_batch_size)
        for number, (part, counts) in enumerate(parts, 1):
            loss, metrics = self._loss(part)
            # The parts of all ranks add up to the mean over the whole batch.
            self._backward(loss / units if counts else loss * 0.0, number == len(parts))
            _add_metrics(sums, loss, metrics, counts)
        sums = self._sum_over_ranks(sums) | {"units": units, "rows": len(examples)}
        norm = optimizer.grad_norm()
        if not math.isfinite(sums["loss"]) or not bool(norm.isfinite()):
            why = f"loss {sums['loss'] / units}, gradient norm {float(norm)}"
            fix = "a lower learning_rate, or model.dtype=float32"
            what, where = "the loss or its gradient is not finite", f"step {step}"
            raise NumbersError(Problem(what, where, why, fix))
        optimizer.step(norm)
        return sums | {"grad_norm": float(norm) * len(examples)}

    def _loss(self, examples: Sequence[R]) -> tuple[Tensor, dict[str, float]]:
        loss, metrics = self.module.call(self.objective, examples)
        return loss, metrics

    def _backward(self, loss: Tensor, is_last: bool) -> None:
        if self.engine is None:
            loss.backward()
        else:
            self.engine.backward(loss, is_last)

    def _rank_parts(
        self, examples: Sequence[R], part_size: int | None
    ) -> list[tuple[Sequence[R], bool]]:
        """This rank's parts of a batch, and whether each counts; all ranks have equally many.

        A rank that has too few forwards its first example once more, which does not count: ranks of
        sharded weights gather them together.
        """
        shares = [[examples[i] for i in rank_share(len(examples), rank, self.world.size)]
                  for rank in range(self.world.size)]  # fmt: skip
        parts = [[*_split_batch(share, part_size)] for share in shares]
        own, most = parts[self.world.rank], max(map(len, parts))
        empty = [(examples[:1], False)] * (most - len(own))
        return [*empty, *((part, True) for part in own)]

    def _sum_over_ranks(self, sums: MetricsObject) -> MetricsObject:
        """Sum metrics that every rank may have, over all of them."""
        if self.world.size == 1:
            return sums
        by_rank = self.world.gather(sums)
        names = dict.fromkeys(name for found in by_rank for name in found)
        return {name: sum(found.get(name, 0.0) for found in by_rank) for name in names}

    @torch.no_grad()
    def evaluate_loss(self, examples: Sequence[R]) -> MetricsObject:
        """Means over held-out examples, in eval mode: {eval_<name>: value}."""
        self.model.eval()
        units = sum(map(self.objective.loss_count, examples))
        sums: MetricsObject = {"loss": 0.0}
        ordered = sorted(examples, key=self.objective.length)
        size = self.settings.micro_batch_size or self.settings.batch_size
        for part, counts in self._rank_parts(ordered, size):
            self.world.check_stop(frequent=True)
            loss, metrics = self._loss(part)
            _add_metrics(sums, loss, metrics, counts)
        sums = self._sum_over_ranks(sums) | {"units": units, "rows": len(examples)}
        return {f"eval_{name}": value for name, value in _mean_metrics(sums).items()}


def rank_share(count: int, rank: int, num_ranks: int) -> range:
    """The items of `count` that a rank takes: every num_ranks-th, as neighbours are alike."""
    return range(rank, count, num_ranks)


def _add_metrics(
    sums: MetricsObject, loss: Tensor, metrics: dict[str, float], counts: bool
) -> None:
    """Add a part's loss and metrics, if it counts."""
    for name, value in {"loss": float(loss.detach()), **metrics}.items() if counts else ():
        sums[name] = sums.get(name, 0.0) + value


def batch_order(
    lengths: IndexArray | Sequence[int], batch_size: int, seed: int
) -> Iterator[list[int]]:
    """Iterate over batches of example indices without end; each pass has every example once."""
    epoch, window_size = 0, SORT_WINDOW * batch_size
    while True:
        rng = random.Random(f"{seed}/{epoch}")
        indices = list(range(len(lengths)))
        rng.shuffle(indices)
        windows = [indices[i : i + window_size] for i in range(0, len(indices), window_size)]
        alike = [i for window in windows for i in sorted(window, key=lambda i: lengths[i])]
        batches = [alike[i : i + batch_size] for i in range(0, len(alike), batch_size)]
        rng.shuffle(batches)
        yield from batches
        epoch += 1


def optimizer_config(settings: TrainingConfig) -> TrainConfig:
    """The keys that the optimizer of an RLOO run reads, from those of this training."""
    return TrainConfig.model_construct(
        learning_rate=settings.learning_rate,
        lr_scheduler="linear",
        lr_scheduler_kwargs={},
        warmup_steps=settings.warmup_steps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        optimizer="adamw",
        optimizer_kwargs={},
    )


def pad_right(sequences: Sequence[Sequence[int]], model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Right-padded ids and their mask, (B, T) each. The ids in the padding are never read."""
    width = max(map(len, sequences))
    padded = [[*sequence] + [0] * (width - len(sequence)) for sequence in sequences]
    ids = torch.tensor(padded, device=model.device)
    lengths = torch.tensor([*map(len, sequences)], device=model.device)
    return ids, (torch.arange(width, device=model.device) < lengths[:, None]).long()


def _split_batch(examples: Sequence[R], size: int | None) -> Iterator[Sequence[R]]:
    size = size or len(examples) or 1
    return (examples[i : i + size] for i in range(0, len(examples), size))


def _mean_metrics(sums: MetricsObject) -> MetricsObject:
    """The loss per unit that it counts, and all other metrics per example."""
    means = {n: v / sums["rows"] for n, v in sums.items() if n not in ("loss", "units", "rows")}
    return {"loss": sums["loss"] / sums["units"]} | means | {"rows": sums["rows"]}

"""The loop that `rloo sft` and `rloo reward-model` share: rows in a seeded order, AdamW, a line now
and then.

What a row is and what it costs is the caller's (`Objective`). The schedule is a linear warm-up and
a linear fall to 0. Rows of like length stand together, so that little is padded; which batch comes
when is still random. Nothing of it is saved on the way: these trainings are short, and one that is
stopped begins anew.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from rloo_cli.config.schema import TrainConfig, TrainingConfig
from rloo_cli.distributed.optimizer import Optimizer
from rloo_cli.utils import signals
from rloo_cli.utils.errors import NumbersError, Problem
from rloo_cli.utils.files import JsonObject

SORT_WINDOW = 16  # batches whose rows are sorted by length together
MetricsObject = JsonObject
R = TypeVar("R")
In = TypeVar("In", contravariant=True)


class Objective(Protocol[In]):
    """What is learned from a row."""

    def length(self, example: In) -> int:
        """Tokens of the longest sequence in it."""

    def loss_count(self, example: In) -> int:
        """What the loss is a mean over: its completion tokens, or 1 for a pair."""

    def loss(self, model: Any, examples: Sequence[In]) -> tuple[Tensor, dict[str, float]]:
        """The loss summed over the units of these rows (), and sums over rows of what else is
        measured."""


class SupervisedTrainer(Generic[R]):
    """One training: `run` does it, `measure` says how it stands."""

    def __init__(
        self,
        model: Any,
        objective: Objective[R],
        settings: TrainingConfig,
        seed: int,
        write_metrics: Callable[[MetricsObject], None] = lambda line: None,
    ):
        """`write` takes each line of metrics."""
        self.model, self.objective, self.settings = model, objective, settings
        self.seed, self.write_metrics = seed, write_metrics

    def train(self, examples: Sequence[R]) -> int:
        """Train; the number of optimizer steps. Raises NumbersError, Stopped."""
        size = self.settings.batch_size
        steps = math.ceil(self.settings.epochs * len(examples) / size)
        optimizer = Optimizer(self.model, optimizer_config(self.settings), steps)
        lengths = [self.objective.length(row) for row in examples]
        self.model.train()
        sums: MetricsObject = {"units": 0}
        began = time.monotonic()
        for step, places in zip(
            range(1, steps + 1), batch_order(lengths, size, self.seed), strict=False
        ):
            signals.raise_if_stopped()
            rate, found = (
                optimizer.learning_rate,
                self._optimizer_step(optimizer, [examples[i] for i in places]),
            )
            sums = {name: sums.get(name, 0) + value for name, value in found.items()}
            if step % self.settings.log_every == 0 or step == steps:
                head = {"step": step, "steps": steps, "epoch": step * size / len(examples)}
                tail = {"learning_rate": rate, "seconds": time.monotonic() - began}
                self.write_metrics(head | _mean_metrics(sums) | tail)
                sums = {}
        return steps

    def _optimizer_step(self, optimizer: Optimizer, examples: Sequence[R]) -> MetricsObject:
        """One optimizer step; sums of loss, units, rows and what else the objective measures."""
        units = sum(map(self.objective.loss_count, examples))
        sums: MetricsObject = {"loss": 0.0, "units": units, "rows": len(examples)}
        for part in _split_batch(examples, self.settings.micro_batch_size):
            loss, said = self.objective.loss(self.model, part)
            (loss / units).backward()  # the parts add up to the mean over the whole batch
            for name, value in {"loss": float(loss.detach()), **said}.items():
                sums[name] = sums.get(name, 0.0) + value
        norm = optimizer.grad_norm()
        if not math.isfinite(sums["loss"]) or not bool(norm.isfinite()):
            why = f"loss {sums['loss'] / units}, gradient norm {float(norm)}"
            fix = "a lower learning_rate, or model.dtype=float32"
            raise NumbersError(Problem("the loss or its gradient is not finite", why=why, fix=fix))
        optimizer.step(norm)
        return sums | {"grad_norm": float(norm) * len(examples)}

    @torch.no_grad()
    def evaluate_loss(self, examples: Sequence[R]) -> MetricsObject:
        """Means over rows that nothing is learned from, in eval mode: {eval_<name>: value}."""
        self.model.eval()
        sums: MetricsObject = {
            "loss": 0.0,
            "units": sum(map(self.objective.loss_count, examples)),
            "rows": len(examples),
        }
        ordered = sorted(examples, key=self.objective.length)
        for part in _split_batch(
            ordered, self.settings.micro_batch_size or self.settings.batch_size
        ):
            signals.raise_if_stopped()
            loss, said = self.objective.loss(self.model, part)
            for name, value in {"loss": float(loss), **said}.items():
                sums[name] = sums.get(name, 0.0) + value
        return {f"eval_{name}": value for name, value in _mean_metrics(sums).items()}


def batch_order(lengths: Sequence[int], batch_size: int, seed: int) -> Iterator[list[int]]:
    """Batches of row numbers without end; each pass has every row once. Its last may be smaller."""
    epoch = 0
    while True:
        dice = random.Random(f"{seed}/{epoch}")
        rows = list(range(len(lengths)))
        dice.shuffle(rows)
        windows = [
            rows[i : i + SORT_WINDOW * batch_size]
            for i in range(0, len(rows), SORT_WINDOW * batch_size)
        ]
        alike = [i for window in windows for i in sorted(window, key=lambda i: lengths[i])]
        batches = [alike[i : i + batch_size] for i in range(0, len(alike), batch_size)]
        dice.shuffle(batches)
        yield from batches
        epoch += 1


def optimizer_config(settings: TrainingConfig) -> TrainConfig:
    """These keys as the run's own optimizer reads them."""
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


def pad_right(sequences: Sequence[Sequence[int]], model: Any) -> tuple[Tensor, Tensor]:
    """Right-padded ids and their mask, (B, T) each. What stands in the padding is never read."""
    width = max(map(len, sequences))
    ids = torch.tensor(
        [[*row] + [0] * (width - len(row)) for row in sequences], device=model.device
    )
    lengths = torch.tensor([len(row) for row in sequences], device=model.device)
    return ids, (torch.arange(width, device=model.device) < lengths[:, None]).long()


def _split_batch(examples: Sequence[R], size: int | None) -> Iterator[Sequence[R]]:
    size = size or len(examples)
    return (examples[i : i + size] for i in range(0, len(examples), size))


def _mean_metrics(sums: MetricsObject) -> MetricsObject:
    """Loss per unit, everything else per row."""
    means = {n: v / sums["rows"] for n, v in sums.items() if n not in ("loss", "units", "rows")}
    return {"loss": sums["loss"] / sums["units"]} | means | {"rows": sums["rows"]}

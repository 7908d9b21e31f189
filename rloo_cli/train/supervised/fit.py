"""The loop of `rloo sft` and `rloo reward-model`: examples in a seeded order, AdamW, metrics.

An `Objective` defines an example and its loss. The schedule is a linear warm-up and a linear decay
to 0. Examples of like length share a batch, so that little is padded; the order of batches is still
random. There are no checkpoints: these trainings are short, and a stopped one starts again.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rloo_cli.config.schema import TrainConfig, TrainingConfig
from rloo_cli.distributed.optimizer import Optimizer
from rloo_cli.utils import signals
from rloo_cli.utils.errors import NumbersError, Problem
from rloo_cli.utils.files import JsonObject

SORT_WINDOW = 16  # batches whose examples are sorted by length together
MetricsObject = JsonObject
R = TypeVar("R")
In = TypeVar("In", contravariant=True)


class Objective(Protocol[In]):
    """Defines what is learned from an example."""

    def length(self, example: In) -> int:
        """Tokens of the longest sequence in an example."""

    def loss_count(self, example: In) -> int:
        """What the loss is averaged over: an example's completion tokens, or 1 for a pair."""

    def loss(
        self, model: PreTrainedModel, examples: Sequence[In]
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss summed over these examples, (), and sums of the other metrics."""


class SupervisedTrainer(Generic[R]):
    """One training: `train` does it, `evaluate_loss` measures it."""

    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective[R],
        settings: TrainingConfig,
        seed: int,
        write_metrics: Callable[[MetricsObject], None] = lambda line: None,
    ):
        """`write_metrics` takes each line of metrics."""
        self.model, self.objective, self.settings = model, objective, settings
        self.seed, self.write_metrics = seed, write_metrics

    def train(self, examples: Sequence[R]) -> int:
        """Train. -> the number of optimizer steps. Raises NumbersError, Stopped."""
        size = self.settings.batch_size
        steps = math.ceil(self.settings.epochs * len(examples) / size)
        optimizer = Optimizer(self.model, optimizer_config(self.settings), steps)
        lengths = [self.objective.length(example) for example in examples]
        self.model.train()
        sums: MetricsObject = {"units": 0}
        began = time.monotonic()
        batches = batch_order(lengths, size, self.seed)
        for step, indices in zip(range(1, steps + 1), batches, strict=False):
            signals.raise_if_stopped()
            rate = optimizer.learning_rate
            metrics = self._optimizer_step(optimizer, [examples[i] for i in indices])
            sums = {name: sums.get(name, 0) + value for name, value in metrics.items()}
            if step % self.settings.log_every == 0 or step == steps:
                head = {"step": step, "steps": steps, "epoch": step * size / len(examples)}
                tail = {"learning_rate": rate, "seconds": time.monotonic() - began}
                self.write_metrics(head | _mean_metrics(sums) | tail)
                sums = {}
        return steps

    def _optimizer_step(self, optimizer: Optimizer, examples: Sequence[R]) -> MetricsObject:
        """Take one optimizer step. -> sums of loss, counts, examples and other metrics"""
        units = sum(map(self.objective.loss_count, examples))
        sums: MetricsObject = {"loss": 0.0, "units": units, "rows": len(examples)}
        for part in _split_batch(examples, self.settings.micro_batch_size):
            loss, metrics = self.objective.loss(self.model, part)
            (loss / units).backward()  # the parts add up to the mean over the whole batch
            for name, value in {"loss": float(loss.detach()), **metrics}.items():
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
        """Means over held-out examples, in eval mode: {eval_<name>: value}."""
        self.model.eval()
        units = sum(map(self.objective.loss_count, examples))
        sums: MetricsObject = {"loss": 0.0, "units": units, "rows": len(examples)}
        ordered = sorted(examples, key=self.objective.length)
        size = self.settings.micro_batch_size or self.settings.batch_size
        for part in _split_batch(ordered, size):
            signals.raise_if_stopped()
            loss, metrics = self.objective.loss(self.model, part)
            for name, value in {"loss": float(loss), **metrics}.items():
                sums[name] = sums.get(name, 0.0) + value
        return {f"eval_{name}": value for name, value in _mean_metrics(sums).items()}


def batch_order(lengths: Sequence[int], batch_size: int, seed: int) -> Iterator[list[int]]:
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
    size = size or len(examples)
    return (examples[i : i + size] for i in range(0, len(examples), size))


def _mean_metrics(sums: MetricsObject) -> MetricsObject:
    """The loss per unit that it counts, and all other metrics per example."""
    means = {n: v / sums["rows"] for n, v in sums.items() if n not in ("loss", "units", "rows")}
    return {"loss": sums["loss"] / sums["units"]} | means | {"rows": sums["rows"]}

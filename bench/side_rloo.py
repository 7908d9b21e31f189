"""`rloo` as a side of the benchmark: what `rloo train` does in a step, with nothing left out."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shapes import Shape
from sides import (
    BETA,
    CLIP,
    LONG,
    RATE,
    WORDS_VARIABLE,
    Answer,
    Order,
    Orders,
    Rows,
    Watch,
    body,
    digits,
    disturb,
    keep_gradient,
    memory,
)

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.data.batch import Batch, Group, Rollout
from rloo_cli.generation import Generator, GeneratorWrapper, ignore_arrival
from rloo_cli.run import Run, StepProgress
from rloo_cli.train.between_steps import log_step
from rloo_cli.train.build import build_run
from rloo_cli.train.step import update_policy

# Every key that is not the package's own default, in one list.
OURS = (
    "data.shuffle=false",  # TRL reads the prompts in the file's order too
    "generation.ignore_eos=true",  # completions of a forced length
    f"algorithm.beta={BETA}",
    f"train.learning_rate={RATE}",
    f"train.max_grad_norm={CLIP}",
    f"max_steps={LONG}",
    "distributed.threads=1",
    "logging.console=plain",
    "reward=[]",
    "+reward.digits={type: function, path: 'python:digits', kwargs: {}}",
)


def build(shape: Shape, folder: Path, seed: int, more: Sequence[str] = ()) -> Run:
    """The run, in `folder`/rloo. `more`: keys that come on top of all others."""
    root = folder / "rloo"
    root.mkdir(exist_ok=True)
    words = [
        *OURS,
        f"model.path={folder / 'model'}",
        f"data.path={folder / 'prompts.jsonl'}",
        f"data.max_prompt_length={shape.prompt[1]}",
        f"root={folder}",
        f"name={root.name}",
        f"seed={seed}",
        f"algorithm.num_generations={shape.k}",
        f"train.prompts_per_step={shape.prompts}",
        f"generation.max_completion_length={shape.completion[1]}",
    ]
    words = [w for w in words if not any(w.split("=")[0] == m.split("=")[0] for m in more)]
    words += more
    settings = check.resolve_config(check.check_config(compose_config(words)))
    run = build_run(settings, root, {"digits": digits})
    run.log.display = None
    disturb(run.policy.model)
    run.generator.load(run.policy, run.state.updates)
    return run


class RecordedSampler(GeneratorWrapper):
    """Gives recorded completions in the place of sampling."""

    def __init__(self, inner: Generator, recorded: Sequence[Sequence[Rollout]]):
        super().__init__(inner)
        self.recorded = recorded

    def generate(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        greedy: bool = False,
        temperature: float | None = None,
        arrived: Callable[[int], None] = ignore_arrival,
    ) -> None:
        """Give each group its recorded completions."""
        for index, (group, own) in enumerate(zip(groups, self.recorded, strict=True)):
            group.rollouts = list(own)
            arrived(index)


class Side:
    """A run that takes one step at a time."""

    def __init__(self, run: Run):
        self.run = run
        self.watch, self.rows = Watch(), Rows(self.run.policy.model)
        self.recorded: list[list[Rollout]] = []

    def batch(self, offset: int) -> Batch:
        """The batch of the prompts from `offset` on, sampled and scored."""
        state = self.run.state
        return self.run.rollouts.next_batch(state.step, offset, state.seen_by_rewards(self.run))

    def step(self, count: bool = False) -> Answer:
        """A whole step, with its ledger, its log line and its samples on disk."""
        run, state = self.run, self.run.state
        run.clock.lap()
        self.watch.start(count)
        cycle = StepProgress(self.batch(state.place))
        update_policy(run, cycle)
        with run.clock.phase("sync"):
            run.generator.load(run.policy, state.updates)
        run.ledger.step(cycle.batch, state.place, cycle.updates.num_updates, cycle.batch.updated)
        state.advance(cycle.batch)
        log_step(run, cycle.batch, cycle.updates)
        got, logged = self.watch.read(), run.log.metrics_lines[-1]
        split = {name[5:]: s for name, s in logged.items() if name.startswith("time/")}
        return got | {"split": split}

    def train(self, path: str | None) -> Answer:
        """The train phase on the recorded completions: reference, forward, backward, optimizer."""
        run, sampler, take = self.run, self.run.rollouts.generator, self.run.optimizer.step
        run.rollouts.generator = RecordedSampler(sampler, self.recorded)
        cycle = StepProgress(self.batch(0))
        run.rollouts.generator = sampler

        def step(norm: Any) -> None:
            if path is not None:
                keep_gradient(run.policy.model, path)
            take(norm)

        run.optimizer.step = step
        run.clock.lap()
        self.watch.start()
        update_policy(run, cycle)
        got = self.watch.read() | {"split": dict(run.clock.seconds)}
        run.optimizer.step = take
        return got

    def record(self) -> Answer:
        """Sample the first prompts' completions once; both tools train on them afterwards."""
        groups = self.batch(0).groups
        # Without the sampler's own log-probabilities: they would age while the weights move.
        self.recorded = [[replace(r, behaviour_logp=None) for r in g.rollouts] for g in groups]
        return {"rows": [[g.prompt_ids, r.completion_ids] for g in groups for r in g.rollouts]}

    def obey(self, order: Order) -> Answer:
        """One order's answer."""
        if order["do"] == "record":
            return self.record()
        self.rows.take()
        step = order["do"] == "step"
        got = self.step(order.get("count", False)) if step else self.train(order["gradient"])
        return got | {"computed": self.rows.take(), "peak": memory("VmHWM")}


def serve(shape: Shape, folder: Path, seed: int, orders: Orders) -> None:
    """Obey until there are no more orders."""
    run = build(shape, folder, seed, os.environ.get(WORDS_VARIABLE, "").split())
    side = Side(run)
    orders.answer(
        base=memory("VmRSS"),
        body=body(run.policy.model),
        level=getattr(run.policy, "layout", "padded"),
        attention=run.policy.model.config._attn_implementation,
    )
    while (order := orders()) is not None:
        orders.answer(**side.obey(order))

"""How much an old run did: completions per step, updates, steps, and the learning rate over them.

Old trainers derive the batch from per-device numbers; here it is prompts times completions. With
b = per_device_train_batch_size (completions), GA = gradient_accumulation_steps and W processes:
TRL <=0.21 sampled B = b*GA*num_mini_batches*W rows per step, TRL >=0.22 and ms-swift sample
B = b*W*steps_per_generation, and P = B/K prompts (docs/OBJECTIVES.md, Dialects).
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from rloo_cli.cli.migrate.recipe import Recipe, ours
from rloo_cli.cli.migrate.tables import SWIFT_ROWS
from rloo_cli.utils.errors import ConfigError, Problem

OLD_NAMES = ("rloo_k", "num_ppo_epochs", "num_mini_batches")  # K, passes, mini-batches
NEW_NAMES = ("num_generations", "num_iterations", "steps_per_generation", "generation_batch_size")
LENGTHS = ("max_steps", "total_episodes", "train.epochs")
EVERY = {"logging_steps": "logging.every", "save_steps": "checkpoint.every"}
EVERY |= {"eval_steps": "eval.every"}


@dataclass(frozen=True)
class Dialect:
    """One tool at one time: the defaults its users rely on without writing them."""

    title: str
    old: bool  # the trainer of TRL <=0.21
    defaults: dict[str, Any]
    device_batch: int = 8
    rewards: dict[str, str] = field(default_factory=dict)  # its reward names -> ours
    swift: bool = False
    vllm_mode: str = "server"
    correction: dict[str, Any] = field(default_factory=dict)  # where vLLM samples


@dataclass(frozen=True)
class Sizes:
    """K, B, and updates per step (passes times mini-batches) of the old run."""

    completions: int
    batch: int
    updates: int


def number(recipe: Recipe, name: str, default: Any = None) -> Any:
    """Take an old flag that must be a number."""
    value = recipe.take(name, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ConfigError(Problem(f"{name}: a number is expected, not {value!r}", "the old run"))
    return value


def whole(recipe: Recipe, name: str, default: int | None = None) -> Any:
    """Take an old flag that must be a whole number, 1 or more."""
    value = number(recipe, name, default)
    if value is not None and (value != int(value) or value < 1):
        raise ConfigError(Problem(f"{name}: {value} is not a whole number >= 1", "the old run"))
    return value if value is None else int(value)


def sizes(recipe: Recipe, dialect: Dialect, world: int) -> Sizes:
    """Write the batch. Raises ConfigError when B is no multiple of K, with the two nearest."""
    k_name, passes_name, parts_names = (
        ("rloo_k", "num_ppo_epochs", ["num_mini_batches"])
        if dialect.old
        else (
            "num_generations",
            "num_iterations",
            ["steps_per_generation", "generation_batch_size"],
        )
    )
    k = whole(recipe, k_name, dialect.defaults["algorithm.num_generations"])
    passes = whole(recipe, passes_name, dialect.defaults["algorithm.num_iterations"])
    b = whole(recipe, "per_device_train_batch_size", dialect.device_batch)
    ga = whole(recipe, "gradient_accumulation_steps")
    if ga is None:
        ga = max(1, -(-SWIFT_ROWS // (b * world))) if dialect.swift else 1
        if ga > 1:
            recipe.notes.append(
                f"gradient_accumulation_steps is not said: ms-swift takes {ga}, which makes"
                f" {SWIFT_ROWS} rows of {b} on {world} process{'es' if world > 1 else ''}"
            )
    rule = _old_batch if dialect.old else _new_batch
    batch, parts, how = rule(recipe, b, ga, world, passes)
    if batch % k:
        raise _no_multiple(batch, k, how)
    prompts = _whole_minibatches(recipe, batch // k, parts)
    recipe.put("train.prompts_per_step", prompts, f"P = B/K = {batch}/{k}, B = {how}")
    for key, value, names in (
        ("algorithm.num_generations", k, [k_name]),
        ("algorithm.num_iterations", passes, [passes_name]),
        ("algorithm.num_minibatches", parts, parts_names),
    ):
        said = [recipe.said(name) for name in names if name in recipe.given]
        if said:
            recipe.put(key, value, ", ".join(said))
    _forwards(recipe, k, b)
    if world > 1:
        why = f"{world} processes; the batch above is for all of them, on any number"
        if prompts < world:
            why = f"there {world}: a prompt's completions stay on one process here"
        recipe.put("distributed.num_processes", min(world, prompts), why)
        engine, from_ = _engine(recipe)
        recipe.put("distributed.engine", engine, from_)
    return Sizes(k, prompts * k, passes * parts)


def _engine(recipe: Recipe) -> tuple[str, str]:
    """How several processes shared the model there, and what says so."""
    deepspeed, fsdp = (str(recipe.flags.get(name) or "") for name in ("deepspeed", "fsdp"))
    file = recipe.launcher_file
    for said in (deepspeed, file):
        for engine in ("zero3", "zero2", "zero1"):
            if engine in said.replace("zero_", "zero").replace("stage", "zero"):
                return engine, said
    if deepspeed:
        return "zero2", f"{deepspeed}: its stage is in that file"
    if fsdp or "fsdp" in file:
        return "fsdp2", fsdp or file
    return "ddp", "a copy of the model in each"


def _forwards(recipe: Recipe, k: int, b: int) -> None:
    """Rows per forward pass, in whole groups; they change memory, never a number."""
    sizes = {"train.micro_batch_size": ("per_device_train_batch_size", b)}
    name = "local_rollout_forward_batch_size"
    if rows := whole(recipe, name):
        sizes["train.no_grad_batch_size"] = (name, rows)
    for key, (flag, rows) in sizes.items():
        groups = max(k, rows - rows % k)
        why = "" if groups == rows else f"; {rows} would split groups of {k}"
        recipe.put(key, groups, f"{flag} {rows}{why}; a matter of memory only")


def _old_batch(recipe: Recipe, b: int, ga: int, world: int, _: int) -> tuple[int, int, str]:
    """B, mini-batches and the arithmetic of TRL <=0.21."""
    parts = whole(recipe, "num_mini_batches", 1)
    return b * ga * parts * world, parts, f"b*GA*num_mini_batches*W = {b}*{ga}*{parts}*{world}"


def _new_batch(recipe: Recipe, b: int, ga: int, world: int, passes: int) -> tuple[int, int, str]:
    """B, mini-batches and the arithmetic of TRL >=0.22 and ms-swift."""
    rows = whole(recipe, "generation_batch_size")
    micro_steps = whole(recipe, "steps_per_generation")
    if rows is not None:
        batch, how = rows, f"generation_batch_size = {rows}"
    else:
        per = micro_steps or ga
        name = "steps_per_generation" if micro_steps else "GA"
        batch, how = b * world * per, f"b*W*{name} = {b}*{world}*{per}"
    parts = Fraction(batch, b * world * ga)  # updates per generation: steps_per_generation / GA
    if parts.denominator == 1:
        return batch, int(parts), how
    if parts.numerator == 1 and passes == 1:
        # One update used several sampled batches, all drawn with the same weights: one batch.
        return (
            b * world * ga,
            1,
            f"b*W*GA = {b}*{world}*{ga}, {1 / parts} sampled batches an update",
        )
    parts_whole = max(1, round(parts))
    recipe.notes.append(
        f"steps_per_generation / gradient_accumulation_steps = {parts} is not whole: TRL updated in"
        f" the middle of a batch. num_minibatches = {parts_whole} is near it, not equal"
    )
    return batch, parts_whole, how


def _whole_minibatches(recipe: Recipe, prompts: int, parts: int) -> int:
    """P, or the next P that mini-batches of whole groups divide."""
    if prompts % parts == 0:
        return prompts
    up = -(-prompts // parts) * parts
    nearest = " or ".join(str(p) for p in (up - parts, up) if p)
    recipe.notes.append(
        f"{prompts} prompts make no {parts} mini-batches of whole groups (the old trainer split"
        f" groups): {nearest} do, {up} is written"
    )
    return up


def _no_multiple(batch: int, k: int, how: str) -> ConfigError:
    below = batch - batch % k
    near = " or ".join(f"{n} (P = {n // k})" for n in (below, below + k) if n)
    return ConfigError(
        Problem(
            f"{batch} completions per step are no multiple of K = {k}",
            "the old run",
            f"B = {how} = {batch}; nearest: {near}",
            "give the number of processes it ran on: rloo migrate --world-size N ...",
        )
    )


def duration(recipe: Recipe, dialect: Dialect, size: Sizes) -> int | None:
    """Write how long the run is; returns its steps where the old settings tell."""
    episodes = whole(recipe, "total_episodes")
    said_steps, epochs = recipe.said("max_steps"), number(recipe, "num_train_epochs")
    updates = number(recipe, "max_steps", -1)
    steps: int | None = None
    if episodes:
        steps = -(-episodes // size.batch)
        floor = f" (TRL 0.9 did {episodes // size.batch})" if dialect.old else ""
        why = f"{recipe.said('total_episodes')}: {steps} steps of {size.batch}{floor}"
        recipe.put("total_episodes", episodes, why)
    elif updates > 0 and not dialect.old:
        steps = math.ceil(updates / size.updates)
        why = f"{said_steps} counted updates, {size.updates} per step"
        recipe.put("max_steps", steps, why)
    else:
        passes = float(3 if epochs is None else epochs)
        why = "the old default" if epochs is None else recipe.said("num_train_epochs")
        if dialect.old:
            why += f" / K: it counted completions, {size.completions} for each prompt"
            passes = passes / size.completions
        recipe.put("train.epochs", passes, why)
        epochs = None
    if epochs is not None:
        recipe.dropped.append(f"{recipe.said('num_train_epochs')}: the length above came first")
    if dialect.old and updates > 0:
        recipe.dropped.append(f"{said_steps}: the trainer of TRL <=0.21 never read it")
    for key in LENGTHS:  # exactly one may be set
        if key not in recipe.lines and ours().get(key) is not None:
            recipe.put(key, None, "exactly one length may be set")
    return steps


def schedule(recipe: Recipe, dialect: Dialect, size: Sizes, steps: int | None) -> None:
    """Write warm-up, and what happens every n steps. Old trainers' clocks differ.

    TRL <=0.21 stepped its schedule and counted logging_steps once per rollout batch; TRL >=0.22
    and ms-swift count updates. Our warm-up counts updates, everything else steps.
    """
    said = recipe.said("warmup_steps")
    ratio = number(recipe, "warmup_ratio")
    warmup = number(recipe, "warmup_steps")
    if warmup and warmup < 1:  # transformers 5: a share of the run
        ratio, warmup = warmup, None
    elif ratio:
        said = recipe.said("warmup_ratio")
    if warmup:
        times = size.updates if dialect.old else 1
        why = said + (f" * {times} updates per step" if times > 1 else "")
        recipe.put("train.warmup_steps", int(warmup) * times, why)
    elif ratio and steps:
        why = f"{said} of {steps} steps * {size.updates} updates"
        recipe.put("train.warmup_steps", math.ceil(ratio * steps * size.updates), why)
    elif ratio:
        recipe.notes.append(
            f"{said}: set train.warmup_steps to that share of all updates;"
            " their number depends on the length of the data"
        )
    for name, key in EVERY.items():
        said, every = recipe.said(name), number(recipe, name)
        if every and every < 1:
            recipe.dropped.append(f"{said}: a share of the run; set {key} in steps")
        elif every and not (key == "eval.every" and _never(recipe)):
            per = 1 if dialect.old else size.updates
            why = said + (f" / {per} updates per step" if per > 1 else "")
            recipe.put(key, max(1, round(every / per)), why)
    if shown := number(recipe, "num_sample_generations"):
        said = recipe.said("num_sample_generations")
        if steps and shown > 0:
            recipe.put(
                "logging.samples_every", max(1, int(steps // shown)), f"{steps} steps; {said}"
            )
        else:
            recipe.dropped.append(f"{said}: set logging.samples_every, in steps")


def _never(recipe: Recipe) -> bool:
    """`eval_strategy no`, which YAML reads as false."""
    kinds = [recipe.given.get(n) for n in ("eval_strategy", "evaluation_strategy")]
    return any(kind in ("no", False) for kind in kinds if kind is not None)

"""Writes how much an old run did: completions per step, updates, steps, and the schedule over them.

Old trainers derive the batch from per-device numbers; here it is prompts times completions. With
b = per_device_train_batch_size (completions), GA = gradient_accumulation_steps and W processes:
TRL <=0.21 sampled B = b*GA*num_mini_batches*W completions per step, TRL >=0.22 and ms-swift sample
B = b*W*steps_per_generation, and P = B/K prompts (docs/OBJECTIVES.md, Dialects).
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

from rloo_cli.compat.migrate.recipe import Recipe, our_defaults
from rloo_cli.compat.migrate.tables import SWIFT_BATCH_COMPLETIONS, Dialect
from rloo_cli.utils.errors import ConfigError, Problem, refuse

OLD_NAMES = ("rloo_k", "num_ppo_epochs", "num_mini_batches")  # K, passes, mini-batches
NEW_NAMES = ("num_generations", "num_iterations", "steps_per_generation", "generation_batch_size")
LENGTH_KEYS = ("max_steps", "total_episodes", "train.epochs")
INTERVAL_KEYS = {"logging_steps": "logging.every", "save_steps": "checkpoint.every"}
INTERVAL_KEYS |= {"eval_steps": "eval.every"}
Number = TypeVar("Number", float, None)
WholeNumber = TypeVar("WholeNumber", int, None)


@dataclass(frozen=True)
class BatchSizes:
    """K, B, and updates per step (passes times mini-batches) of the old run."""

    num_generations: int
    batch: int
    updates: int


def take_number(recipe: Recipe, name: str, default: Number) -> float | Number:
    """Take the value of an old flag, or the default. Raises ConfigError unless it is a number."""
    value = recipe.take(name, default)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        what = f"{name}: a number is expected, not {value!r}"
        why, fix = recipe.original_text(name), f"give {name} its number in the old settings"
        refuse("the old run", what, fix, why)
    return value


def take_whole_number(recipe: Recipe, name: str, default: WholeNumber) -> int | WholeNumber:
    """Take a number as `take_number` does. Raises ConfigError unless it is whole, and 1 or more."""
    value = take_number(recipe, name, default)
    if value is None:
        return default
    if value != int(value) or value < 1:
        what, why = f"{name}: {value} is not a whole number >= 1", recipe.original_text(name)
        fix = f"give {name} a whole number in the old settings, such as {max(1, round(value))}"
        refuse("the old run", what, fix, why)
    return int(value)


def write_batch_sizes(recipe: Recipe, dialect: Dialect, world: int) -> BatchSizes:
    """Write the batch of the old run on `world` processes.

    Raises ConfigError if B is not a multiple of K, and names the two nearest multiples.
    """
    k_name, passes_name, *parts_names = OLD_NAMES if dialect.is_old_trl else NEW_NAMES
    k = take_whole_number(recipe, k_name, dialect.defaults["algorithm.num_generations"])
    passes = take_whole_number(recipe, passes_name, dialect.defaults["algorithm.num_iterations"])
    b = take_whole_number(recipe, "per_device_train_batch_size", dialect.device_batch)
    ga = take_whole_number(recipe, "gradient_accumulation_steps", None)
    if ga is None:
        ga = max(1, -(-SWIFT_BATCH_COMPLETIONS // (b * world))) if dialect.is_swift else 1
        if ga > 1:
            recipe.notes.append(
                f"gradient_accumulation_steps is not set: ms-swift takes {ga}, so that batches of"
                f" {b} on {world} process{'es' if world > 1 else ''} make"
                f" {SWIFT_BATCH_COMPLETIONS} completions"
            )
    batch_rule = _old_batch if dialect.is_old_trl else _new_batch
    batch, parts, how = batch_rule(recipe, b, ga, world, passes)
    if batch % k:
        raise _not_multiple_error(batch, k, how)
    prompts = _whole_minibatches(recipe, batch // k, parts)
    recipe.put("train.prompts_per_step", prompts, f"P = B/K = {batch}/{k}, B = {how}")
    for key, value, names in (
        ("algorithm.num_generations", k, [k_name]),
        ("algorithm.num_iterations", passes, [passes_name]),
        ("algorithm.num_minibatches", parts, parts_names),
    ):
        reasons = [recipe.original_text(name) for name in names if name in recipe.original_flags]
        if reasons:
            recipe.put(key, value, ", ".join(reasons))
    _write_forward_sizes(recipe, k, b)
    if world > 1:
        why = f"{world} processes; the batch above is for all of them, on any number"
        if prompts < world:
            why = f"there {world}: a prompt's completions stay on one process here"
        nodes = recipe.nodes if world % recipe.nodes == 0 and prompts >= world else 1
        if nodes > 1:
            why += "; on each node"
            recipe.put("distributed.num_nodes", nodes, f"{nodes} machines")
        recipe.put("distributed.num_processes", min(world, prompts) // nodes, why)
        recipe.put("distributed.engine", *_parallel_strategy(recipe))
    return BatchSizes(k, prompts * k, passes * parts)


def _parallel_strategy(recipe: Recipe) -> tuple[str, str]:
    """How processes shared the model in the old run, and the setting that says so."""
    deepspeed, fsdp = (str(recipe.flags.get(name) or "") for name in ("deepspeed", "fsdp"))
    file = recipe.launcher_file
    for setting in (deepspeed, file):
        for engine in ("zero3", "zero2", "zero1"):
            if engine in setting.replace("zero_", "zero").replace("stage", "zero"):
                return engine, setting
    if deepspeed:
        return "zero2", f"{deepspeed}: its stage is in that file"
    if fsdp or "fsdp" in file:
        return "fsdp2", fsdp or file
    return "ddp", "a copy of the model in each"


def _write_forward_sizes(recipe: Recipe, k: int, b: int) -> None:
    """Write completions per forward pass, in whole groups: they change memory, never a number."""
    sizes = {"train.micro_batch_size": ("per_device_train_batch_size", b)}
    name = "local_rollout_forward_batch_size"
    if completions := take_whole_number(recipe, name, None):
        sizes["train.no_grad_batch_size"] = (name, completions)
    for key, (flag, completions) in sizes.items():
        whole_groups = max(k, completions - completions % k)
        why = "" if whole_groups == completions else f"; {completions} would split groups of {k}"
        recipe.put(key, whole_groups, f"{flag} {completions}{why}; a matter of memory only")


def _old_batch(recipe: Recipe, b: int, ga: int, world: int, _: int) -> tuple[int, int, str]:
    """B, mini-batches and the arithmetic of TRL <=0.21."""
    parts = take_whole_number(recipe, "num_mini_batches", 1)
    return b * ga * parts * world, parts, f"b*GA*num_mini_batches*W = {b}*{ga}*{parts}*{world}"


def _new_batch(recipe: Recipe, b: int, ga: int, world: int, passes: int) -> tuple[int, int, str]:
    """B, mini-batches and the arithmetic of TRL >=0.22 and ms-swift."""
    generated = take_whole_number(recipe, "generation_batch_size", None)
    micro_steps = take_whole_number(recipe, "steps_per_generation", None)
    if generated is not None:
        batch, how = generated, f"generation_batch_size = {generated}"
    else:
        per = micro_steps or ga
        name = "steps_per_generation" if micro_steps else "GA"
        batch, how = b * world * per, f"b*W*{name} = {b}*{world}*{per}"
    parts = Fraction(batch, b * world * ga)  # updates per generation: steps_per_generation / GA
    if parts.denominator == 1:
        return batch, int(parts), how
    if parts.numerator == 1 and passes == 1:
        # One update used several batches, all sampled with the same weights: they are one batch.
        how = f"b*W*GA = {b}*{world}*{ga}, {1 / parts} sampled batches an update"
        return b * world * ga, 1, how
    parts_whole = max(1, round(parts))
    recipe.notes.append(
        f"steps_per_generation / gradient_accumulation_steps = {parts} is not whole: TRL updated in"
        f" the middle of a batch. num_minibatches = {parts_whole} is near it, not equal"
    )
    return batch, parts_whole, how


def _whole_minibatches(recipe: Recipe, prompts: int, parts: int) -> int:
    """P, or the next larger P that can be split into so many parts of whole groups."""
    if prompts % parts == 0:
        return prompts
    up = -(-prompts // parts) * parts
    nearest = " or ".join(str(p) for p in (up - parts, up) if p)
    recipe.notes.append(
        f"{prompts} prompts cannot be split into {parts} mini-batches of whole groups (the old"
        f" trainer split groups): {nearest} can, {up} is written"
    )
    return up


def _not_multiple_error(batch: int, k: int, how: str) -> ConfigError:
    below = batch - batch % k
    near = " or ".join(f"{n} (P = {n // k})" for n in (below, below + k) if n)
    what = f"{batch} completions per step are not a multiple of K = {k}"
    fix = "give the number of processes it ran on: rloo migrate --world-size N ..."
    return ConfigError(Problem(what, "the old run", f"B = {how} = {batch}; nearest: {near}", fix))


def write_duration(recipe: Recipe, dialect: Dialect, size: BatchSizes) -> int | None:
    """Write how long the run is. Returns its steps, or None if the old settings do not tell."""
    episodes = take_whole_number(recipe, "total_episodes", None)
    said_steps = recipe.original_text("max_steps")
    epochs = take_number(recipe, "num_train_epochs", None)
    updates = take_number(recipe, "max_steps", -1)
    rows = take_whole_number(recipe, "train_rows", None)  # of a trainer called from Python
    steps: int | None = None
    if episodes:
        steps = -(-episodes // size.batch)
        floor = f" (TRL 0.9 did {episodes // size.batch})" if dialect.is_old_trl else ""
        why = f"{recipe.original_text('total_episodes')}: {steps} steps of {size.batch}{floor}"
        recipe.put("total_episodes", episodes, why)
    elif updates > 0 and not dialect.is_old_trl:
        steps = math.ceil(updates / size.updates)
        why = f"{said_steps} counted updates, {size.updates} per step"
        recipe.put("max_steps", steps, why)
    else:
        passes = float(3 if epochs is None else epochs)
        why = "the old default" if epochs is None else recipe.original_text("num_train_epochs")
        if dialect.is_old_trl:
            why += f" / K: it counted completions, {size.num_generations} for each prompt"
            passes = passes / size.num_generations
        recipe.put("train.epochs", passes, why)
        epochs = None
        if rows is not None:
            steps = math.ceil(passes * rows / (size.batch // size.num_generations))
    if epochs is not None:
        said_epochs = recipe.original_text("num_train_epochs")
        recipe.dropped.append(f"{said_epochs}: the length above came first")
    if dialect.is_old_trl and updates > 0:
        recipe.dropped.append(f"{said_steps}: the trainer of TRL <=0.21 never read it")
    for key in LENGTH_KEYS:  # exactly one may be set
        if key not in recipe.lines and our_defaults().get(key) is not None:
            recipe.put(key, None, "exactly one length may be set")
    return steps


def write_schedule(recipe: Recipe, dialect: Dialect, size: BatchSizes, steps: int | None) -> None:
    """Write warm-up, and what happens every n steps, which old trainers count differently.

    TRL <=0.21 stepped its schedule and counted logging_steps once per rollout batch; TRL >=0.22
    and ms-swift count updates. Our warm-up counts updates, everything else steps.
    """
    text = recipe.original_text("warmup_steps")
    ratio = take_number(recipe, "warmup_ratio", None)
    warmup = take_number(recipe, "warmup_steps", None)
    if warmup and warmup < 1:  # transformers 5: a share of the run
        ratio, warmup = warmup, None
    elif ratio:
        text = recipe.original_text("warmup_ratio")
    if warmup:
        times = size.updates if dialect.is_old_trl else 1
        why = text + (f" * {times} updates per step" if times > 1 else "")
        recipe.put("train.warmup_steps", int(warmup) * times, why)
    elif ratio and steps:
        why = f"{text} of {steps} steps * {size.updates} updates"
        recipe.put("train.warmup_steps", math.ceil(ratio * steps * size.updates), why)
    elif ratio:
        recipe.notes.append(
            f"{text}: set train.warmup_steps to that share of all updates;"
            " their number depends on the length of the data"
        )
    for name, key in INTERVAL_KEYS.items():
        text, every = recipe.original_text(name), take_number(recipe, name, None)
        if every and every < 1:
            recipe.dropped.append(f"{text}: a share of the run; set {key} in steps")
        elif every and not (key == "eval.every" and _evaluation_is_off(recipe)):
            per = 1 if dialect.is_old_trl else size.updates
            why = text + (f" / {per} updates per step" if per > 1 else "")
            recipe.put(key, max(1, round(every / per)), why)
    if shown := take_number(recipe, "num_sample_generations", None):
        text = recipe.original_text("num_sample_generations")
        if steps and shown > 0:
            interval = max(1, int(steps // shown))
            recipe.put("logging.samples_every", interval, f"{steps} steps; {text}")
        else:
            recipe.dropped.append(f"{text}: set logging.samples_every, in steps")


def _evaluation_is_off(recipe: Recipe) -> bool:
    """Whether the old run set `eval_strategy no`, which YAML reads as false."""
    kinds = [recipe.original_flags.get(n) for n in ("eval_strategy", "evaluation_strategy")]
    return any(kind in ("no", False) for kind in kinds if kind is not None)

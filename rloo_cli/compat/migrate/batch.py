"""Writes the size of an old run: completions per step, updates, steps, and the schedule over them.

Old trainers derive the batch from per-device numbers; here it is prompts times completions. With
b = per_device_train_batch_size (completions), GA = gradient_accumulation_steps and W processes:
TRL <=0.21 sampled B = b*GA*num_mini_batches*W completions per step, TRL >=0.22 and ms-swift sample
B = b*W*steps_per_generation, and P = B/K prompts (docs/algorithms.md, Dialects).
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from rloo_cli.compat.migrate.read import OldRun
from rloo_cli.compat.migrate.recipe import Recipe, old_run_error, our_defaults

OLD_NAMES = ("rloo_k", "num_ppo_epochs", "num_mini_batches")  # K, passes, mini-batches
NEW_NAMES = ("num_generations", "num_iterations", "steps_per_generation", "generation_batch_size")
LENGTH_KEYS = ("max_steps", "total_episodes", "train.epochs")
INTERVAL_KEYS = {
    "logging_steps": "logging.every", "save_steps": "checkpoint.every", "eval_steps": "eval.every"
}  # fmt: skip
# Completions of an update, from which ms-swift derives gradient_accumulation_steps if it is unset.
SWIFT_BATCH_COMPLETIONS = 16


@dataclass(frozen=True)
class BatchSizes:
    """K, B, and updates per step (passes times mini-batches) of the old run."""

    num_generations: int
    batch: int
    updates: int


def write_batch_sizes(recipe: Recipe, old_run: OldRun, world: int) -> BatchSizes:
    """Write the batch of the old run on `world` processes.

    Raises ConfigError if B is not a multiple of K, and names the two nearest multiples.
    """
    dialect = recipe.dialect
    k_name, passes_name, *parts_names = OLD_NAMES if dialect.is_old_trl else NEW_NAMES
    k = recipe.take_whole_number(k_name, dialect.defaults["algorithm.num_generations"])
    passes = recipe.take_whole_number(passes_name, dialect.defaults["algorithm.num_iterations"])
    b = recipe.take_whole_number("per_device_train_batch_size", 1 if dialect.is_swift else 8)
    ga = recipe.take_whole_number("gradient_accumulation_steps")
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
        below = batch - batch % k
        near = " or ".join(f"{n} (P = {n // k})" for n in (below, below + k) if n)
        what = f"{batch} completions per step are not a multiple of K = {k}"
        fix = "give the number of processes it ran on: rloo migrate --world-size N ..."
        raise old_run_error(what, f"B = {how} = {batch}; nearest: {near}", fix)
    prompts = _whole_minibatches(recipe, batch // k, parts)
    recipe.put("train.prompts_per_step", prompts, f"P = B/K = {batch}/{k}, B = {how}")
    for key, value, names in (
        ("algorithm.num_generations", k, [k_name]),
        ("algorithm.num_iterations", passes, [passes_name]),
        ("algorithm.num_minibatches", parts, parts_names),
    ):
        if said := [recipe.original_text(name) for name in names if name in recipe.original_flags]:
            recipe.put(key, value, ", ".join(said))
    _write_forward_sizes(recipe, k, b)
    if world > 1:
        _write_processes(recipe, old_run, world, prompts)
    return BatchSizes(k, prompts * k, passes * parts)


def _write_processes(recipe: Recipe, old_run: OldRun, world: int, prompts: int) -> None:
    """Write the number of processes and nodes, and how the model is distributed over them."""
    why = f"{world} processes; the batch above is for all of them, on any number"
    if prompts < world:
        why = f"there {world}: a prompt's completions stay on one process here"
    nodes = old_run.nodes if world % old_run.nodes == 0 and prompts >= world else 1
    if nodes > 1:
        why += "; on each node"
        recipe.put("distributed.num_nodes", nodes, f"{nodes} machines")
    recipe.put("distributed.num_processes", min(world, prompts) // nodes, why)
    deepspeed, fsdp = (str(recipe.take(name, "")) for name in ("deepspeed", "fsdp"))
    file = old_run.launcher_file
    stages = [
        (stage, setting)
        for setting in (deepspeed, file)
        for stage in ("zero3", "zero2", "zero1")
        if stage in setting.replace("zero_", "zero").replace("stage", "zero")
    ]
    engine, why = "ddp", "a copy of the model in each"
    if stages:
        engine, why = stages[0]
    elif deepspeed:
        engine, why = "zero2", f"{deepspeed}: its stage is in that file"
    elif fsdp or "fsdp" in file:
        engine, why = "fsdp2", fsdp or file
    recipe.put("distributed.engine", engine, why)


def _write_forward_sizes(recipe: Recipe, k: int, b: int) -> None:
    """Write completions per forward pass, in whole groups: they affect only memory."""
    no_grad = "local_rollout_forward_batch_size"
    for key, name, completions in (
        ("train.micro_batch_size", "per_device_train_batch_size", b),
        ("train.no_grad_batch_size", no_grad, recipe.take_whole_number(no_grad)),
    ):
        if completions is not None:
            whole_groups = max(k, completions - completions % k)
            why = (
                "" if whole_groups == completions else f"; {completions} would split groups of {k}"
            )
            recipe.put(key, whole_groups, f"{name} {completions}{why}; a matter of memory only")


def _old_batch(recipe: Recipe, b: int, ga: int, world: int, _: int) -> tuple[int, int, str]:
    """B, mini-batches and the arithmetic of TRL <=0.21."""
    parts = recipe.take_whole_number("num_mini_batches", 1)
    return b * ga * parts * world, parts, f"b*GA*num_mini_batches*W = {b}*{ga}*{parts}*{world}"


def _new_batch(recipe: Recipe, b: int, ga: int, world: int, passes: int) -> tuple[int, int, str]:
    """B, mini-batches and the arithmetic of TRL >=0.22 and ms-swift."""
    generated = recipe.take_whole_number("generation_batch_size")
    micro_steps = recipe.take_whole_number("steps_per_generation")
    if generated is not None:
        batch, how = generated, f"generation_batch_size = {generated}"
    else:
        per, name = micro_steps or ga, "steps_per_generation" if micro_steps else "GA"
        batch, how = b * world * per, f"b*W*{name} = {b}*{world}*{per}"
    parts = Fraction(batch, b * world * ga)  # updates per generation: steps_per_generation / GA
    if parts.denominator == 1:
        return batch, int(parts), how
    if parts.numerator == 1 and passes == 1:
        # One update used several batches, all sampled with the same weights: they are one batch.
        how = f"b*W*GA = {b}*{world}*{ga}, {1 / parts} sampled batches an update"
        return b * world * ga, 1, how
    whole = max(1, round(parts))
    recipe.notes.append(
        f"steps_per_generation / gradient_accumulation_steps = {parts} is not whole: TRL updated in"
        f" the middle of a batch. num_minibatches = {whole} is near it, not equal"
    )
    return batch, whole, how


def _whole_minibatches(recipe: Recipe, prompts: int, parts: int) -> int:
    """P, or the next larger P that can be split into this many parts of whole groups."""
    up = -(-prompts // parts) * parts
    if up != prompts:
        recipe.notes.append(
            f"{prompts} prompts cannot be split into {parts} mini-batches of whole groups (the old"
            f" trainer split groups): {up} are written"
        )
    return up


def write_duration(recipe: Recipe, size: BatchSizes) -> int | None:
    """Write the length of the run. Returns its steps, or None if the old settings do not say."""
    is_old = recipe.dialect.is_old_trl
    episodes = recipe.take_whole_number("total_episodes")
    epochs = recipe.take_number("num_train_epochs")
    updates = recipe.take_number("max_steps", -1)
    rows = recipe.take_whole_number("train_rows")  # of a trainer called from Python
    said = {n: recipe.original_text(n) for n in ("total_episodes", "max_steps", "num_train_epochs")}
    steps: int | None = None
    if episodes:
        steps = -(-episodes // size.batch)
        floor = f" (TRL 0.9 did {episodes // size.batch})" if is_old else ""
        why = f"{said['total_episodes']}: {steps} steps of {size.batch}{floor}"
        recipe.put("total_episodes", episodes, why)
    elif updates > 0 and not is_old:
        steps = math.ceil(updates / size.updates)
        why = f"{said['max_steps']} counted updates, {size.updates} per step"
        recipe.put("max_steps", steps, why)
    else:
        passes = float(3 if epochs is None else epochs)
        why = "the old default" if epochs is None else said["num_train_epochs"]
        if is_old:
            why += f" / K: it counted completions, {size.num_generations} for each prompt"
            passes = passes / size.num_generations
        recipe.put("train.epochs", passes, why)
        if rows is not None:
            steps = math.ceil(passes * rows / (size.batch // size.num_generations))
    if epochs is not None and "train.epochs" not in recipe.lines:
        recipe.dropped.append(f"{said['num_train_epochs']}: the length above came first")
    if is_old and updates > 0:
        recipe.dropped.append(f"{said['max_steps']}: the trainer of TRL <=0.21 never read it")
    for key in LENGTH_KEYS:  # exactly one may be set
        if key not in recipe.lines and our_defaults().get(key) is not None:
            recipe.put(key, None, "exactly one length may be set")
    return steps


def write_schedule(recipe: Recipe, size: BatchSizes, steps: int | None) -> None:
    """Write warm-up and intervals, which old trainers count differently.

    TRL <=0.21 stepped its schedule and counted logging_steps once per rollout batch; TRL >=0.22
    and ms-swift count updates. Our warm-up counts updates, everything else steps.
    """
    is_old = recipe.dialect.is_old_trl
    ratio, warmup = recipe.take_number("warmup_ratio"), recipe.take_number("warmup_steps")
    text = recipe.original_text("warmup_ratio" if ratio and not warmup else "warmup_steps")
    if warmup and warmup < 1:  # transformers 5: a share of the run
        ratio, warmup = warmup, None
    if warmup:
        times = size.updates if is_old else 1
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
    kinds = [recipe.flags.get(n) for n in ("eval_strategy", "evaluation_strategy")]
    if "no" in kinds or False in kinds:  # `no`, which YAML reads as false
        recipe.drop(["eval_steps"], "the old run did not evaluate")
    for name, key in INTERVAL_KEYS.items():
        text, every = recipe.original_text(name), recipe.take_number(name)
        if every and every < 1:
            recipe.dropped.append(f"{text}: a share of the run; set {key} in steps")
        elif every:
            per = 1 if is_old else size.updates
            why = text + (f" / {per} updates per step" if per > 1 else "")
            recipe.put(key, max(1, round(every / per)), why)

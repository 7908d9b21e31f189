"""`rloo train --dry-run`: what would be done, from a config that was checked."""

import math

import yaml

from rloo_cli import config
from rloo_cli.schema import RunConfig


def text(run: RunConfig) -> str:
    """The batch arithmetic, the length of the run, and the resolved config."""
    k, p = run.algorithm.num_generations, run.train.prompts_per_step
    rows = run.episodes_per_step
    size, places = run.train.micro_batch_size, run.train.micro_batch_tokens
    forward = f"{places} rows" if places else "what the memory holds"
    if size is not None:
        forward = f"{size // k} groups = {size} completions"
    updates = run.updates_per_step
    if run.max_steps is not None:
        steps = f"{run.max_steps} (max_steps)"
    elif run.total_episodes is not None:
        steps = (
            f"{math.ceil(run.total_episodes / rows)} (total_episodes {run.total_episodes} / {rows})"
        )
    else:
        steps = f"{run.train.epochs} epochs x prompts / {p}, known when the data is loaded"
    lines = [
        f"run        {run.root}/{run.name}",
        f"step       {p} prompts x {k} completions = {rows} completions",
        f"updates    {run.algorithm.num_iterations} iterations x "
        f"{run.algorithm.num_minibatches} mini-batches = {updates} per step",
        f"forward    {forward} at a time",
        f"steps      {steps}",
        f"rewards    {', '.join(f'{n} x {c.weight:g}' for n, c in run.rewards.items())}",
        "",
        yaml.safe_dump(config.dump(run), sort_keys=False),
    ]
    return "\n".join(lines)

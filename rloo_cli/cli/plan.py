"""`rloo plan +recipe=NAME`: memory, disk, tokens, steps and time of a run, before it starts.

Needs neither a GPU nor weights. Imports torch only to count the parameters of a model that is not
built in, and to measure a CPU. `rloo train --dry-run` also checks the data's first rows and the
rewards, and prints the plan's summary and the resolved config.
"""

import contextlib
import json
import sys

import yaml

from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config import check, compose, hf_cache
from rloo_cli.config.compose import ComposedConfig
from rloo_cli.config.idle_keys import idle_notes
from rloo_cli.config.schema import RunConfig
from rloo_cli.launch import launcher, preflight
from rloo_cli.planning import text as planning_text
from rloo_cli.planning.machine_plan import does_not_fit_error, plan_on_this_machine, plan_run
from rloo_cli.planning.plan import PlanOptions
from rloo_cli.utils import fault_injection
from rloo_cli.utils.errors import RunError, refuse
from rloo_cli.utils.files import JsonObject

# Sections that a training run does not use.
SECTIONS_NOT_READ = ("sft", "reward_model", "slurm")
HIDDEN_SECTIONS_TEXT = "sft, reward_model and slurm, not used by a run,"


def run(args: list[str]) -> int:
    """The verb. Raises MachineError for a run that cannot fit, with the two keys to change."""
    flags = parse_verb("plan", args)
    composed = compose.compose_config(flags.overrides)
    settings = check.check_config(composed)
    with hf_cache.recorded_command(composed.user_overrides):
        asked = PlanOptions(
            flags.gpus, flags.prompts, flags.prompt_tokens, flags.completion_tokens, flags.turns,
            flags.observation_tokens,
        )  # fmt: skip
        if asked.turns is not None or asked.observation_tokens is not None:
            _require_agent(settings.agent is not None)
        found = plan_run(settings, flags.gpu, asked)
    if flags.json:
        print(json.dumps(planning_text.plan_values(found), indent=2))
    else:
        print(planning_text.plan_text(found))
    if not found.fits:
        raise does_not_fit_error(found)
    return 0


def _require_agent(has_agent: bool) -> None:
    """Raises ConfigError for episode flags on a run without an agent."""
    if not has_agent:
        what = "--turns and --observation-tokens need an agent"
        fix = "agent=tools, or omit these flags"
        refuse("command line", what, fix, "agent is null: each completion is a single turn")


def dry_run_text(run: RunConfig) -> str:
    """Batch arithmetic, length of the run, its plan, and the resolved config."""
    shown = {k: v for k, v in check.dump_config(run).items() if k not in SECTIONS_NOT_READ}
    k, p = run.algorithm.num_generations, run.train.prompts_per_step
    rows = run.episodes_per_step
    size, max_rows = run.train.micro_batch_size, run.train.micro_batch_tokens
    forward = f"{max_rows} rows" if max_rows else "as many as fit in memory"
    if size is not None:
        forward = f"{size // k} groups = {size} completions"
    updates = run.updates_per_step
    if run.max_steps is not None:
        steps = f"{run.max_steps} (max_steps)"
    elif run.total_episodes is not None:
        steps = f"{run.num_steps()} (total_episodes {run.total_episodes} / {rows})"
    else:
        steps = f"{run.train.epochs} epochs x prompts / {p}, computed when the data is loaded"
    lines = [
        f"run        {run.root}/{run.name}",
        f"step       {p} prompts x {k} completions = {rows} completions",
        f"updates    {run.algorithm.num_iterations} iterations x "
        f"{run.algorithm.num_minibatches} mini-batches = {updates} per step",
        f"forward    {forward} at a time",
        f"steps      {steps}",
        f"rewards    {', '.join(f'{n} x {c.weight:g}' for n, c in run.rewards.items())}",
        "",
        *_plan_summary(run),
        "",
        yaml.safe_dump(shown, sort_keys=False)
        + f"# {HIDDEN_SECTIONS_TEXT} are hidden: --cfg job prints all",
    ]
    return "\n".join(lines)


def dry_run_values(run: RunConfig) -> JsonObject:
    """The output of `rloo train --dry-run --json`: the run's folder, plan and whole config."""
    try:
        values: JsonObject = planning_text.plan_values(plan_on_this_machine(run))
    except RunError as error:
        values = {"unknown": error.problems[0].what}
    return {"run": f"{run.root}/{run.name}", "plan": values, "config": check.dump_config(run)}


def _plan_summary(run: RunConfig) -> list[str]:
    """The plan's summary. Unknown figures do not fail a dry run."""
    try:
        found = plan_on_this_machine(run)
        other = " (for a GPU: --gpu NAME)" if found.inputs.device.kind == "cpu" else ""
        return [
            *planning_text.plan_summary(found),
            f"plan       details: rloo plan{other}",
        ]
    except RunError as error:
        unknown = f"plan       {error.problems[0].what}: {error.problems[0].why}"
        return [*planning_text.teacher_line(run.algorithm.teacher_server), unknown]


def dry_run(composed: ComposedConfig, multirun: bool = False) -> int:
    """`rloo train --dry-run`: check everything, print the plan, train nothing. Raises RunError."""
    from rloo_cli.inspection.environment import experiment_data  # lazy: `rloo plan` reads no data

    fault_injection.arm_faults()
    run = check.check_config(launcher.name_sweep_job(composed) if multirun else composed)
    preflight.check_machine(run, downloads=False)
    with contextlib.redirect_stdout(sys.stderr):  # output of a reward's file
        notes = experiment_data.check_first_rows(run)
    print("".join(f"{note}\n" for note in notes) + dry_run_text(run))
    idle = idle_notes(composed.changed_keys, type(run), check.dump_config(run))
    print("".join(f"{note}\n" for note in idle), end="")
    return 0

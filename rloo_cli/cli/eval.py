"""`rloo eval`: score a checkpoint, a finished run or any model on held-out data.

Results go to RUN/eval/<label>/, those of a recipe to <root>/eval/<name>/<label>/ (a folder
<root>/<name> would look like a run): metrics.json, samples, and the config. Repeating the command
writes to the same folder; complete new results replace the old ones atomically. The run's own files
are not touched.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import yaml

from rloo_cli.cli import answers
from rloo_cli.cli.eval_target import USAGE, EvalTarget, eval_target_of_recipe, eval_target_of_run
from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config import check
from rloo_cli.launch import local_ranks, preflight, processes, rollout_server
from rloo_cli.utils import child_process
from rloo_cli.utils.errors import StorageError, refuse
from rloo_cli.utils.files import read_json, write_json, write_text

STOPPED = 75


def run(args: list[str]) -> int:
    """The verb. Raises RunError; earlier results are kept then."""
    options = parse_verb("eval", args)
    if options.run is None and not options.overrides:
        why = "expected a run, a checkpoint or a recipe"
        refuse("command line", "rloo eval needs a model", USAGE, why)
    if options.run is not None:
        subject = eval_target_of_run(options.run, options.overrides)
    else:
        subject = eval_target_of_recipe(options.overrides)
    where, ranks = subject.output_dir.parent, local_ranks.count_local_ranks(subject.config)
    local_ranks.check_not_a_rank("eval")
    config = subject.config.model_copy(update={"root": str(where)})
    preflight.check_machine(config, local_ranks=ranks)
    with answers.json_answer(options.json) as answer:
        code = _evaluate(subject, ranks)
        metrics = read_json(subject.output_dir / "metrics.json") if code == 0 else {}
        answer |= {"results": str(subject.output_dir), "code": code, "metrics": metrics}
    return code


def _evaluate(target: EvalTarget, ranks: int) -> int:
    """Evaluate in separate processes. -> their exit code. Results appear complete or not at all.

    Each of several `ranks` has the whole model and its share of the prompts.
    """
    output_dir = target.output_dir
    _check_output_dir(output_dir)
    try:
        with temporary_output_dir(output_dir) as folder:
            settings = yaml.safe_dump(check.dump_config(target.config), sort_keys=False)
            write_text(folder / "config.yaml", settings)
            write_json(folder / "about.json", target.provenance)
            config = target.config
            with (
                rollout_server.managed_server(folder, config, local_ranks=ranks) as (look, env),
                local_ranks.local_rank_specs(config.distributed, ranks, env, look) as (
                    starts,
                    watch,
                ),
            ):
                code = processes.run_processes("evaluation.worker", [str(folder)], watch, starts)
            if code == 0:
                _replace_results(folder, output_dir)
    except OSError as error:
        fix = f"free some space in {output_dir.parent}, or make it writable; then run this again"
        refuse(str(output_dir), "results cannot be written", fix, str(error), error=StorageError)
    if code == 0:
        print(f"results        {output_dir}")
    elif code == STOPPED:
        print("stopped: partial results are not kept")
    return code


def _check_output_dir(output_dir: Path) -> None:
    """Raise ConfigError if the folder holds anything but evaluation results."""
    if output_dir.is_dir() and (
        (output_dir / "about.json").is_file() or not [*output_dir.iterdir()]
    ):
        return
    if output_dir.exists() or output_dir.is_symlink():
        why, fix = "it does not hold evaluation results", f"mv {output_dir} {output_dir}.old"
        refuse("name", f"{output_dir} exists", fix, why)


@contextlib.contextmanager
def temporary_output_dir(output_dir: Path) -> Iterator[Path]:
    """A folder beside the output, removed at the end with empty parent folders."""
    new = [p for p in output_dir.parents if not p.exists()]
    for left in output_dir.parent.glob(f".tmp-{output_dir.name}-*"):  # left by a killed process
        number = left.name.rpartition("-")[2]
        ours = number.isdigit() and (
            (left / "config.yaml").exists() or (left / "training").exists()
        )
        if ours and not child_process.process_start_time(int(number)):
            shutil.rmtree(left, ignore_errors=True)
    folder = output_dir.with_name(f".tmp-{output_dir.name}-{os.getpid()}")
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in new:
            with contextlib.suppress(OSError):
                parent.rmdir()


def _replace_results(folder: Path, output_dir: Path) -> None:
    """Replace older results with complete new ones."""
    old = folder.with_name(f".old-{output_dir.name}-{os.getpid()}")
    if output_dir.exists():
        output_dir.rename(old)
    folder.rename(output_dir)
    shutil.rmtree(old, ignore_errors=True)

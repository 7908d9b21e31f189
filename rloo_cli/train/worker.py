"""One rank: it reads its config, builds the run, trains, saves, and reports the result.

`launch` starts it with the resume plan as one JSON object; or Python code calls `run_training`. A
signal only sets a flag (`signals`): finished work is saved before the end.
"""

import contextlib
import json
import logging
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rloo_cli.checkpoint import export, resume, run_folder, save
from rloo_cli.checkpoint.resume import ResumePlan
from rloo_cli.config import check, messages
from rloo_cli.config.schema import RunConfig
from rloo_cli.distributed.optimizer import warmup_note
from rloo_cli.distributed.world import (
    explain_lost_ranks,
    is_collective_error,
    is_rank_lost,
    is_remote_error,
    is_shared_error,
    rank_lost_error,
)
from rloo_cli.reporting.events import Events, EventSender, load_listeners
from rloo_cli.reporting.target import target_result
from rloo_cli.reporting.trackers import TrackerClient, tracker_about
from rloo_cli.run import Run
from rloo_cli.train import memory_check
from rloo_cli.train import summary as train_summary
from rloo_cli.train.build import RewardFunctions, build_run
from rloo_cli.train.loop import run_training_loop
from rloo_cli.train.memory_errors import out_of_memory_error
from rloo_cli.utils import (
    console,
    fault_injection,
    files,
    heartbeat,
    paths,
    process_exit,
    redact,
    rng,
    signals,
)
from rloo_cli.utils.environment import environment_number
from rloo_cli.utils.errors import (
    ConfigError,
    DataError,
    GenerationError,
    GuardError,
    NumbersError,
    RewardError,
    RunError,
    Stopped,
    StorageError,
    disk_write_error,
    print_error,
    print_exit,
)
from rloo_cli.utils.files import JsonObject, update_json, write_json

log = logging.getLogger("rloo")
# After these errors the run's state is complete: it is saved.
SAVED_ON_ERRORS = (Stopped, RewardError, GenerationError, GuardError)


def run_training(
    settings: RunConfig,
    folder: Path,
    functions: RewardFunctions | None = None,
    resume_plan: ResumePlan | None = None,
    events: Sequence[Events] = (),
) -> JsonObject:
    """Do a whole run in this process. -> its summary. Raises RunError.

    `functions`: rewards given as Python callables, by the name of their config entry.
    `resume_plan`: the checkpoint that the run resumes from. `events`: callbacks in addition to
    those of `logging.events`.
    """
    settings, folder = check.resolve_config(settings), paths.absolute_path(folder)
    resume_plan = resume_plan or ResumePlan(folder)
    checkpoint = resume_plan.checkpoint and paths.absolute_path(resume_plan.checkpoint)
    resume_plan = replace(resume_plan, folder=folder, checkpoint=checkpoint)
    with _check_folder_on_error(folder):
        is_first = environment_number("RANK", 0) == 0
        listeners = [*events, *load_listeners(settings.logging.events)] if is_first else []
        run, bytes_before = _build_with_memory(settings, functions, resume_plan)
        run.log.events = EventSender(listeners, run.log.note)
        with _tell_of_errors(run), _save_on_failure(run):
            first_step, start = _log_start(run), run.clock.elapsed()
            run_training_loop(run)
            return _write_results(run, first_step, run.clock.elapsed() - start, bytes_before)


@contextlib.contextmanager
def _check_folder_on_error(folder: Path) -> Iterator[None]:
    """Turn an error inside into exit 8 if its cause is that the run's folder was removed."""
    with files.hold_folder(folder):
        try:
            yield
        except Exception as error:
            if files.is_folder_gone(folder):
                raise run_folder.folder_removed_error(paths.path_as_typed(folder)) from error
            raise


def _build_with_memory(
    settings: RunConfig, functions: RewardFunctions | None, resume_plan: ResumePlan
) -> tuple[Run, float]:
    """Build the run. -> it, and the bytes of memory that this process had before."""
    process_exit.silence_libraries()
    rng.seed_generators(settings.seed)  # the same on all ranks, so new heads are the same
    bytes_before = memory_check.reset_peak_memory()
    try:
        with explain_lost_ranks("while the run was built"):
            run = build_run(settings, resume_plan.folder, functions, resume_plan)
    except torch.OutOfMemoryError as error:
        phase = getattr(error, "__notes__", ["the start"])[0]
        when = f"while the run was built, {phase}"
        raise out_of_memory_error(error, when, phase, settings) from error
    signals.defer_signals()
    return run, bytes_before


@contextlib.contextmanager
def _tell_of_errors(run: Run) -> Iterator[None]:
    """Report an error inside, once its cause is named and finished work is saved."""
    try:
        yield
    except Exception as error:
        code = error.code if isinstance(error, RunError) else 1
        run.log.events.send("on_error", str(error), code)
        raise


@contextlib.contextmanager
def _save_on_failure(run: Run) -> Iterator[None]:
    """Let an error inside name its cause, and save a checkpoint if the state is complete."""
    try:
        yield
    except SAVED_ON_ERRORS as error:
        if is_rank_lost(error):
            problem = error.problems[0]
            where = f"step {run.state.step + 1}, {run.log.current_phase}, {problem.where}"
            raise rank_lost_error(where, problem.why) from error
        if run.world.size == 1 or is_shared_error(error):  # saving takes all ranks
            _save_what_is_done(run, error)
        raise
    except OSError as error:  # metrics, samples: checkpoints are not affected
        raise disk_write_error(error) from error
    except torch.OutOfMemoryError as error:
        phase = run.clock.failed_phase or run.log.current_phase
        when = f"in step {run.state.step + 1}, {phase}"
        raise out_of_memory_error(error, when, phase, run.config, run) from error
    except RuntimeError as error:
        if run.world.size == 1 or not is_collective_error(error):
            raise
        where = f"step {run.state.step + 1}, {run.log.current_phase}"
        raise rank_lost_error(where, str(error).strip().partition("\n")[0]) from error
    finally:
        with contextlib.suppress(OSError):
            run.source.close()
            if run.world.is_main:
                _write_progress(run)
                run.log.close()
                run.log.draw_curves()
        run.generator.close()
        if run.teacher is not None:
            run.teacher.close()


def _write_progress(run: Run) -> None:
    """Record in run.json how far the run got, and the attempt if it trained nothing."""
    untouched = not run.state.updates and run.position <= (0, 0)
    untrained = run.attempt if untouched else None  # another run may then take its name
    update_json(run.folder / "run.json", progress=run.state.dump(), untrained=untrained)


def _save_what_is_done(run: Run, error: RunError) -> None:
    """Save a checkpoint. Raises StorageError if a run that was asked to stop cannot be saved."""
    run.log.phase("saving")
    step = run.step_progress
    if step is not None and not step.iteration:  # no update was made
        step.rng = run.source.give_up() or step.rng
    run.optimizer.zero_grad()
    asked = signals.stop_requested_at()
    try:
        target = save.save_checkpoint(run, raise_on_failure=True)
    except StorageError as failed:
        if isinstance(error, Stopped):
            raise failed from error
        log.error("%s", failed)
        return
    if target is not None:
        after = f" {time.monotonic() - asked:.1f} s after the signal" if asked else ""
        run.log.note(f"saved {paths.path_as_typed(target)}{after}")


def _log_start(run: Run) -> int:
    """Print warnings and the plan. -> the step that the run starts at"""
    for note in run.algorithm.warnings(run.config):
        run.log.note(f"warning: {note}")
    if note := warmup_note(run.config.train, run.num_steps * run.config.updates_per_step):
        run.log.note(f"warning: {note}")
    if run.config.logging.trackers:
        run.world.run_on_rank0(lambda: _start_trackers(run))
    if run.log.display is not None:
        run.log.display.plan["max_steps"] = run.num_steps
        update_json(run.folder / "run.json", plan=run.log.display.plan)
    run.log.events.send("on_start", run.folder, check.dump_config(run.config))
    first = run.state.step
    if first >= run.num_steps:
        run.log.note(f"step {first} of {run.num_steps}: nothing left to train")
    return first


def _start_trackers(run: Run) -> None:
    """Start sending metrics. Raises TrackerError if a required tracker fails to start."""
    logging = run.config.logging
    config = check.dump_config(run.config)
    about = tracker_about(
        run.folder, logging.trackers, logging.tracker_project, run.folder.name, config
    )
    client = TrackerClient(about, run.log.note)
    client.start(run.log.metrics_lines, logging.trackers_required)
    run.log.trackers = client


def _write_results(run: Run, first_step: int, seconds: float, bytes_before: float) -> JsonObject:
    """Write the trained model and the summary; -> the summary, {} on other ranks."""
    if run.state.step == first_step < run.num_steps:
        raise RuntimeError(f"no step was done, but {run.num_steps - first_step} were due")
    run.log.phase("saving")
    final = export.save_final(
        run.policy.model, run.tokenizer, run.folder, run.attempt, run.world,
        lambda folder: save.write_final_model(run, folder),
    )  # fmt: skip
    if not run.world.is_main:
        return {}
    save.remove_trash(run)
    run.log.draw_curves()
    summary = {
        **train_summary.summarize_run(run),
        "seconds": round(seconds, 2),
        "steps": run.state.step,
        "updates": run.state.updates,
        "final": str(paths.path_as_typed(final)),
    }
    if target := target_result(run.config.target, run.log):
        summary["target"] = target
    write_json(run.folder / "summary.json", summary)
    update_json(
        run.folder / "run.json",
        memory=memory_check.compare_peak_memory(run, bytes_before),
        seconds=memory_check.compare_step_time(run),
    )
    run.log.close()
    run.log.events.send("on_end", summary)
    train_summary.print_report(run)
    return summary


def main() -> None:
    """Run the process that `launch` starts, and exit with the code of the error, if any."""
    start = ResumePlan.from_json(sys.argv[1])
    folder, rank = start.folder, environment_number("RANK", 0)
    run_json, config_path = folder / "run.json", resume.attempt_config_path(folder, start.attempt)
    logging.basicConfig(
        filename=config_path.parent / f"rank_{rank}.log", level=logging.INFO, encoding="utf-8",
        errors="backslashreplace",
    )  # fmt: skip
    logging.raiseExceptions = False  # no traceback if a full disk rejects a log line
    console.open_descriptors()
    heartbeat.start_heartbeat()
    redact.redact_console()
    signals.install_signal_handlers(at_once=True)
    code, state = 1, "failed"
    try:
        fault_injection.arm_faults()
        run_training(check.read_config(config_path), folder, resume_plan=start)
        code, state = 0, "finished"
    except Exception as raised:
        log.error("%s", traceback.format_exc())
        error = signals.stop_behind(raised)
        if isinstance(error, RunError):
            _report_refusal(folder, error, rank)
            code, state = error.code, "stopped" if isinstance(error, Stopped) else "failed"
        else:
            print_exit(error, f"the log is in {config_path.parent}")
    except BaseException as ended:  # user code: our signal handlers raise Stopped
        error = process_exit.user_exit_error(ended)
        _report_refusal(folder, error, rank)
        code = error.code
    finally:
        with contextlib.suppress(OSError):  # the exit code is enough; the disk may be gone
            if rank == 0 and run_json.exists():  # else the folder was removed
                update_json(run_json, state=state, code=code)
    console.end_process(code)


def _report_refusal(folder: Path, error: RunError, rank: int) -> None:
    """Write it to the run's folder, and print it unless another rank does or it is not an error."""
    _write_error_detail(folder, error)
    error.problems = messages.locate_in_run(error.problems, folder)
    is_first = not is_remote_error(error) and not _repeats_rank0_error(error, rank)
    if is_first and not isinstance(error, Stopped):
        print_error(error)


def _repeats_rank0_error(error: RunError, rank: int) -> bool:
    """Whether rank 0 raises the same error: every rank finds what all ranks compute."""
    return rank > 0 and isinstance(error, ConfigError | DataError | NumbersError)


def _write_error_detail(folder: Path, error: RunError) -> None:
    """Write a reward error's call, arguments and trace to debug/reward_error.json."""
    detail = getattr(error, "detail", None)
    if detail and folder.is_dir():
        text = json.dumps(detail, indent=2, default=str)
        files.write_text(folder / "debug" / "reward_error.json", text)


if __name__ == "__main__":
    main()

"""Runs a command's work in a worker process and ends it with an exit code; silences libraries."""

import os
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch
import transformers

from rloo_cli.utils import console, redact, signals
from rloo_cli.utils.errors import (
    GenerationError,
    OutOfMemory,
    Problem,
    RunError,
    StorageError,
    print_exit,
)


def run_and_exit(
    work: Callable[[], object],
    memory_fix: str,
    is_printed_elsewhere: Callable[[BaseException], bool] = lambda error: False,
) -> NoReturn:
    """Do `work`, and exit with code 0, or with the code of the error that stopped it.

    `memory_fix`: the fix to show for out of memory. `is_printed_elsewhere`: whether
    another rank prints an error. A signal ends the work at once.
    """
    console.open_descriptors()
    redact.redact_console()
    signals.install_signal_handlers(at_once=True)
    code = 0
    try:
        work()
    except Exception as raised:
        error = _as_refusal(signals.stop_behind(raised), memory_fix)
        if isinstance(error, RunError) and is_printed_elsewhere(error):
            code = error.code
        else:
            code = print_exit(error)
    except BaseException as ended:  # user code: our signal handlers raise Stopped
        code = print_exit(user_exit_error(ended))
    console.end_process(code)


def user_exit_error(ended: BaseException) -> GenerationError:
    """The error for a SystemExit, KeyboardInterrupt or GeneratorExit, naming its source."""
    frame = traceback.extract_tb(ended.__traceback__)[-1]
    what = f"{type(ended).__name__}({ended}) ended the work before it was done"
    why = f"{frame.name} raised it; only the run itself may end the process"
    fix = "return from that code, or raise another exception"
    return GenerationError(Problem(what, f"{frame.filename}:{frame.lineno}", why, fix))


def _as_refusal(error: Exception, memory_fix: str) -> Exception:
    """A file or memory error as a refusal with its exit code; any other unchanged."""
    if isinstance(error, OSError):
        what = "a file cannot be read or written"
        where = str(error.filename or "this machine")
        fix = "check that file, its permissions and free disk space, then run the command again"
        return StorageError(Problem(what, where, str(error), fix))
    if isinstance(error, torch.OutOfMemoryError):
        why = str(error).splitlines()[0]
        return OutOfMemory(Problem("out of memory", "this machine", why, memory_fix))
    return error


def silence_libraries() -> None:
    """Keep transformers and DeepSpeed from printing, in this process and its children.

    transformers imports DeepSpeed if it is installed, used or not.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it probes devices and prints

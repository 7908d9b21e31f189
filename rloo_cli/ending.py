"""How the process of a verb ends: its work done, or refused with a block and an exit code."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch

from rloo_cli import redact, stop
from rloo_cli.errors import OutOfMemory, Problem, RunError, StorageError


def run(work: Callable[[], object], memory_fix: str) -> NoReturn:
    """Do `work` and end this process with the code of what stopped it.

    `memory_fix`: what to lower where memory runs out. A signal ends it at once.
    """
    redact.start()
    stop.listen(at_once=True)
    code = 1
    try:
        work()
        code = 0
    except RunError as error:
        code = refused(error)
    except OSError as error:
        code = refused(StorageError(Problem("a file cannot be read or written", why=str(error))))
    except torch.OutOfMemoryError as error:
        why = str(error).splitlines()[0]
        code = refused(OutOfMemory(Problem("out of memory", why=why, fix=memory_fix)))
    except Exception:
        traceback.print_exc()
        print(
            "error: this is a bug in rloo; please report it with the lines above", file=sys.stderr
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a reward thread that hangs must not keep the process


def refused(error: RunError) -> int:
    """Print a refusal; its exit code."""
    if os.environ.get("RLOO_DEBUG"):
        traceback.print_exception(error)
    print(error.render(as_json=os.environ.get("RLOO_ERRORS") == "json"), file=sys.stderr)
    return error.code

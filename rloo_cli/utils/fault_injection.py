"""Injects faults at named points: the tests use them to prove that nothing is lost.

    RLOO_ALLOW_FAULTS=1 RLOO_FAULTS="ckpt.rename@1=kill9; reward@3=raise" rloo train ...

`name@n=action`: the n-th time (default 1) that a point whose name matches (`ckpt.*` matches all
of a save) is passed. RLOO_FAULTS is refused without the first variable. Points:
load, gen.request, gen.chunk, turn (between two turns of episodes), reward, logp, loss, grad,
step, metrics, eval, of a weight sync
sync.{start,update,finish,version} (skip leaves that part out), and of a save
ckpt.{write,fsync,manifest,rename,latest,prune}. Unarmed points do nothing.
"""

import errno
import fnmatch
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rloo_cli.utils.environment import environment_number
from rloo_cli.utils.errors import refuse

if TYPE_CHECKING:
    from torch import Tensor

ACTIONS = ("kill9", "term", "raise", "hang", "nan", "oom", "enospc", "exit", "skip")
_armed: list["_Fault"] = []


@dataclass
class _Fault:
    name: str
    at: int
    action: str
    value: str
    rank: int
    passed: int = 0


def arm_faults() -> None:
    """Arm the faults of RLOO_FAULTS. Raises ConfigError if they are not allowed or not valid."""
    text = os.environ.get("RLOO_FAULTS", "")
    _armed.clear()
    if not text.strip():
        return
    if os.environ.get("RLOO_ALLOW_FAULTS") != "1":
        why = "it breaks runs on purpose and needs RLOO_ALLOW_FAULTS=1"
        refuse("environment", "RLOO_FAULTS is set", "unset RLOO_FAULTS", why)
    _armed.extend(_parse_fault(part) for part in text.split(";") if part.strip())


def _parse_fault(text: str) -> _Fault:
    where, _, action = text.strip().partition("=")
    name, _, at = where.partition("@")
    action, _, rank = action.partition("#")
    action, _, value = action.partition(":")
    if action not in ACTIONS or not (at or "1").isdigit() or not (rank or "0").isdigit():
        why = f"expected name@n=action[:value][#rank], with one of {', '.join(ACTIONS)}"
        what = f"RLOO_FAULTS: {text.strip()!r} is not a valid fault"
        refuse("environment", what, "RLOO_FAULTS=step@2=kill9", why)
    return _Fault(name.strip(), int(at or 1), action, value, int(rank or 0))


def trigger_fault(name: str) -> str | None:
    """Pass the point `name`: trigger its armed fault. -> `nan` or `skip`, which the caller does"""
    for armed in _armed:
        if not fnmatch.fnmatch(name, armed.name):
            continue
        armed.passed += 1
        if armed.passed == armed.at and armed.rank == environment_number("RANK", 0):
            return _perform_fault(name, armed)
    return None


def poison_tensor(name: str, value: "Tensor") -> "Tensor":
    """Pass the point `name` with a tensor of any shape: it becomes NaN if `nan` is armed."""
    return value * float("nan") if trigger_fault(name) == "nan" else value


def _perform_fault(name: str, armed: _Fault) -> str | None:
    match armed.action:
        case "kill9" | "term":
            os.kill(os.getpid(), signal.SIGKILL if armed.action == "kill9" else signal.SIGTERM)
        case "raise":
            raise RuntimeError(f"fault at {name}")
        case "hang":
            time.sleep(float(armed.value or 3600))
        case "oom":
            import torch

            raise torch.OutOfMemoryError(f"fault at {name}")
        case "enospc":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        case "exit":
            os._exit(int(armed.value or 1))
        case _:
            return armed.action
    return None

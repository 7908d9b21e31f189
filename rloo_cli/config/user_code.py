"""Loads the user's code, and finds its location and its frames in a traceback."""

import functools
import inspect
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import rloo_cli
from rloo_cli.config import registry, rules
from rloo_cli.config.agent import agent_config
from rloo_cli.config.judge import OpenaiJudge, RewardJudge
from rloo_cli.config.schema import RunConfig
from rloo_cli.utils.errors import ConfigError, refuse
from rloo_cli.utils.exit_guard import guard_import

PACKAGE = os.path.dirname(os.path.abspath(rloo_cli.__file__)) + os.sep
LIBRARIES = (
    sysconfig.get_paths()["stdlib"],
    *site.getsitepackages(),
    site.getusersitepackages(),
    "<frozen",
)
CALLERS = tuple(
    PACKAGE + name
    for name in (
        "rewards/engine/reward_calls.py", "rewards/engine/worker.py", "config/user_code.py",
        "utils/exit_guard.py", "config/registry.py",
    )
)  # fmt: skip


def load_user_code(spec: str, where: str, seconds: float = 120.0) -> Callable[..., object]:
    """The callable that `file.py:name` or `package.module:name` names.

    `where` is the config key that names it, `seconds` the limit for its import. Raises ConfigError
    for a missing file or name, for anything the file raises on import, and for something that is
    not callable.
    """
    try:
        with guard_import(seconds):
            code = registry.load_code(spec)
    except ConfigError as error:
        raise ConfigError(replace(error.problems[0], where=where)) from None
    except BaseException as error:  # a sys.exit() at import must not end the run silently
        file = spec.rpartition(":")[0]
        what, fix = f"{file} could not be imported", f"correct {file}"
        why = f"{format_user_frames(error)}{exception_text(error)}"
        refuse(where, what, fix, why)
    if not callable(code):
        why = f"it is a {type(code).__name__}: {code!r:.80}"
        fix = f"name a function: {where}={spec.rpartition(':')[0]}:NAME"
        refuse(where, f"{spec} is not callable", fix, why)
    return code  # type: ignore[no-any-return]


def code_location(code: Callable[..., object]) -> str:
    """`file:line` of a callable, or its repr if it has no Python source."""
    while isinstance(code, functools.partial):
        code = code.func
    plain = inspect.unwrap(code)
    if not hasattr(plain, "__code__"):
        plain = getattr(type(plain), "__call__", plain)  # noqa: B004  (an object)
    source = getattr(plain, "__code__", None)
    return f"{source.co_filename}:{source.co_firstlineno}" if source else repr(code)


def exception_text(error: BaseException) -> str:
    """Type and message of an exception, as at the end of a traceback."""
    return "".join(traceback.format_exception_only(error)).strip()


def format_user_frames(error: BaseException) -> str:
    """The frames of an exception that are the user's own."""
    return _format_chosen_frames(traceback.extract_tb(error.__traceback__))


def format_running_frames(ident: int | None) -> str:
    """The user's own frames of the thread with this identifier; "" if it has ended."""
    frame = sys._current_frames().get(ident or -1)
    return _format_chosen_frames(traceback.extract_stack(frame)) if frame is not None else ""


def _format_chosen_frames(frames: traceback.StackSummary) -> str:
    """The user's frames; for a shipped or installed reward, all frames below our call."""
    own = [f for f in frames if not f.filename.startswith((*LIBRARIES, PACKAGE))]
    if not own:
        calls = [i for i, f in enumerate(frames) if f.filename.startswith(CALLERS)]
        below = frames[calls[-1] + 1 :] if calls else frames
        own = [f for f in below if not f.filename.startswith("<frozen")]
    return "".join(traceback.format_list(own))


def user_code_notes(config: RunConfig) -> list[str]:
    """Notes for the log: the user's code that runs, with the hash of its file."""
    codes = {f"reward.{n}": getattr(e, "path", "") for n, e in config.rewards.items()
             if e.type == "function"}  # fmt: skip
    codes |= rules.user_code_specs(config.data, config.held_out, agent_config(config))
    if registry.is_user_file("algorithms", config.algorithm.name):
        codes["algorithm.name"] = f"{config.algorithm.name}:Config"
    judge = cast(OpenaiJudge | RewardJudge | None, config.eval.judge)
    if judge is not None and judge.type == "reward" and judge.reward.type == "function":
        codes["eval.judge.reward"] = judge.reward.path
    codes |= {f"train.{k}": getattr(config.train, k) for k in ("optimizer", "lr_scheduler")}
    notes = [
        f"{key}: code from {code.removesuffix(':Config')}, sha256 {registry.code_fingerprint(code)}"
        for key, code in codes.items()
        if ":" in code
    ]
    for name, entry in config.rewards.items():
        notes_of = getattr(registry.registered_module("rewards", entry.type), "notes", None)
        notes += notes_of(entry, f"reward.{name}") if notes_of else []
    if config.model.trust_remote_code:
        notes.append("warning: model.trust_remote_code is on: code from the model's repo runs")
    return notes


def code_files(config: RunConfig) -> dict[str, str]:
    """Key -> `file.py:name` or file of all user code that a run trains with.

    Code of evaluations is excluded: it may change during a run.
    """
    codes = {f"reward.{n}.path": getattr(e, "path", "") for n, e in config.rewards.items()
             if e.type == "function"}  # fmt: skip
    specs = rules.user_code_specs(config.data, config.held_out, agent_config(config))
    codes |= {key: spec for key, spec in specs.items() if not key.startswith("eval.")}
    codes |= {f"train.{k}": getattr(config.train, k) for k in ("optimizer", "lr_scheduler")}
    codes |= {f"logging.events[{spec}]": spec for spec in config.logging.events}
    codes = {key: spec for key, spec in codes.items() if ":" in spec}
    if registry.is_user_file("algorithms", config.algorithm.name):
        codes["algorithm.name"] = f"{config.algorithm.name}:Config"
    template = config.model.chat_template
    return codes | ({"model.chat_template": template} if template is not None else {})


def code_fingerprints(files: Mapping[str, str]) -> dict[str, str]:
    """Key -> hash of the file of each of these `code_files`. Imports none of them.

    A file that comes with rloo, or is missing, has the hash "-".
    """
    return {key: _file_fingerprint(spec) for key, spec in files.items()}


def _file_fingerprint(spec: str) -> str:
    if os.path.isfile(spec):
        return registry.file_fingerprint(spec)
    return registry.code_fingerprint(spec) if ":" in spec else "-"

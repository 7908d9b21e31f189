"""Environments of the package `verifiers`, which drives its episodes itself, behind the proxy.

The versions that it needs are not vLLM's, so a process of another Python loads the environment,
once, and plays every episode of the run with it. It talks to the policy as to OpenAI's API
(agent=proxy), and says the reward of the environment's rubric, which `reward=environment` makes the
score.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rloo_cli.agents.proxy import ForeignConfig, check_address
from rloo_cli.config.schema import RunConfig, Text, key
from rloo_cli.utils.child_process import start_child
from rloo_cli.utils.errors import MachineError, Problem
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rloo_cli.generation import Generator

HOST_PROGRAM = Path(__file__).parent / "foreign" / "verifiers_host.py"
FOUND_MARK = "environment found: "  # before what the program's `check` found
CHECK_S = 600.0  # an environment may have to fetch its data


class Config(ForeignConfig):
    kind: Literal["verifiers"] = key("verifiers: environments of that package")
    id: Text = key("The environment: what verifiers.load_environment takes")
    args: JsonObject = key("What verifiers.load_environment takes beside it")
    python: Text = key("The interpreter of the virtual environment that has verifiers")


def host_command(config: Config, verb: str, *more: str) -> list[str]:
    """The command of the program that loads the environment."""
    args = json.dumps(config.args)
    return [config.python, "-P", str(HOST_PROGRAM), verb, config.id, *more, f"--args={args}"]


def preflight(config: Config) -> None:
    """Raises MachineError where the environment cannot be loaded. It is loaded, in its Python."""
    _check_python(config)
    child = start_child(
        host_command(config, "check"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        out, err = child.communicate(timeout=CHECK_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        out, err = "", f"it was not loaded within {CHECK_S:g} s"
    if child.returncode or not any(line.startswith(FOUND_MARK) for line in out.splitlines()):
        what = f"the environment agent.id = {config.id} cannot be loaded by {config.python}"
        why = (err.strip().splitlines() or ["it said nothing"])[-1][:500]
        fix = f"{config.python} -m pip install -r scripts/verifiers/requirements.lock, and the"
        raise MachineError(Problem(what, "agent.id", why, f"{fix} environment's package there"))


def load_tools(config: Config) -> None:
    """Nothing: verifiers has its tools.

    Raises MachineError without the interpreter, ConfigError where the proxy cannot listen.
    """
    _check_python(config)
    check_address(config)


def _check_python(config: Config) -> None:
    if shutil.which(config.python) is None:
        what = f"agent.python: there is no program {config.python}"
        why = "verifiers' own virtual environment has the interpreter that loads the environment"
        fix = "python -m venv verifiers; verifiers/bin/pip install -r"
        fix += " scripts/verifiers/requirements.lock; agent.python=verifiers/bin/python"
        raise MachineError(Problem(what, "agent.python", why, fix))


def build_generator(
    inner: "Generator",
    run: RunConfig,
    tokenizer: "PreTrainedTokenizerBase",
    stop_ids: set[int],
    context_length: int | None,
    note: Callable[[str], None],
) -> "Generator":
    """A generator of episodes that verifiers plays, around `inner`.

    Raises ConfigError, also for a chat template that cannot go on after an answer.
    """
    from rloo_cli.agents.foreign import generator  # lazy: the registry reads schemas without torch

    config = run.agent
    assert isinstance(config, Config)

    def command(url: str) -> list[str]:
        return host_command(config, "play", url, f"--workers={config.workers}")

    launch = generator.AgentLaunch(None, {}, generator.random_token(), command)
    return generator.build_proxy(inner, run, launch, tokenizer, stop_ids, context_length, note)

"""Ends what a suite has started when the suite ends, however it ends: a plug-in of pytest.

Servers, ranks and workers are in sessions of their own, so no Ctrl-C reaches them, and after a
`kill -9` of pytest nobody would end them. All of them inherit the variable SUITE_MARK. The guard
that the product has for agents (agent_guard.py) kills what has it, once the kernel closes a pipe
that pytest holds.
"""

import os
import sys
import time

import pytest

from rloo_cli.agents.external.agent_process import GUARD
from rloo_cli.utils.child_process import start_child

SUITE_MARK = "SUITE_MARK"
PIPE = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Mark this process's environment, and start the guard. A worker of xdist has its own."""
    mark = os.environ[SUITE_MARK] = f"{os.getpid()}.{time.time_ns()}."
    its_pipe, config.stash[PIPE] = os.pipe()
    command = [sys.executable, "-I", "-S", str(GUARD), str(its_pipe), f"{SUITE_MARK}={mark}"]
    start_child(command, pass_fds=[its_pipe])
    os.close(its_pipe)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close the pipe: the guard kills what is left, and ends."""
    if PIPE in config.stash:
        os.close(config.stash[PIPE])
        del config.stash[PIPE]

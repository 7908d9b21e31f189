"""Fixtures of this room's tests."""

import signal
from collections.abc import Iterator

import pytest
from resume_cases import copy, stopped
from vllm_cases import fake

__all__ = ["copy", "fake", "stopped"]


@pytest.fixture
def hears_hangups() -> Iterator[None]:
    """What the test starts hears SIGHUP, also where the suite itself runs under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)

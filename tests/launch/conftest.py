"""Fixtures of this room's tests."""

from resume_cases import copy, stopped
from vllm_cases import fake

__all__ = ["copy", "fake", "stopped"]

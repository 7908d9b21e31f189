"""Fixtures of this room's tests."""

from resume_cases import copy, stopped

__all__ = ["copy", "stopped"]

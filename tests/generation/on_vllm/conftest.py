"""Fixtures of this room's tests."""

from vllm_cases import fake

__all__ = ["fake"]

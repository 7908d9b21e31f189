"""Fixtures of this folder's tests.

It is not named `vllm`: without vLLM installed, Python would import such a folder in its place.
"""

from vllm_cases import fake

__all__ = ["fake"]

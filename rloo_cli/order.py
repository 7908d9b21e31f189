"""Which prompt stands at which place: a pure function that anybody can compute again.

The place is the one global counter of prompts consumed, over all epochs; each epoch has its own
permutation. Numpy alone, so that what only reads a run's folder needs no torch.
"""

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np


def at(place: int, n: int, seed: int, fingerprint: str, shuffle: bool) -> int:
    """Index, among n prompts, of the one at a place of the endless order of draws."""
    epoch, within = divmod(place, n)
    return int(permutation(seed, epoch, fingerprint, n)[within]) if shuffle else within


@lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, fingerprint: str, n: int) -> np.ndarray[Any, Any]:
    """The permutation of an epoch: nothing but its arguments goes into it. -> (n,)"""
    text = f"{seed}/{epoch}/{fingerprint}".encode()
    key = int.from_bytes(hashlib.sha256(text).digest()[:16], "big")
    return np.random.Generator(np.random.PCG64(key)).permutation(n)

"""Sampling seeds: a completion's seed depends on what it is, never on where it was sampled."""

import hashlib


def sampling_seed(seed: int, phase: str, step: int, prompt: int, k: int, turn: int = 0) -> int:
    """The seed of completion `k` of the step's `prompt`-th draw (OBJECTIVE 7).

    First 8 bytes, big-endian, of SHA-256 of `{seed}/{phase}/{step}/{prompt}/{k}/{turn}`, shifted
    right by one so that it fits a signed 64-bit integer. `phase` is train or eval.
    """
    text = f"{seed}/{phase}/{step}/{prompt}/{k}/{turn}"
    return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:8], "big") >> 1

"""Captures and restores the states of all global random generators.

Sampling does not use them (a completion has its own seed), but dropout and a user's rewards may.
"""

import hashlib
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rloo_cli.utils.files import JsonObject


@dataclass
class RandomStates:
    """torch's states as bytes; those of `random` and numpy as plain integers."""

    tensors: dict[str, Tensor]  # cpu, cuda-<device>: uint8
    plain: JsonObject


def seed_generators(number: int) -> None:
    """Seed the generators of torch, `random` and numpy."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def fresh_random_states(number: int, step: int, rank: int) -> RandomStates:
    """New states for a rank that resumes from a checkpoint with another number of ranks."""
    before = capture_random_states()
    seed_generators(int(np.random.SeedSequence([number, step, rank]).generate_state(1)[0]))
    states = capture_random_states()
    restore_random_states(before)
    return states


def capture_random_states() -> RandomStates:
    """The current states of all generators."""
    tensors = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tensors |= {f"cuda-{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    kind, keys, *rest = np.random.get_state()
    version, numbers, gauss = random.getstate()
    plain = {
        "random": [version, list(numbers), gauss],
        "numpy": [str(kind), np.asarray(keys).tolist(), *rest],
    }
    return RandomStates(tensors, plain)


def restore_random_states(states: RandomStates) -> None:
    """Restore what `capture_random_states` returned, for the devices that still exist."""
    torch.set_rng_state(states.tensors["cpu"])
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"cuda-{i}" in states.tensors:
            torch.cuda.set_rng_state(states.tensors[f"cuda-{i}"], i)
    version, numbers, gauss = states.plain["random"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states.plain["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def turn_seed(seed: int, turn: int) -> int:
    """The seed of an episode's turn: turn 0 has the completion's own, others are derived from it.

    Computed as `sampling_seed`, from `{seed}/turn/{turn}`.
    """
    return derived_seed(seed, "turn", turn) if turn else seed


def derived_seed(seed: int, purpose: str, number: int) -> int:
    """A further seed for a completion, computed as `sampling_seed`."""
    text = f"{seed}/{purpose}/{number}"
    return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:8], "big") >> 1


def sampling_seed(seed: int, phase: str, step: int, prompt: int, k: int, turn: int = 0) -> int:
    """The seed of completion `k` of the step's prompt number `prompt`.

    First 8 bytes, big-endian, of SHA-256 of `{seed}/{phase}/{step}/{prompt}/{k}/{turn}`, shifted
    right by one so that it fits a signed 64-bit integer. `phase` is train or eval; of
    overlap=carry it is carry, the step 0, and the prompt its offset in the order of all.
    """
    text = f"{seed}/{phase}/{step}/{prompt}/{k}/{turn}"
    return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:8], "big") >> 1

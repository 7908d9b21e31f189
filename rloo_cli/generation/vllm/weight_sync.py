"""What an engine has, and what it must have: connections, weights, labels, and lost engines."""

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rloo_cli.generation import tolerance
from rloo_cli.generation.vllm.engine import Answer, Engine, Lost, Refused
from rloo_cli.generation.vllm.weights import Adapter, Gathered, Meta, Whole
from rloo_cli.policy import lora
from rloo_cli.utils.device_waits import wait_for_device
from rloo_cli.utils.errors import GenerationError, Problem

log = logging.getLogger(__name__)


class Counted:
    """A source of weights that counts the bytes of what it has given."""

    def __init__(self, model: Any, source: Any):
        self.model, self.source, self.bytes = model, source, 0

    def metadata(self) -> list[Meta]:
        """What iteration brings, in the same order."""
        found: list[Meta] = self.source.metadata()
        return found

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        # An engine packs on streams of its own, which do not wait for the optimizer's: without
        # this it could read weights that the last update has not written yet.
        wait_for_device()
        for name, tensor in self.source:
            self.bytes += tensor.nbytes
            yield name, tensor


class Supply:
    """Keeps `engine`, which computes in `dtype`, at the trainer's weights.

    `run_id` begins the label of each version, so that no other run's weights are taken for ours.
    `note` prints a line for the user. `tolerance`: what may differ, by the dtypes of both sides.
    """

    def __init__(
        self,
        engine: Engine,
        dtype: torch.dtype,
        run_id: str,
        note: Callable[[str], None] = log.warning,
        tolerance: Callable[..., float] = tolerance,
    ):
        self.allowed = tolerance
        self.engine, self.dtype, self.run_id, self.note = engine, dtype, run_id, note
        self.policy: Any = None
        self.version = -1  # of the weights that the engine should have
        self.connected = self.checked = False
        self.synced: str | None = None  # the label that the engine said it has
        self.facts: dict[str, float] = {"vllm/restarts": 0.0}
        self.source: Counted | None = None
        self.tolerance = tolerance(str(dtype))

    @property
    def label(self) -> str:
        """The name of the weights that the engine should have."""
        return f"{self.run_id}:{self.version}"

    def take(self, policy: Any, version: int) -> None:
        """From now on it should have these weights. Sends nothing."""
        self.policy, self.version = policy, version
        own = getattr(policy, "dtype", None) or next(policy.model.parameters()).dtype
        self.tolerance = self.allowed(str(self.dtype), str(own))
        self.facts["vllm/weight_version"] = float(version)

    def current(self) -> None:
        """Connect where there is no connection, send where other weights are there.

        Raises Lost, and GenerationError where the engine says that it has others all the same.
        """
        if self.policy is None:
            raise GenerationError("the sampler was given no weights: load comes before generate")
        if not self.connected:
            self.engine.connect()
            self.connected, self.synced, self.checked = True, None, False
            self.facts["vllm/restarts"] = float(self.engine.restarts)
        if self.synced == self.label:
            return
        source = self._source()
        found = self.engine.sync(source, self.label)
        if found != self.label:
            raise GenerationError(_other_weights(found, self.label))
        self.synced = self.label
        self.facts["vllm/synced_bytes"] = float(source.bytes)

    def _source(self) -> "Counted":
        """What is sent of the policy's weights: the same object each time, which a link keeps."""
        model = self.policy.model
        if self.source is None or self.source.model is not model:
            self.source = Counted(model, self._kind(model))
        self.source.bytes = 0
        return self.source

    def _kind(self, model: Any) -> Any:
        if lora.on(model):
            return Adapter(model, self.dtype)
        if getattr(self.policy, "pieces", None) is None:
            return Whole(model, self.dtype)
        return Gathered(model, self.dtype, lambda: self.policy.pieces())  # of whoever asks then

    def rest(self) -> None:
        """The engine may let go of memory; of its weights too, and they are then sent again."""
        if self.engine.rest():
            self.synced = None

    def lost(self, why: Lost) -> None:
        """Let go of a lost engine. Raises GenerationError where it is well and only refuses: a
        second try would be refused too."""
        if isinstance(why, Refused) and self.engine.well():
            raise GenerationError(Problem("the sampler refuses", "generation", str(why))) from why
        self.note(f"warning: the sampler was lost: {why}")
        self.connected = self.checked = False
        self.synced = None
        self.engine.give_up(str(why))

    def true(self, answer: Answer) -> Answer:
        """Raises GenerationError unless the current weights drew it, every token with its logp."""
        for version in answer.versions or ["(not told)"]:
            if version != self.label:
                raise GenerationError(_other_weights(version, self.label))
        finite = sum(map(math.isfinite, answer.logp))
        if not answer.ids or not len(answer.ids) == len(answer.logp) == finite:
            what = f"{len(answer.ids)} tokens came with {finite} log-probabilities"
            raise GenerationError(Problem(what, "generation"))
        return answer


def _other_weights(found: str, expected: str) -> Problem:
    return Problem(
        "the sampler has other weights than the trainer",
        "generation",
        f"it says {found}, the trainer is at {expected}",
        "nobody else may send weights to this server; two runs need two servers",
    )

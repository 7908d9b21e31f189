"""What an engine has, and what it must have: connections, weights, labels, and lost engines."""

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rloo_cli.generation import logprob_tolerance
from rloo_cli.generation.vllm.engine import (
    EngineCompletion,
    EngineLost,
    EngineRefused,
    InferenceEngine,
)
from rloo_cli.generation.vllm.weights import (
    AdapterWeightSource,
    GatheredWeightSource,
    ModelWeightSource,
    TensorMeta,
)
from rloo_cli.policy import lora
from rloo_cli.utils.device_waits import wait_for_device
from rloo_cli.utils.errors import GenerationError, Problem

log = logging.getLogger(__name__)


class CountedWeightSource:
    """A source of weights that counts the bytes of what it has given."""

    def __init__(self, model: Any, source: Any):
        self.model, self.source, self.bytes_sent = model, source, 0

    def metadata(self) -> list[TensorMeta]:
        """What iteration brings, in the same order."""
        found: list[TensorMeta] = self.source.metadata()
        return found

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        # An engine packs on streams of its own, which do not wait for the optimizer's: without
        # this it could read weights that the last update has not written yet.
        wait_for_device()
        for name, tensor in self.source:
            self.bytes_sent += tensor.nbytes
            yield name, tensor


class WeightSync:
    """Keeps `engine`, which computes in `dtype`, at the trainer's weights.

    `run_id` begins the label of each version, so that no other run's weights are taken for ours.
    `note` prints a line for the user. `tolerance`: what may differ, by the dtypes of both sides.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        dtype: torch.dtype,
        run_id: str,
        note: Callable[[str], None] = log.warning,
        tolerance_of_dtypes: Callable[..., float] = logprob_tolerance,
    ):
        self.tolerance_of_dtypes = tolerance_of_dtypes
        self.engine, self.dtype, self.run_id, self.note = engine, dtype, run_id, note
        self.policy: Any = None
        self.version = -1  # of the weights that the engine should have
        self.connected = self.parity_checked = False
        self.synced_label: str | None = None  # the label that the engine said it has
        self.metrics: dict[str, float] = {"vllm/restarts": 0.0}
        self.source: CountedWeightSource | None = None
        self.tolerance = tolerance_of_dtypes(str(dtype))

    @property
    def label(self) -> str:
        """The name of the weights that the engine should have."""
        return f"{self.run_id}:{self.version}"

    def set_policy(self, policy: Any, version: int) -> None:
        """From now on it should have these weights. Sends nothing."""
        self.policy, self.version = policy, version
        own = getattr(policy, "dtype", None) or next(policy.model.parameters()).dtype
        self.tolerance = self.tolerance_of_dtypes(str(self.dtype), str(own))
        self.metrics["vllm/weight_version"] = float(version)

    def ensure_synced(self) -> None:
        """Connect where there is no connection, send where other weights are there.

        Raises Lost, and GenerationError where the engine says that it has others all the same.
        """
        if self.policy is None:
            raise GenerationError("the sampler was given no weights: load comes before generate")
        if not self.connected:
            self.engine.connect()
            self.connected, self.synced_label, self.parity_checked = True, None, False
            self.metrics["vllm/restarts"] = float(self.engine.restarts)
        if self.synced_label == self.label:
            return
        source = self._weight_source()
        found = self.engine.sync_weights(source, self.label)
        if found != self.label:
            raise GenerationError(_other_weights(found, self.label))
        self.synced_label = self.label
        self.metrics["vllm/synced_bytes"] = float(source.bytes_sent)

    def _weight_source(self) -> "CountedWeightSource":
        """What is sent of the policy's weights: the same object each time, which a link keeps."""
        model = self.policy.model
        if self.source is None or self.source.model is not model:
            self.source = CountedWeightSource(model, self._make_weight_source(model))
        self.source.bytes_sent = 0
        return self.source

    def _make_weight_source(self, model: Any) -> Any:
        if lora.has_adapter(model):
            return AdapterWeightSource(model, self.dtype)
        if getattr(self.policy, "gather_weights", None) is None:
            return ModelWeightSource(model, self.dtype)
        return GatheredWeightSource(
            model, self.dtype, lambda: self.policy.gather_weights()
        )  # of whoever asks then

    def sleep(self) -> None:
        """The engine may let go of memory; of its weights too, and they are then sent again."""
        if self.engine.sleep():
            self.synced_label = None

    def handle_engine_loss(self, error: EngineLost) -> None:
        """Let go of a lost engine. Raises GenerationError where it is well and only refuses: a
        second try would be refused too."""
        if isinstance(error, EngineRefused) and self.engine.is_healthy():
            raise GenerationError(
                Problem("the sampler refuses", "generation", str(error))
            ) from error
        self.note(f"warning: the sampler was lost: {error}")
        self.connected = self.parity_checked = False
        self.synced_label = None
        self.engine.discard_engine(str(error))

    def check_completion(self, completion: EngineCompletion) -> EngineCompletion:
        """Raises GenerationError unless the current weights drew it, every token with its logp."""
        for version in completion.weight_versions or ["(not told)"]:
            if version != self.label:
                raise GenerationError(_other_weights(version, self.label))
        finite = sum(map(math.isfinite, completion.logp))
        if not completion.ids or not len(completion.ids) == len(completion.logp) == finite:
            what = f"{len(completion.ids)} tokens came with {finite} log-probabilities"
            raise GenerationError(Problem(what, "generation"))
        return completion


def _other_weights(actual_label: str, expected_label: str) -> Problem:
    return Problem(
        "the sampler has other weights than the trainer",
        "generation",
        f"it says {actual_label}, the trainer is at {expected_label}",
        "nobody else may send weights to this server; two runs need two servers",
    )

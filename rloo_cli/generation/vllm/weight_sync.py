"""The state of a weight sync: whether the engine is connected, and which weights it has."""

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

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
    WeightSource,
)
from rloo_cli.policy import lora
from rloo_cli.policy.model import Policy
from rloo_cli.utils.device_waits import wait_for_device
from rloo_cli.utils.errors import GenerationError, Problem

log = logging.getLogger(__name__)

UNLABELED_WEIGHTS = "default"  # vLLM's version of the weights that a server began with


class CountedWeightSource:
    """A source of a model's weights that counts the bytes of the tensors that it yields."""

    def __init__(self, model: nn.Module, source: WeightSource):
        self.model, self.source, self.bytes_sent = model, source, 0

    def metadata(self) -> list[TensorMeta]:
        return self.source.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        # An engine packs on its own streams, which do not wait for the optimizer's: without
        # this it could read weights that the last update has not written yet.
        wait_for_device()
        for name, tensor in self.source:
            self.bytes_sent += tensor.nbytes
            yield name, tensor


METRICS = {"Sampler against trainer": [  # read by utils.metrics
    ("vllm/restarts", "count", "last", "engines that were lost and started again"),
    ("vllm/weight_version", "updates", "last", "update whose weights the engine has"),
    ("vllm/synced_bytes", "bytes", "last", "bytes of the last weight update"),
]}  # fmt: skip


class WeightSync:
    """Keeps `engine`, which computes in `dtype`, at the trainer's weights.

    `run_id` begins the label of each version, so that another run's weights are recognized.
    `note` prints a line for the user. `tolerance_of_dtypes`: maps the dtypes of engine and
    trainer to the rms nats per token by which their log-probabilities may differ.
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
        self.policy: Any = None  # a Policy once `set_policy` was called
        self.version = -1  # of the weights that the engine should have
        self.connected = self.parity_checked = False
        self.synced_label: str | None = None  # the label that the engine last reported
        self.metrics: dict[str, float] = {"vllm/restarts": 0.0}
        self.source: CountedWeightSource | None = None
        self.tolerance = tolerance_of_dtypes(str(dtype))

    @property
    def label(self) -> str:
        """The label of the weights that the engine should have."""
        return f"{self.run_id}:{self.version}"

    def set_policy(self, policy: Policy, version: int) -> None:
        """Set the weights that the engine should have from now on. Sends nothing."""
        self.policy, self.version = policy, version
        self.tolerance = self.tolerance_of_dtypes(str(self.dtype), str(policy.dtype))
        self.metrics["vllm/weight_version"] = float(version)

    def ensure_synced(self) -> None:
        """Connect if needed, and send the weights if the engine has others.

        Raises EngineLost, and GenerationError if the engine still reports other weights.
        """
        assert self.policy is not None, "load comes before generate"
        if not self.connected:
            self.engine.connect()
            self.connected, self.synced_label, self.parity_checked = True, None, False
            self.metrics["vllm/restarts"] = float(self.engine.restarts)
        if self.synced_label == self.label:
            return
        source = self._weight_source()
        found = self.engine.sync_weights(source, self.label)
        if found != self.label:
            raise _other_weights_error(found, self.label)
        self.synced_label = self.label
        self.metrics["vllm/synced_bytes"] = float(source.bytes_sent)

    def _weight_source(self) -> CountedWeightSource:
        """The source of the policy's weights: always the same object, since a sender keeps it."""
        model = self.policy.model
        if self.source is None or self.source.model is not model:
            self.source = CountedWeightSource(model, self._make_weight_source(model))
        self.source.bytes_sent = 0
        if isinstance(self.source.source, ModelWeightSource):
            self.source.source.leaves_frozen = self.synced_label is not None  # sent earlier
        return self.source

    def _make_weight_source(self, model: nn.Module) -> WeightSource:
        is_sharded = self.policy.gather_weights is not None

        def gather_weights() -> Iterator[dict[str, Tensor]]:
            # The policy may have changed by the time the weights are gathered.
            weights: Iterator[dict[str, Tensor]] = self.policy.gather_weights()
            return weights

        if lora.has_adapter(model):
            return AdapterWeightSource(model, self.dtype, gather_weights if is_sharded else None)
        if not is_sharded:
            return ModelWeightSource(model, self.dtype)
        return GatheredWeightSource(model, self.dtype, gather_weights)

    def sleep(self) -> None:
        """Let the engine free memory. If it frees its weights, they are sent again later."""
        if self.engine.sleep():
            self.synced_label = None

    def handle_engine_loss(self, error: EngineLost) -> None:
        """Discard a lost engine. Raises GenerationError if it is healthy and refused a request,
        since it would refuse that request again."""
        if isinstance(error, EngineRefused) and self.engine.is_healthy():
            fix = "fix the named cause; the sampler's log has the full error"
            refusal = Problem("the sampler refused a request", "generation", str(error), fix)
            raise GenerationError(refusal) from error
        self.note(f"warning: the sampler was lost: {error}")
        self.connected = self.parity_checked = False
        self.synced_label = None
        self.engine.discard_engine(str(error))

    def check_completion(self, completion: EngineCompletion) -> EngineCompletion:
        """Raises GenerationError unless the current weights sampled the completion, and each of its
        tokens has a finite log-probability. Raises EngineLost for a server's first weights: it was
        restarted, and got a request before its loss was noticed."""
        for version in completion.weight_versions or ["(no label)"]:
            if version == UNLABELED_WEIGHTS:
                raise EngineLost("it was restarted: a completion comes from its first weights")
            if version != self.label:
                raise _other_weights_error(version, self.label)
        finite = sum(map(math.isfinite, completion.logp))
        if not completion.ids or not len(completion.ids) == len(completion.logp) == finite:
            what = f"{len(completion.ids)} tokens came with {finite} finite log-probabilities"
            fix = "model.dtype=float32, or an older checkpoint: resume=RUN/checkpoint-STEP"
            raise GenerationError(f"{what}; {fix}")
        return completion


def _other_weights_error(actual_label: str, expected_label: str) -> GenerationError:
    what = "the sampler has other weights than the trainer"
    what += f": it reports {actual_label}, the trainer is at {expected_label}"
    fix = "use one server per run: another run may have sent weights to this one"
    return GenerationError(f"{what}; {fix}")

"""The interface of an inference engine, wherever it runs. Imports no torch.

EngineLost means that the engine is gone: the generator then connects again, sends it the weights,
and asks for what is missing. Every other error is a GenerationError, and final.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Protocol

from rloo_cli.data.sampling_mask import SamplingMask
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from rloo_cli.generation.vllm.weights import WeightSource


class EngineLost(Exception):
    """The engine died, hangs, or cannot be reached."""


class EngineRefused(EngineLost):
    """The engine answers, but this call failed, and would fail again."""


@dataclass(frozen=True)
class EngineRequest:
    """One completion to sample."""

    prompt_ids: list[int]
    params: JsonObject  # vLLM's SamplingParams, the completion's own seed among them
    images: JsonObject | None = None  # of the prompt (`engine_images`); None = no images


@dataclass(frozen=True)
class EngineCompletion:
    """One completion, as the engine sampled it."""

    ids: list[int]
    logp: list[float]  # of each id, after temperature and filters
    finish_reason: str  # stop, length; abort is an error unless interrupted
    weight_versions: list[
        str
    ]  # of the weights that sampled it: one label, unless something is wrong
    sampling_mask: SamplingMask | None = None  # of its ids; None = not sent


OnCompletion = Callable[[int, EngineCompletion], None]  # gets the request's index, too


class InferenceEngine(Protocol):
    """A sampler in another process."""

    restarts: int  # times it was lost and restarted

    def connect(self) -> None:
        """Wait until the engine is ready and in its initial state.

        Raises EngineLost, GenerationError.
        """

    def sync_weights(self, source: "WeightSource", label: str) -> str:
        """Send the weights as `label` and reset the prefix cache. -> the label read back

        Raises EngineLost, GenerationError.
        """

    def generate(self, requests: Sequence[EngineRequest], on_completion: OnCompletion) -> None:
        """Sample all of them; `on_completion(i, completion)` as each is ready, in any order.

        Raises EngineLost, GenerationError, Stopped (requests in flight are then aborted).
        """

    def is_healthy(self) -> bool:
        """Whether it answers and reports no error."""

    def sleep(self) -> bool:
        """Let an unused engine free memory. -> whether it freed the weights"""

    def discard_engine(self, reason: str) -> None:
        """Clean up after a lost engine, if we started it."""

    def close(self) -> None:
        """End it if we started it; else return it to its initial state."""


class InterruptibleEngine(InferenceEngine, Protocol):
    """An engine that can be interrupted, and then returns partial completions (overlap=carry)."""

    def generate_until(
        self, requests: Sequence[EngineRequest], on_completion: OnCompletion, interrupted: Event
    ) -> None:
        """`generate`, until `interrupted` is set.

        Unfinished requests are then answered with the finish reason `abort` and the tokens so far,
        perhaps none; those that the engine had not started may get no answer.
        """

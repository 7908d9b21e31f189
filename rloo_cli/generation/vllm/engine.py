"""What a generator asks of an engine, wherever it runs. Imports no torch.

`Lost` says that an engine is not there any more: the generator then connects anew, sends it the
weights, and asks for what is missing. Whatever else is wrong is a GenerationError, and final.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rloo_cli.utils.files import JsonObject


class EngineLost(Exception):
    """The engine died, hangs, or cannot be reached."""


class EngineRefused(EngineLost):
    """The engine answers, but it failed at this. Where it is well otherwise, it would again."""


@dataclass(frozen=True)
class EngineRequest:
    """One completion to draw."""

    prompt_ids: list[int]
    params: JsonObject  # vLLM's SamplingParams, the completion's own seed among them


@dataclass(frozen=True)
class EngineCompletion:
    """One completion as an engine drew it."""

    ids: list[int]
    logp: list[float]  # of each id, after temperature and filters
    finish_reason: str  # stop, length; abort is an error
    weight_versions: list[str]  # labels of the weights that drew it; one, unless something is wrong


class InferenceEngine(Protocol):
    """A sampler in another process."""

    restarts: int  # times it was lost and came back

    def connect(self) -> None:
        """Wait until it is there, as if nobody had used it before. Raises Lost, GenerationError."""

    def sync_weights(self, source: Any, label: str) -> str:
        """Send the weights as `label`, forget cached prompts; the label that is read back.

        Raises Lost, GenerationError.
        """

    def generate(
        self,
        requests: Sequence[EngineRequest],
        on_completion: Callable[[int, EngineCompletion], None],
    ) -> None:
        """Draw all of them, `done(i, answer)` as each is ready, in any order.

        Raises Lost, GenerationError, Stopped (what is under way is then aborted).
        """

    def is_healthy(self) -> bool:
        """Whether it is there and says that nothing is wrong with it."""

    def sleep(self) -> bool:
        """Nothing will be asked for a while: memory may be let go of; whether the weights were."""

    def discard_engine(self, reason: str) -> None:
        """It was lost: end what is left of it, if it is ours to end."""

    def close(self) -> None:
        """End it if it is ours; leave it fit for the next trainer if it is not."""

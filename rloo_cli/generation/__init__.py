"""Backends that sample. A backend is a file here: its `Config`, and the name of its `Generator`.

The backend's file imports no torch, so that the registry can read its `Config`. Its
`IMPLEMENTATION` (`module:name`, for `registry.load_code`) names the function that makes the
generator: `implementation(model, tokenizer, run_config, context_length, folder, note)`; `note`
prints a line. A file may have `rules(config, max_prompt_length)`, problems of its keys. The
training loop uses only its `Generator`.

    common/        shared by every backend
    hf/            sampling with the trained model
    transformers   sampling in this process with the trainer's own weights
    vllm/          sampling with vLLM
    vllm_colocate  a vLLM engine on the trainer's own device, in a child process
    vllm_server    sampling by vLLM servers
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from rloo_cli.utils.errors import GenerationError

if TYPE_CHECKING:
    from threading import Event

    from rloo_cli.data.batch import Group
    from rloo_cli.generation.common.open_groups import OpenGroup
    from rloo_cli.generation.common.stop_rule import StopRule
    from rloo_cli.policy.model import Policy

# Rms nats per token. A healthy run has about 0.002 (float32) or 0.03 to 0.04 (half precision); the
# router of a mixture of experts, and fp8, add to that.
FLOAT32_TOLERANCE, HALF_TOLERANCE, QUANTIZED_TOLERANCE = 0.02, 0.1, 0.4
GPU_FLOAT32_TOLERANCE = 0.1  # vLLM's attention multiplies float32 in TF32 there; not measured yet


def logprob_tolerance(*dtypes: str, on_gpu: bool = False, coarse: bool = False) -> float:
    """Rms nats per token by which sampler and trainer, of these dtypes, may differ.

    `on_gpu`: the sampler is an engine on a GPU. `coarse`: its weights or cache are quantized, or
    the model is a mixture of experts, whose router can turn a rounding error into another expert.
    """
    if coarse:
        return QUANTIZED_TOLERANCE
    if {d.removeprefix("torch.") for d in dtypes} <= {"float32"}:
        return GPU_FLOAT32_TOLERANCE if on_gpu else FLOAT32_TOLERANCE
    return HALF_TOLERANCE


def ignore_arrival(group_index: int) -> None:
    """The default of `arrived`, which does nothing."""


class Generator(Protocol):
    """A sampler: it fills groups with completions. `GeneratorBase` has what most of them share."""

    samples_on_rank0: bool  # whether rank 0 samples for all ranks

    @property
    def metrics(self) -> dict[str, float]:
        """Its current metrics."""

    @property
    def tolerance(self) -> float:
        """Rms nats per token by which its log-probabilities may differ from ours."""

    def generate(
        self,
        groups: "list[Group]",
        seeds: list[list[int]],
        greedy: bool = False,
        temperature: float | None = None,
        arrived: Callable[[int], None] = ignore_arrival,
    ) -> None:
        """Fill `groups[i].rollouts` with `len(seeds[i])` rollouts, one per seed and in order.

        A completion depends on its prompt and its seed, not on its neighbours. `temperature` None
        means the config's. `arrived(i)` is called once for each group, as soon as it is complete,
        from any thread. Raises GenerationError.
        """

    def load(self, policy: "Policy", version: int) -> None:
        """Take the policy's weights; `version`, the number of optimizer updates, becomes the
        `weight_version` of rollouts."""

    def close(self) -> None:
        """Release the sampler's resources."""

    def stay_awake(self) -> AbstractContextManager[None]:
        """Inside, an engine that frees its memory after each call keeps it."""

    def without_recovery(self) -> AbstractContextManager[None]:
        """Inside, a lost engine ends the sampling: GenerationError's cause is then EngineLost."""

    def forbid_recovery(self) -> None:
        """Never restart a lost engine from now on."""

    def carrying(self) -> "CarryingGenerator":
        """The generator that can continue completions with other weights (overlap=carry)."""


class GeneratorBase:
    """Defaults for a generator without an engine of its own."""

    samples_on_rank0 = False

    def stay_awake(self) -> AbstractContextManager[None]:
        """Nothing sleeps here."""
        return nullcontext()

    def without_recovery(self) -> AbstractContextManager[None]:
        """Nothing recovers here."""
        return nullcontext()

    def forbid_recovery(self) -> None:
        """Nothing recovers here."""

    def carrying(self) -> "CarryingGenerator":
        """Config rules allow overlap=carry only for generators that override this."""
        raise NotImplementedError(f"{type(self).__name__} cannot continue completions")


class GeneratorWrapper(GeneratorBase):
    """A generator around another one, `inner`, with the abilities of `inner`."""

    def __init__(self, inner: Generator):
        self.inner = inner

    @property
    def metrics(self) -> dict[str, float]:
        """Those of the inner generator."""
        return self.inner.metrics

    @property
    def tolerance(self) -> float:
        """That of the inner generator."""
        return self.inner.tolerance

    def generate(
        self,
        groups: "list[Group]",
        seeds: list[list[int]],
        greedy: bool = False,
        temperature: float | None = None,
        arrived: Callable[[int], None] = ignore_arrival,
    ) -> None:
        """`Generator.generate` of the inner one."""
        self.inner.generate(groups, seeds, greedy, temperature, arrived)

    def load(self, policy: "Policy", version: int) -> None:
        """Take the policy's weights."""
        self.inner.load(policy, version)

    def close(self) -> None:
        """Release the sampler."""
        self.inner.close()

    def stay_awake(self) -> AbstractContextManager[None]:
        return self.inner.stay_awake()

    def without_recovery(self) -> AbstractContextManager[None]:
        return self.inner.without_recovery()

    def forbid_recovery(self) -> None:
        self.inner.forbid_recovery()

    def carrying(self) -> "CarryingGenerator":
        return self.inner.carrying()


class CarryingGenerator(Generator, Protocol):
    """A generator that can be interrupted, and later continues with other weights."""

    stop_rule: "StopRule"

    @property
    def version(self) -> int:
        """The version of the weights that it samples with."""

    def make_ready(self, groups: "list[Group]") -> None:
        """Connect, and check that the sampler has the weights; called by the trainer's thread."""

    def extend(
        self,
        groups: "list[OpenGroup]",
        ended: "Callable[[OpenGroup], None]",
        interrupted: "Event",
    ) -> None:
        """Sample each group's unfinished completions to their ends, or until `interrupted` is set.

        The sampled tokens are added to them, however the call ends. `ended(group)` is called once a
        group has no unfinished one left, from any thread. Raises GenerationError, EngineLost.
        """

    def handle_engine_loss(self, error: Exception) -> None:
        """Give a lost engine up; `make_ready` connects again. Called by the trainer's thread.

        Raises GenerationError if it was lost too often.
        """


def check_prompt_lengths(
    groups: "Sequence[Group]", max_completion_length: int, context_length: int | None
) -> None:
    """Raises GenerationError for an empty prompt, or one too long to leave room for completions."""
    for group in groups:
        length, which = len(group.prompt_ids), f"the prompt of draw {group.prompt_offset}"
        most = group.max_tokens or max_completion_length
        total = length + most
        if length == 0:
            raise GenerationError(f"{which} has no tokens")
        if context_length is not None and total > context_length:
            raise GenerationError(
                f"{which} leaves no room for its completion: {length} prompt tokens +"
                f" {most} = {total}, and the model's context length is"
                f" {context_length}; lower data.max_prompt_length or"
                " generation.max_completion_length"
            )

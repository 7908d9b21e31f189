"""Who samples. A backend is a file here: its `Config`, and where its `Generator` lives.

The backend's file imports no torch, so that the registry can read its `Config`; the class that
does the work is named in its `IMPLEMENTATION` (`module:name`, for `registry.load_code`) and is
built as `implementation(model, tokenizer, run_config, context_length, folder, note)`; `note`
prints a line. A file may have `rules(run_config)`, problems of its keys. The loop knows
`Generator` and nothing else.

    common/        shared by every backend
    hf/            sampling with the trained model
    transformers   Sampling in this process with the trainer's own weights
    vllm/          sampling with vLLM
    vllm_colocate  a vLLM engine on the trainer's own device, in a child process
    vllm_server    Sampling by vLLM servers
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rloo_cli.utils.errors import GenerationError, Problem

if TYPE_CHECKING:
    from rloo_cli.data.batch import Group

# Rms nats per token. About 0.002 (float32) and 0.03 to 0.04 (half precision) are seen where all is
# well; a mixture's router, and fp8, add to that.
FLOAT32_TOLERANCE, HALF_TOLERANCE, QUANTIZED_TOLERANCE = 0.02, 0.1, 0.4
GPU_FLOAT32_TOLERANCE = (
    0.1  # vLLM's attention kernels multiply float32 in TF32 there; not measured yet
)


def logprob_tolerance(*dtypes: str, on_gpu: bool = False, coarse: bool = False) -> float:
    """Rms nats per token that sampler and trainer, of these dtypes, may differ by.

    `on_gpu`: the sampler is an engine on a GPU. `coarse`: its weights or its cache are quantized,
    or the model is a mixture of experts, whose router turns a rounding into another expert.
    """
    if coarse:
        return QUANTIZED_TOLERANCE
    if {d.removeprefix("torch.") for d in dtypes} <= {"float32"}:
        return GPU_FLOAT32_TOLERANCE if on_gpu else FLOAT32_TOLERANCE
    return HALF_TOLERANCE


def ignore_arrival(group_index: int) -> None:
    """Nobody waits for single groups."""


class Generator(Protocol):
    """Prompts in, completions out."""

    metrics: dict[str, float]  # metrics of its own, as they stand
    tolerance: float  # rms nats per token by which its log-probabilities may differ from ours

    def generate(
        self,
        groups: "list[Group]",
        seeds: list[list[int]],
        greedy: bool = False,
        temperature: float | None = None,
        arrived: Callable[[int], None] = ignore_arrival,
    ) -> None:
        """Fill `groups[i].rollouts` with `len(seeds[i])` rollouts, one per seed and in order.

        A completion depends on its prompt and its seed, not on its neighbours.
        `temperature` None: that of the config. `arrived(i)` is called once for each group, as soon
        as it is whole, from any thread.
        Raises GenerationError.
        """

    def load(self, policy: Any, version: int) -> None:
        """The sampler now has the weights of optimizer update `version`, and says so on each
        rollout as `weight_version`."""

    def close(self) -> None:
        """Let go of whatever the sampler holds."""


def check_prompt_lengths(
    groups: "Sequence[Group]", max_completion_length: int, context_length: int | None
) -> None:
    """Every prompt has a token, and room for `most` more. Raises GenerationError."""
    for group in groups:
        length = len(group.prompt_ids)
        if length == 0:
            raise GenerationError(f"the prompt of draw {group.prompt_offset} has no tokens")
        if context_length is not None and length + max_completion_length > context_length:
            raise GenerationError(
                Problem(
                    "a prompt leaves no room for its completion",
                    f"draw {group.prompt_offset}",
                    f"{length} prompt tokens + {max_completion_length} = "
                    f"{length + max_completion_length}, but the model's "
                    f"context length is {context_length}",
                    "lower data.max_prompt_length or generation.max_completion_length",
                )
            )

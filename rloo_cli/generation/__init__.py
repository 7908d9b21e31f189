"""Who samples. A backend is a file here: its `Config`, and where its `Generator` lives.

The backend's file imports no torch, so that the registry can read its `Config`; the class that
does the work is named in its `IMPLEMENTATION` (`module:name`, for `registry.load_code`) and is
built as `Implementation(model, tokenizer, config, context_length)`. The loop knows `Generator`
and nothing else.
"""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rloo_cli.rollout import Group

PARTS = ("decode", "engine", "rows", "sampling", "stopping")  # shared files, not backends


class Generator(Protocol):
    """Prompts in, completions out."""

    def generate(
        self,
        groups: "list[Group]",
        seeds: list[list[int]],
        greedy: bool = False,
        temperature: float | None = None,
    ) -> None:
        """Fill `groups[i].rollouts` with `len(seeds[i])` rollouts, one per seed and in order.

        A completion depends on its prompt and its seed, not on its neighbours (OBJECTIVE 7).
        `temperature` None: that of the config.
        Raises GenerationError.
        """

    def load(self, policy: Any, version: int) -> None:
        """The sampler now has the weights of optimizer update `version`, and says so on each
        rollout as `weight_version`."""

    def close(self) -> None:
        """Let go of whatever the sampler holds."""

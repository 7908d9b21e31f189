"""Plays the completions that a run recorded, in place of a sampler (generation=replay).

A completion is found by its prompt's position and its seed, and the prompt's tokens are compared:
nothing is played that was drawn for something else. Held-out prompts are no part of a record; the
trained model itself answers them.
"""

import math
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rloo_cli.config import check
from rloo_cli.config.schema import GenerationConfig, RunConfig
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.rollout_record import read_rollout_record
from rloo_cli.generation import Generator, RecordedDraws, ignore_arrival
from rloo_cli.generation.hf.generator import TransformersGenerator
from rloo_cli.generation.replay import changed_keys, recorded_folder
from rloo_cli.generation.transformers import Config as TransformersConfig
from rloo_cli.generation.transformers import TransformersSection
from rloo_cli.policy.model import Policy
from rloo_cli.utils.errors import ConfigError, GenerationError, Problem

CHANGES_SHOWN = 5  # keys that differ from the recorded run, in the note at the start


class RecordPlayer:
    """The recorded rollouts of the run in `folder`.

    `held_out` makes the sampler of held-out prompts; None = there is none. `tolerance`: nats per
    token by which the policy may differ from the sampler; it does, where another config trains.
    """

    def __init__(
        self,
        folder: Path,
        held_out: Callable[[], Generator] | None = None,
        tolerance: float = math.inf,
    ):
        self.folder, self.make_held_out, self.tolerance = folder, held_out, tolerance
        self.metrics: dict[str, float] = {}
        self.held_out: Generator | None = None
        self.policy_version: tuple[Policy, int] | None = None
        self.step = -1
        self.wrap_held_out: Callable[[Generator], Generator] = lambda inner: inner  # an agent
        self.groups: dict[int, Group] = {}  # of the step, by position
        self.rollouts: dict[tuple[int, int], Rollout] = {}  # by position and seed

    def recorded_draws(self, step: int) -> RecordedDraws:
        """Read step `step`, counted from 0 (`RecordedGenerator.recorded_draws`)."""
        batch = read_rollout_record(self.folder, step + 1).batch
        self.step = step
        self.groups = {g.prompt_offset: g for g in batch.groups}
        self.rollouts = {(g.prompt_offset, r.seed): r for g in batch.groups for r in g.rollouts}
        offsets = [g.prompt_offset for g in batch.groups]
        greedy, pending, left_out = batch.greedy, batch.pending, batch.left_out
        return RecordedDraws(offsets, batch.draws, greedy, pending, left_out)

    def play_recorded(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        arrived: Callable[[int], None] = ignore_arrival,
    ) -> None:
        """Fill groups of the current step (`RecordedGenerator.play_recorded`)."""
        for index, (group, group_seeds) in enumerate(zip(groups, seeds, strict=True)):
            offset = group.prompt_offset
            recorded = self.groups.get(offset)
            if recorded is None or not _same_prompt(recorded, group):
                raise self._not_recorded(f"draw {offset} has another prompt, or none")
            missing = [seed for seed in group_seeds if (offset, seed) not in self.rollouts]
            if missing:
                raise self._not_recorded(f"draw {offset} has no completion of seed {missing[0]}")
            group.take_rollouts([self.rollouts[offset, seed] for seed in group_seeds])
            arrived(index)

    def _not_recorded(self, why: str) -> GenerationError:
        what = f"step {self.step + 1} of the record is not what is asked for"
        fix = "the seed and the data of the recorded run"
        return GenerationError(Problem(what, str(self.folder), why, fix))

    def generate(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        greedy: bool = False,
        temperature: float | None = None,
        arrived: Callable[[int], None] = ignore_arrival,
    ) -> None:
        """Answer held-out prompts with the trained model (`Generator.generate`)."""
        if self.held_out is None:
            if self.make_held_out is None or self.policy_version is None:
                raise GenerationError("generation=replay has no sampler")
            self.held_out = self.wrap_held_out(self.make_held_out())
            self.held_out.load(*self.policy_version)
        self.held_out.generate(groups, seeds, greedy, temperature, arrived)

    def load(self, policy: Policy, version: int) -> None:
        """Hand the weights on to the sampler of held-out prompts."""
        self.policy_version = policy, version
        if self.held_out is not None:
            self.held_out.load(policy, version)

    def close(self) -> None:
        """Release the sampler of held-out prompts; no file is kept open."""
        if self.held_out is not None:
            self.held_out.close()


def _same_prompt(recorded: Group, asked: Group) -> bool:
    """Whether a recorded group is of this prompt. What an environment's reset put into the ids is
    the record's alone: the messages are compared there."""
    if any(r.opening_ids is not None for r in recorded.rollouts):
        return recorded.prompt == asked.prompt
    return recorded.prompt_ids == asked.prompt_ids


def build_record_player(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    run: RunConfig,
    context_length: int | None,
    folder: Path,
    note: Callable[[str], None],
) -> RecordPlayer:
    """Build the generator of generation=replay."""
    recorded, values = recorded_folder(run), run.generation.model_dump()
    common = {n: values[n] for n in GenerationConfig.model_fields if n != "backend"}
    own = TransformersConfig(
        **common,
        backend="transformers",
        transformers=TransformersSection(batch_tokens=None, shared_prompt="auto"),
    )
    note(_policy_note(run, recorded))
    return RecordPlayer(
        recorded,
        lambda: TransformersGenerator(model, tokenizer, own, context_length),
        run.generation.logp_tolerance or math.inf,
    )


def _policy_note(run: RunConfig, recorded: Path) -> str:
    """Whether the policy is the one that sampled, and if not, why."""
    try:
        before = check.dump_config(check.read_resolved_config(recorded / "config.yaml"))
    except (ConfigError, OSError) as error:
        return f"replays {recorded}, whose config cannot be read: off-policy ({error})"
    changed = changed_keys(check.dump_config(run), before)
    if not changed:
        return f"replays {recorded} with its own config: the policy is the one that sampled"
    shown = ", ".join(changed[:CHANGES_SHOWN])
    more = f" and {len(changed) - CHANGES_SHOWN} more" if len(changed) > CHANGES_SHOWN else ""
    return f"replays {recorded} off-policy: other values of {shown}{more}"

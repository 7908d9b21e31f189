"""Builds a run whose completions were recorded: everything but what samples them.

The config is the run's own. Neither its sampler nor its agent's code is asked for: an engine may
be gone, a server may sample for others, an environment may have changed since.
"""

import math
from collections.abc import Callable

from rloo_cli.agents.common import build as agent_build
from rloo_cli.agents.common.tool_set import ToolSet
from rloo_cli.checkpoint.restore import check_same_code
from rloo_cli.checkpoint.resume import ResumePlan
from rloo_cli.config.schema import RunConfig
from rloo_cli.config.user_code import user_code_notes
from rloo_cli.data.batch import Group
from rloo_cli.data.fingerprint import tokenizer_digest
from rloo_cli.data.rollout_record import RecordedStep
from rloo_cli.generation import GeneratorBase, ignore_arrival
from rloo_cli.generation.common.batch_source import BatchSource
from rloo_cli.generation.common.rollouts import Rollouts
from rloo_cli.policy.model import Policy
from rloo_cli.run import Run
from rloo_cli.train.build import RunBuilder
from rloo_cli.utils.errors import DataError, GenerationError, refuse


class NoSampler(GeneratorBase):
    """The generator of a run whose completions were recorded (`generation.Generator`).

    `tolerance`: nats per token by which the policy may differ from what sampled, when it is
    computed on another machine than that.
    """

    def __init__(self, tolerance: float = math.inf):
        self.tolerance = tolerance
        self.metrics: dict[str, float] = {}

    def generate(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        greedy: bool = False,
        temperature: float | None = None,
        arrived: Callable[[int], None] = ignore_arrival,
    ) -> None:
        """Raise GenerationError: nothing is sampled."""
        raise GenerationError("the completions of a recorded step are not sampled again")

    def load(self, policy: Policy, version: int) -> None:
        """Do nothing: there are no other weights than the policy's."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class ReplayBuilder(RunBuilder):
    """Builds the run of a recorded step, without what sampled it."""

    def __init__(self, config: RunConfig, resume_plan: ResumePlan, record: RecordedStep):
        super().__init__(config, resume_plan)
        self.record = record

    def check_user_code(self) -> list[str]:
        """`RunBuilder.check_user_code`, without the agent's code, which is not called."""
        config = self.config.model_copy(update={"agent": None})
        return check_same_code(self.resume_plan, config) + user_code_notes(config)

    def load_tools(self) -> ToolSet | None:
        """The descriptions of the tools that the recorded episodes had."""
        saved = self.record.head.get("tools")
        return None if saved is None else ToolSet.from_json(saved)

    def load_tokenizer(self) -> None:
        """Tokenise the prompts. Raises ConfigError for other tokens, DataError for other data."""
        super().load_tokenizer()
        head, prompts = self.record.head, self.prompts
        if head["tokenizer"] != tokenizer_digest(self.tokenizer):
            what = "the tokenizer is not the one that the rollouts were recorded with"
            why = f"tokens have other ids than in step {self.record.step}"
            refuse("model.tokenizer", what, "the tokenizer as it was when the run was trained", why)
        if head["fingerprint"] != prompts.fingerprint:
            what = "the data are not those that the rollouts were recorded with"
            why = f"{len(prompts)} prompts, fingerprint {prompts.fingerprint}; in step"
            why += f" {self.record.step} there were {head['num_prompts']}, {head['fingerprint']}"
            refuse("data.path", what, "the data as they were then", why, error=DataError)

    def check_images(self) -> None:
        """Do nothing: what sampled the completions took the images."""

    def start_generator(self) -> None:
        """Take no sampler; the policy reads images of episodes, too."""
        self.policy.vision = agent_build.load_episode_vision(self.config, self.tokenizer)
        self.generator = NoSampler(self.config.generation.logp_tolerance or math.inf)

    def choose_source(self, rollouts: Rollouts) -> BatchSource:
        """The rollouts: nothing is sampled beside the updates."""
        return rollouts


def recorded_groups(run: Run, record: RecordedStep) -> list[Group]:
    """A recorded step's groups as the run reads them now, with the recorded completions.

    A record has ids of prompts and no pixels, and of some columns the text alone. Raises DataError
    where the prompts are not the recorded ones.
    """
    groups = []
    for recorded in record.batch.groups:
        group = run.prompts.groups_at(recorded.prompt_offset, 1)[0]
        if not _is_same_prompt(recorded, group):
            what = f"draw {recorded.prompt_offset} has another prompt than in the record"
            why = "its completions were sampled for the recorded one"
            fix = "the data and the chat template as they were then"
            refuse(f"step {record.step}", what, fix, why, error=DataError)
        group.take_rollouts(recorded.rollouts)
        groups.append(group)
    return groups


def _is_same_prompt(recorded: Group, group: Group) -> bool:
    """Whether a recorded group is of this prompt. What an environment's reset put into the ids is
    the record's alone: the messages are compared there."""
    if any(r.opening_ids is not None for r in recorded.rollouts):
        return recorded.prompt == group.prompt
    return recorded.prompt_ids == group.prompt_ids

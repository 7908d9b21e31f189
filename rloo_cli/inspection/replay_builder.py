"""Builds a run with recorded completions: everything except the sampler.

The config is the run's own. Neither its sampler nor its agent's code is used: an engine may be
gone, a server may sample for others, an environment may have changed.
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
    """The generator of a run with recorded completions (`generation.Generator`).

    `tolerance`: nats per token by which the policy may differ from the recorded sampler, when
    computed on another machine.
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
        """Do nothing: the policy's weights are the only ones."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class ReplayBuilder(RunBuilder):
    """Builds the run of a recorded step, without its sampler."""

    def __init__(self, config: RunConfig, resume_plan: ResumePlan, record: RecordedStep):
        super().__init__(config, resume_plan)
        self.record = record

    def check_user_code(self) -> list[str]:
        """`RunBuilder.check_user_code`, without the agent's code, which is not used."""
        config = self.config.model_copy(update={"agent": None})
        return check_same_code(self.resume_plan, config) + user_code_notes(config)

    def load_tools(self) -> ToolSet | None:
        """The descriptions of the tools of the recorded episodes."""
        saved = self.record.head.get("tools")
        return None if saved is None else ToolSet.from_json(saved)

    def load_tokenizer(self) -> None:
        """Tokenize the prompts. Raises ConfigError if tokens changed, DataError if data changed."""
        super().load_tokenizer()
        head, prompts = self.record.head, self.prompts
        if head["tokenizer"] != tokenizer_digest(self.tokenizer):
            what = "the tokenizer differs from that of the recorded rollouts"
            why = f"token ids differ from step {self.record.step}"
            refuse("model.tokenizer", what, "restore the tokenizer of the training", why)
        if head["fingerprint"] != prompts.fingerprint:
            what = "the data differ from those of the recorded rollouts"
            why = f"{len(prompts)} prompts, fingerprint {prompts.fingerprint}; expected"
            why += f" {head['num_prompts']}, {head['fingerprint']} from step {self.record.step}"
            refuse("data.path", what, "restore the data of the training", why, error=DataError)

    def check_images(self) -> None:
        """Do nothing: the original sampler used the images."""

    def start_generator(self) -> None:
        """Use no sampler; the policy reads images of episodes too."""
        self.policy.vision = agent_build.load_episode_vision(self.config, self.tokenizer)
        self.generator = NoSampler(self.config.generation.logp_tolerance or math.inf)

    def choose_source(self, rollouts: Rollouts) -> BatchSource:
        """The rollouts: nothing is sampled beside the updates."""
        return rollouts


def recorded_groups(run: Run, record: RecordedStep) -> list[Group]:
    """A recorded step's groups, with prompts read now and the recorded completions.

    A record has ids of prompts and no pixels, and only text for some columns. Raises DataError
    if the prompts differ from the recorded ones.
    """
    groups = []
    for recorded in record.batch.groups:
        group = run.prompts.groups_at(recorded.prompt_offset, 1)[0]
        if not _is_same_prompt(recorded, group):
            what = f"draw {recorded.prompt_offset} has a different prompt than in the record"
            why = "its completions were sampled for the recorded one"
            fix = "restore the data and the chat template of the training"
            refuse(f"step {record.step}", what, fix, why, error=DataError)
        group.take_rollouts(recorded.rollouts)
        groups.append(group)
    return groups


def _is_same_prompt(recorded: Group, group: Group) -> bool:
    """Whether a recorded group is of this prompt. Ids from an environment's reset only exist in the
    record: for these, messages are compared."""
    if any(r.opening_ids is not None for r in recorded.rollouts):
        return recorded.prompt == group.prompt
    return recorded.prompt_ids == group.prompt_ids

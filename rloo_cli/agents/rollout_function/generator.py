"""A `Generator` whose episodes a user function plays.

It is called once for the groups of a step, in the run's own process, with one prompt per
completion. Each row that it returns is split into turns: a span of the policy's own tokens, with
what came before. A turn from the run's generator must have been sampled after exactly the ids
before it; otherwise its log-probabilities would belong to another text.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import TYPE_CHECKING

from rloo_cli.agents.common.build import EpisodeSetup
from rloo_cli.agents.common.episode import Episode, finish_group
from rloo_cli.agents.common.episode_sampler import EpisodeSampler, EpisodeStep
from rloo_cli.agents.common.tool_set import Environment
from rloo_cli.agents.rollout_function.returned_rows import ReturnedRow, check_returned
from rloo_cli.agents.rollout_function.turn_sampler import FunctionRow, FunctionRules, TurnSampler
from rloo_cli.config.agent import EpisodeConfig
from rloo_cli.config.user_code import exception_text, format_user_frames
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.generation import Generator
from rloo_cli.policy.load import read_vocab_size
from rloo_cli.utils.errors import GenerationError, RunError, refuse
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from rloo_cli.policy.model import Policy

RolloutFunction = Callable[..., object]


def build_function_generator(
    config: EpisodeConfig, function: RolloutFunction, setup: EpisodeSetup
) -> "FunctionGenerator":
    """The generator of episodes that `function` plays by the agent's keys."""
    # Without any limit a row may use whatever the run's buffers hold.
    most = config.max_episode_tokens
    if most is None and setup.context_tokens is None:
        most = setup.episode_tokens
    rules = FunctionRules(
        renderer=setup.build_renderer(config.renderer),
        generation=setup.generation,
        max_turns=config.max_turns,
        max_episode_tokens=most,
        context_length=setup.context_tokens,
        max_sampled_tokens=setup.sampled_tokens,
        vocab_size=read_vocab_size(setup.model) or len(setup.tokenizer),
        stop_ids=setup.stop_ids,
        fields=config.reward_columns(),
    )
    return FunctionGenerator(setup.inner, rules, function, config.code_specs()["agent.rollout"])


class FunctionGenerator(EpisodeSampler):
    """Samples episodes with `inner`, the generator of single turns, as `function` requests them."""

    def __init__(
        self, inner: Generator, rules: FunctionRules, function: RolloutFunction, spec: str
    ):
        super().__init__(inner)
        self.rules, self.function, self.spec = rules, function, spec
        self.version = 0  # of the weights, for tokens that the function sampled itself

    def load(self, policy: "Policy", version: int) -> None:
        """Take the policy's weights."""
        super().load(policy, version)
        self.version = version

    def begin_step(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        options: JsonObject,
        arrived: Callable[[int], None],
    ) -> EpisodeStep:
        """The episodes of these groups."""
        return _FunctionStep(self, groups, seeds, options, arrived)


class _FunctionStep:
    """The episodes of one call of `generate`."""

    def __init__(
        self, generator: FunctionGenerator, groups: list[Group], seeds: list[list[int]],
        options: JsonObject, arrived: Callable[[int], None],
    ):  # fmt: skip
        self.generator, self.rules = generator, generator.rules
        self.groups, self.arrived = groups, arrived
        self.family = [
            [FunctionRow(group, k, seed) for k, seed in enumerate(group_seeds)]
            for group, group_seeds in zip(groups, seeds, strict=True)
        ]
        rows = [row for siblings in self.family for row in siblings]
        self.rows, self.sampler = rows, TurnSampler(generator.inner, self.rules, rows, options)

    def run(self) -> None:
        """Call the function, and make rollouts of what it returns."""
        returned = self._call()
        rules, spec = self.rules, self.generator.spec
        found = check_returned(returned, len(self.rows), rules.vocab_size, rules.fields, spec)
        for number, row in enumerate(found):
            self._check_limits(number, row)
        numbered = iter(range(len(self.rows)))
        for i, (group, siblings) in enumerate(zip(self.groups, self.family, strict=True)):
            numbers = [next(numbered) for _ in siblings]
            finish_group(group, [self._episode(n, found[n]) for n in numbers])
            for n, rollout in zip(numbers, group.rollouts, strict=True):
                rollout.columns = found[n].columns
            self.arrived(i)

    def abandon(self) -> None:
        """Nothing is left: the function has returned, or raised."""

    def _call(self) -> object:
        """What the function returned. Raises GenerationError if it raised."""
        prompts = [deepcopy(row.group.prompt) for row in self.rows]
        try:
            return self.generator.function(prompts, self.sampler)
        except (RunError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a sys.exit() in it must not end the run silently
            what = f"{self.generator.spec} raised an error"
            why = f"{format_user_frames(error)}{exception_text(error)}"
            fix = "fix the function, then resume=auto"
            refuse("agent.rollout", what, fix, why, error=GenerationError)

    def _check_limits(self, number: int, row: ReturnedRow) -> None:
        rules, whole = self.rules, len(row.completion_ids)
        most = rules.most_tokens_after(len(row.prompt_ids))
        which, what = f"row {number} of {self.generator.spec}", ""
        if sum(row.mask) > rules.max_sampled_tokens:
            what = f"{sum(row.mask)} policy tokens, more than {rules.max_sampled_tokens}"
            what += " (agent.max_turns of generation.max_completion_length tokens each)"
        elif most is not None and whole > most:
            what = f"{whole} tokens after its prompt, more than {most}, which agent."
            what += "max_episode_tokens and the model's context allow"
        if what:
            fix = "sampler.has_room says whether another turn fits"
            raise GenerationError(f"agent.rollout: {which} has {what}; {fix}")

    def _episode(self, number: int, returned: ReturnedRow) -> Episode:
        """A row as an episode. Raises GenerationError for one with too many turns."""
        row = self.rows[number]
        episode = Episode(row.group, row.k, row.seed, Environment([], {}), returned.prompt_ids)
        ids, mask = returned.completion_ids, returned.mask
        start = 0
        while 1 in mask[start:]:  # tokens after the last turn were never read: drop them
            begin = start + mask[start:].index(1)
            length = self._turn_length(number, returned, begin)
            sampled = self._sampled_turn(row, returned, begin, begin + length)
            episode.new_ids = ids[start:begin]
            if episode.new_ids:
                text = self.rules.renderer.tokenizer.decode(episode.new_ids)
                episode.new_messages = [{"role": "user", "content": text}]
            episode.add_turn(sampled, [*returned.prompt_ids, *ids[:begin]], [])
            start = begin + length
        episode.ended_by = "answer" if episode.terminated else "completion"
        if len(episode.turns) > self.rules.max_turns:
            what = f"row {number} of {self.generator.spec} has {len(episode.turns)} turns, more"
            what += f" than agent.max_turns = {self.rules.max_turns}"
            why = "sampler.max_turns says how many turns an episode may have"
            fix = f"agent.max_turns={len(episode.turns)}, or let the function end it earlier"
            refuse("agent.rollout", what, fix, why, error=GenerationError)
        return episode

    def _turn_length(self, number: int, returned: ReturnedRow, begin: int) -> int:
        """Length of the turn that begins there: one that was sampled, or all tokens up to a 0.

        Raises GenerationError if it was sampled after other ids.
        """
        ids, mask, row = returned.completion_ids, returned.mask, self.rows[number]
        end = begin + mask[begin:].index(0) if 0 in mask[begin:] else len(mask)
        before = [*returned.prompt_ids, *ids[:begin]]
        fitting = [
            (asked, len(sampled.completion_ids))
            for asked, sampled in row.sampled
            if sampled.completion_ids == ids[begin : begin + len(sampled.completion_ids)]
            and begin + len(sampled.completion_ids) <= end
        ]
        exact = [length for asked, length in fitting if asked == before]
        if exact:
            return max(exact)
        if any(length == end - begin for _, length in fitting):
            what = f"row {number} of {self.generator.spec} has a turn that was sampled after ids"
            what += " other than those before it"
            why = f"{len(before)} tokens come before it, prompt included"
            fix = "return exactly the ids that sampler.sample got; do not tokenize the text again"
            refuse("agent.rollout", what, fix, why, error=GenerationError)
        return end - begin

    def _sampled_turn(
        self, row: FunctionRow, returned: ReturnedRow, start: int, end: int
    ) -> Rollout:
        """The sampled rollout of these tokens; if unknown, one made of what the row says."""
        ids = returned.completion_ids[start:end]
        logps = returned.logprobs[start:end]
        before = [*returned.prompt_ids, *returned.completion_ids[:start]]
        for asked, sampled in row.sampled:
            if asked == before and sampled.completion_ids == ids:
                return Rollout(
                    ids, sampled.text, sampled.finish_reason, sampled.terminated, row.seed,
                    sampled.weight_version, logps, sampling_mask=sampled.sampling_mask,
                )  # fmt: skip
        stops = self.rules.stop_ids
        ended = ids[-1] in stops
        text = self.rules.renderer.tokenizer.decode(ids[:-1] if ended else ids)
        reason = "stop" if ended else "length"
        return Rollout(ids, text, reason, ended, row.seed, self.generator.version, logps)

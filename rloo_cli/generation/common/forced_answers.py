"""Forced answers (generation.answer_budget): a completion that does not end in time is asked to.

The sampler is called twice. The first call samples at most `at` tokens. A completion that has not
ended by then gets the ids of `text`, and the second call samples at most `tokens` more, with all of
it as the prompt and a seed derived from its own. One that ends in time is what it would have been
without a budget.

To everything that computes, the text is like a tool's answer in an episode: the policy reads it,
and its mask is 0. To rewards and people the whole is one completion, whose text includes it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rloo_cli.config.schema import AnswerBudget
from rloo_cli.data.batch import Group, Rollout, Turn
from rloo_cli.generation import Generator, GeneratorWrapper, ignore_arrival
from rloo_cli.utils.rng import turn_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ForcedAnswers(GeneratorWrapper):
    """Samples with `inner`. `text_ids`: the ids of the budget's text."""

    def __init__(
        self,
        inner: Generator,
        budget: AnswerBudget,
        tokenizer: "PreTrainedTokenizerBase",
        text_ids: list[int],
    ):
        super().__init__(inner)
        self.budget, self.tokenizer, self.text_ids = budget, tokenizer, text_ids

    def generate(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        greedy: bool = False,
        temperature: float | None = None,
        arrived: Callable[[int], None] = ignore_arrival,
    ) -> None:
        """Fill `groups[i].rollouts`, one per seed and in order (`Generator.generate`)."""
        begun = [replace(group, rollouts=[], max_tokens=self.budget.at) for group in groups]

        def take_group(index: int) -> None:
            """Pass a group on, once all of its completions have ended or had their answer."""
            groups[index].take_rollouts(begun[index].rollouts)
            arrived(index)

        def begun_group(index: int) -> None:
            if all(rollout.terminated for rollout in begun[index].rollouts):
                take_group(index)

        with self.inner.stay_awake():
            self.inner.generate(begun, seeds, greedy, temperature, begun_group)
            unfinished = [
                (i, k)
                for i, group in enumerate(begun)
                for k, rollout in enumerate(group.rollouts)
                if not rollout.terminated
            ]
            asked = [self._with_text(begun[i], begun[i].rollouts[k]) for i, k in unfinished]
            missing = Counter(i for i, _ in unfinished)

            def add_answer(number: int) -> None:
                i, k = unfinished[number]
                (answer,) = asked[number].rollouts
                begun[i].rollouts[k] = self._join_parts(begun[i].rollouts[k], answer)
                missing[i] -= 1
                if not missing[i]:
                    take_group(i)

            if asked:
                answer_seeds = [[turn_seed(seeds[i][k], 1)] for i, k in unfinished]
                self.inner.generate(asked, answer_seeds, greedy, temperature, add_answer)

    def _with_text(self, group: Group, begun: Rollout) -> Group:
        """A group of one completion, that of the answer: its prompt ends with the text."""
        ids = [*group.prompt_ids, *begun.completion_ids, *self.text_ids]
        return replace(group, prompt_ids=ids, rollouts=[], max_tokens=self.budget.tokens)

    def _join_parts(self, begun: Rollout, answer: Rollout) -> Rollout:
        """One completion of what was sampled first, the text, and the answer."""
        turns = [_as_turn(begun, []), _as_turn(answer, self.text_ids)]
        whole = Rollout.from_turns(turns, answer.terminated, begun.seed)
        # The answer's own text lacks the stop id, or what a stop string cut off.
        cut = len(self._decode(answer.completion_ids)) - len(answer.text)
        text = self._decode(whole.completion_ids)
        return replace(whole, text=text[: len(text) - cut], turns=None)

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def _as_turn(part: Rollout, read_ids: list[int]) -> Turn:
    """A part of a completion, sampled after `read_ids`."""
    return Turn(
        prompt_ids=read_ids,
        sampled_ids=part.completion_ids,
        logp=part.behaviour_logp,
        text=part.text,
        finish_reason=part.finish_reason,
        weight_version=part.weight_version,
        sampling_mask=part.sampling_mask,
    )

"""The sampler that a user function gets: token ids in, ids and log-probabilities out.

Every turn is sampled by the run's own generator, with the step's weights. The seed of turn t is
derived from the completion's seed and t, as for every kind of agent: what a row samples depends on
its prompt, its seed and its function, not on the other rows.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rloo_cli.agents.common.turn_rendering import TurnRenderer
from rloo_cli.config.schema import GenerationConfig
from rloo_cli.data.batch import Group, Prompt, Rollout, copy_value
from rloo_cli.data.render import render_prompt
from rloo_cli.generation import Generator
from rloo_cli.utils import signals
from rloo_cli.utils.errors import GenerationError
from rloo_cli.utils.fault_injection import trigger_fault
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.rng import turn_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHERE = "sampler.sample"
PROMPTS_FIRST = "begin each list with the ids of its row in sampler.prompt_ids"


@dataclass(frozen=True)
class FunctionRules:
    """Settings shared by all episodes of a run."""

    renderer: TurnRenderer
    generation: GenerationConfig
    max_turns: int
    max_episode_tokens: int | None  # after the prompt
    context_length: int | None  # tokens of a prompt and a whole episode; None = not known
    max_sampled_tokens: int  # per episode, over all turns
    vocab_size: int
    stop_ids: set[int]
    fields: Sequence[str]  # returned by the function, for rewards

    def most_tokens_after(self, num_prompt_tokens: int) -> int | None:
        """The most tokens of an episode after its prompt; None = no known limit."""
        limits = [] if self.max_episode_tokens is None else [self.max_episode_tokens]
        if self.context_length is not None:
            limits.append(self.context_length - num_prompt_tokens)
        return min(limits, default=None)


@dataclass(frozen=True)
class SampledTurn:
    """One sampled turn."""

    ids: list[int]  # the stop token (or the stop string's tokens) included
    logprobs: list[float]  # of each id, of the sampler's own distribution
    text: str  # without the stop token
    finish_reason: str  # stop, length


@dataclass
class FunctionRow:
    """One completion that the function plays: what was sampled for it so far."""

    group: Group
    k: int
    seed: int
    sampled: list[tuple[list[int], Rollout]] = field(default_factory=list)  # prompt ids, answer


class TurnSampler:
    """The function's second argument. A row is the index of its prompt in the first one."""

    def __init__(
        self, inner: Generator, rules: FunctionRules, rows: list[FunctionRow], options: JsonObject
    ):
        self._inner, self._rules, self._rows, self._options = inner, rules, rows, options
        self._lock = threading.Lock()  # only one thread at a time may call the run's generator

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer."""
        return self._rules.renderer.tokenizer

    @property
    def processing_class(self) -> "PreTrainedTokenizerBase":
        """The tokenizer, under the name that TRL's trainer has for it."""
        return self.tokenizer

    @property
    def prompt_ids(self) -> list[list[int]]:
        """Each row's prompt as ids, as the run renders it."""
        return [list(row.group.prompt_ids) for row in self._rows]

    @property
    def columns(self) -> list[JsonObject]:
        """Each row's other columns in the data set."""
        return [copy_value(row.group.example) for row in self._rows]

    @property
    def seeds(self) -> list[int]:
        """Each row's seed; derive all other randomness from it."""
        return [row.seed for row in self._rows]

    @property
    def greedy(self) -> bool:
        """Whether to take the most likely tokens, as for some held-out answers."""
        return bool(self._options["greedy"])

    @property
    def max_turns(self) -> int:
        """agent.max_turns"""
        return self._rules.max_turns

    @property
    def max_completion_length(self) -> int:
        """Most tokens per turn (generation.max_completion_length)."""
        return self._rules.generation.max_completion_length

    def render(self, prompt: Prompt, tools: list[JsonObject] | None = None) -> list[int]:
        """The ids of a prompt: a conversation by the chat template, a text unchanged."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        kwargs = self._rules.generation.chat_template_kwargs
        return render_prompt(prompt, self.tokenizer, kwargs | ({"tools": tools} if tools else {}))

    def new_ids(self, turn: SampledTurn, messages: list[JsonObject]) -> list[int]:
        """The ids between a turn and the next one, with these (user) messages in between.

        They complete the turn as the chat template does, and begin the next. Raises
        GenerationError for a template that does not support this.
        """
        renderer = self._rules.renderer
        safe = [m | {"content": renderer.split_specials(str(m["content"]))} for m in messages]
        return renderer.new_ids([], safe, [], turn.ids[-1])

    def has_room(self, row: int, ids: Sequence[int]) -> bool:
        """Whether another turn fits after these ids (prompt and all turns) in this row."""
        begin = len(self._rows[row].group.prompt_ids)
        most = self._rules.most_tokens_after(begin)
        length = len(ids) - begin + self.max_completion_length
        return len(self._rows[row].sampled) < self.max_turns and (most is None or length <= most)

    def sample(
        self, prompt_ids: Sequence[Sequence[int]], rows: Sequence[int] | None = None
    ) -> list[SampledTurn]:
        """Sample one turn after each of these lists of ids. -> in their order

        `rows`: the row of each list; None = one list per row, in order. Turns requested together
        are sampled together. Raises GenerationError.
        """
        with self._lock:
            if any(row.sampled for row in self._rows):
                trigger_fault("turn")
            signals.raise_if_stopped()
            return self._sample(prompt_ids, rows)

    def _sample(
        self, prompt_ids: Sequence[Sequence[int]], rows: Sequence[int] | None
    ) -> list[SampledTurn]:
        numbers = list(range(len(self._rows)) if rows is None else rows)
        asked = [self._checked_ids(ids) for ids in prompt_ids]
        self._check_rows(numbers, len(asked))
        # Siblings that continue the same ids form one group: their prompt is computed once.
        together: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for index, (number, ids) in enumerate(zip(numbers, asked, strict=True)):
            key = self._rows[number].group.prompt_offset, tuple(ids)
            together.setdefault(key, []).append(index)
        stand_ins, seeds = [], []
        for indices in together.values():
            group = self._rows[numbers[indices[0]]].group
            ids = list(asked[indices[0]])
            stand_ins.append(Group(group.prompt_offset, group.example, group.prompt, ids))
            asking = [self._rows[numbers[index]] for index in indices]
            seeds.append([turn_seed(row.seed, len(row.sampled)) for row in asking])
        self._inner.generate(stand_ins, seeds, **self._options)
        found: dict[int, SampledTurn] = {}
        for indices, stand_in in zip(together.values(), stand_ins, strict=True):
            for index, rollout in zip(indices, stand_in.rollouts, strict=True):
                self._rows[numbers[index]].sampled.append((stand_in.prompt_ids, rollout))
                logps = rollout.behaviour_logp or []
                found[index] = SampledTurn(
                    list(rollout.completion_ids), list(logps), rollout.text, rollout.finish_reason
                )
        return [found[index] for index in range(len(asked))]

    def _check_rows(self, numbers: list[int], num_asked: int) -> None:
        what = ""
        if len(numbers) != num_asked:
            what = f"{num_asked} lists of ids for {len(numbers)} rows; without rows=[...], pass"
            what += " one list per prompt"
        elif wrong := [n for n in numbers if not 0 <= n < len(self._rows)]:
            what = f"row {wrong[0]} does not exist, rows are 0 to {len(self._rows) - 1}"
        elif len({*numbers}) < len(numbers):
            twice = next(n for n in numbers if numbers.count(n) > 1)
            what = f"row {twice} is requested twice in one call; request its next turn afterwards"
        if what:
            raise GenerationError(f"{WHERE}: {what}")

    def _checked_ids(self, ids: Any) -> list[int]:
        values = ids.tolist() if hasattr(ids, "tolist") else ids
        problem = wrong_ids(values, self._rules.vocab_size)
        if problem or not values:
            raise GenerationError(f"{WHERE}: {problem or 'a list has no ids'}; {PROMPTS_FIRST}")
        return list(values)


def wrong_ids(values: object, vocab_size: int) -> str | None:
    """The fault in a list of token ids; None if it is valid."""
    if not isinstance(values, list | tuple):
        return f"it is a {type(values).__name__}, not a list of ids: {values!r:.80}"
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int):
            return f"entry {index} is not a token id: {value!r:.80}"
        if not 0 <= value < vocab_size:
            return f"entry {index} is {value}, but token ids are 0 to {vocab_size - 1}"
    return None

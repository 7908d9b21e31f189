"""Many episodes at once: a `Generator` whose completions have several turns.

One turn is one call of the run's own generator, ids in and ids out. A wave samples one turn of
every episode that is ready; tool calls begin as soon as a turn ends, while the rest of the wave is
still being sampled. The next wave waits for tools no longer than the last one took: a tool that is
slower than a turn delays only its own episode.

The seed of turn t is derived from the completion's seed and t: an episode depends on its prompt,
its seed and its tools, not on the other episodes.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from rloo_cli.agents.common.call_parsers import CallParser, ParsedCalls
from rloo_cli.agents.common.episode import Episode, common_prefix
from rloo_cli.agents.common.episode_sampler import EpisodeSampler, EpisodeStep
from rloo_cli.agents.common.observations import (
    Content,
    Observation,
    ObservationLimit,
    ToolImages,
    joined_content,
)
from rloo_cli.agents.common.tool_calls import Answers, ToolCalls
from rloo_cli.agents.common.tool_processes import ToolProcesses
from rloo_cli.agents.common.tool_set import ToolSet
from rloo_cli.agents.common.tool_worker import NO_IMAGES
from rloo_cli.agents.common.turn_rendering import TurnRenderer, tool_message
from rloo_cli.config.agent import AgentConfig
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.episode_media import extended_media
from rloo_cli.data.render import render_prompt, render_text
from rloo_cli.generation import Generator
from rloo_cli.utils import signals
from rloo_cli.utils.fault_injection import trigger_fault
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.rng import turn_seed

MAX_THREADS = 256  # waiting for tools
SHORTEST_WAIT_S = 0.05  # for tools, after a wave that took less
OPENING_WAIT_S = 1.0  # for environments to be reset, before the first wave
POLL_S = 0.2


@dataclass(frozen=True)
class EpisodeRules:
    """Settings shared by all episodes of a run."""

    config: AgentConfig
    tools: ToolSet
    renderer: TurnRenderer
    parser: CallParser
    max_completion_length: int
    context_length: int | None  # tokens of a prompt and a whole episode; None = not known
    turn_rewards: str = "sum"  # algorithm.turn_rewards
    images: ToolImages = field(default_factory=lambda: ToolImages(NO_IMAGES))


class EpisodeGenerator(EpisodeSampler):
    """Samples episodes with `inner`, the generator of single turns."""

    def __init__(self, inner: Generator, rules: EpisodeRules):
        super().__init__(inner)
        self.rules = rules
        self.processes = ToolProcesses(rules.tools.import_specs, rules.config.kept_processes())

    def close(self) -> None:
        """End all tool processes, and release the sampler."""
        self.processes.close()
        super().close()

    def begin_step(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        options: JsonObject,
        arrived: Callable[[int], None],
    ) -> EpisodeStep:
        """The episodes of these groups."""
        return _EpisodeStep(self, groups, seeds, options, arrived)


@dataclass
class _Asked:
    """Episodes that continue the same ids: a group's first turns, or one episode's next."""

    episodes: list[Episode]
    ids: list[int] = field(default_factory=list)


class _EpisodeStep:
    """The episodes of one call of `generate`."""

    def __init__(
        self,
        generator: EpisodeGenerator,
        groups: list[Group],
        seeds: list[list[int]],
        options: JsonObject,
        arrived: Callable[[int], None],
    ):
        self.inner, self.rules = generator.inner, generator.rules
        self.groups, self.options, self.arrived = groups, options, arrived
        self.calls = ToolCalls(self.rules.config, generator.processes, self.rules.images)
        self.family = [
            [self._new_episode(group, k, seed) for k, seed in enumerate(group_seeds)]
            for group, group_seeds in zip(groups, seeds, strict=True)
        ]
        count = sum(map(len, self.family))
        self.executor = ThreadPoolExecutor(min(MAX_THREADS, max(1, count)), "tools")
        self.waiting: dict[Future[Any], tuple[str, Episode]] = {}
        self.index = {id(e): i for i, siblings in enumerate(self.family) for e in siblings}
        self.unopened = [len(siblings) for siblings in self.family]
        self.unfinished = [len(siblings) for siblings in self.family]
        self.ready: list[_Asked] = []

    def _new_episode(self, group: Group, k: int, seed: int) -> Episode:
        environment = self.rules.tools.environment_of(group.example)
        return Episode(group, k, seed, environment, group.prompt_ids)

    def run(self) -> None:
        """Sample wave after wave until every episode has ended."""
        for episode in (e for siblings in self.family for e in siblings):
            self._submit("opened", episode, self.calls.open_environment, episode)
        patience = OPENING_WAIT_S
        while self.ready or self.waiting:
            if self.waiting:
                self._collect(patience)
            if not self.ready:
                continue
            began, wave = time.monotonic(), self.ready
            self.ready = []
            if any(episode.turns for asked in wave for episode in asked.episodes):
                trigger_fault("turn")
                signals.raise_if_stopped()
            self._sample_wave(wave)
            patience = max(SHORTEST_WAIT_S, time.monotonic() - began)

    def abandon(self) -> None:
        """End what is still running; after an error there may be some."""
        for episode in (e for siblings in self.family for e in siblings):
            if episode.caller is not None:
                episode.caller.kill()
        for future in list(self.waiting):
            future.cancel()
        self.executor.shutdown()

    def _submit(
        self, kind: str, episode: Episode, work: Callable[..., Any], *arguments: Any
    ) -> None:
        self.waiting[self.executor.submit(work, *arguments)] = (kind, episode)

    def _collect(self, patience_s: float) -> None:
        """Collect tool answers; wait until an episode can continue, or none is left."""
        limit = time.monotonic() + patience_s
        while self.waiting:
            signals.raise_if_stopped()
            left = limit - time.monotonic()
            if left <= 0 and self.ready:
                return
            pause = min(POLL_S, left) if left > 0 else POLL_S
            done, _ = wait(list(self.waiting), timeout=pause, return_when=FIRST_COMPLETED)
            ended = [(*self.waiting.pop(future), future.result()) for future in done]
            for kind, episode, result in sorted(ended, key=self._position):
                self._go_on(kind, episode, result)
        # A fixed order, whichever tool was faster: the same episodes make the same wave.
        self.ready.sort(key=lambda asked: self._position(("", asked.episodes[0], None)))

    def _position(self, entry: tuple[str, Episode, object]) -> tuple[int, int]:
        return self.index[id(entry[1])], entry[1].k

    def _go_on(self, kind: str, episode: Episode, result: Answers | None) -> None:
        i = self.index[id(episode)]
        if kind == "opened":
            self.unopened[i] -= 1
            if not self.unopened[i]:
                self._begin_group(i)
        elif kind == "answered":
            assert result is not None
            self._tell(episode, result)
        else:
            self._finish(episode)

    def _begin_group(self, i: int) -> None:
        """All environments of a group have been reset: its first turns can be sampled."""
        siblings = self.family[i]
        for episode in siblings:
            if episode.opening:
                self._open_prompt(episode, episode.opening)
        asked: dict[tuple[object, ...], _Asked] = {}
        for episode in siblings:
            if episode.failed is not None or self._has_no_room(episode):
                self._close(episode)
                continue
            ids = episode.base_ids
            key = (*ids, *episode.new_images)
            asked.setdefault(key, _Asked([], ids)).episodes.append(episode)
        self.ready += asked.values()

    def _open_prompt(self, episode: Episode, opening: Content) -> None:
        """Add what `reset` returned to the episode's prompt."""
        renderer, seen = self.rules.renderer, Observation()
        limit = ObservationLimit(renderer, self.rules.config.max_observation_tokens)
        prompt = add_opening(episode.group.prompt, limit.shown(opening, seen))
        kwargs = renderer.template_kwargs | {"tools": episode.environment.schemas}
        media = episode.group.media
        if media is None and not seen.files:
            episode.base_ids = render_prompt(prompt, renderer.tokenizer, kwargs)
            return
        assert renderer.vision is not None
        text = render_text(prompt, renderer.tokenizer, kwargs)
        shown = [] if media is None else [image.size for image in media.images]
        episode.base_ids = renderer.expanded(text, [*shown, *seen.sizes])
        plain = renderer.expanded(text, ())
        episode.media = extended_media(media, seen.files, episode.base_ids, plain, renderer.vision)
        episode.new_images = seen.files

    def _has_no_room(self, episode: Episode) -> bool:
        """Whether a limit leaves no room for another turn; if so, it ends the episode."""
        rules, length = self.rules, self.rules.max_completion_length
        most, whole = rules.config.max_episode_tokens, len(episode.sent_ids) + length
        if most is not None and episode.num_tokens + length > most:
            episode.ended_by = "tokens"
        elif rules.context_length is not None and whole > rules.context_length:
            episode.ended_by = "context"
            if not episode.turns:
                episode.fail(f"its prompt and reset have {len(episode.base_ids)} tokens")
        return episode.ended_by is not None

    def _sample_wave(self, wave: Sequence[_Asked]) -> None:
        stand_ins = [
            Group(g.prompt_offset, g.example, g.prompt, asked.ids, media=first.media or g.media)
            for asked in wave
            for first in asked.episodes[:1]
            for g in (first.group,)
        ]
        seeds = [[turn_seed(e.seed, len(e.turns)) for e in asked.episodes] for asked in wave]

        def heard(index: int) -> None:
            pairs = zip(wave[index].episodes, stand_ins[index].rollouts, strict=True)
            for episode, rollout in pairs:
                self._take_turn(episode, rollout, stand_ins[index].prompt_ids)

        self.inner.generate(stand_ins, seeds, arrived=heard, **self.options)

    def _take_turn(self, episode: Episode, sampled: Rollout, prompt_ids: list[int]) -> None:
        """Parse a sampled turn, and start its calls. Called from any thread."""
        config = self.rules.config
        found = self._parse(sampled)
        turn = episode.add_turn(sampled, prompt_ids, found.calls)
        assert not episode.retokenised, "a turn was sampled from ids other than those before it"
        wrong = bool(found.unreadable) or any(
            episode.environment.check_call(c["name"], c["arguments"]) for c in found.calls
        )
        if not sampled.terminated:
            episode.ended_by, turn.calls = "completion", []
        elif not found.calls and not found.unreadable:
            episode.ended_by = "answer"
        elif wrong and config.on_bad_call == "end":
            episode.ended_by = "bad_call"
            episode.counts.calls += len(found.calls)
            episode.counts.bad_calls += 1
        elif len(episode.turns) >= config.max_turns:
            episode.ended_by = "turns"
        if episode.ended_by is not None:
            self._close(episode)
            return
        arguments = (episode, found.calls, found.unreadable)
        self._submit("answered", episode, self.calls.answer_calls, *arguments)

    def _parse(self, sampled: Rollout) -> ParsedCalls:
        ids, renderer = sampled.completion_ids, self.rules.renderer
        kept = ids[:-1] if ids[-1] in renderer.stop_ids else ids
        return self.rules.parser(renderer.tokenizer.decode(kept, skip_special_tokens=False))

    def _tell(self, episode: Episode, answers: Answers) -> None:
        """Put the tools' answers before the next turn, or end the episode."""
        if episode.failed is None and not answers.done:
            renderer, seen = self.rules.renderer, Observation()
            limit = ObservationLimit(renderer, self.rules.config.max_observation_tokens)
            for i, (call, said) in enumerate(zip(answers.calls, answers.contents, strict=True)):
                seen.messages.append(tool_message(i, call, limit.shown(said, seen)))
            for text in answers.unreadable:
                seen.messages.append({"role": "user", "content": limit.shown(text, seen)})
            last = episode.turns[-1].sampled_ids[-1]
            given = answers.calls, seen.messages, episode.environment.schemas, last
            if seen.files:
                assert renderer.vision is not None
                episode.new_ids, plain = renderer.new_ids_with_images(*given, seen.sizes)
                episode.show_images(seen.files, plain, renderer.vision)
            else:
                episode.new_ids = renderer.new_ids(*given)
            episode.new_messages = seen.text_messages
        elif episode.failed is None:
            episode.ended_by = "done"
        if episode.ended_by is not None or self._has_no_room(episode):
            episode.new_ids, episode.new_messages, episode.new_images = [], [], []
            self._close(episode)
        else:
            self.ready.append(_Asked([episode], episode.sent_ids))

    def _close(self, episode: Episode) -> None:
        self._submit("closed", episode, self.calls.close_environment, episode)

    def _finish(self, episode: Episode) -> None:
        """Finish an episode; with the last one of its group, finish the group."""
        i = self.index[id(episode)]
        self.unfinished[i] -= 1
        if self.unfinished[i]:
            return
        group, siblings = self.groups[i], self.family[i]
        changed = any(e.base_ids is not group.prompt_ids for e in siblings)
        prompt_ids = self._shared_prompt(group, siblings) if changed else group.prompt_ids
        rollouts = [e.to_rollout(prompt_ids, self.rules.turn_rewards) for e in siblings]
        for rollout in rollouts if changed else ():
            rollout.opening_ids = prompt_ids
        group.take_rollouts(rollouts)
        self.arrived(i)

    def _shared_prompt(self, group: Group, siblings: list[Episode]) -> list[int]:
        """The common prefix of all siblings' prompts, without the images of `reset`, since those
        of two siblings may have the same ids."""
        shared, vision = common_prefix([e.base_ids for e in siblings]), self.rules.renderer.vision
        if vision is None or not any(e.turns and e.turns[0].images for e in siblings):
            return shared
        own = 0 if group.media is None else int(group.media.is_image_token.sum())
        at = [n for n, token in enumerate(shared) if token == vision.image_token_id]
        return shared[: at[own]] if len(at) > own else shared


def add_opening(prompt: Any, opening: Content) -> list[JsonObject]:
    """The prompt with what `reset` returned added to its last user message."""
    messages = [dict(message) for message in prompt]
    for message in reversed(messages):
        if message.get("role") == "user":
            message["content"] = joined_content(message["content"], opening)
            return messages
    return [*messages, {"role": "user", "content": opening}]

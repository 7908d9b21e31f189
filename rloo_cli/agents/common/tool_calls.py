"""Makes an episode's calls, and turns their results into messages for the model.

It runs in a thread for each episode that waits for a tool, and touches only that episode. A failed
call becomes an error message to the model, or an episode without a score; never a score of 0.
"""

import json
import time
from dataclasses import dataclass

from rloo_cli.agents.common.episode import Episode
from rloo_cli.agents.common.observations import Content, ToolImages, answer_content
from rloo_cli.agents.common.tool_processes import ToolGone, ToolProcesses
from rloo_cli.config.agent import AgentConfig
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.rng import derived_seed

CHARACTERS_PER_TOKEN = 64  # a text is cut to this many before it is sent, and by tokens after that


@dataclass
class Answers:
    """Results of a turn's calls: an answer for each, and an error text for each unreadable one."""

    calls: list[JsonObject]
    contents: list[Content]
    unreadable: list[str]
    done: bool = False  # the environment says that the episode is over


class ToolCalls:
    """Makes the calls of all episodes of a run."""

    def __init__(self, config: AgentConfig, processes: ToolProcesses, images: ToolImages):
        self.config, self.processes, self.images = config, processes, images

    def open_environment(self, episode: Episode) -> None:
        """Make an episode's environment and reset it; what reset returns is its `opening`."""
        if not episode.environment.is_stateful:
            return
        spec = episode.environment.class_spec
        row, prompt = dict(episode.group.example), episode.group.prompt
        if any(m["content"] for m in prompt if m["role"] == "user"):  # type: ignore[index]
            row["prompt"] = prompt  # not if reset provides the whole first turn
        message = {"do": "reset", "spec": spec, "row": row}
        answer = self._ask_environment(episode, message | self._limits(episode, 0))
        if answer is not None and "error" in answer:
            self._give_up(episode, f"reset: {answer['error']}")
        elif answer is not None:
            episode.opening = answer_content(answer)

    def answer_calls(
        self, episode: Episode, calls: list[JsonObject], unreadable: list[str]
    ) -> Answers:
        """Make the calls of the episode's last turn, one after the other."""
        answers, made = Answers(calls, [], unreadable), 0
        for number, call in enumerate(calls):
            episode.counts.calls += 1
            wrong = episode.environment.check_call(call["name"], call["arguments"])
            if wrong is not None:
                episode.counts.bad_calls += 1
                answers.contents.append(_error_text(wrong))
                continue
            made += 1
            began = time.monotonic()
            answer = self._call(episode, call, number)
            episode.counts.tool_s += time.monotonic() - began
            if answer is None:
                return answers  # the episode has failed
            answers.done = answers.done or bool(answer.get("done"))
            answers.contents.append(answer.get("refusal") or answer_content(answer))
        episode.counts.bad_calls += len(unreadable)
        if episode.environment.has_turn_reward and made:
            self._ask_turn_reward(episode)
        return answers

    def close_environment(self, episode: Episode) -> None:
        """Ask for the environment's reward and state, and end its process."""
        caller = episode.caller
        if caller is None:
            return
        if episode.failed is None:
            message = {"do": "end"} | self._limits(episode, 0)
            answer = self._ask_environment(episode, message)
            if answer is not None and "error" in answer:
                self._give_up(episode, f"get_reward: {answer['error']}")
            elif answer is not None:
                episode.reward, episode.state = answer["reward"], answer["state"]
        if episode.caller is not None:
            episode.caller.kill()
        episode.caller = None

    def _ask_turn_reward(self, episode: Episode) -> None:
        """Store the reward that the environment gives for the episode's last turn."""
        message = {"do": "turn"} | self._limits(episode, 0) | {"seed": None}  # seeded at reset
        answer = self._ask_environment(episode, message)
        if answer is not None and "error" in answer:
            self._give_up(episode, f"get_turn_reward: {answer['error']}")
        elif answer is not None:
            episode.turns[-1].reward = answer["reward"]

    def _call(self, episode: Episode, call: JsonObject, number: int) -> JsonObject | None:
        """One call's answer: `text`, or `refusal` if it failed; None if the episode failed."""
        spec = episode.environment.specs[call["name"]]
        message = {"do": "call", "spec": spec, **call} | self._limits(episode, number)
        if episode.environment.is_stateful:
            message["seed"] = None  # seeded at reset
            answer = self._ask_environment(episode, message)
        else:
            answer = self._ask_function(message)
        if answer is None or "error" not in answer:
            return answer
        episode.counts.errors += 1
        if self.config.on_tool_error == "mask":
            self._give_up(episode, f"{call['name']}: {answer['error']}")
            return None
        return {"refusal": _error_text(answer["error"])}

    def _ask_function(self, message: JsonObject) -> JsonObject:
        try:
            answer = self.processes.call_function(message, self.config.max_tool_s)
            return self.images.read_answer(answer)
        except ToolGone as gone:
            return {"error": str(gone)}

    def _ask_environment(self, episode: Episode, message: JsonObject) -> JsonObject | None:
        """An answer of the episode's own process; None if that exited, and its state with it."""
        try:
            if episode.caller is None:
                episode.caller = self.processes.take_new()
            answer = episode.caller.request(message, self.config.max_tool_s)
            return self.images.read_answer(answer)
        except ToolGone as gone:
            episode.counts.errors += 1
            episode.caller = None
            episode.fail(f"{message.get('name', message['do'])}: {gone}")
            return None

    def _give_up(self, episode: Episode, why: str) -> None:
        episode.fail(why)

    def _limits(self, episode: Episode, number: int) -> JsonObject:
        """The fields of every message: the time limit of its answer, and the seed."""
        turn = len(episode.turns)
        return {
            "max_characters": CHARACTERS_PER_TOKEN * self.config.max_observation_tokens,
            "seed": derived_seed(episode.seed, f"tool/{turn}", number),
            "images": self.images.why_not is None,
            "no_images": self.images.why_not,
        }


def _error_text(text: str) -> str:
    return json.dumps({"error": text}, ensure_ascii=False)

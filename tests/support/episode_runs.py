"""Runs of episodes in an environment, with a random model: its answers are read as calls."""

import json
from pathlib import Path
from typing import Any

from agent_cases import write_file
from resume_cases import left

# Every third of the byte tokens ends a turn: most do not run into their limit.
ENDS = f"generation.stop_token_ids={[*range(10, 258, 3)]}".replace(" ", "")
# It is imported by the run's own process, which then reads every answer of some lengths as a call.
# One row in a few fails, and what is drawn is seeded by counter.
WORLD = '''
import os
import random

from rloo_cli.agents.common import call_parsers


def read_calls(text):
    calls = [] if len(text) % 4 == 0 else [{"name": "look", "arguments": {}}]
    return call_parsers.ParsedCalls(calls)


call_parsers.PARSERS["mistral"] = read_calls


class World:
    def reset(self, **row) -> str | None:
        self.number = random.random()
        return f" {self.number:.2f}" if row["answer"][-1] in "13579" else None

    def look(self) -> str:
        """Looks around."""
        if self.number < 0.25:
            os.kill(os.getpid(), 9)
        self.number = (self.number * 7 + random.random()) % 1
        return f"{self.number:.3f}"

    def get_reward(self) -> float:
        return self.number
'''
# Every answer of some lengths is a call; an image is as large as the state of its world says.
IMAGE_WORLD = '''
import random

from PIL import Image

from rloo_cli.agents.common import call_parsers


def read_calls(text):
    calls = [] if len(text) % 4 == 0 else [{"name": "look", "arguments": {}}]
    return call_parsers.ParsedCalls(calls)


call_parsers.PARSERS["mistral"] = read_calls


class World:
    def reset(self, **row) -> object:
        self.seen = 0
        return self._view() if row["answer"] in "0246" else None

    def _view(self):
        side = random.choice((16, 20, 24))
        return Image.new("RGB", (side, 16), (random.randrange(256), self.seen, 90))

    def look(self) -> object:
        """Looks around."""
        self.seen += 1
        return [{"type": "text", "text": "see "}, {"type": "image", "image": self._view()}]

    def get_reward(self) -> float:
        return self.seen + random.random()
'''
# A turn is sampled with those that wait at the same time, and the sampler's log-probabilities
# differ by rounding with the company. With this each is sampled alone, and bits can be compared.
ALONE = "generation.transformers.batch_tokens=1"
WORDS = (
    "data.path=make:tiny_chat", "agent=class", "agent.max_turns=3", "agent.parser=mistral",
    "agent.max_observation_tokens=12", "reward=environment", "generation.max_completion_length=6",
    "train.prompts_per_step=3", "algorithm.num_generations=3", "data.eval_split=null",
    "logging.samples=9", ENDS,
)  # fmt: skip


def world_words(folder: Path) -> list[str]:
    """The overrides of a run in the environment, whose file is written into `folder`."""
    path = write_file(folder, WORLD, "world.py")
    return [*WORDS, f"agent.environments={{world: '{path}:World'}}"]


def image_world_words(folder: Path) -> list[str]:
    """The overrides of a run in an environment that shows images, whose file is written."""
    path = write_file(folder, IMAGE_WORLD, "world.py")
    return [
        "agent=class", "agent.max_turns=3", "agent.parser=mistral", "logging.samples=9",
        "agent.max_observation_tokens=40", "reward=environment",
        f"agent.environments={{world: '{path}:World'}}",
    ]  # fmt: skip


def left_but_times(run: Path) -> dict[str, Any]:
    """`left`, without the seconds that tools took."""
    found = left(run)
    for name, text in found["samples"].items():
        rows = [json.loads(line) for line in text.splitlines()]
        for row in rows:
            row["episode"].pop("tool_s")
        found["samples"][name] = rows
    found["metrics"] = [
        {n: v for n, v in line.items() if n != "agent/tool_s"} for line in found["metrics"]
    ]
    return found


def said_in(run: Path) -> list[tuple[list[str], str]]:
    """What every sampled turn said, and why its episode ended."""
    lines = [line for p in sorted((run / "samples").iterdir()) for line in p.open()]
    rows = map(json.loads, lines)
    return [([t["said"] for t in row["turns"]], row["episode"]["ended_by"]) for row in rows]

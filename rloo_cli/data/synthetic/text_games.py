"""Games of TextWorld (Microsoft; arXiv 1806.11532): small houses, each made from a seed.

`data=textworld` has a row per game, 24 to train on and 8 others held out. `TextWorldGame` is their
environment: real games, compiled and played by TextWorld's own interpreter. The model reads what
the game says and which commands it takes now; the score is the game's own, over its highest.

The package is in the extra `textworld`. It is imported with this file, so that a process for an
episode, which is a fork, has it already; a game is compiled once, some seconds, and kept.
"""

import importlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from rloo_cli.data.cache import cached_folder
from rloo_cli.utils.errors import require_package
from rloo_cli.utils.files import JsonObject

textworld: Any = None
if importlib.util.find_spec("textworld") is not None:
    textworld = importlib.import_module("textworld")

TRAIN_GAMES, HELD_OUT_GAMES = 24, 8
ROOMS, OBJECTS, QUEST_LENGTH = 2, 3, 2
ASKED = (
    "You play a text game: call act with one of the commands at a time, until its task is done.\n"
)
# What a call looks like, which a small model does not know: two moves of another game.
SHOWN_GAME = (
    "Put the lamp on the desk. You are in an office. There is a lamp on the floor."
    "\nCommands: look, take lamp, go east",
    "take lamp",
    "You pick up the lamp.\nCommands: look, drop lamp, put lamp on desk",
    "put lamp on desk",
)

# The interpreter's prompt mark, and the line below it: the room, and the score of the highest.
STATUS_LINE = re.compile(r"\s*(> )?-= [^=]+ =-\d+/\d+$")


def require_textworld(key: str) -> None:
    """Raises MachineError when textworld is not installed."""
    require_package(key, "textworld", "textworld", "its games are made and played by it")


def text_game_examples(split: str) -> list[JsonObject]:
    """A row for each game of a split, train or test: its seed, in the column `game`."""
    end = TRAIN_GAMES + HELD_OUT_GAMES
    seeds = {"train": range(TRAIN_GAMES), "test": range(TRAIN_GAMES, end)}[split]
    return [{"prompt": _shown_moves(), "game": seed} for seed in seeds]


def _shown_moves() -> list[JsonObject]:
    """The game that is shown, as a conversation; the real one's beginning is put at its end."""
    begun, first, answered, second = SHOWN_GAME
    moves = [_call_of(command) for command in (first, second)]
    said = [ASKED + begun, moves[0], f"<tool_response>\n{answered}\n</tool_response>", moves[1]]
    roles = ("user", "assistant", "user", "assistant", "user")
    texts = [*said, "That game is done. Here is another one.\n" + ASKED]
    return [{"role": r, "content": text} for r, text in zip(roles, texts, strict=True)]


def _call_of(command: str) -> str:
    call = {"name": "act", "arguments": {"command": command}}
    return f"<tool_call>{json.dumps(call)}</tool_call>"


def game_file(seed: int) -> Path:
    """The compiled game of a seed; made on first use."""
    require_textworld("data.path")
    recipe = f"{textworld.__version__} {ROOMS} {OBJECTS} {QUEST_LENGTH} {seed}"
    return cached_folder("textworld", recipe, lambda folder: _make_game(folder, seed)) / "game.z8"


def _make_game(folder: Path, seed: int) -> None:
    options = textworld.GameOptions()
    options.seeds, options.path = seed, str(folder / "game.z8")
    options.nb_rooms, options.nb_objects, options.quest_length = ROOMS, OBJECTS, QUEST_LENGTH
    textworld.generator.compile_game(textworld.generator.make_game(options), options)


class TextWorldGame:
    """One game; the row's column `game` has its seed."""

    def reset(self, game: int, **_: object) -> str:
        """Begin the game. -> its task, where the player is, and the commands that it takes"""
        infos = textworld.EnvInfos(
            objective=True, description=True, admissible_commands=True, score=True,
            max_score=True, won=True,
        )  # fmt: skip
        self._world = textworld.start(str(game_file(game)), infos)
        state = self._world.reset()
        self.score, self.max_score = int(state.score), int(state.max_score)
        self.moves, self.done, self.won = 0, False, False
        return _with_commands(f"{state.objective}\n{state.description}", state)

    def act(self, command: str) -> str:
        """Does one thing in the game.

        Args:
            command: What to do, such as "go east" or "take key".

        Returns:
            What the game says, and the commands that it takes now.
        """
        state, _, self.done = self._world.step(command)
        self.moves += 1
        self.score, self.won = int(state.score), bool(state.won)
        return _with_commands(str(state.feedback), state)

    def get_reward(self) -> float:
        """The game's score, as a share of its highest."""
        return self.score / self.max_score if self.max_score else 0.0


def _with_commands(said: str, state: Any) -> str:
    text = STATUS_LINE.sub("", " ".join(said.split()))
    return f"{text}\nCommands: {', '.join(state.admissible_commands or [])}"

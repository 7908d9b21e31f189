"""How far it is from the command line to `backward()`, counted on real stacks."""

import json
import traceback
from pathlib import Path
from typing import Any

import fork_cases
import pytest
from fork_cases import Forked

OURS = "/rloo_cli/"
MOST = 13  # frames of ours, on both sides of the one process boundary
ALGORITHM = """import json, traceback
from rloo_cli.plugin import RLOO, LossInputs, Switches


class Config(Switches):
    pass


class Watched(RLOO[Config]):
    def loss(self, inputs):
        names = [f"{f.filename}:{f.name}" for f in traceback.extract_stack()]
        with open("stack.json", "w") as file:
            json.dump(names, file)
        return super().loss(inputs)
"""


def frames(stack: list[str]) -> list[str]:
    """The functions of ours, but for the guard around a hook of the user's own file."""
    own = [line.rpartition(OURS)[2] for line in stack if OURS in line]
    return [line for line in own if not line.startswith("config/hooks.py")]


def test_from_the_command_line_to_backward_are_thirteen_frames_and_one_boundary(
    forked: Forked, monkeypatch: pytest.MonkeyPatch
) -> None:
    (forked.folder / "watched.py").write_text(ALGORITHM)
    before: list[str] = []
    ended = fork_cases.ended

    def started(*given: Any) -> int:
        before.extend(f"{f.filename}:{f.name}" for f in traceback.extract_stack())
        return ended(*given)

    monkeypatch.setattr(fork_cases, "ended", started)
    words = ("train", "+recipe=smoke", "algorithm.name=watched.py", "max_steps=1")
    assert forked(*words) == 0, forked.said()
    command = ["cli/main.py:main", *frames(before), "launch/processes.py:run"]
    inside = frames(json.loads(Path(forked.folder, "stack.json").read_text()))
    inside += [
        "distributed/engine.py:backward"
    ]  # which `train/step.py:backward_micro_batch` calls next
    assert (
        inside[0] == "train/worker.py:main" and inside[-2] == "train/step.py:backward_micro_batch"
    )
    assert command[1:3] == ["cli/main.py:_run_verb", "cli/train.py:run"], "what main() calls"
    assert len(command) + len(inside) <= MOST, "\n".join([*command, *inside])

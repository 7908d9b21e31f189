"""How far it is from the command line to `backward()`, and how much building a run enters.

Both are counted on what really runs: stacks, and the calls of one `build_run`.
"""

import inspect
import json
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import fork_cases
import loop_cases
import pytest
from fork_cases import Forked

from rloo_cli.train import build

OURS = "/rloo_cli/"
MOST = 13  # frames of ours, on both sides of the one process boundary
# Files that `train/build.py` calls into itself, and all that are entered while a run of the smoke
# recipe is built: data are read, tokenized and packed, and layouts are tried on the model, which is
# most of both figures. They only go down. A run enters 453 functions; once, on a
# busy machine, it entered 454, and why is not known.
MOST_FILES_CALLED, MOST_FILES, MOST_FUNCTIONS = 37, 91, 455
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


class CallRecord:
    """The functions of ours that were entered, as `file:name`, and the files called by a file."""

    def __init__(self, caller: str):
        self.caller, self.functions, self.called = caller, set[str](), set[str]()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """What `sys.setprofile` calls. Bodies of modules and classes are not calls."""
        code = frame.f_code
        _, ours, file = code.co_filename.rpartition(OURS)
        if event != "call" or not ours or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        if not code.co_name.startswith("<"):
            self.functions.add(f"{file}:{code.co_qualname}")
            back = frame.f_back
            if back is not None and back.f_code.co_filename.endswith(OURS + self.caller):
                self.called.add(file)

    @property
    def files(self) -> set[str]:
        """All files that were entered."""
        return {function.partition(":")[0] for function in self.functions}


def test_building_a_run_enters_no_more_files_than_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    loop_cases.make(first, rewards={})  # makes the model, and imports what is lazy
    record = CallRecord("train/build.py")

    def traced(*given: Any) -> Any:
        sys.setprofile(record)
        try:
            return build.build_run(*given)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(loop_cases, "make_run", traced)
    loop_cases.make(second, rewards={})
    found = len(record.called), len(record.files), len(record.functions)
    print(f"build.py calls into {found[0]} files; {found[2]} functions in {found[1]} are entered")
    assert found[0] <= MOST_FILES_CALLED, "\n".join(sorted(record.called))
    assert found[1] <= MOST_FILES and found[2] <= MOST_FUNCTIONS, "\n".join(sorted(record.files))

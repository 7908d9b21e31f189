"""What a run tells code of the user's: in order, as copies, and nothing of it changes the run."""

import json
from pathlib import Path
from typing import Any

import pytest
from agent_cases import write_file
from assert_refused import assert_refused
from resume_cases import attempt, tensors

from rloo_cli.plugin import Events
from rloo_cli.reporting.events import EventSender, load_listeners
from rloo_cli.utils.errors import ConfigError, RewardError

HEARD = """
import json
from pathlib import Path

from rloo_cli.plugin import Events

HERE = Path(__file__).with_name("heard.jsonl")


def write(*what):
    with HERE.open("a") as file:
        file.write(json.dumps(what, default=str) + "\\n")


class Heard(Events):
    def on_start(self, folder, config):
        write("start", folder.name, config["max_steps"])

    def on_step(self, step, metrics):
        write("step", step, metrics["reward"])
        metrics.clear()

    def on_evaluation(self, step, metrics):
        write("evaluation", step)

    def on_save(self, step, folder):
        write("save", step, folder.name, (folder / "MANIFEST.json").is_file())

    def on_end(self, summary):
        write("end", summary["steps"])

    def on_error(self, error, code):
        write("error", code, error.partition("\\n")[0])


class Fails(Events):
    def on_step(self, step, metrics):
        raise SystemExit(3)


class Other:
    pass


class Broken(Events):
    def __init__(self):
        raise ValueError("no")
"""
SHORT = ("max_steps=2", "checkpoint.every=1")


def heard(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "heard.jsonl").read_text().splitlines()]


def words(folder: Path, *names: str) -> list[str]:
    file = write_file(folder, HEARD, "mine.py")
    specs = ",".join(f"'{file}:{name}'" for name in names)
    return [*SHORT, f"logging.events=[{specs}]"]


def test_a_run_tells_what_it_does_in_order_and_copies_of_it(tmp_path: Path) -> None:
    assert attempt(tmp_path / "runs", *words(tmp_path, "Fails", "Heard"))
    assert attempt(tmp_path / "plain", *SHORT)
    got = heard(tmp_path)
    assert [line[0] for line in got if line[0] != "evaluation"] == [
        "start", "step", "save", "step", "save", "end",
    ]  # fmt: skip
    assert [line[1] for line in got if line[0] == "evaluation"] == [0, 2]
    assert got[0] == ["start", "smoke", 2] and got[-1] == ["end", 2]
    assert ["save", 1, "checkpoint-1", True] in got
    run, plain = tmp_path / "runs" / "smoke", tmp_path / "plain" / "smoke"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    of_steps = [line["reward"] for line in lines if "step_time" in line]
    assert of_steps == [line[2] for line in got if line[0] == "step"]
    weights = Path("final", "model.safetensors")
    assert tensors(run / weights) == tensors(plain / weights)


@pytest.mark.slow
def test_a_run_that_ends_by_an_error_or_a_signal_tells_it_with_its_code(tmp_path: Path) -> None:
    def fails(completion_ids: Any, **_: Any) -> list[float]:
        raise ValueError("no score")

    given = words(tmp_path, "Heard")
    with pytest.raises(RewardError):
        attempt(tmp_path / "failed", *given, fails=fails)
    kind, code, text = heard(tmp_path)[-1]
    assert (kind, code) == ("error", 5) and "fails" in text
    (tmp_path / "heard.jsonl").unlink()
    looks: list[int] = []
    assert attempt(tmp_path / "whole", *given, looks=looks)
    (tmp_path / "heard.jsonl").unlink()
    assert not attempt(tmp_path / "cut", *given, stop_at=len(looks) * 3 // 4)
    assert heard(tmp_path)[-1][:2] == ["error", 75]
    assert attempt(tmp_path / "cut", *given)
    assert [line[0] for line in heard(tmp_path)].count("start") == 2
    assert heard(tmp_path)[-1][0] == "end"


def test_what_fails_in_a_note_is_said_once_and_others_are_told() -> None:
    class Fails(Events):
        def on_step(self, step: int, metrics: dict[str, Any]) -> None:
            raise KeyError("loss")

    class Hears(Events):
        steps: list[int] = []  # noqa: RUF012

        def on_step(self, step: int, metrics: dict[str, Any]) -> None:
            self.steps.append(step)

    said: list[str] = []
    sender = EventSender([Fails(), Hears()], said.append)
    for step in (1, 2):
        sender.send("on_step", step, {})
    assert Hears.steps == [1, 2]
    (warning,) = said
    assert "Fails.on_step" in warning and warning.endswith("KeyError: 'loss'")


@pytest.mark.parametrize(
    ("name", "key"),
    [("Other", "mine.py:Other"), ("Broken", "ValueError"), ("Missing", "'Missing'")],
)
def test_what_cannot_listen_is_refused_before_anything_loads(
    tmp_path: Path, name: str, key: str
) -> None:
    file = write_file(tmp_path, HEARD, "mine.py")
    with pytest.raises(ConfigError) as caught:
        load_listeners([f"{file}:{name}"])
    assert_refused(caught, 2, key, where="logging.events")

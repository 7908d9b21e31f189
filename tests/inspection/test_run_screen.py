"""`rloo top`: one screen for a run that goes on, has ended, or is damaged; it only reads."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from assert_refused import assert_refused
from compare_cases import write

from rloo_cli.cli import top
from rloo_cli.inspection.run_screen import RunScreen
from rloo_cli.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_run(name: str = "one", **keys: Any) -> Path:
    folder = write(Path("runs"), name, **keys)
    about = json.loads((folder / "run.json").read_text())
    about |= {"plan": {"name": name, "max_steps": 8}, "memory": {"measured_bytes": 2**31}}
    (folder / "run.json").write_text(json.dumps(about))
    (folder / "samples").mkdir()
    samples = [
        {"prompt": "2+2?", "completion": "four\x1b[31m[b]", "score": 1.0, "weight_version": version}
        for version in (3, 3, 2)
    ]
    text = "".join(json.dumps(sample) + "\n" for sample in samples)
    (folder / "samples" / "step_000004.jsonl").write_text(text)
    return folder


def add_steps(folder: Path, first: int, last: int, **metrics: float) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(first, last + 1):
            file.write(json.dumps({"step": step, "step_time": 1.0, **metrics}) + "\n")


def test_one_frame_has_what_the_files_say(capsys: pytest.CaptureFixture[str]) -> None:
    make_run()
    assert top.run(["--once"]) == 0
    shown = capsys.readouterr().out
    assert all(
        x in shown for x in ("step 4/8", "four", "0: 2, 1: 1", "memory 2.00 GiB", "finished")
    )
    assert "\x1b[31m" not in shown and "[b]" in shown
    assert top.run(["one", "--once", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["step"], values["of_steps"], values["lag"]) == (4, 8, {"0": 2, "1": 1})
    assert values["held_out"][-1] == {"step": 4, "score": 1.0} and not values["late"]


def test_the_run_written_last_is_shown_and_a_missing_one_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError) as caught:
        top.run(["--once"])
    assert_refused(caught, 2, "rloo top", fix="rloo top RUN")
    make_run("first")
    make_run("second")
    assert top.run(["--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "runs/second"
    for words, fix in (
        (["frist", "--once"], "rloo top first"),
        (["first", "--every", "0"], "--every 2"),
    ):
        with pytest.raises(ConfigError) as caught:
            top.run(words)
        assert_refused(caught, 2, fix=fix)


def test_advice_is_given_once_with_its_step_while_the_run_grows() -> None:
    folder = make_run(state="training", steps=0, scores=())
    screen = RunScreen(folder)
    assert screen.screen_values()["advice"] == []
    add_steps(folder, 1, 6, **{"completions/clipped_ratio": 0.9})
    screen.refresh_run()
    screen.refresh_run()
    (advice,) = screen.screen_values()["advice"]
    assert advice["step"] == 5 and "completions/clipped_ratio" in advice["text"]


def test_a_step_that_takes_much_longer_than_those_before_it_is_called_late() -> None:
    folder = make_run(state="training")
    screen = RunScreen(folder)
    written = (folder / "run.json").stat().st_mtime
    assert not screen.screen_values(now=written + 30)["late"]
    assert screen.screen_values(now=written + 100)["late"]


def test_a_damaged_run_is_shown_as_far_as_it_can_be(capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run()
    (folder / "config.yaml").write_text("name: [")
    (folder / "samples" / "step_000004.jsonl").write_text("no sample\n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("nothing\n")
    assert top.run(["one", "--once"]) == 0
    shown = capsys.readouterr().out
    assert "step 4/8" in shown and "metrics.jsonl:" in shown and "config.yaml" in shown


def test_the_screen_grows_with_the_run_and_leaving_touches_nothing() -> None:
    folder = make_run(state="training")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    async def watch() -> list[str]:
        from textual.widgets import Static

        app, frames = top.run_screen_app(RunScreen(folder), every_s=0.05), []
        async with app.run_test(size=(100, 40)) as pilot:
            await pilot.pause()
            frame = app.query_one("#frame", Static)
            frames.append(_plain(frame))
            add_steps(folder, 5, 6)
            for _ in range(100):
                await pilot.pause(0.05)
                if "step 6/8" in _plain(frame):
                    break
            frames.append(_plain(frame))
            await pilot.press("q")
        return frames

    first, second = asyncio.run(watch())
    assert "step 4/8" in first and "step 6/8" in second
    after = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    grown = folder / "metrics.jsonl"
    assert {**after, grown: b""} == {**before, grown: b""}
    assert after[grown].startswith(before[grown])


def _plain(frame: Any) -> str:
    return "\n".join(strip.text for strip in (frame.render_line(y) for y in range(20)))

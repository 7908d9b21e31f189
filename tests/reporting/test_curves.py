"""The picture of a run: drawn from whatever its metrics.jsonl holds."""

import json
import math
import random
from types import SimpleNamespace

import pytest

from rloo_cli.reporting import curves
from rloo_cli.reporting.curves import (
    draw_run_curves,
    metric_points,
    read_metrics_lines,
    smooth_values,
)
from rloo_cli.reporting.events import EventSender
from rloo_cli.train import between_steps, worker
from rloo_cli.utils.errors import ConfigError, Problem, RewardError, Stopped
from rloo_cli.utils.timers import StepTimer


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_rows(steps, **more):
    dice = random.Random(1)
    rows = [{"step": 0, "eval_reward": 0.2}]
    for step in range(1, steps + 1):
        done = 1 - math.exp(-step / (steps / 3))
        rows.append(
            {
                "step": step,
                "reward": 0.2 + 0.6 * done + dice.gauss(0, 0.06),
                "reward_std": 0.3 - 0.15 * done + dice.gauss(0, 0.02),
                "kl": 0.08 * done + abs(dice.gauss(0, 0.004)),
                "entropy": 1.9 - 1.1 * done + dice.gauss(0, 0.05),
                "completions/mean_length": 14 - 6 * done + dice.gauss(0, 0.6),
                "completions/min_length": 3,
                "completions/max_length": 24 - round(4 * done),
                "clip_ratio/region_mean": abs(dice.gauss(0.03, 0.02)),
                "clip_ratio/high_mean": abs(dice.gauss(0.01, 0.01)),
                "grad_norm": 30 * math.exp(dice.gauss(0, 0.3)) * (1.2 - done),
                **more,
            }
        )
    return [*rows, {"step": steps, "eval_reward": 0.78}]


def texts(path):
    """An SVG's words: matplotlib keeps each text as a comment beside its outlines."""
    return path.read_text()


@pytest.mark.slow_but("1", "200")
@pytest.mark.parametrize("steps", [1, 2, 11, 30, 31, 200])
def test_a_run_of_any_length_becomes_a_png(tmp_path, steps):
    out = draw_run_curves(
        write(tmp_path / "m.jsonl", run_rows(steps)), tmp_path / "a" / "c.png", "run"
    )
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_name_that_ends_in_svg_gives_an_svg_with_titles_units_and_held_out_points(tmp_path):
    svg = texts(
        draw_run_curves(write(tmp_path / "m.jsonl", run_rows(60)), tmp_path / "c.svg", "my $run$ 1")
    )
    assert svg.startswith("<?xml")
    for words in ("my $run$ 1", "Reward", "nats per token", "tokens", "step", "held out"):
        assert f"<!-- {words} -->" in svg
    assert "no data" not in svg


def test_a_metric_the_run_does_not_have_says_no_data(tmp_path):
    rows = [{k: v for k, v in row.items() if k not in ("kl", "entropy")} for row in run_rows(40)]
    svg = texts(draw_run_curves(write(tmp_path / "m.jsonl", rows), tmp_path / "c.svg", "run"))
    assert svg.count("<!-- no data -->") == 2


def test_a_run_without_rows_draws_six_empty_pictures(tmp_path):
    svg = texts(draw_run_curves(write(tmp_path / "m.jsonl", []), tmp_path / "c.svg", "run"))
    assert svg.count("<!-- no data -->") == 6


def test_a_run_without_evaluation_has_no_held_out_points(tmp_path):
    rows = [row for row in run_rows(40) if "eval_reward" not in row]
    svg = texts(draw_run_curves(write(tmp_path / "m.jsonl", rows), tmp_path / "c.svg", "run"))
    assert "held out" not in svg


def test_rows_may_lack_keys_or_hold_no_numbers(tmp_path):
    rows = [{"step": 1, "reward": 1.0}, {"step": 2, "reward": float("nan"), "kl": None}, {"x": 1}]
    path = write(tmp_path / "m.jsonl", rows)
    assert metric_points(read_metrics_lines(path), "reward") == ([1.0], [1.0])
    draw_run_curves(path, tmp_path / "c.png", "run")


def test_a_last_line_cut_off_by_a_kill_is_left_out(tmp_path):
    path = write(tmp_path / "m.jsonl", [{"step": 1}, {"step": 2}])
    path.write_text(path.read_text() + '{"step": 3, "rew')
    assert [row["step"] for row in read_metrics_lines(path)] == [1, 2]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step":\n{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"m\.jsonl:2"):
        read_metrics_lines(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        draw_run_curves(tmp_path / "nowhere.jsonl", tmp_path / "c.png", "run")


def test_smoothing_keeps_a_straight_line_straight():
    straight = [2.0 * i for i in range(100)]
    assert smooth_values(straight) == pytest.approx(straight)
    assert len(smooth_values([1.0])) == 1


def test_a_run_that_goes_on_is_drawn_now_and_then_and_a_failure_is_one_warning(
    tmp_path, monkeypatch
):
    clock, notes = [1000.0], []
    monkeypatch.setattr(curves.time, "monotonic", lambda: clock[0])
    write(tmp_path / "metrics.jsonl", run_rows(5))
    drawer, picture = curves.CurveDrawer(tmp_path), tmp_path / "curves.png"

    drawer.draw_curves(1, notes.append)  # one line is no curve
    clock[0] += 40
    drawer.draw_curves(3, notes.append, rate_limited=True)  # a second is more than 2 % of 40
    assert not picture.exists()
    clock[0] += 20
    drawer.draw_curves(4, notes.append, rate_limited=True)
    assert picture.read_bytes().startswith(b"\x89PNG") and [*tmp_path.iterdir()] != [picture]
    picture.unlink()
    drawer.draw_curves(4, notes.append)  # nothing new since
    assert not picture.exists() and not notes
    drawer.draw_curves(5, notes.append)  # an end waits for nothing
    assert picture.exists()

    def broken(*given):
        raise RuntimeError("no fonts")

    monkeypatch.setattr(curves, "draw_run_curves", broken)
    drawer.draw_curves(6, notes.append)
    drawer.draw_curves(7, notes.append)
    (note,) = notes
    assert "curves.png" in note and note.endswith("RuntimeError: no fonts")


@pytest.mark.parametrize("error", [None, Stopped, RewardError, ZeroDivisionError])
def test_every_end_of_a_run_draws_it_after_its_last_line(error, tmp_path, monkeypatch):
    did = []
    log = SimpleNamespace(
        note=did.append,
        events=None,
        close=lambda: did.append("close"),
        draw_curves=lambda: did.append("draw"),
        current_phase="update",
    )
    run = SimpleNamespace(
        log=log,
        world=SimpleNamespace(size=1, is_main=True),
        state=SimpleNamespace(dump=dict, step=3, updates=3),
        step_position=(3, 0),
        attempt=1,
        folder=tmp_path,
        generator=SimpleNamespace(close=lambda: did.append("generator")),
        teacher=None,
        source=SimpleNamespace(close=lambda: None),
    )

    def ends(*given):
        if error is not None:
            raise error(Problem("it ends")) if error is not ZeroDivisionError else error
        return {}

    run.clock = SimpleNamespace(elapsed=lambda: 0.0)
    monkeypatch.setattr(worker, "build_run", lambda *given: run)
    monkeypatch.setattr(worker, "_log_start", lambda run: 0)
    monkeypatch.setattr(worker, "run_training_loop", ends)
    monkeypatch.setattr(worker, "_write_results", lambda *given: {})
    monkeypatch.setattr(worker, "_save_what_is_done", lambda run, error: did.append("save"))
    monkeypatch.setattr(worker.signals, "defer_signals", lambda: None)
    monkeypatch.setattr(worker.check, "resolve_config", lambda config: config)
    settings = SimpleNamespace(seed=1, logging=SimpleNamespace(events=[]))
    if error is None:
        assert worker.run_training(settings, tmp_path) == {}
    else:
        with pytest.raises(error):
            worker.run_training(settings, tmp_path)
    saved = ["save"] if error in (Stopped, RewardError) else []
    assert did == [*saved, "close", "draw", "generator"]


def test_a_checkpoint_draws_the_run_so_far_and_the_last_step_leaves_it_to_the_end(monkeypatch):
    did = []
    run = SimpleNamespace(
        num_steps=4,
        state=SimpleNamespace(step=2, evaluated=2),
        config=SimpleNamespace(
            eval=SimpleNamespace(at_start=False, every=0),
            checkpoint=SimpleNamespace(every=2),
            target=SimpleNamespace(metric=None, at_least=None),
        ),
        step_progress=None,
        clock=StepTimer(),
        world=SimpleNamespace(check_stop=lambda often=False, end_asked=False: end_asked),
        log=SimpleNamespace(
            draw_curves=lambda rate_limited: did.append(rate_limited),
            events=EventSender(),
            advisor=SimpleNamespace(levels={}),
            metrics_lines=[],
        ),
    )
    monkeypatch.setattr(between_steps.save, "save_checkpoint", lambda run: None)
    assert between_steps.evaluate_and_checkpoint(run) and did == [True]
    run.state.step = 3
    assert between_steps.evaluate_and_checkpoint(run) and did == [True]
    run.state.step = run.state.evaluated = 4
    assert not between_steps.evaluate_and_checkpoint(run) and did == [True]

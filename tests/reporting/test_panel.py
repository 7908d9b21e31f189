"""What a user sees of a run: panel, plain lines, end table, SVG."""

import io
import json
import math
import random
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from rloo_cli.reporting.display import Display
from rloo_cli.reporting.panel import (
    SPARKLINE_BARS,
    before_after_tables,
    clean_line,
    draw_sparkline,
    evaluation_table,
    format_duration,
    format_number,
    last_message,
    main,
    phase_split,
    render_panel,
    time_left,
    wrap_text,
    write_panel_svg,
)

PLAN = {
    "name": "quickstart",
    "recipe": "quickstart",
    "model": "make:tiny-count",
    "algorithm": "rloo K=4 beta=0.05",
    "max_steps": 60,
    "folder": "runs/quickstart",
}
NASTY = [
    "[red]x[/red]",
    "\x1b[31mred\x1b[2J\x07\x9b31m",
    "\u202eright to left\u200b\u2028line",
    "a\r\nb\rc\td\x00",
    "漢字かな" * 500,
    "👨\u200d👩\u200d👧 👍🏽 " * 100,
    "no_spaces_" * 1000,
    "\ud800 lone surrogate",
    "",
]


def run_rows(steps):
    dice, rows = random.Random(1), [{"step": 0, "eval_reward": 0.2}]
    for step in range(1, steps + 1):
        done, seconds = 1 - math.exp(-step / 20), 2.0 + dice.gauss(0, 0.1)
        rows.append(
            {
                "step": step,
                "reward": 0.2 + 0.6 * done,
                "kl": 0.08 * done,
                "entropy": 1.9 - done,
                "completions/mean_length": 12345.6,
                "completions/clipped_ratio": 0.02,
                "clip_ratio/region_mean": 0.0,
                "frac_reward_zero_std": 0.3,
                "grad_norm": 30.0 - step,
                "perf/tokens_per_s": 1_234_567.0,
                "step_time": seconds,
                "time/generation": 0.6 * seconds,
                "time/reward": 0.1 * seconds,
                "time/old_logp": 0.05 * seconds,
                "time/update": 0.2 * seconds,
            }
        )
    return rows


def sample(text="12"):
    rewards = {"correct": 1.0, "format": None}
    return {
        "prompt": "What is 5 + 7?\nAnswer: " + text,
        "completion": text,
        "score": 1.2,
        "rewards": rewards,
        "finish_reason": "stop",
    }


def shown(renderable, width=80):
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(renderable)
    return out.getvalue()


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def ordinary_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("width", [20, 48, 60, 80, 140])
@pytest.mark.parametrize("count", [0, 1, 42, 1000])
def test_the_panel_never_exceeds_its_width(width, count):
    for text in NASTY:
        panel = render_panel(run_rows(count)[:count], [sample(text)], PLAN, width, "generation")
        assert all(cell_len(line) <= width for line in shown(panel, width).splitlines())


@pytest.mark.parametrize("width", [80, 140])
def test_the_panel_of_huge_samples_fits_a_terminal_of_24_lines(width):
    for text in NASTY:
        text = shown(render_panel(run_rows(42), [sample(text)], PLAN, width, "generation"), width)
        assert len(text.splitlines()) <= 23  # and one for the cursor


def test_the_panel_shows_step_figures_split_and_sample():
    text = shown(render_panel(run_rows(42), [sample()], PLAN, 80, "generation"))
    for part in (
        *("quickstart", "make:tiny-count", "step 42/60", "36s left", "generation 60%"),
        *("reference 5%", "other 5%", "0.727", "+0.497 since start", "held out", "truncated"),
        *("2.0%", "1,234,567", "Answer: 12", "score 1.2 · correct 1 · format – · stop"),
    ):
        assert part.replace(" ", "") in text.replace("\xa0", "").replace(" ", ""), part


@pytest.mark.parametrize("width", [60, 80, 140])
def test_rows_without_keys_or_with_odd_values_and_an_empty_plan_do_not_raise(width):
    rows = [{}, {"step": 3}, {"step": 4, "reward": None, "kl": float("nan"), "entropy": "high"}]
    rows += [{"step": 5, "step_time": 0.0}, {"step": 6, "time/generation": 1.0}]
    for count in range(len(rows) + 1):
        assert "nan" not in shown(render_panel(rows[:count], [{}], {}, width), width)


def test_samples_that_look_like_markup_or_control_codes_appear_as_written_and_harmless():
    text = shown(render_panel([], [sample("[red]x[/red] :smile: \x1b[31m\x07")], PLAN, 80))
    assert "[red]x[/red] :smile: ␛[31m␇" in text
    assert not any(c in text for c in "\x1b\x07\r")


@pytest.mark.parametrize("text", NASTY)
def test_a_cleaned_text_is_one_printable_line(text):
    assert clean_line(text).isprintable()


def test_newlines_are_shown_and_long_texts_cut_at_the_far_side():
    assert clean_line("a\r\nb\nc") == "a⏎ b⏎ c"
    assert wrap_text("one two three four", 9, 1) == ["one two …"]
    assert wrap_text("one two three four", 10, 1, from_end=True) == ["…hree four"]
    assert wrap_text("one two", 9, 1) == ["one two"]


def test_the_sample_rotates_from_row_to_row():
    rows, samples = run_rows(3), [sample("first"), sample("second")]
    texts = [shown(render_panel(rows[:n], samples, PLAN, 80)) for n in (1, 2, 3)]
    assert ["second" in text for text in texts] == [False, True, False]


def test_a_sparkline_runs_from_its_least_to_its_greatest_value():
    assert draw_sparkline([0.0, 1.0], 10) == SPARKLINE_BARS[0] + SPARKLINE_BARS[-1]
    assert draw_sparkline([2.0, 2.0, 2.0], 10) == SPARKLINE_BARS[3] * 3
    assert draw_sparkline([float(i) for i in range(800)], 8) == SPARKLINE_BARS
    assert draw_sparkline([], 10) == ""


def test_numbers_and_durations_are_short():
    assert [format_number(v) for v in (0.53125, 12.0, 12345.6)] == ["0.531", "12", "12,346"]
    assert [format_number(v, "x %") for v in (0.0, 0.004, 0.5)] == ["0%", "0.4%", "50%"]
    assert [format_duration(s) for s in (0.4, 59.6, 100, 7500)] == ["0s", "1m00s", "1m40s", "2h05m"]


def test_time_left_takes_the_median_so_that_one_slow_step_does_not_count():
    rows = [{"step": s, "step_time": 100.0 if s == 9 else 2.0} for s in range(1, 11)]
    assert time_left(rows, {"max_steps": 60}) == 100.0
    assert time_left(rows, {"max_steps": 10}) == 0.0
    assert time_left(rows, {}) is None
    assert time_left([], {"max_steps": 10}) is None


def test_the_split_bar_fills_its_width_and_adds_up_to_one():
    bar, legend = phase_split(run_rows(42), 76)
    assert cell_len(bar.plain) == 76
    shares = [int(part.split("%")[0]) for part in legend.plain.split("\xa0") if "%" in part]
    assert shares == [60, 10, 5, 20, 5]


def plain(mode="plain", samples=0, file=None):
    out = file or io.StringIO()
    display = Display(PLAN, mode, samples, file=out)
    display.phase("loading")
    for row in run_rows(3):
        for phase in ("data", "generation", "reward", "old_logp", "update", "optimizer", "sync"):
            display.phase(phase)
        display.step(row, [sample(text) for text in NASTY[:3]])
    display.note("advice: [b]look[/b]\nsecond \x1b[31mline")
    display.close()
    display.close()
    return out.getvalue()


def test_plain_mode_writes_one_line_per_logged_step():
    lines = plain().splitlines()
    assert lines[0] == "loading ..."
    assert lines[1] == "step 0/60  held-out 0.2"
    shown = dict(re.findall(r"(\w+) ([\d.,/%]+)  ", lines[2]))
    assert shown == {"step": "1/60", "reward": "0.229", "kl": "0.0039", "entropy": "1.85",
                     "length": "12,346", "truncated": "2.0%"}  # fmt: skip
    assert lines[2].endswith("s")
    assert "s/step  eta 2m" in lines[2] or "s/step  eta 1m" in lines[2]
    assert lines[5:] == ["advice: [b]look[/b]", "second ␛[31mline"]


@pytest.mark.parametrize("samples", [0, 2])
def test_plain_mode_emits_neither_carriage_returns_nor_escape_codes(samples, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # asks for colour, and still a log stays a log
    text = plain(samples=samples)
    assert not any(c in text for c in "\r\x1b\x07\x9b")
    assert text.count("score 1.2 · correct 1") == 4 * samples


def test_plain_mode_survives_an_output_that_knows_only_ascii():
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    Display(PLAN, "plain", 1, file=file).step({"step": 1}, [sample("漢\n字")])
    assert b"score 1.2" in raw.getvalue()


@pytest.mark.parametrize(
    ("file", "term", "panel"),
    [
        (Terminal, "xterm", True),
        (Terminal, "dumb", False),
        (io.StringIO, "xterm", False),
    ],
)
def test_auto_is_a_panel_only_on_a_terminal_that_can_draw_one(file, term, panel, monkeypatch):
    monkeypatch.setenv("TERM", term)
    text = plain(mode="auto", file=file())
    assert ("╭" in text) is panel
    assert ("\x1b[" in text) is panel


def test_auto_is_plain_on_a_terminal_without_utf_8():
    class Latin(Terminal):
        encoding = "latin-1"

    assert "╭" not in plain(mode="auto", file=Latin())


def colours(text):
    return [code for code in ("[32m", "[36m", "[33m", "[90m") if code in text]


def test_the_live_panel_has_colours_unless_no_color_is_set(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert colours(plain(mode="auto", file=Terminal()))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colours(plain(mode="auto", file=Terminal()))


def test_an_error_leaves_the_cursor_shown_and_the_last_panel_standing():
    file = Terminal()
    display = Display(PLAN, "auto", file=file)
    with pytest.raises(RuntimeError):
        try:
            display.step(run_rows(1)[1], [sample()])
            raise RuntimeError("reward failed")
        finally:
            display.close()
    text = file.getvalue()
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") >= 0
    assert "step 1/60" in text
    display.close()
    display.phase("over")
    display.note("checkpoint-1")
    assert file.getvalue().endswith("checkpoint-1\n")


def test_the_live_panel_is_drawn_by_the_clock_and_not_by_every_step():
    file = Terminal()
    display = Display(PLAN, "panel", file=file)
    for row in run_rows(500):
        display.phase("update")
        display.step(row, [sample()])
    display.close()
    assert file.getvalue().count("rloo · quickstart") < 100
    assert "step 500/60" in file.getvalue()


def test_the_plan_may_learn_the_number_of_steps_later():
    out, plan = io.StringIO(), PLAN | {"max_steps": None}
    display = Display(plan, "plain", file=out)
    display.step({"step": 1})
    display.plan["max_steps"] = 7
    display.step({"step": 2})
    assert out.getvalue() == "step 1/?\nstep 2/7\n"
    assert plan["max_steps"] is None


def test_notes_stay_above_the_live_panel_as_written():
    file = Terminal()
    display = Display(PLAN, "panel", file=file)
    display.note("advice: [red]raise[/red] algorithm.beta " + "and so on " * 20)
    display.close()
    assert "advice: [red]raise[/red] algorithm.beta" in file.getvalue()


def test_the_end_table_shows_scores_and_problems_before_and_after():
    before = {"eval_reward": 0.2, "eval_completions/mean_length": 12.25, "only_before": 1.0}
    after = {"eval_reward": 0.78, "eval_completions/mean_length": 8.0, "step": 60}
    problem = {"prompt": "[b]3+4[/b]\n=", "answer": 7, "before": "77\x1b[2J", "after": "7"}
    text = shown(before_after_tables(before, after, [problem] * 3))
    for part in ("reward", "0.2", "0.78", "+0.58", "-4.25", "[b]3+4[/b]⏎ =", "77␛[2J"):
        assert part in text, part
    assert "only_before" not in text
    assert "\x1b" not in text
    assert "prompt" not in shown(before_after_tables(before, after, []))


SCORED = {"eval_reward": 0.8, "eval_reward/se": 0.02, "eval_reward/low": 0.76,
          "eval_reward/high": 0.84}  # fmt: skip


@pytest.mark.parametrize("shown_by", ["before and after", "one evaluation", "panel", "lines"])
def test_a_held_out_score_is_shown_with_its_interval_and_not_its_parts(shown_by):
    if shown_by == "before and after":
        text = shown(before_after_tables(SCORED, SCORED, []))
    elif shown_by == "one evaluation":
        text = shown(evaluation_table({"step": 0, **SCORED}, [""]))
    elif shown_by == "panel":
        text = shown(render_panel([{"step": 0, **SCORED}], [], PLAN, 100))
    else:
        out = io.StringIO()
        Display({"max_steps": 1}, "plain", file=out).step({"step": 0, **SCORED})
        text = out.getvalue()
    assert "(0.76 to 0.84)" in text
    assert not re.search(r"/se|/low|/high", text)


def folder(path):
    (path / "samples").mkdir(parents=True)
    rows = "".join(json.dumps(row) + "\n" for row in run_rows(20))
    (path / "metrics.jsonl").write_text(rows + '{"step": 21, "rew')
    (path / "run.json").write_text(json.dumps({"plan": PLAN}))
    for step in (10, 20):
        name = path / "samples" / f"step_{step:06d}.jsonl"
        name.write_text(json.dumps(sample(f"<b>at&{step}</b>")) + "\n")
    return path


def words(svg):
    return svg.read_text().replace("&#160;", " ")


def test_the_panel_of_a_finished_run_becomes_an_svg(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    out = tmp_path / "panel.svg"
    main([str(folder(tmp_path / "run")), str(out)])
    text = words(out)
    assert text.startswith("<svg")
    for part in ("rloo train +recipe=quickstart", "step 20/60", "&lt;b&gt;at&amp;20"):
        assert part in text


def test_the_svg_shows_the_step_that_was_asked_for(tmp_path):
    out = tmp_path / "panel.svg"
    main([str(folder(tmp_path / "run")), str(out), "--step", "14"])
    assert "step 14/60" in words(out)
    assert "at&amp;10" in words(out)


def test_a_run_folder_with_metrics_only_is_enough_for_an_svg(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    write_panel_svg(run, tmp_path / "panel.svg")
    assert "+recipe=run" in words(tmp_path / "panel.svg")


def test_a_folder_that_is_no_run_is_named_and_exits_with_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "nothing"), str(tmp_path / "panel.svg")])
    assert stop.value.code == 2
    assert "nothing" in capsys.readouterr().err


def test_several_rewards_have_their_own_means_in_the_panel_and_in_plain_lines():
    parts = {"reward/right/mean": 0.25, "reward/length/mean": -0.5, "reward/right/std": 0.1}
    row = {"step": 1, "reward": 0.125, "step_time": 1.0} | parts
    said = shown(render_panel([row], [], {}, 80))
    assert "· right        0.25" in said and "· length       -0.5" in said
    assert max(map(len, said.splitlines())) <= 80
    file = io.StringIO()
    Display({"max_steps": 3}, "plain", file=file).step(row)
    assert "reward 0.125 (right 0.25, length -0.5)" in file.getvalue()
    alone = {k: v for k, v in row.items() if "length" not in k}  # one reward is the score itself
    assert "right" not in shown(render_panel([alone], [], {}, 80))


def test_a_conversation_is_shown_by_its_last_question():
    asked = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "The answer is"},
    ]
    said = shown(render_panel([{"step": 1}], [{"prompt": asked, "completion": "4"}], {}, 80))
    assert "prompt     What is 2+2?" in said and "role" not in said
    assert last_message("plain") == "plain" and last_message([]) == "[]"
    assert last_message([{"role": "system", "content": "hm"}]) == "hm"


def episode(text):
    """A sample of an episode in which everything that is said is the same text."""
    got = [{"role": "tool", "name": text, "content": text}]
    turns = [
        {"told": [], "said": text, "calls": [{"name": text, "arguments": {"a": text}}]},
        {"told": got, "said": text, "calls": []},
    ]
    facts = {"calls": 1, "bad_calls": 0, "errors": 2, "ended_by": "answer"}
    return sample(text) | {"turns": turns, "episode": facts, "failed": text}


def episode_rows(count):
    figures = {"agent/turns": 1.5, "agent/calls": 0.5, "agent/bad_calls": 0.25, "agent/tool_s": 0.1}
    cut = {
        "agent/failures": 0.25,
        "agent/truncated_by/turns": 1.0,
        "agent/truncated_by/tokens": 0.1,
    }
    return [row | figures | cut for row in run_rows(count)]


@pytest.mark.parametrize("width", [48, 80, 140])
@pytest.mark.parametrize("text", NASTY)
def test_an_episode_of_hostile_texts_stays_inside_the_panel_and_a_terminal(width, text):
    panel = render_panel(episode_rows(42), [episode(text)], PLAN, width, "generation")
    lines = shown(panel, width).splitlines()
    assert len(lines) <= (23 if width >= 80 else 30)
    assert all(cell_len(line) <= width for line in lines)
    assert not any(c in line for c in "\x1b\x07\r\u202e" for line in lines)


def test_a_run_that_samples_while_it_trains_shows_what_is_hidden_exposed_and_idle():
    rows = run_rows(3)
    for row in rows:
        row["time/exposed"] = row.pop("time/generation", None)
        row |= {"overlap/hidden_s": 7.5, "overlap/exposed_s": 0.25, "overlap/idle_s": 1.125}
    text = shown(render_panel(rows, [sample("seven")], PLAN, 80))
    for label, value in (("hidden s", "7.5"), ("exposed s", "0.25"), ("idle s", "1.12")):
        assert re.search(rf"{label} +{re.escape(value)}", text), (label, text)
    assert "generation\xa060%" in text or "generation 60%" in text  # what was waited for
    assert "hidden s" not in shown(render_panel(run_rows(3), [sample("seven")], PLAN, 80))


def test_an_episode_is_shown_as_a_conversation_with_its_figures():
    text = shown(render_panel(episode_rows(3), [episode("seven")], PLAN, 80))
    for line in ("turn 1     seven", 'calls      seven({"a": "seven"})', "seven      seven",
                 "turn 2     seven"):  # fmt: skip
        assert line in text
    assert "1 call, 2 errors" in text
    for label, value in (("turns", "1.5"), ("no score", "25%"), ("cut: turns", "100%")):
        assert re.search(rf"{label} +{value} ", text), label
    assert "completion" not in text and "cut: tokens" not in text
    assert "turns" not in shown(render_panel(run_rows(3), [sample("seven")], PLAN, 80))
    file = io.StringIO()
    Display({"max_steps": 3}, "plain", file=file).step(episode_rows(3)[-1])
    assert "turns 1.5  no score 25%" in file.getvalue()


@pytest.mark.parametrize(
    "turns", ["x", [3], [{}], [{"got": 1, "calls": [2]}], [{"told": [{"content": [7, {}]}]}]]
)
def test_turns_that_are_damaged_are_shown_as_far_as_they_can_be(turns):
    shown(render_panel([], [{"turns": turns, "episode": [], "failed": 3}], PLAN, 80))


def test_a_start_says_what_took_long_and_how_far_it_has_come(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("rloo_cli.reporting.display.time.monotonic", lambda: clock[0])
    file = io.StringIO()
    display = Display({}, "plain", file=file)
    display.phase("loading data")
    clock[0] += 1
    display.phase("making make:addition")
    for seconds in (3, 3, 3, 7):  # said every few seconds, not every time
        clock[0] += seconds
        display.progress(f"about {clock[0]:.0f}%")
    display.phase("loading the model")
    display.phase("generation")
    display.step({"step": 1, "reward": 0.0})
    clock[0] += 60
    display.phase("update")
    said = file.getvalue().splitlines()
    assert said[:-1] == [
        "loading data ...",
        "making make:addition ...",
        "  6s: about 7%",
        "  16s: about 17%",
        "making make:addition: 16s",
        "loading the model ...",
    ]
    assert said[-1].startswith("step 1/?")


def screen_of(stream, width):
    """What a terminal shows of a stream: text that wraps at its width, and rich's few orders."""
    lines, at, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]", stream):
        if part == "\n":
            at, column = at + 1, 0
        elif part == "\r":
            column = 0
        elif part.endswith("A") and part[0] == "\x1b":
            at -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[at] = ""
        elif part[0] != "\x1b":
            if column == width:  # only what follows the last cell goes on in the next line
                at, column = at + 1, 0
            lines += [""] * (at + 1 - len(lines))
            lines[at] = f"{lines[at]:<{column}}"[:column] + part + lines[at][column + 1 :]
            column += 1
        lines += [""] * (at + 1 - len(lines))
    return lines


def test_the_c_that_a_terminal_writes_for_ctrl_c_leaves_no_part_of_a_frame(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "40")
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    display = Display({"max_steps": 3}, file=file)
    display.step({"step": 1, "reward": 0.5, "step_time": 1.0})
    display.live_panel.refresh()
    file.write("^C")
    display.live_panel.refresh()
    display.note("saved checkpoint-1")
    display.close()
    said = screen_of(file.getvalue(), 60)
    assert [line for line in said if "saved" in line] == ["saved checkpoint-1"]
    frames = [line for line in said if line.startswith("╭")]
    assert len(frames) == 1 and said.index(frames[0]) > said.index("saved checkpoint-1")

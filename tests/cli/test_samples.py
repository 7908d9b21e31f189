"""`rloo samples`: what a run wrote, sorted, readable, and without surprises for a terminal."""

import json

import pytest
from assert_refused import assert_refused
from cli_cases import Rloo
from ledger_cases import six
from PIL import Image

from rloo_cli.cli import main, samples
from rloo_cli.data.images import encode_thumbnail
from rloo_cli.train.loop import run_training_loop
from rloo_cli.utils.errors import ConfigError, DataError

SCORES = [0.5, None, 2.0, -1.0, 0.5, 1.0]


def row(i, score, **more):
    """As the log writes them: three prompts, two completions each."""
    found = {
        "draw": 10 + i // 2,
        "k": i % 2,
        "prompt": f"question {i // 2}",
        "completion": f"answer {i}",
        "finish_reason": "stop",
        "terminated": True,
        "prompt_length": 7,
        "completion_length": 40 + i,
        "seed": 1,
        "weight_version": 3,
        "score": score,
        "shaped": score,
        "kl": 0.25,
        "reward": None if score is None else score - 0.1,
        "advantage": None if score is None else score / 2,
        "rewards": {"right": score, "short": float(-i)},
    }
    return found | more


def save(run, name, rows):
    path = run / "samples" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run with samples of steps 10, 20 and 40; its name is `mine`."""
    folder = tmp_path / "runs" / "mine"
    for at in (10, 20, 40):
        rows = [row(i, s, prompt=f"question {i // 2} of {at}") for i, s in enumerate(SCORES)]
        save(folder, f"step_{at:06d}", rows)
    (folder / "run.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def show(run, capsys):
    def ask(*words):
        assert main.find_verb(["samples", "mine", *words])() == 0
        return capsys.readouterr().out

    return ask


def answers(text):
    """The number of each completion shown, in order."""
    return [int(line.split()[-1]) for line in text.splitlines() if line.startswith("completion")]


def refused(*words, kind=ConfigError):
    with pytest.raises(kind) as caught:
        main.find_verb(["samples", *words])()
    return caught.value


def test_the_last_step_is_shown_with_one_completion_of_each_prompt_first(show):
    text = show()
    assert "step_000040.jsonl: 5 of 6 " in text
    assert "question 0 of 40" in text and answers(text) == [0, 2, 4, 1, 3]
    assert answers(show("-n", "2")) == [0, 2]


def test_the_worst_and_the_best_come_first_and_what_has_no_score_last(show, sentence):
    assert answers(show("--worst", "-n", "9")) == [3, 0, 4, 5, 2, 1]
    assert answers(show("--best", "-n", "9")) == [2, 5, 0, 4, 3, 1]
    text = show("--worst", "-n", "1", "--step", "20")
    assert answers(text) == [3]
    sentence(text)


def test_one_of_the_rewards_can_be_what_they_are_sorted_by(show):
    assert answers(show("--worst", "--reward", "short", "-n", "3")) == [5, 4, 3]
    assert answers(show("--best", "--reward", "short", "-n", "3")) == [0, 1, 2]
    text = show("--worst", "--reward", "right", "-n", "9")
    assert answers(text) == [3, 0, 4, 5, 2, 1] and "by right" in text
    problem = assert_refused(refused("mine", "--best", "--reward", "shrt"), fix="--reward short")
    assert "right, short" in problem.why


def test_a_sample_is_shown_with_everything_that_made_its_score(show, sentence):
    sentence(show("--best", "-n", "1"))


def test_a_reward_may_have_the_name_of_a_part_of_ours(run, show):
    save(run, "step_000050", [row(0, 1.0, rewards={"kl": 3.0, "score": 4.0})])
    assert "kl 3 · score 4 · kl 0.25" in show()


def test_what_is_not_known_has_a_dash(show):
    text = show("--worst", "-n", "6")
    assert all(f"{part} – " in f"{text} " for part in ("right", "reward")) and "advantage –" in text


def test_a_number_that_is_none_counts_as_no_score(run, show):
    rows = [row(0, float("nan")), row(1, 3.0), row(2, float("-inf")), row(3, 2.0)]
    save(run, "step_000050", rows)
    text = show("--best")
    assert answers(text) == [1, 3, 0, 2] and "2 without" in text
    found = json.loads(show("--worst", "--json"), parse_constant=pytest.fail)
    assert [r["score"] for r in found] == [2.0, 3.0, None, None]


def test_other_columns_and_a_cut_off_end_are_shown(run, show):
    more = {"terminated": False, "finish_reason": "length", "parsed": "4\x07", "empty": None}
    save(run, "step_000050", [row(0, 1.0, **more)])
    text = show()
    assert "length, cut off" in text
    assert "also       parsed 4␇" in text and "empty" not in text


def test_texts_keep_their_lines_and_lose_their_tricks(run, show):
    nasty = "one\r\ntwo\n\x1b[2J\x1b]0;title\x07[red]three[/red]\u202eevil\ud800\n" + "w" * 150
    conversation = [{"role": "system", "content": "Be\nkind."}, {"role": "user", "content": "Hi"}]
    save(run, "step_000050", [row(0, 1.0, completion=nasty, prompt=conversation)])
    text = show()
    start = text.index("prompt     ")
    assert text[start:].splitlines()[:8] == [
        "prompt     system: Be",
        "           kind.",
        "           user: Hi",
        "completion one",
        "           two",
        "           ␛[2J␛]0;title␇[red]three[/red]�evil�",
        "           " + "w" * 89,
        "           " + "w" * 61,
    ]
    assert "\x1b" not in text and "\u202e" not in text


def test_an_episode_is_a_conversation_and_what_tools_say_loses_its_tricks(run, show):
    nasty = "one\n\x1b[2J\x1b]0;title\x07[red]two[/red]\u202eevil"
    turns = [
        {"told": [], "said": "Let me see.", "calls": [{"name": "look\x1b", "arguments": {"a": 1}}]},
        {"told": [{"role": "tool", "name": "look\x1b", "content": nasty}], "said": "It is 2.",
         "calls": []},
    ]  # fmt: skip
    facts = {"calls": 1, "bad_calls": 0, "errors": 0, "ended_by": "turns"}
    save(run, "step_000050", [row(0, 1.0, turns=turns, episode=facts, failed="late\x1b")])
    text = show()
    start = text.index("turn 1")
    *lines, episode = text[start:].splitlines()
    assert lines == [
        "turn 1     Let me see.",
        'calls      look␛({"a": 1})',
        "look␛      one",
        "           ␛[2J␛]0;title␇[red]two[/red]�evil",
        "turn 2     It is 2.",
    ]
    assert "agent.max_turns, 1 call," in episode and episode.endswith("late␛")
    assert "\x1b" not in text and "\u202e" not in text and "completion" not in text


def test_a_long_prompt_shows_its_end_and_a_long_completion_its_beginning(run, show):
    many = "\n".join(f"line {i}" for i in range(50))
    save(run, "step_000050", [row(0, 1.0, completion=many, prompt=many)])
    text = show()
    assert "line 41\n" not in text.partition("completion")[0]
    prompt, _, completion = text.partition("completion ")
    assert "prompt     …\n           line 42\n" in prompt and prompt.endswith("line 49\n")
    assert completion.startswith("line 0\n") and completion.endswith("line 23\n           …\n")
    long = "word " * 1000
    save(run, "step_000060", [row(0, 1.0, completion=long, prompt=long)])
    text = show()
    assert len(text.splitlines()) < 40 and max(map(len, text.splitlines())) <= 100
    assert json.loads(show("--json"))[0]["completion"] == long


def test_as_json_samples_are_whole(show):
    found = json.loads(show("--worst", "-n", "2", "--json"))
    wanted = [row(i, SCORES[i], prompt=f"question {i // 2} of 40") for i in (3, 0)]
    assert found == wanted


# Held-out samples.


def held_out(run, name, count=2, **more):
    extra = {"row": {"answer": "42", "hint": None}} | more
    save(run, name, [{**row(i, float(i), **extra), "k": 0} for i in range(count)])


def test_held_out_samples_are_those_of_the_last_evaluation(run, show):
    held_out(run, "eval_000000")
    held_out(run, "eval_000030")
    text = show("--eval", "--best")
    assert "eval_000030.jsonl: 2 of 2 " in text and answers(text) == [1, 0]
    assert "also       answer 42" in text
    assert "eval_000000.jsonl" in show("--eval", "--step", "0")
    assert_refused(refused("mine", "--eval", "--step", "7"), key="0 and 30")


def test_held_out_sets_are_told_apart_by_name(run, show):
    held_out(run, "eval_easy_sums_000030", 1, set="easy_sums", greedy=False)
    assert "set easy_sums ·" in show("--eval")  # there is but one
    assert "stop, sampled\n" in show("--set", "easy_sums", "--eval")
    held_out(run, "eval_hard_000030", 3)
    assert "eval_hard_000030.jsonl: 3 of 3" in show("--set", "hard")
    assert_refused(refused("mine", "--eval"), key="easy_sums, hard")
    assert_refused(refused("mine", "--set", "hrd"), key="hrd", fix="--set hard")
    assert_refused(refused("mine", "--set", "zzz"), key="zzz", fix="--set NAME")
    held_out(run, "eval_000030", 2, set=None, greedy=True)
    text = show("--eval")
    assert "eval_000030.jsonl: 2 of 2" in text and "set" not in text
    assert "stop, greedy\n" in text


def test_a_set_is_asked_for_where_there_is_but_one_without_a_name(run, sentence):
    held_out(run, "eval_000030")
    error = refused("mine", "--set", "hard")
    assert_refused(error, key="hard")
    sentence(error)


# What is not there, or not understood.


@pytest.mark.parametrize(
    ("asked", "near"), [("9", "10 and 20"), ("21", "10 and 20"), ("1000", "20 and 40")]
)
def test_a_step_without_samples_names_the_nearest_that_have(run, asked, near, sentence):
    error = refused("mine", "--step", asked)
    assert_refused(error, key=near, fix=f"--step {near.split()[0]}")
    if asked == "9":
        sentence(error)


@pytest.mark.parametrize(
    ("words", "key", "fix"),
    [
        (["mine", "--wrst"], "--wrst", "--worst"),
        (["mine", "--worst", "--best"], "--worst", ""),
        (["mine", "--step", "two"], "'two'", ""),
        (["mine", "--step"], "--step", ""),
        (["mine", "-n", "0"], "-n", "rloo samples RUN"),
        (["mine", "--reward", "right"], "--reward", "--worst --reward right"),
        (["mine", "step=3"], "step=3", ""),
        (["mine", "--eval"], "held-out", ""),
        (["mein"], "mein", "rloo samples mine"),
        (["other/place"], "runs/other/place", ""),
        ([], "rloo samples", ""),
    ],
)
def test_what_is_not_understood_is_one_clear_error(run, words, key, fix, sentence):
    error = refused(*words)
    assert_refused(error, key=key, where="command line", fix=fix)
    assert len(error.problems) == 1
    if not error.problems[0].what.startswith("rloo samples: "):  # argparse's own words
        sentence(error)


def test_the_shell_completes_the_names_of_runs(run, capsys):
    (run.parent / "debug" / "smoke").mkdir(parents=True)
    (run.parent / "debug" / "smoke" / "run.json").write_text("{}")
    for verb in ("samples", "ledger"):
        assert main.find_verb(["completion", "query", verb, ""])() == 0
        assert capsys.readouterr().out.split() == ["debug/smoke", "mine"]
        assert main.find_verb(["completion", "query", verb, "m"])() == 0
        assert capsys.readouterr().out.split() == ["mine"]


def test_a_run_without_samples_says_so(run, tmp_path):
    bare = tmp_path / "runs" / "debug" / "bare"
    bare.mkdir(parents=True)
    (bare / "run.json").write_text("{}")
    assert_refused(refused("debug/bare"), key="runs/debug/bare")
    assert_refused(refused("debug/bar"), key="debug/bar", fix="rloo samples debug/bare")


@pytest.mark.parametrize("junk", ["{", "[1]", "null", ""])
def test_a_line_that_is_no_sample_is_named(run, junk):
    path = run / "samples" / "step_000040.jsonl"
    path.write_text(json.dumps(row(0, 1.0)) + f"\n{junk}\n")
    assert_refused(refused("mine", kind=DataError), 4, "runs/mine/samples/step_000040.jsonl:2")


def test_samples_of_a_real_step_are_shown(tmp_path, capsys):
    run = six(tmp_path, steps=1)
    run_training_loop(run)
    capsys.readouterr()
    assert main.find_verb(["samples", str(run.folder), "--best", "-n", "100", "--json"])() == 0
    found = json.loads(capsys.readouterr().out)
    scores = [r["score"] for r in found]
    assert scores == sorted(scores, reverse=True) and len(scores) == 16
    assert sum(scores) / 16 == pytest.approx(run.log.metrics_lines[-1]["reward"])
    assert {r["draw"] for r in found} == {0, 1, 2, 3}
    assert main.find_verb(["samples", str(run.folder), "--worst"])() == 0
    assert capsys.readouterr().out.count("completion ") == 5


def test_the_command_needs_no_torch_and_colours_nothing_that_is_no_terminal(
    rloo_without_torch: Rloo,
):
    save(rloo_without_torch.folder / "runs/mine", "step_000001", [row(0, 1.0, completion="é–漢")])
    (rloo_without_torch.folder / "runs/mine/run.json").write_text("{}")
    shown = rloo_without_torch("samples", "mine", "--worst")
    assert shown.code == 0 and "completion é–漢" in shown.out and "\x1b" not in shown.out
    for variables in ({"PYTHONIOENCODING": "ascii"}, {"TERM": "dumb", "COLUMNS": "40"}):
        shown = rloo_without_torch("samples", "mine", **variables)
        assert shown.code == 0 and "completion " in shown.out, shown.said
    wrong = rloo_without_torch("samples", "mine", "--step", "7")
    assert_refused(wrong, key="step 7")


def test_images_of_a_prompt_are_drawn_and_words_stand_for_them_in_the_text():
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    half = Image.new("RGB", (32, 32), (250, 0, 0))
    half.paste((0, 0, 250), (0, 16, 32, 32))
    record = row(0, 1.0, prompt=prompt, images=[encode_thumbnail(half)])
    lines = samples.sample_lines(record, 80)
    text = "\n".join(line.plain for line in lines)
    assert "user: [image]what?" in text and "data:" not in text
    drawn = [line for line in lines if "▀" in line.plain]
    assert len(drawn) == 10 and all(line.plain.count("▀") == 20 for line in drawn)
    red, blue = (line.spans[-1].style.color.triplet for line in (drawn[0], drawn[-1]))
    assert red.red > 200 > 60 > red.blue and blue.blue > 200 > 60 > blue.red


def test_a_damaged_image_is_named_and_the_sample_is_shown_all_the_same():
    record = row(0, 1.0, images=["data:image/jpeg;base64,AAAA"])
    text = "\n".join(line.plain for line in samples.sample_lines(record, 80))
    assert "1, not shown" in text and "answer 0" in text

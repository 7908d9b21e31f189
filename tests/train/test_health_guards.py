"""`guards.NAME`: a health rule that warns, says nothing, or stops the run after its step."""

import json
import random
import re
from pathlib import Path

import pytest
import yaml
from assert_refused import assert_refused
from cli_cases import Ended, strict
from fork_cases import Forked
from loop_cases import checked, make, timeless

from rloo_cli.cli import config as config_verb
from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.config.idle_keys import key_conditions
from rloo_cli.config.schema import GuardsConfig
from rloo_cli.reporting.health.advisor import CHECKS, Advisor
from rloo_cli.reporting.health.rules import HEALTH_RULES
from rloo_cli.train import between_steps, loop
from rloo_cli.utils.errors import ConfigError, GuardError

DOCTOR = Path(__file__).parents[2] / "docs" / "inspect.md"
# Nearly every completion of 4 tokens is cut: many_truncated speaks at the fifth line.
CUT = ("generation.max_completion_length=4", "max_steps=7", "train.learning_rate=1e-4")
WORDS = ("train", "+recipe=smoke", "distributed.threads=1", "logging.console=plain", *CUT)
KEY = re.compile(r"\b(?:algorithm|checkpoint|data|generation|model|train)\.\w+(?:\.\w+)*")
TEETH = "guards.many_truncated=fail"


def heard(run) -> list[str]:
    """The advice that a run shows, kept."""
    notes: list[str] = []
    run.log.note = notes.append
    return notes


def advice(notes: list[str]) -> list[str]:
    return [note for note in notes if note.startswith("advice:")]


def test_a_guard_that_warns_says_so_once_and_the_run_goes_on(tmp_path):
    run = make(tmp_path, *CUT)
    notes = heard(run)
    loop.run_training_loop(run)
    assert run.state.step == 7
    assert len([n for n in advice(notes) if "completions/clipped_ratio is 1.00" in n]) == 1


def test_a_guard_that_is_off_says_nothing(tmp_path):
    run = make(tmp_path, *CUT, "guards.many_truncated=off")
    notes = heard(run)
    loop.run_training_loop(run)
    assert run.state.step == 7 and not [n for n in advice(notes) if "clipped_ratio" in n]


def test_a_guard_that_fails_stops_the_run_after_that_step_and_names_figures_and_keys(
    tmp_path, sentence
):
    run = make(tmp_path, *CUT, TEETH)
    notes = heard(run)
    with pytest.raises(GuardError) as caught:
        loop.run_training_loop(run)
    assert run.state.step == 5 and run.step_progress is None
    assert_refused(caught, 7, "many_truncated", where=TEETH, fix="guards.many_truncated=warn")
    sentence(caught)
    assert not [n for n in advice(notes) if "clipped_ratio" in n]  # the error says it
    (guard,) = json.loads((run.folder / "run.json").read_text())["guards"]
    assert guard["name"] == "many_truncated" and guard["step"] == 5
    assert "completions/clipped_ratio is 1.00" in guard["figures"]


def test_steps_that_are_not_logged_are_not_judged(tmp_path):
    run = make(tmp_path, *CUT, TEETH, "logging.every=2", "max_steps=12")
    with pytest.raises(GuardError):
        loop.run_training_loop(run)
    assert run.state.step == 10  # the fifth line


def test_a_guard_at_the_last_step_fails_the_run_too(tmp_path):
    run = make(tmp_path, *CUT, TEETH, "max_steps=5")
    with pytest.raises(GuardError):
        loop.run_training_loop(run)


def test_a_held_out_score_that_falls_stops_the_run_at_that_evaluation(tmp_path, monkeypatch):
    run = make(tmp_path, *CUT, "guards.held_out_falling=fail", "eval.every=1")
    scores = [0.4, 0.5, 0.6, 0.1, 0.1, 0.1, 0.1, 0.1]

    def evaluate(run):
        step = run.state.step
        line = {"step": step, "eval_reward": scores[step], "eval_samples": 50}
        return run.log.write_evaluation(line)

    monkeypatch.setattr(between_steps, "evaluate_run", evaluate)
    with pytest.raises(GuardError):
        loop.run_training_loop(run)
    assert run.state.step == run.state.evaluated == 4
    (guard,) = json.loads((run.folder / "run.json").read_text())["guards"]
    assert guard["name"] == "held_out_falling"


@pytest.fixture(scope="module")
def home(fast, tmp_path_factory) -> Forked:
    return Forked(fast, tmp_path_factory.mktemp("guards"))


def facts(home: Forked, name: str) -> dict:
    return json.loads((home.folder / "runs" / name / "run.json").read_text())


def rows(home: Forked, name: str) -> list[dict]:
    """Its lines, without times; those of evaluations too."""
    return [timeless(row) for row in strict(home.folder / "runs" / name / "metrics.jsonl")]


@pytest.mark.slow
def test_a_run_that_a_guard_stopped_is_saved_goes_on_and_ends_as_one_left_alone(home):
    assert home(*WORDS, "name=alone") == 0, home.said()
    code, said = home(*WORDS, "name=watched", TEETH), home.said()
    problem = assert_refused(Ended(code, said, ""), 7, "many_truncated", fix="resume=auto")
    assert problem.where.startswith("guards.many_truncated=fail, ") and "step 5" in problem.what
    assert "guards.many_truncated=fail, " in said
    stopped = facts(home, "watched")
    assert (stopped["state"], stopped["code"]) == ("failed", 7)
    assert (
        stopped["checkpoint"] == "checkpoint-5" and stopped["hash"] == facts(home, "alone")["hash"]
    )
    assert [guard["name"] for guard in stopped["guards"]] == ["many_truncated"]
    assert home(*WORDS, "name=watched", TEETH, "resume=auto") == 0, home.said()  # 2 lines: too few
    ended = facts(home, "watched")
    assert (ended["state"], ended["guards"]) == ("finished", [])
    assert rows(home, "watched") == rows(home, "alone")


@pytest.mark.slow
def test_a_resumed_run_is_stopped_again_once_the_rule_holds_since_then(home):
    longer = ("max_steps=12", "train.lr_scheduler=constant", "data.eval_split=null")
    assert home(*WORDS, *longer, "name=again", TEETH) == 7, home.said()
    assert home(*WORDS, *longer, "name=again", TEETH, "resume=auto") == 7, home.said()
    assert facts(home, "again")["checkpoint"] == "checkpoint-10"
    warned = ("guards.many_truncated=warn", "resume=auto")
    assert home(*WORDS, *longer, "name=again", *warned) == 0, home.said()
    assert facts(home, "again")["state"] == "finished"


@pytest.mark.slow
def test_all_ranks_stop_together_and_what_they_did_is_saved(home):
    ranks = ("distributed=ddp", "distributed.num_processes=2", "name=two")
    home.said()  # what earlier tests have left
    assert home(*WORDS, TEETH, *ranks, ranks=2) == 7
    said = home.said()
    assert said.count("error: the guard ") == 1, said
    stopped = facts(home, "two")
    assert stopped["checkpoint"] == "checkpoint-5" and stopped["code"] == 7
    other = home.folder / "runs/two/logs/attempt_1/rank_1.log"
    assert "GuardError" in other.read_text()
    assert home(*WORDS, TEETH, *ranks, "resume=auto", ranks=2) == 0, home.said()


# The config's side.


def test_the_guards_of_the_config_are_the_rules_and_each_says_what_it_rests_on():
    assert {*GuardsConfig.model_fields} == {*CHECKS}
    for name, field in GuardsConfig.model_fields.items():
        assert any(metric in str(field.description) for metric in HEALTH_RULES[name].metrics)
    said = config_verb.explain_key("guards.many_truncated", ["+recipe=smoke"])
    assert "completions/clipped_ratio above 0.5" in said and "fail | warn | off" in said


def test_an_unknown_guard_is_answered_with_the_nearest_name(tmp_path):
    with pytest.raises(ConfigError) as caught:
        check.check_config(compose_config(["+recipe=smoke", "guards.kl_risin=fail"]))
    assert_refused(caught, 2, "guards.kl_rising")


def test_a_level_that_is_none_is_refused_with_those_there_are():
    with pytest.raises(ConfigError) as caught:
        check.check_config(compose_config(["+recipe=smoke", "guards.kl_rising=stop"]))
    assert_refused(caught, 2, "'fail', 'warn' or 'off'")


def test_off_without_quotes_in_a_file_is_off(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("# Mine.\ndefaults: [smoke]\nguards: {kl_rising: off, reward_flat: fail}\n")
    run = check.check_config(compose_config([f"+recipe={recipe}"]))
    assert (run.guards.kl_rising, run.guards.reward_flat) == ("off", "fail")
    text = tmp_path / "config.yaml"
    text.write_text(check.config_text(run))
    assert check.read_config(text).guards == run.guards


def test_guards_are_no_part_of_the_experiment():
    plain, teeth = checked((), ()), checked((), (TEETH,))
    assert check.config_hash(plain) == check.config_hash(teeth)


def test_a_guard_that_could_never_speak_is_an_idle_key():
    conditions = key_conditions(type(checked((), ())))
    idle = {key for key in conditions if key.startswith("guards.")}
    assert idle == {
        "guards.policy_clipping", "guards.kl_rising", "guards.low_ess",
        "guards.every_update_clipped", "guards.held_out_falling",
    }  # fmt: skip
    said = config_verb.explain_key("guards.kl_rising", ["+recipe=smoke", "algorithm.beta=0"])
    assert "idle" in said


def test_the_page_has_a_row_for_each_guard_with_its_metric_and_keys():
    page = DOCTOR.read_text()
    for name, rule in ((name, HEALTH_RULES[name]) for name in CHECKS):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        for part in (*rule.metrics, *KEY.findall(rule.fix)):
            assert f"`{part}`" in row, f"{name}: {part}"


def test_a_rule_that_names_keys_names_those_of_its_advice():
    known = set(config_verb.value_keys()) | {"algorithm.missing_eos_penalty"}
    for name in CHECKS:
        named = KEY.findall(HEALTH_RULES[name].fix)
        assert named and {*named} <= known, name


# The rules' side: what a rule that may stop a run has seen.

CUT_ROW = {"completions/clipped_ratio": 0.9}


def spoken(levels: dict[str, str], count: int) -> list[int]:
    """The steps at which many_truncated speaks."""
    advisor = Advisor(levels)
    return [s for s in range(1, count + 1) if advisor.advise(CUT_ROW | {"step": s})]


def test_a_rule_that_fails_begins_anew_where_it_fired_and_one_that_warns_stays_silent():
    assert spoken({}, 20) == spoken({"many_truncated": "warn"}, 20) == [5]
    assert spoken({"many_truncated": "fail"}, 20) == [5, 10, 15, 20]
    assert spoken({"many_truncated": "off"}, 20) == []


def test_a_rule_that_is_off_does_not_silence_its_opposite():
    dice = random.Random(0)
    level = [max(0.3, 0.9 - 0.01 * s) + dice.gauss(0, 0.01) for s in range(250)]
    flat = [{"step": s, "reward": reward} for s, reward in enumerate(level)]
    off = {"reward_falling": "off", "reward_swinging": "off"}
    for levels, wanted in (({}, False), (off, True)):
        advisor = Advisor(levels)
        said = [name for row in flat for name in advisor.advise(row)]
        assert ("reward_flat" in said) == wanted, said


def test_the_levels_of_a_run_come_from_its_files(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(check.dump_config(checked((), ("guards.kl_rising=off",)))))
    assert yaml.safe_load(path.read_text())["guards"]["kl_rising"] == "off"

"""Every metric of docs/metrics.md, computed once more from what short runs have written.

`plain_metrics` shares nothing with the package. A line may have no metric that is not compared
here, and the page none that no run compares, but for clocks and what it says is not recomputed.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import loop_cases
import plain_metrics as plain
import pytest
from agent_cases import write_file
from carry_cases import carrying, cutting
from endpoint_cases import chats
from fork_cases import Forked
from loop_cases import ENDS, digits
from plain_metrics import Part, Parts, Rules, Trainer, Written, mean
from resume_cases import attempt

from rloo_cli.evaluation.evaluate import evaluate_run
from rloo_cli.train.loop import run_training_loop

pytestmark = pytest.mark.wide

# What clocks and the memory's meter say: nothing that a run writes shows it again.
CLOCKS = re.compile(
    r"eps|step_time|time/.*|reward/[^/]+/time|overlap/\w+_s|perf/(completions|tokens)_per_s.*"
    r"|perf/(rollout_wait_frac|mfu)|memory/.*|agent/tool_s"
)
NOT_RECOMPUTED = {*plain.page_names()["Not recomputed"]}
SHORT = (
    ENDS, "data.eval_split=null", "checkpoint.every=1", "checkpoint.keep_last=99",
    "logging.rollouts_every=1", "train.optimizer=torch.optim:SGD", "train.learning_rate=0.01",
    "train.lr_scheduler=constant", "train.max_grad_norm=null", "max_steps=3",
)  # fmt: skip
CISPO = ("algorithm=cispo", "algorithm.num_generations=4", "algorithm.epsilon_high=1.0005",
         "algorithm.num_iterations=2")  # fmt: skip


def long_ones(completion_ids: Any, **_: Any) -> list[float | None]:
    """1 or 0, so that groups are flat; None for some completions."""
    return [None if ids[0] % 5 == 0 else float(len(ids) > 8) for ids in completion_ids]


def always_one(completion_ids: Any, **_: Any) -> list[float]:
    return [1.0 for _ in completion_ids]


@pytest.fixture(autouse=True)
def models() -> Iterator[None]:
    with mock.patch.dict(os.environ, RLOO_CACHE=loop_cases.cache()):
        yield


@cache
def tiny_weights() -> dict[str, Any]:
    """The weights that every run of the tiny model begins with."""
    folder = Path(loop_cases.cache()) / "first"
    folder.mkdir()
    run = loop_cases.make(folder, "data.eval_split=null", noise=0.0)
    return {n: w.clone() for n, w in run.policy.model.state_dict().items()}


def trained(folder: Path, *words: str, **rewards: Any) -> Written:
    """What a run leaves."""
    tiny_weights()
    run = loop_cases.make(folder, *SHORT, *words, rewards=rewards or {"digits": digits}, noise=0.0)
    run_training_loop(run)
    return Written(run.folder, tiny_weights())


def progress_parts(run: Written, step: int, scored: plain.Scored) -> Parts:
    """Counters, staleness, and what a record's head says of the prompts that were drawn."""
    heads = [run.record(s)[0] for s in range(1, step + 1)]
    rows = [row for s in range(1, step + 1) for row in plain.read_rows(run, s)]
    draws, k = sum(head["draws"] for head in heads), heads[0]["num_generations"]
    now = len(scored.groups)
    lags = [
        heads[-1]["state"]["updates"] - row.sample["weight_version"]
        for row in scored.rows for _ in range(row.length)
    ]  # fmt: skip
    return {
        "step": Part("last", step),
        "updates": Part("last", sum(len(head["updates"]["loss"]) for head in heads)),
        "episode": Part("last", len(rows)),
        "sampled_completions": Part("last", draws * k),
        "num_tokens": Part("last", sum(len(row.prompt) + len(row.ids) for row in rows)),
        "epoch": Part("last", draws / plain.NUM_PROMPTS),
        "data/dropped_long": Part("last", 0),
        "data/truncated": Part("last", 0),
        "groups/resampled": Part("each", heads[-1]["draws"] - now),
        "staleness/mean": mean(sum(lags), len(lags)),
        "staleness/max": Part("max", max(lags)),
    }


def step_parts(
    run: Written,
    step: int,
    rules: Rules,
    more: Callable[[int, Trainer], Parts] = lambda step, trainer: {},
    **options: Any,
) -> Parts:
    """Every metric of a step."""
    scored = plain.score_rows(plain.read_rows(run, step), rules)
    trainer = Trainer(run, rules, step, scored, **options)
    parts = trainer.run_step()
    for name, weight in trainer.model.state_dict().items():
        if name in run.weights(step):  # the step that was trained again ends where the run did
            assert weight.sub(run.weights(step)[name]).abs().max() < 2e-5, (step, name)
    parts |= plain.score_parts(scored, rules) | plain.length_parts([*scored.rows])
    parts |= plain.sampler_parts(scored) | progress_parts(run, step, scored)
    parts |= {f"reward/{name}/error_rate": mean(0, len(scored.rows)) for name in rules.weights}
    return parts | more(step, trainer)


def compare(line: dict[str, Any], expected: dict[str, float], case: str) -> None:
    """A line has what is expected, and nothing else but clocks and what is excepted."""
    found = {n: v for n, v in line.items() if not CLOCKS.fullmatch(n) and n not in NOT_RECOMPUTED}
    assert sorted(found) == sorted(expected), case
    wrong = {
        name: (value, expected[name])
        for name, value in found.items()
        if value != pytest.approx(expected[name], rel=2e-4, abs=4e-6)
    }
    assert not wrong, f"{case}, step {line['step']}"


def check_lines(run: Written, case: str, parts_of: Callable[[int], Parts], steps: int = 3) -> None:
    """Every line is that of its steps."""
    lines, done = run.lines(), 0
    for line in lines:
        members = range(done + 1, line["step"] + 1)
        compare(line, plain.merged([parts_of(step) for step in members]), case)
        done = line["step"]
    assert done == steps
    SHOWN.setdefault(case, set()).update(name for line in lines for name in line)


SHOWN: dict[str, set[str]] = {}  # the metrics that each case's lines had
# One name of every kind that a case shows, for those that only it shows.
TRAINED = """
step updates episode sampled_completions num_tokens epoch learning_rate lr reward reward_std
reward_std_batch reward/<reward>/mean reward/<reward>/std reward/<reward>/none_frac
reward/<reward>/error_rate reward/valid_frac frac_reward_zero_std groups/unscorable
groups/duplicates groups/dropped groups/resampled objective/scores objective/kl
objective/non_score_reward objective/rlhf_reward objective/entropy advantages/mean advantages/std
advantages/abs_max advantages/zero_frac advantages/norm_skipped completions/mean_length
completions/min_length completions/max_length completions/mean_terminated_length
completions/min_terminated_length completions/max_terminated_length completions/clipped_ratio
completions/unique_ratio completions/most_common_frac
val/num_eos_tokens data/dropped_long data/truncated staleness/mean
staleness/max loss policy_loss loss/policy_avg kl_loss grad_norm grad_clip_fraction
update/changed_frac kl entropy policy/entropy_avg clip_ratio/low_mean clip_ratio/high_mean
clip_ratio/region_mean clip_ratio/low_min clip_ratio/high_max delta_ratio policy/approxkl_avg
policy/clipfrac_avg val/ratio val/ratio_var ratio/min ratio/max sampling/entropy
sampling/logp_diff_mean sampling/logp_diff_rms sampling/logp_diff_max sampling/logp_diff_from<k>
sampling/missing_frac
sampling/kl perf/level perf/rows perf/padding_frac perf/forwarded_frac
sampling/sampling_logp_difference/mean sampling/sampling_logp_difference/max rewards/<reward>/mean
"""
RECOMPUTED = {
    "plain": TRAINED,
    "cispo": "cispo_clip_ratio",
    "resample": "sampled_reward sampled_frac_reward_zero_std sampled_kept_frac",
    "ahead": "sampling/logp_diff_lag0 sampling/logp_diff_lag1"
    " sampling/importance_sampling_ratio/mean sampling/importance_sampling_ratio/min"
    " sampling/importance_sampling_ratio/max sampling/ess sampling/capped_frac"
    " sampling/masked_frac",
    "ppo": "loss/value_avg val/clipfrac_avg value/explained_variance",
    "remax": "objective/greedy_scores",
    "masks": "sampling/mask_ids/mean sampling/mask_ids/max sampling/mask_bytes",
    "budget": "completions/answer_forced_share",
    "carry": "staleness/span_max staleness/frac_lag<k> sampling/logp_diff_lag<k>",
    "episodes": "agent/turns agent/calls agent/bad_calls agent/errors agent/failures"
    " agent/retokenised agent/truncated_by/turns agent/truncated_by/tokens"
    " agent/truncated_by/context agent/truncated_by/completion",
    "evaluation": "reward reward/<reward>/mean reward/<reward>/error_rate completions/mean_length"
    " completions/clipped_ratio samples unscored sampled_unscored avg@<k> pass@<k> pass@<k>/prompts"
    " win_rate win_rate/wins win_rate/ties win_rate/losses win_rate/invalid win_rate/mean_length"
    " win_rate/mean_other_length judge/win_rate judge/invalid win_rate/low win_rate/high"
    + "".join(
        f" {name}/{part}"
        for name in ("reward", "reward/<reward>/mean", "avg@<k>", "pass@<k>")
        for part in ("se", "low", "high")
    ),
}


def test_every_metric_of_the_page_is_recomputed_by_a_run_or_named_with_a_reason() -> None:
    sections = plain.page_names()
    page = {name for names in sections.values() for name in names}
    reasons = {*sections.pop("Not recomputed")}
    recomputed = {name for names in RECOMPUTED.values() for name in names.split()}
    counted = {name for names in sections.values() for name in names if not CLOCKS.fullmatch(name)}
    assert not counted - recomputed - reasons, "metrics that no run recomputes"
    assert not (recomputed | reasons) - page, "metrics that the page does not have"
    assert not recomputed & reasons and 10 * len(reasons) <= len(counted)


def shows(case: str) -> None:
    """The case's lines had what `RECOMPUTED` says of it: checked after they were compared."""
    prefix = r"eval_" if case == "evaluation" else ""
    patterns = [
        re.escape(n).replace("<reward>", r"\w+").replace("<k>", r"\d+").replace("@", "@")
        for n in RECOMPUTED[case].split()
    ]
    seen = SHOWN[case]
    assert not [p for p in patterns if not any(re.fullmatch(f"(?:{prefix})?{p}", n) for n in seen)]


def test_a_plain_run(tmp_path: Path) -> None:
    words = ("algorithm.num_iterations=2", "algorithm.delta=1.3", "train.learning_rate=0.02")
    words += ("algorithm.epsilon=0.02", "train.max_grad_norm=5", "logging.trl_aliases=true")
    words += ("algorithm.mask_truncated_completions=true",)
    run = trained(tmp_path, *words, digits=digits)
    rules = Rules(iterations=2, delta=1.3, rate=0.02, epsilon=0.02, max_norm=5.0)
    rules = Rules(**vars(rules) | {"masks_truncated": True})

    def aliased(step: int, trainer: Trainer) -> Parts:
        parts = trainer.parts | plain.score_parts(trainer.scored, rules)
        parts["reward/digits/error_rate"] = mean(0, len(trainer.scored.rows))
        theirs = "sampling/sampling_logp_difference/"
        aliases = {theirs + kind: parts[f"sampling/logp_diff_{kind}"] for kind in ("mean", "max")}
        return aliases | {"rewards" + n[6:]: p for n, p in parts.items() if n.startswith("reward/")}

    lines = [line | {"rewards/digits/time": 0.0} for line in run.lines()]
    with mock.patch.object(Written, "lines", lambda *_: [
        {n: v for n, v in line.items() if n != "rewards/digits/time"} for line in lines
    ]):  # fmt: skip
        check_lines(run, "plain", lambda step: step_parts(run, step, rules, aliased))
    shows("plain")
    assert any(line["clip_ratio/region_mean"] > 0 for line in lines)


def test_a_run_without_beta_covers_what_needs_no_forward(tmp_path: Path) -> None:
    run = trained(tmp_path, "algorithm.beta=0", "seed=3", long_ones=long_ones)
    rules = Rules({"long_ones": 1.0}, beta=0.0)
    check_lines(run, "beta 0", lambda step: step_parts(run, step, rules))
    lines = run.lines()
    assert any(line["perf/forwarded_frac"] < 0.9 for line in lines)
    assert all(line["sampling/entropy"] != line["entropy"] for line in lines)


def test_a_run_that_learns_by_penalties_alone(tmp_path: Path) -> None:
    words = (
        "algorithm.missing_eos_penalty=0.5",
        "guards.no_signal=fail",
        "guards.zero_spread=fail",
    )
    words += ("algorithm.overlong_penalty={max_length: 12, cache: 8, weight: 1.0}", "max_steps=3")
    run = trained(tmp_path, "algorithm.beta=0", *words, always_one=always_one)
    penalty = {"missing_eos": 0.5, "overlong": (12, 8, 1.0)}
    rules = Rules({"always_one": 1.0}, beta=0.0, **penalty)  # type: ignore[arg-type]
    check_lines(run, "penalties", lambda step: step_parts(run, step, rules))
    assert all(line["frac_reward_zero_std"] < 1 and line["grad_norm"] > 0 for line in run.lines())


def test_a_run_that_resamples_counts_what_it_threw_away(tmp_path: Path) -> None:
    calls: list[tuple[int, list[float | None]]] = []

    def kept_calls(completion_ids: Any, trainer_state: Any, **_: Any) -> list[float | None]:
        calls.append((trainer_state.step + 1, long_ones(completion_ids)))
        return calls[-1][1]

    words = ("algorithm.zero_std_groups=resample", "algorithm.beta=0", "seed=3")
    run = trained(tmp_path, *words, kept=kept_calls)
    rules = Rules({"kept": 1.0}, beta=0.0, resamples=True)

    def of_all(step: int, trainer: Trainer) -> Parts:
        whole = [v for s, values in calls if s == step for v in values]
        groups = [whole[i : i + 4] for i in range(0, len(whole), 4)]
        known = [[v for v in g if v is not None] for g in groups]
        flat = [len(set(g)) == 1 for g in known if len(g) > 1]
        scores = [v for g in known for v in g]
        return {
            "sampled_reward": mean(sum(scores), len(scores)),
            "sampled_frac_reward_zero_std": mean(sum(flat), len(flat)),
            "sampled_kept_frac": mean(len(trainer.scored.rows), len(whole)),
        }

    check_lines(run, "resample", lambda step: step_parts(run, step, rules, of_all))
    shows("resample")
    last = run.lines()[-1]
    assert last["sampled_completions"] == sum(len(v) for _, v in calls) > last["episode"]


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_of_cispo_merges_its_steps_by_counts(every: int, tmp_path: Path) -> None:
    words = (*CISPO, f"logging.every={every}", "max_steps=5", "seed=3")
    run = trained(tmp_path, *words, long_ones=long_ones)
    rules = Rules({"long_ones": 1.0}, beta=0.0, kind="cispo", iterations=2, cap=1.0005)
    check_lines(run, "cispo", lambda step: step_parts(run, step, rules), 5)
    shows("cispo")
    lines = run.lines()
    assert len(lines) == (5 if every == 1 else 2)
    assert any(0 < line["cispo_clip_ratio"] < 1 for line in lines)


@pytest.mark.slow
def test_a_run_whose_sampler_is_a_step_behind(tmp_path: Path) -> None:
    rule = "{mode: truncate, level: sequence, cap: 1.01, floor: 0.0, geometric_range: null}"
    words = ("generation.overlap=ahead", f"algorithm.correction={rule}", "logging.every=2")
    words += ("algorithm.ratio_level=sequence", "algorithm.beta=0", "max_steps=4")
    run = trained(tmp_path, *words, digits=digits)
    rules = Rules(beta=0.0, correction=(0.0, 1.01))

    def lagged(step: int, trainer: Trainer) -> Parts:
        return {f"sampling/logp_diff_lag{int(step > 1)}": trainer.parts["sampling/logp_diff_rms"]}

    check_lines(run, "ahead", lambda step: step_parts(run, step, rules, lagged), 4)
    shows("ahead")
    assert any(0 < line["sampling/capped_frac"] < 1 for line in run.lines())
    assert "cispo_clip_ratio" not in run.lines()[-1]


@pytest.mark.slow
def test_a_run_of_ppo(tmp_path: Path) -> None:
    words = ("algorithm=ppo", "algorithm.num_iterations=1", "train.prompts_per_step=8")
    run = trained(tmp_path, *words, digits=digits)
    rules = Rules(kind="ppo")

    def parts(step: int) -> Parts:
        _, tensors = run.record(step)
        lengths = tensors["completion_lengths"].tolist()
        values = tensors["column/value"].double().split(lengths)
        found = step_parts(run, step, rules, values=[*values])
        value_loss = 0.1 * found["loss/value_avg"].value
        found["loss"] = mean(found["loss"].value + value_loss, 1)
        for name in ("reward_std", "update/changed_frac", "grad_norm"):  # K = 1; of both models
            found.pop(name, None)
        return found

    lines = run.lines()
    assert all(line.pop("grad_norm") > 0 < line.pop("update/changed_frac") for line in lines)
    with mock.patch.object(Written, "lines", lambda *_: lines):
        check_lines(run, "ppo", parts)
    shows("ppo")


@pytest.mark.slow
def test_a_run_of_remax_counts_its_greedy_completions(tmp_path: Path) -> None:
    run = trained(tmp_path, "algorithm=remax", "algorithm.beta=0", digits=digits)
    rules = Rules(kind="remax", beta=0.0)
    ends = {*range(10, 258, 16)}

    def parts(step: int) -> Parts:
        model, scores = run.model(step - 1), []
        prompts = {row.group: row.prompt for row in plain.read_rows(run, step)}
        for prompt in prompts.values():
            ids = [*prompt]
            while len(ids) < len(prompt) + 16:
                row = plain.Row({}, ids, [0], [1], [0.0], 0)
                ids.append(int(plain.token_logits(model, row)[0].argmax()))
                if ids[-1] in ends:
                    break
            scores += digits([ids[len(prompt) :]])
        found = step_parts(run, step, rules, greedy=scores)
        found["objective/greedy_scores"] = mean(sum(scores), len(scores))
        drawn = found["sampled_completions"].value
        found["sampled_completions"] = Part("last", drawn * 5 / 4)
        return found

    check_lines(run, "remax", parts)
    shows("remax")


def check_some(run: Written, case: str, parts_of: Callable[[int], Parts]) -> None:
    """The metrics that only this case shows, of every line."""
    pattern = "|".join(re.escape(n).replace("<k>", r"\d+") for n in RECOMPUTED[case].split())
    lines = [{n: v for n, v in x.items() if re.fullmatch(pattern, n) or n == "step"}
             for x in run.lines()]  # fmt: skip
    with mock.patch.object(Written, "lines", lambda *_: lines):
        check_lines(run, case, lambda step: parts_of(step) | {"step": Part("last", step)})
    shows(case)


def test_a_run_that_carries_groups_over_steps(tmp_path: Path) -> None:
    rule = "{mode: truncate, level: sequence, cap: 1.01, floor: 0.0, geometric_range: null}"
    words = (*SHORT[1:], f"algorithm.correction={rule}", "algorithm.beta=0", "logging.every=2")
    with cutting():
        begun = carrying(tmp_path, *words, noise=0.0)
        run_training_loop(begun)
    run = Written(begun.folder, tiny_weights())

    def of_lags(step: int) -> Parts:
        head, _ = run.record(step)
        got = [r["version_spans"] for group in head["groups"] for r in group["rollouts"]]
        rows, model = plain.read_rows(run, step), run.model(step - 1)
        gaps: dict[int, list[float]] = {}
        for row, spans in zip(rows, got, strict=True):
            versions = [v for v, count in spans for _ in range(count)]
            ours = plain.token_logp(model, row).tolist()
            for version, a, b in zip(versions, ours, row.logp, strict=True):
                gaps.setdefault(head["state"]["updates"] - version, []).append((a - b) ** 2)
        tokens = sum(map(len, gaps.values()))
        parts = {"staleness/span_max": Part("max", max(map(len, got)))}
        for lag in range(10):  # a lag that a step does not have is a share of 0 in its line
            found = gaps.get(lag, [])
            parts[f"staleness/frac_lag{lag}"] = mean(len(found), tokens)
            if found:
                parts[f"sampling/logp_diff_lag{lag}"] = Part("rms", sum(found), len(found))
        return parts

    lines = [
        line | {f"staleness/frac_lag{lag}": line.get(f"staleness/frac_lag{lag}", 0.0)
                for lag in range(10)} for line in run.lines()
    ]  # fmt: skip
    with mock.patch.object(Written, "lines", lambda *_: lines):
        check_some(run, "carry", of_lags)
    for line in lines:
        shares = [v for n, v in line.items() if n.startswith("staleness/frac_lag")]
        assert sum(shares) == pytest.approx(1.0)
    assert len(lines) == 2 and lines[0]["staleness/frac_lag1"] > 0


def test_a_run_with_sampling_masks(tmp_path: Path) -> None:
    words = ("generation.top_p=0.5", "generation.return_sampling_mask=true", "logging.every=2")
    run = trained(tmp_path, *words, digits=digits)

    def of_masks(step: int) -> Parts:
        counts = run.record(step)[1]["sampling_mask_counts"].tolist()
        return {
            "sampling/mask_ids/mean": mean(sum(counts), len(counts)),
            "sampling/mask_ids/max": Part("max", max(counts)),
            "sampling/mask_bytes": mean(4 * (sum(counts) + len(counts)), len(counts)),
        }

    check_some(run, "masks", of_masks)


def test_a_run_with_an_answer_budget(tmp_path: Path) -> None:
    budget = "generation.answer_budget={at: 3, text: 'ab', tokens: 2}"
    run = trained(tmp_path, budget, "logging.every=2", digits=digits)

    def of_the_text(step: int) -> Parts:
        rows = plain.read_rows(run, step)
        forced = [row.ids[3:5] == [66, 67] and row.mask[3:5] == [0, 0] for row in rows]
        return {"completions/answer_forced_share": mean(sum(forced), len(rows))}

    check_some(run, "budget", of_the_text)
    assert all(0 < line["completions/answer_forced_share"] < 1 for line in run.lines())


WORLD = '''
class World:
    def reset(self, **row):
        self.looks = 0

    def look(self) -> str:
        """Looks around."""
        self.looks += 1
        if self.looks == 2:
            raise ValueError("broken")
        return "7"

    def get_reward(self) -> float:
        if self.looks == 1:
            raise ValueError("nothing to say")
        return self.looks
'''


@pytest.mark.slow
def test_a_run_of_episodes(tmp_path: Path) -> None:
    path = write_file(tmp_path, WORLD)
    words = (
        "data.path=make:tiny_chat", "agent=class", "agent.max_turns=3", "agent.parser=hermes",
        "agent.max_observation_tokens=12", "reward=environment", "train.prompts_per_step=6",
        "generation.max_completion_length=6", f"agent.environments={{world: '{path}:World'}}",
        "agent.on_tool_error=tell", "agent.on_bad_call=tell", "logging.every=2",
        f"generation.stop_token_ids={[*range(10, 258, 5)]}".replace(" ", ""),
    )  # fmt: skip
    begun = loop_cases.make(tmp_path, *SHORT[1:], *words, rewards={}, noise=0.0)
    rules = begun.generator.rules  # type: ignore[attr-defined]
    names = {1: "nothing", 2: "look", 3: "look"}  # by the length of what was said

    def read(text: str) -> Any:
        name = names.get(len(text) % 4)
        call = json.dumps({"name": name, "arguments": {}})
        return rules.parser("" if name is None else f"<tool_call>{call}</tool_call>")

    begun.generator.rules = type(rules)(**vars(rules) | {"parser": read})  # type: ignore[attr-defined]
    run_training_loop(begun)
    run = Written(begun.folder, {})

    def of_episodes(step: int) -> Parts:
        totals = dict.fromkeys(RECOMPUTED["episodes"].split(), 0.0)
        samples = run.samples(f"step_{step:06d}")
        for sample in samples:
            cut = sample["finish_reason"] == "length"
            asked = [[call["name"] for call in turn["calls"]] for turn in sample["turns"]]
            called = [name for names in asked[:2] for name in names]  # a third turn's are not made
            looks = called.count("look")
            totals["agent/turns"] += len(asked)
            totals["agent/calls"] += len(called)
            totals["agent/bad_calls"] += called.count("nothing")
            totals["agent/errors"] += looks >= 2
            totals["agent/failures"] += looks == 1
            if looks != 1:
                totals["agent/truncated_by/turns"] += bool(len(asked) == 3 and asked[-1])
                totals["agent/truncated_by/completion"] += cut
        parts = {name: mean(total, len(samples)) for name, total in totals.items()}
        return parts | {"agent/retokenised": Part("each", 0.0)}

    check_some(run, "episodes", of_episodes)
    assert all(line["agent/errors"] > 0 < line["agent/bad_calls"] for line in run.lines())


def error_and_limits(name: str, values: list[float], completions: int = 1) -> dict[str, float]:
    """Standard error and 95 % interval of a mean of values in [0, 1], one for each prompt."""
    n, middle = len(values), sum(values) / len(values)
    variance = sum((v - middle) ** 2 for v in values) / n
    alike = (n * variance + 0.1) / (n * middle * (1 - middle) + 0.1)
    added = 1.5 * min(1.0, max(1 / completions, alike))
    total = n + 2 * added
    center = (n * middle + added) / total
    half = 1.959964 * ((sum(v * v for v in values) + added) / total - center**2) ** 0.5
    half /= total**0.5
    limits = {f"{name}/low": max(0.0, center - half), f"{name}/high": min(1.0, center + half)}
    return {f"{name}/se": (variance / (n - 1)) ** 0.5, **limits}


def test_an_evaluation_with_a_judge(serve: Any, tmp_path: Path) -> None:
    def verdict(question: str) -> str:
        a, b = re.findall(r"=== answer . ===\n(.*)\n", question)
        shorter = min(a, b, key=len)
        return (
            "no idea" if shorter[-1] in "789" else "AB"[(len(a) < len(b)) ^ (ord(shorter[0]) % 2)]
        )

    failed = []

    def score_some(completion_ids: Any, **_: Any) -> list[float | None]:
        ids = completion_ids[0]
        if ids[0] % 7 == 0:
            failed.append(ids)
            raise ValueError("a bad start")
        return [None if ids[0] % 3 == 0 else float(len(ids) > 8)]

    stub = serve(chats(verdict))
    words = ["judge=openai", "eval.judge.model=m", f"eval.judge.base_url={stub.url}/v1", ENDS]
    words += ["eval.num_generations=4", "eval.max_samples=12", "eval.judge.retries=0"]
    words += ["reward.some.scope=row", "reward.some.on_error=none", "reward.some.max_error_rate=1"]
    begun = loop_cases.make(tmp_path, *words, rewards={"some": score_some})
    evaluate_run(begun)
    run = Written(begun.folder, {})
    samples, pairs = run.samples("eval_000000"), run.samples("pairs_000000")
    greedy = [s for s in samples if s["greedy"]]
    scores = [s["score"] for s in greedy if s["score"] is not None]
    by_prompt: dict[int, list[float | None]] = {}
    for sample in samples:
        if not sample["greedy"]:
            by_prompt.setdefault(sample["draw"], []).append(sample["score"])
    known = [[v for v in values if v is not None] for values in by_prompt.values()]
    averages = [sum(v) / len(v) for v in known if v]
    values = [pair["value"] for pair in pairs if pair["value"] is not None]
    line = {
        "step": 0, "eval_samples": len(greedy), "eval_unscored": len(greedy) - len(scores),
        "eval_reward": sum(scores) / len(scores),
        "eval_reward/some/mean": sum(scores) / len(scores),
        "eval_completions/mean_length": sum(s["completion_length"] for s in greedy) / len(greedy),
        "eval_completions/clipped_ratio": sum(not s["terminated"] for s in greedy) / len(greedy),
        "eval_reward/some/error_rate": len(failed) / len(samples),
        "eval_sampled_unscored": 4 * len(by_prompt) - sum(map(len, known)),
        "eval_avg@4": sum(averages) / len(averages),
        "eval_win_rate": sum(values) / len(values), "judge/win_rate": sum(values) / len(values),
        "eval_win_rate/wins": values.count(1.0), "eval_win_rate/losses": values.count(0.0),
        "eval_win_rate/ties": len(values) - values.count(1.0) - values.count(0.0),
        "eval_win_rate/invalid": len(pairs) - len(values),
        "judge/invalid": len(pairs) - len(values),
    }  # fmt: skip
    for k in (1, 2, 4):
        chances = [
            1 - math.comb(len(v) - sum(v), k) / math.comb(len(v), k)  # type: ignore[arg-type]
            for v in ([int(x) for x in values] for values in known) if len(v) >= k
        ]  # fmt: skip
        line[f"eval_pass@{k}"] = sum(chances) / len(chances)
        line |= error_and_limits(f"eval_pass@{k}", chances, max(1, 4 // k))
        if len(chances) < len(by_prompt):
            line[f"eval_pass@{k}/prompts"] = len(chances)
    line |= error_and_limits("eval_avg@4", averages, 4)
    for name in ("eval_reward", "eval_reward/some/mean"):
        line |= error_and_limits(name, scores)
    line |= {n: v for n, v in error_and_limits("eval_win_rate", values).items() if n[-2:] != "se"}
    got = [pair for pair in pairs if pair["value"] is not None]
    for name, side in (("mean_length", 0), ("mean_other_length", 1)):
        line[f"eval_win_rate/{name}"] = sum(pair["tokens"][side] for pair in got) / len(got)
    (found,) = run.lines(evaluations=True)
    SHOWN["evaluation"] = {*found}
    fitted = "eval_win_rate/length_controlled"
    compare({n: v for n, v in found.items() if n != fitted}, line, "evaluation")
    shows("evaluation")
    assert 0 < found["eval_win_rate/invalid"] < 12 and found["eval_win_rate/wins"] > 0


@pytest.mark.slow
def test_a_run_that_went_on_after_a_stop(tmp_path: Path) -> None:
    words = (*SHORT, "logging.every=2", "algorithm.beta=0", "seed=3", "max_steps=4")
    looks: list[int] = []
    assert attempt(tmp_path / "whole", *words, looks=looks, long_ones=long_ones)
    index = int(0.6 * len(looks))
    assert not attempt(tmp_path / "cut", *words, stop_at=index, long_ones=long_ones)
    latest = (tmp_path / "cut" / "smoke" / "latest").read_text().strip()
    saved = tmp_path / "cut" / "smoke" / latest / "trainer" / "state.json"
    done = json.loads(saved.read_text())["state"]["step"]
    assert attempt(tmp_path / "cut", *words, long_ones=long_ones)
    run = Written(tmp_path / "cut" / "smoke", tiny_weights())
    rules = Rules({"long_ones": 1.0}, beta=0.0)
    check_lines(run, "resumed", lambda step: step_parts(run, step, rules), 4)
    last = run.lines()[-1]
    assert 0 < done < 4
    since = last["eps"] * last["step_time"]  # at most what the steps since then have sampled
    assert since < 16 * (4 - done) + 1e-6


REWARDS = """
def some(completion_ids, log_metric, **_):
    log_metric("heads", float(completion_ids[0][0]))
    return [None if ids[0] % 4 == 0 else float(len(ids) > 8) for ids in completion_ids]


def flaky(completion_ids, **_):
    if completion_ids[0][0] % 6 == 0:
        raise ValueError("a bad start")
    return [len(set(ids)) / 10 for ids in completion_ids]
"""


@pytest.mark.slow
def test_a_run_of_two_ranks_with_uneven_groups_and_rewards_of_none(
    forked: Forked, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    entry = "{type: function, path: 'FILE:NAME', kwargs: {}}".replace(
        "FILE", f"{tmp_path}/rewards.py"
    )
    words = ["+recipe=smoke", *SHORT, "reward=[]", "distributed=ddp", "distributed.num_processes=2"]
    words += [f"+reward.{name}={entry.replace('NAME', name)}" for name in ("some", "flaky")]
    words += ["reward.flaky.scope=row", "reward.flaky.on_error=none", "reward.flaky.weight=0.5"]
    words += ["reward.flaky.max_error_rate=1", "train.prompts_per_step=3", "logging.every=2"]
    assert forked("train", *words, ranks=2) == 0, forked.said()
    run = Written(forked.folder / "runs" / "smoke", tiny_weights())
    rules = Rules({"some": 1.0, "flaky": 0.5})

    def parts(step: int) -> Parts:
        rows = plain.read_rows(run, step)
        fails = sum(row.ids[0] % 6 == 0 for row in rows)
        heads = [float(rows[i].ids[0]) for i in (0, 4)]  # a call for each rank's share of groups
        return step_parts(run, step, rules) | {
            "reward/flaky/error_rate": mean(fails, len(rows)), "heads": mean(sum(heads), 2),
        }  # fmt: skip

    check_lines(run, "ranks", parts)
    assert all(line["reward/some/none_frac"] > 0 for line in run.lines())

"""Completions that follow a form on the transformers backend, by vLLM's names for it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from assert_refused import assert_refused
from cli_cases import Rloo, strict, surroundings
from loop_cases import checked, make, sampled, step

from rloo_cli.config.rules_sampling import inexact_settings
from rloo_cli.utils.errors import ConfigError, GenerationError

xgrammar = pytest.importorskip("xgrammar")
LONG = ("generation.max_completion_length=40", "data.eval_split=null")
OFF = "algorithm.correction.mode=none"
SCHEMA = {
    "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
    "additionalProperties": False,
}  # fmt: skip


def form(**value: Any) -> str:
    (name, given), = value.items()  # fmt: skip
    text = json.dumps(given) if not isinstance(given, str) else "'" + given + "'"
    return f"generation.kwargs={{structured_outputs:{{{name}:{text}}}}}".replace('"', '\\"')


def texts(folder: Path, word: str) -> list[str]:
    run = make(folder, *LONG, word)
    batch = sampled(run)
    assert all(r.finish_reason == "stop" for g in batch.groups for r in g.rollouts)
    return [r.text for g in batch.groups for r in g.rollouts]


def test_every_completion_matches_a_regular_expression(tmp_path: Path) -> None:
    found = texts(tmp_path, form(regex="[ab]{3}(c|d)"))
    assert all(re.fullmatch("[ab]{3}(c|d)", text) for text in found)
    assert len({*found}) > 4  # it is sampled, and not one of them


def test_a_choice_is_one_of_the_given_texts(tmp_path: Path) -> None:
    words = ["yes", "no", "don't know"]
    run = make(tmp_path, *LONG)
    run.config.generation.kwargs["structured_outputs"] = {"choice": words}
    from rloo_cli.generation.hf.grammar import load_grammar

    sampler = run.generator
    size = run.policy.vocab_size
    sampler.grammar = load_grammar(
        {"choice": words}, run.tokenizer, size, sampler.stop_rule.stop_ids
    )
    batch = sampled(run)
    assert {r.text for g in batch.groups for r in g.rollouts} <= {*words}


def test_a_json_schema_gives_json_of_it(tmp_path: Path) -> None:
    from rloo_cli.generation.hf.grammar import load_grammar

    run = make(tmp_path, *LONG)
    sampler, size = run.generator, run.policy.vocab_size
    sampler.grammar = load_grammar(
        {"json": SCHEMA}, run.tokenizer, size, sampler.stop_rule.stop_ids
    )
    for group in sampled(run).groups:
        for rollout in group.rollouts:
            if rollout.finish_reason == "stop":
                assert json.loads(rollout.text) in ({"a": 1}, {"a": 2})


def test_with_masks_it_is_exact_and_goes_with_a_correction(tmp_path: Path) -> None:
    words = (
        *LONG, form(regex="[a-f]{2,6}"), "generation.return_sampling_mask=true",
        "algorithm.correction.mode=truncate",
    )  # fmt: skip
    run = make(tmp_path, *words)
    run.generator.load(run.policy, run.state.updates)
    _, row, batch = step(run)
    assert row["sampling/logp_diff_max"] < 1e-4
    assert all(r.sampling_mask for g in batch.groups for r in g.rollouts)
    assert max(n for g in batch.groups for r in g.rollouts for n in r.sampling_mask.counts) <= 7


def test_without_masks_it_bends_what_is_sampled_and_a_correction_is_refused() -> None:
    word = form(regex="[ab]+c")
    assert inexact_settings(checked((), (word,)).generation)
    with pytest.raises(ConfigError, match="return_sampling_mask=true"):
        checked((), (word, "algorithm.correction.mode=truncate"))


def test_what_is_no_form_is_refused_with_those_there_are(sentence) -> None:
    for value in ("{regexp:a}", "{regex:a,json_object:true}", "a"):
        with pytest.raises(ConfigError) as refused:
            checked((), (f"generation.kwargs={{structured_outputs:{value}}}",))
        assert_refused(refused, 2, "structured_outputs")
    sentence(refused)


@pytest.mark.parametrize(
    "given",
    [{"regex": "(a"}, {"json": "{"}, {"grammar": "root := a"}, {"choice": []}, {"choice": 3}],
    ids=["regex", "json", "grammar", "no choice", "choice of a number"],
)
def test_a_form_that_cannot_be_read_is_refused_by_its_rule(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        checked((), (form(**given),))


def test_without_xgrammar_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import util

    real = util.find_spec
    hide = lambda name, *more: None if name == "xgrammar" else real(name, *more)  # noqa: E731
    monkeypatch.setattr(util, "find_spec", hide)
    with pytest.raises(ConfigError, match=r"rloo-cli\[structured\]"):
        checked((), (form(regex="ab"),))


def test_a_form_that_may_not_end_is_said(tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match="cannot end"):
        sampled(make(tmp_path, *LONG, form(regex="ab"), "generation.ignore_eos=true"))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["vllm_colocate", "vllm_server"])
def test_vllm_follows_a_form_by_the_same_words(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, backend: str
) -> None:
    rloo = Rloo(tmp_path, surroundings(tmp_path_factory.getbasetemp()))
    done = rloo(
        "train", "+recipe=smoke", f"generation={backend}", "max_steps=1", "eval.at_start=false",
        *LONG, OFF, "generation.kwargs={structured_outputs:{regex:'[ab]{3}c'}}", timeout=900,
    )  # fmt: skip
    assert done.code == 0, done.said
    rows = strict(tmp_path / "runs" / "smoke" / "samples" / "step_000001.jsonl")
    assert rows and all(re.fullmatch("[ab]{3}c", row["completion"]) for row in rows)

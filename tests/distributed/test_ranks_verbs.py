"""`rloo sft`, `rloo reward-model` and `rloo eval` on two ranks leave what one process leaves."""

from pathlib import Path
from typing import Any

import pytest
from cli_cases import Rloo, strict
from fork_cases import Forked
from safetensors.torch import load_file
from test_ranks import spread
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rloo_cli.config import check, synthetic
from rloo_cli.config.compose import compose_config
from rloo_cli.config.supervised import spread_problems, supervised_training
from rloo_cli.launch import local_ranks
from rloo_cli.utils.errors import ConfigError
from rloo_cli.utils.files import read_json

pytestmark = pytest.mark.ranks

SMOKE = ("+recipe=smoke", "distributed.threads=1")
# Batches of 8 in parts of 2, two for each of two ranks; the last batch of 60 has four examples.
SFT = (
    "sft", *SMOKE, "sft.completion_column=answer", "sft.data.eval_split=test", "sft.batch_size=8",
    "sft.data.max_samples=60", "sft.micro_batch_size=2", "sft.log_every=1",
    "sft.learning_rate=1e-3",
)  # fmt: skip
PAIRS = (
    "reward-model", *SMOKE, "reward_model.data.path=make:tiny_pairs", "reward_model.batch_size=8",
    "reward_model.data.max_samples=60", "reward_model.micro_batch_size=2",
    "reward_model.log_every=1", "reward_model.data.eval_split=test",
    "reward_model.learning_rate=1e-3",
)  # fmt: skip
TRAININGS = {"sft": SFT, "reward_model": PAIRS}


@pytest.fixture(scope="module")
def home(fast, tmp_path_factory):
    return Forked(fast, tmp_path_factory.mktemp("verbs"))


@pytest.fixture(scope="module")
def single(home):
    """What one process leaves of both trainings, by section."""
    for words in TRAININGS.values():
        assert home(*words, "name=single") == 0, home.said()
    return {section: home.folder / "runs" / section / "single" for section in TRAININGS}


def trainings_apart(one: Path, other: Path) -> float:
    """The largest relative difference of two trainings' whole updates, over tensors."""
    begin = load_file(Path(synthetic.resolve_model_path("make:tiny")) / "model.safetensors")
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert a.keys() == b.keys()
    moved = {n: a[n] - begin[n] if n in begin else a[n] for n in a}  # a new head: all of it
    return max(float((a[n] - b[n]).norm() / moved[n].norm()) for n in a)


@pytest.mark.slow_cases("ddp-sft")
@pytest.mark.parametrize("section", TRAININGS)
@pytest.mark.parametrize(
    "engine",
    ["ddp", *(pytest.param(e, marks=pytest.mark.slow) for e in ("fsdp2", "zero2", "zero3"))],
)
def test_two_ranks_learn_what_one_process_learns(home, single, section, engine):
    words = [*TRAININGS[section], f"name={engine}", *spread(engine)]
    assert home(*words, ranks=2) == 0, home.said()
    one, two = single[section], home.folder / "runs" / section / engine
    assert trainings_apart(one, two) < 1e-4
    rows = [strict(root / "training" / "metrics.jsonl") for root in (one, two)]
    assert len(rows[0]) == 10
    for ours, theirs in zip(*rows, strict=True):
        ours.pop("seconds", None)
        theirs.pop("seconds", None)
        assert theirs == pytest.approx(ours, rel=1e-3, abs=1e-5)
    kind = AutoModelForCausalLM if section == "sft" else AutoModelForSequenceClassification
    configs = [kind.from_pretrained(root).config.to_dict() for root in (one, two)]
    assert {c.pop("_name_or_path") for c in configs} == {str(one), str(two)}
    assert configs[0] == configs[1]
    summaries = [read_json(root / "training" / "summary.json") for root in (one, two)]
    assert summaries[0]["steps"] == summaries[1]["steps"]
    assert {p.name for p in one.iterdir()} == {p.name for p in two.iterdir()}


SIZE = "def size(completions, **_):\n    return [float(len(text)) for text in completions]\n"
TRAIN = (
    "train", *SMOKE, "max_steps=1", "eval.num_generations=2", "eval.at_start=false",
    "eval.sets.sums={path: make:addition, split: 'test[:5]'}",
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(home):
    """A run with two held-out sets, and its evaluation by one process."""
    assert home(*TRAIN, "name=trained") == 0, home.said()
    assert home("eval", "runs/trained") == 0, home.said()
    return home.folder / "runs" / "trained"


def evaluated(root: Path) -> dict[str, Any]:
    """Everything that an evaluation found."""
    found: dict[str, Any] = {p.name: p.read_text() for p in root.glob("*.jsonl")}
    return found | {"metrics": read_json(root / "metrics.json")}


@pytest.mark.slow_but("fsdp2")
@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_two_ranks_evaluate_as_one_process(home, trained, engine):
    before = {p.name for p in (trained / "eval").iterdir()}
    words = [f"distributed.engine={engine}", "distributed.num_processes=2"]
    assert home("eval", "runs/trained", *words, ranks=2) == 0, home.said()
    (root,) = (p for p in (trained / "eval").iterdir() if p.name not in before)
    assert evaluated(root) == evaluated(trained / "eval" / "final")


def test_a_rank_that_is_killed_in_an_evaluation_is_what_the_other_says(home, trained):
    two = ("distributed.engine=ddp", "distributed.num_processes=2")
    assert home("eval", "runs/trained", *two, faults="eval@1=kill9#1", ranks=2) in (5, 6)
    said = home.said()
    assert "another rank " in said
    assert "Traceback" not in said and "bug in rloo" not in said


@pytest.mark.slow
def test_two_ranks_ask_another_model_and_a_judge_as_one_process(home, trained):
    (home.folder / "mine.py").write_text(SIZE)
    judge = [
        "judge=rule",
        "eval.judge.reward.path=mine.py:size",
        "eval.judge.against=make:tiny",
        "~eval.sets.sums",
    ]
    found = []
    for words, ranks in (([], 0), (["distributed.engine=ddp", "distributed.num_processes=2"], 2)):
        before = {p.name for p in (trained / "eval").iterdir()}
        assert home("eval", "runs/trained", *judge, *words, ranks=ranks) == 0, home.said()
        (root,) = (p for p in (trained / "eval").iterdir() if p.name not in before)
        found.append(evaluated(root))
    assert "pairs.jsonl" in found[0] and found[0] == found[1]


@pytest.mark.slow
def test_the_commands_start_their_ranks_themselves(rloo: Rloo) -> None:
    two = ("distributed=ddp", "distributed.num_processes=2", "logging.console=plain")
    said = rloo.real(*SFT, *two, "sft.data.max_samples=14", "sft.eval_rows=0")
    assert said.code == 0 and said.out.count("loading the model") == 1, said.said
    model = f"model.path={rloo.folder}/runs/sft/smoke"
    said = rloo.real("eval", *SMOKE, *two, model)
    assert said.code == 0 and said.out.count("loading the model") == 1, said.said


def test_a_rank_of_another_launcher_is_told_that_the_verb_starts_its_own():
    local_ranks.check_not_a_rank("sft", {"RANK": "0", "WORLD_SIZE": "1"})
    with pytest.raises(ConfigError, match="one of 4 processes") as caught:
        local_ranks.check_not_a_rank("sft", {"RANK": "1", "WORLD_SIZE": "4"})
    assert "distributed.num_processes=4" in str(caught.value.problems[0].fix)


def test_a_batch_that_ranks_cannot_share_is_refused_with_one_that_they_can():
    run = check.check_config(compose_config(["+recipe=smoke", "sft.batch_size=7"]))
    training = supervised_training(run, "sft")
    assert not [*spread_problems(training, "single", 1)]
    (problem,) = spread_problems(training, "ddp", 2)
    assert problem.where == "sft.batch_size" and problem.fix == "sft.batch_size=8"


def test_no_more_ranks_are_started_than_there_are_gpus(monkeypatch):
    words = ["+recipe=smoke", "distributed=ddp", "distributed.num_processes=4"]
    run = check.check_config(compose_config(words))
    for gpus, ranks in ((0, 4), (1, 1), (2, 2), (8, 4)):
        monkeypatch.setattr(local_ranks.device_count, "visible_gpus", lambda n=gpus: ["0"] * n)
        assert local_ranks.count_local_ranks(run) == ranks

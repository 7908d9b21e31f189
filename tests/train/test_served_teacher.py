"""A teacher that a server has, inside whole steps: what it says is what one loaded here says.

The server is the fake one, with the tiny model behind it; `test_teacher_on_server.py` has a real
one.
"""

import json
from pathlib import Path

import fake_server
import pytest
import torch
from assert_refused import assert_refused
from cli_cases import Ended, strict
from fake_server import SCORE, Fake
from loop_cases import (
    ENDS,
    PLAIN,
    alone,
    apart,
    cache,
    row_logp,
    sampled,
    step,
    timeless,
    updated,
)
from resume_cases import attempt, differing, left
from transformers import AutoModelForCausalLM
from vllm_cases import right, tokenizer

from rloo_cli.data.synthetic import tiny
from rloo_cli.generation.vllm.teacher import TeacherServer
from rloo_cli.train.minibatches import forwarded_completions
from rloo_cli.utils.errors import ConfigError, GenerationError

pytestmark = pytest.mark.wide

CLOSE = 5e-5  # an update read off weights of 1, twice rounded
LOCAL = ("algorithm=opd", "model.ref_path=make:tiny")
EAGER = ("algorithm.teacher.ready_timeout_s=0.3", "algorithm.teacher.reconnect_timeout_s=0.3")


@pytest.fixture
def served(monkeypatch, tmp_path):
    """A server of the tiny model, whose token is in the environment."""
    made = Fake(right(), len(tokenizer()))
    monkeypatch.setenv("RLOO_TEACHER_TOKEN", made.token)
    monkeypatch.setenv("RLOO_CACHE", cache())
    monkeypatch.setattr(fake_server, "PLACES", 4096)
    made.texts = [tokenizer().decode([i]) for i in range(made.vocabulary)]
    model = AutoModelForCausalLM.from_pretrained(tiny.tiny_model_folder(), dtype=torch.float32)

    @torch.no_grad()
    def teach(ids):
        logp = model.eval()(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return logp.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    made.teach = teach
    opened, connect = [], TeacherServer.connect

    def noted(self, *given):
        opened.append(self)
        return connect(self, *given)

    monkeypatch.setattr(TeacherServer, "connect", noted)
    yield made
    for teacher in opened:
        teacher.close()
    made.close()


def words_of(server):
    return ("algorithm=opd", f"algorithm.teacher.base_url={server.url}")


def asked_rows(server):
    return [body["prompt"] for path, body in server.asked if path == SCORE]


WAYS = {
    "shared": (),
    "packed": ("train.layout=packed",),
    "padded": ("train.layout=padded", "train.micro_batch_tokens=90"),
    "alone": ("reward=[]", "algorithm.beta=0.5"),
    "several updates": ("algorithm.num_minibatches=2", "algorithm.kl_discount=0.5"),
    "at temperature 1": ("generation.temperature=0.8", "algorithm.kl_temperature=one"),
}


@pytest.mark.slow_but("packed", "alone")
@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_that_of_the_same_teacher_loaded_here(tmp_path, served, way):
    rewards = {} if way == "alone" else None
    here, there = (
        alone(tmp_path, *PLAIN, ENDS, *teacher, *WAYS[way], f"name={name}", rewards=rewards)
        for name, teacher in (("here", LOCAL), ("there", words_of(served)))
    )
    assert there.reference is None and there.teacher.model == "fake" and here.teacher is None
    expected, row, _ = step(here)
    moved, found, batch = step(there)
    assert apart(moved, expected) < CLOSE
    assert timeless(found).keys() == timeless(row).keys() and "time/reference" in found
    for name in ("kl", "loss", "reward", "grad_norm"):
        assert found[name] == pytest.approx(row[name], rel=1e-4, abs=1e-6), name
    for p, group in enumerate(batch.groups):
        for k, logp in enumerate(group.ref_logp):
            wanted = row_logp(here.reference, batch, p, k)
            torch.testing.assert_close(logp, wanted.detach(), rtol=0, atol=1e-4)


def test_each_completion_is_asked_for_once_a_step(tmp_path, served):
    run = alone(tmp_path, *PLAIN, ENDS, *words_of(served), "algorithm.num_iterations=2")
    served.asked.clear()
    batch = sampled(run)
    updated(run, batch)
    rows = [g.prompt_ids + r.completion_ids for g in batch.groups for r in g.rollouts]
    assert sorted(asked_rows(served)) == sorted(rows) and len(rows) == 16
    ends = {r.completion_ids[-1] for g in batch.groups for r in g.rollouts if r.terminated}
    assert ends and all(any(row[-1] == e for row in asked_rows(served)) for e in ends)


def test_what_a_step_knows_already_is_not_asked_again(tmp_path, served):
    run = alone(tmp_path, *PLAIN, ENDS, *words_of(served))
    batch = sampled(run)
    forwarded = forwarded_completions(run, batch)
    run.teacher.fill_reference(batch, forwarded, run.world.run_on_rank0)
    before = [column.tolist() for group in batch.groups for column in group.ref_logp]
    served.asked.clear()
    updated(run, batch)
    assert asked_rows(served) == []
    assert [column.tolist() for group in batch.groups for column in group.ref_logp] == before


def test_a_teacher_that_is_away_ends_the_start_before_weights_load(tmp_path, served, monkeypatch):
    monkeypatch.setattr("rloo_cli.train.build.RunBuilder.load_model", lambda self: 1 / 0)
    url = served.url
    served.close()
    with pytest.raises(GenerationError) as caught:
        alone(tmp_path, *words_of(served), *EAGER)
    assert_refused(caught, 6, url, where="algorithm.teacher.base_url")


def test_a_teacher_that_goes_away_ends_the_run_with_6_and_its_address(tmp_path, served):
    run = alone(tmp_path, *PLAIN, ENDS, *words_of(served), *EAGER)
    batch = sampled(run)
    served.close()
    run.teacher.close()
    with pytest.raises(GenerationError) as caught:
        updated(run, batch)
    assert_refused(caught, 6, served.url)


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_with_the_same_teacher_and_no_other(tmp_path, served):
    words, looks = (ENDS, *words_of(served), "train.learning_rate=0.01", "max_steps=2"), []
    assert attempt(tmp_path / "whole", *words, looks=looks)
    assert not attempt(tmp_path / "cut", *words, stop_at=len(looks) * 2 // 3)
    run = tmp_path / "cut" / "smoke"
    assert json.loads((run / "run.json").read_text())["teacher"] == "fake"
    served.models = ["another"]
    with pytest.raises(ConfigError, match="teacher was fake"):
        attempt(tmp_path / "cut", *words)
    served.models = ["fake"]
    assert attempt(tmp_path / "cut", *words)
    whole = left(Path(tmp_path / "whole" / "smoke"))
    assert not differing(whole, left(run))


SHORT = ("max_steps=2", "data.eval_split=null", "distributed.threads=1", "logging.console=plain")


def test_a_run_whose_teacher_is_away_ends_with_6_and_says_the_address(forked, served):
    served.close()
    code = forked("train", "+recipe=smoke", *words_of(served), *EAGER, *SHORT)
    assert_refused(Ended(code, forked.said(), ""), 6, served.url)


@pytest.mark.slow
def test_of_two_ranks_one_asks_for_all_and_the_numbers_are_those_of_one(forked, served):
    kl = []
    for name, words in (("one", ()), ("two", ("distributed=ddp", "distributed.num_processes=2"))):
        served.asked.clear()
        code = forked(
            "train", "+recipe=smoke", *words_of(served), *SHORT, *words, f"name={name}",
            ranks=2 if words else 0, env={"RLOO_TEACHER_TOKEN": served.token},
        )  # fmt: skip
        assert code == 0, forked.said()
        rows = strict(forked.folder / "runs" / name / "metrics.jsonl")
        kl.append([row["kl"] for row in rows if "step_time" in row])
        assert len(asked_rows(served)) == 1 + 2 * 16  # what compares the ids, and two steps
    assert len(kl[0]) == 2 and kl[1] == pytest.approx(
        kl[0], rel=1e-4, abs=1e-7
    )  # float32's rounding

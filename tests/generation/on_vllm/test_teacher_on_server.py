"""A teacher's server, fake and real: both answer alike, and the real one as the model itself does.

The real one is the session's shared server of the tiny model: what it teaches is sent first.
"""

import math

import loop_cases
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm_cases import config, engine, tokenizer, weights

from rloo_cli.config.teacher import TeacherConfig
from rloo_cli.data import packing
from rloo_cli.data.batch import Group, Rollout, Turn
from rloo_cli.data.synthetic import tiny
from rloo_cli.generation.vllm.teacher import TeacherServer
from rloo_cli.generation.vllm.weights import ModelWeightSource
from rloo_cli.policy.model import Policy
from rloo_cli.utils.errors import ConfigError, GenerationError

NAMED = "RLOO_TEACHER_TOKEN"


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.vllm)])
def there(request, monkeypatch):
    """A server's address and token; the token is in the environment."""
    found = request.getfixturevalue("fake" if request.param == "fake" else "server")
    monkeypatch.setenv("RLOO_SERVER_TOKEN", found.token)
    monkeypatch.setenv(NAMED, found.token)
    if request.param == "fake":
        found.texts = [tokenizer().decode([i]) for i in range(found.vocabulary)]
    return found


def client(there, **keys):
    given = {
        "base_url": there.url, "model": None, "api_key_env": NAMED, "max_in_flight": None,
        "ready_timeout_s": 30.0, "request_timeout_s": 120.0, "reconnect_timeout_s": 30.0,
        "retries": 1,
    }  # fmt: skip
    return TeacherServer(TeacherConfig(**given | keys), lambda note: None)


@pytest.fixture
def teacher(there):
    found = client(there)
    yield found
    found.close()


def send_weights(there, folder, source):
    sender = engine(config(there.url), folder)
    sender.connect()
    sender.sync_weights(source, "teacher:1")
    sender.close()


def test_a_head_of_zeros_gives_every_id_the_same_probability(there, teacher, tmp_path):
    send_weights(there, tmp_path, weights())
    assert teacher.connect(tokenizer(), 40)
    found = teacher.logprobs([([5, 6, 7, 8], [2, 3]), ([9, 10], [1])])
    assert [len(row) for row in found] == [2, 1]
    even = -math.log(len(tokenizer()))
    assert [x for row in found for x in row] == pytest.approx([even] * 3, abs=1e-4)


def test_the_entries_have_the_names_that_are_read(there, teacher):
    teacher.connect(tokenizer(), 40)
    entries = teacher.client.run(teacher._ask_ids([5, 6, 7]), 120)
    assert entries[0] == {} and all({"logprob", "decoded_token"} <= e.keys() for e in entries[1:])
    assert [e["decoded_token"].strip() for e in entries[1:]] == [
        tokenizer().decode([i]).strip() for i in (6, 7)
    ]


def test_the_longest_row_that_is_promised_is_answered_and_no_longer_one(there, teacher):
    with pytest.raises(ConfigError, match="its limit is 48"):
        teacher.connect(tokenizer(), 48)
    teacher.connect(tokenizer(), 47)
    (found,) = teacher.logprobs([([5] * 47, [46])])
    assert len(found) == 1
    with pytest.raises(GenerationError, match="refused a request"):
        teacher.logprobs([([5] * 48, [47])])


def test_ids_beyond_the_vocabulary_are_another_vocabulary(there, teacher, monkeypatch):
    class Larger:
        def get_vocab(self):
            return tokenizer().get_vocab() | {"<new>": 10**6}

        def decode(self, ids):
            return tokenizer().decode(ids)

    with pytest.raises(ConfigError, match="different vocabularies"):
        teacher.connect(Larger(), 40)


def test_other_tokens_are_seen(there, teacher):
    class Turned:
        def get_vocab(self):
            return tokenizer().get_vocab()

        def decode(self, ids):
            return tokenizer().decode([(i + 1) % len(tokenizer()) for i in ids])

    with pytest.raises(ConfigError, match="here and"):
        teacher.connect(Turned(), 40)


def test_another_model_and_another_token_are_refused(there, monkeypatch):
    with pytest.raises(ConfigError, match="no model other"):
        client(there, model="other").connect(tokenizer(), 40)
    monkeypatch.setenv(NAMED, "another")
    with pytest.raises(GenerationError, match=f"set {NAMED}"):
        client(there).connect(tokenizer(), 40)


@pytest.fixture
def real_server(server, monkeypatch):
    """The session's server, with its token in the environment."""
    for name in (NAMED, "RLOO_SERVER_TOKEN"):
        monkeypatch.setenv(name, server.token)
    monkeypatch.setenv("RLOO_CACHE", loop_cases.cache())
    return server


def noisy_model():
    """The tiny model with weights of its own."""
    model = AutoModelForCausalLM.from_pretrained(
        tiny.tiny_model_folder(), dtype=torch.float32
    ).eval()
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=draw)
    return model


def groups_of_all_kinds():
    """Prompts and completions of several lengths, ended by EOS and not, and an episode."""
    eos, draw = tokenizer().eos_token_id, torch.Generator().manual_seed(5)

    def ids(count):
        return torch.randint(len(tokenizer()), (count,), generator=draw).tolist()

    def rollout(count, ended):
        return Rollout([*ids(count), *([eos] if ended else [])], "", "stop", ended, 0, 0)

    turns = [
        Turn([], ids(3), None, "", "stop", 0), Turn(ids(4), [*ids(2), eos], None, "", "stop", 0),
        Turn(ids(5), ids(4), None, "", "length", 0, begins_row=True),
    ]  # fmt: skip
    kinds = [rollout(1, False), rollout(9, True), rollout(12, False), rollout(0, True)]
    episodes = [Rollout.from_turns(turns, False, 0), rollout(6, True)]
    return [
        Group(0, {}, "", ids(1), kinds), Group(1, {}, "", ids(17), episodes),
        Group(2, {}, "", ids(25), [rollout(14, True), rollout(3, False)]),
    ]  # fmt: skip


@pytest.mark.vllm
def test_a_real_server_says_what_the_model_says_in_every_layout(real_server, tmp_path):
    model, groups = noisy_model(), groups_of_all_kinds()
    send_weights(real_server, tmp_path, ModelWeightSource(model, torch.float32))
    teacher = client(real_server)
    try:
        teacher.connect(tokenizer(), 45)
        slices = packing.whole_group_slices(groups, range(len(groups)))
        pairs = [(groups[i], groups[i].rollouts[k]) for i, ks in slices for k in ks]
        rows = [row for g, r in pairs for row in packing.sampled_positions(g.prompt_ids, r)]
        found = torch.tensor([x for row in teacher.logprobs(rows) for x in row])
        policy = Policy(model, 1.0)
        for policy.layout in ("packed", "padded"):
            wanted = policy.frozen_logp(policy.pack(groups, slices)).logp
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    finally:
        teacher.close()


@pytest.mark.vllm
def test_a_step_with_a_real_teacher_is_that_of_one_loaded_here(real_server, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny.tiny_model_folder(), dtype=torch.float32)
    send_weights(real_server, tmp_path, ModelWeightSource(model, torch.float32))
    short = ("generation.max_completion_length=8", "data.max_prompt_length=32", loop_cases.ENDS)
    moved = []
    for name, words in (
        ("here", ("model.ref_path=make:tiny",)),
        ("there", (f"algorithm.teacher.base_url={real_server.url}",)),
    ):
        run = loop_cases.alone(
            tmp_path, *loop_cases.PLAIN, *short, "algorithm=opd", *words, f"name={name}"
        )
        moved.append(loop_cases.step(run)[0])
        assert (run.reference is None) == (name == "there")
    run.teacher.close()
    assert loop_cases.apart(moved[1], moved[0]) < 2e-4

"""The same words of the client to the fake server and to vLLM's own: both answer alike."""

import http.client
import json
import math
import time
from urllib.parse import urlsplit

import pytest
from fake_server import Fake
from generation_cases import config as transformers_config
from reward_cases import PLAIN as PLAIN_CONTEXT
from reward_cases import reward
from vllm_cases import (
    changed,
    config,
    engine,
    groups,
    policy,
    right,
    sampler,
    tokenizer,
    weights,
)

from rloo_cli.config.schema import AnswerBudget
from rloo_cli.generation.common.forced_answers import ForcedAnswers
from rloo_cli.generation.hf.generator import TransformersGenerator
from rloo_cli.generation.vllm import required_parts
from rloo_cli.generation.vllm.engine import EngineRequest
from rloo_cli.rewards.engine.scoring import ScoringStep
from rloo_cli.utils.errors import GenerationError

PROMPTS = [[40, 41, 42, 43], [50], [60, 61, 62]]
PLAIN = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 8, "logprobs": 0,
    "ignore_eos": True, "stop_token_ids": [], "detokenize": False, "skip_special_tokens": True,
}  # fmt: skip


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.vllm)])
def there(request, monkeypatch):
    """A server's address and token; the token is in the environment."""
    found = request.getfixturevalue("fake" if request.param == "fake" else "server")
    monkeypatch.setenv("RLOO_SERVER_TOKEN", found.token)
    return found


@pytest.fixture
def client(there, tmp_path):
    """A function that makes clients, closed in the end."""
    made = []

    def one(**keys):
        short = {"request_timeout_s": 120.0, "sync_timeout_s": 120.0} | keys
        made.append(engine(config(there.url, **short), tmp_path))
        return made[-1]

    yield one
    for found in made:
        found.close()


@pytest.fixture
def ready(client):
    """A client whose weights the server has, as `run:1`."""
    found = client()
    found.connect()
    found.sync_weights(weights(), "run:1")
    return found


def draw(client, seeds, prompts=PROMPTS, **params):
    """One completion for each prompt and seed, by prompt."""
    places = [(p, s) for p in range(len(prompts)) for s in seeds]
    asks = [EngineRequest(prompts[p], PLAIN | params | {"seed": s}) for p, s in places]
    found = {}
    client.generate(asks, lambda i, answer: found.__setitem__(i, answer))
    assert len(found) == len(asks)
    return [
        [found[i] for i, index in enumerate(places) if index[0] == p] for p in range(len(prompts))
    ]


def ids(drawn):
    return [[answer.ids for answer in group] for group in drawn]


def raw(there, method, path, body=None, token=None):
    """Status and JSON of one request, written by hand."""
    address = urlsplit(there.url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    try:
        headers = {"Authorization": f"Bearer {there.token if token is None else token}"}
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, headers | {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if text.startswith(("{", "[")) else text
    finally:
        connection.close()


def test_a_server_that_is_asked_for_its_routes_has_each_and_stays_as_it_is(
    there, ready, client, monkeypatch
):
    paths = [route.partition(" ")[2] for route in required_parts.SERVER_ROUTES]
    statuses = [raw(there, "GET", path)[0] for path in (*paths, required_parts.GENERATE_ROUTE)]
    assert {*statuses} == {200, 405} and raw(there, "GET", "/no/such/route")[0] == 404
    assert raw(there, "GET", "/weight_info")[1] == {"weight_version": "run:1"}
    assert raw(there, "GET", "/is_paused")[1] == {"is_paused": False}
    monkeypatch.setattr(required_parts, "was_tried", lambda version, on_gpu=None: False)
    client().connect()


def test_it_is_what_the_config_expects(client):
    found = client()
    found.connect()
    assert [s.transfer for s in found.servers] == ["gloo"] and found.is_healthy()
    assert found.restarts == 0


def test_its_facts_have_the_names_that_are_compared(there):
    status, got = raw(there, "GET", "/rloo")
    assert status == 200 and right().keys() <= got.keys()
    same = ("model", "dtype", "tokenizer", "max_model_len", "logprobs_mode", "transfer")
    assert {n: got[n] for n in same} == {n: right()[n] for n in same}
    assert got["devices"] == right()["devices"]
    status, said = raw(there, "GET", "/version")
    assert status == 200 and said["version"].startswith("0.32")
    assert raw(there, "GET", "/v1/models")[1]["data"][0]["max_model_len"] == 48


def test_a_sync_returns_the_label_and_the_server_tells_it(ready, there):
    assert raw(there, "GET", "/weight_info") == (200, {"weight_version": "run:1"})
    assert ready.sync_weights(weights(), "run:2") == "run:2"
    assert raw(there, "GET", "/weight_info") == (200, {"weight_version": "run:2"})
    assert raw(there, "GET", "/is_paused") == (200, {"is_paused": False})


def test_every_request_is_answered_with_its_tokens_and_their_weights(ready):
    drawn = draw(ready, range(5))
    assert [len(group) for group in drawn] == [5, 5, 5]
    for answer in (answer for group in drawn for answer in group):
        assert len(answer.ids) == len(answer.logp) == 8 and answer.finish_reason == "length"
        assert all(0 <= i < len(tokenizer()) for i in answer.ids)
        assert answer.weight_versions == ["run:1"] and max(answer.logp) < 0


def test_all_tokens_are_as_likely_as_the_zero_head_says(ready):
    for group in draw(ready, range(3)):
        for answer in group:
            assert answer.logp == pytest.approx([-math.log(len(tokenizer()))] * 8, abs=1e-4)


def test_equal_seeds_draw_equal_tokens_and_others_differ(ready):
    first = ids(draw(ready, range(6)))
    assert ids(draw(ready, range(6))) == first
    assert all(len({tuple(i) for i in group}) == 6 for group in first)
    other = ids(draw(ready, range(6, 12)))
    assert not [1 for a, b in zip(first, other, strict=True) for i in a if i in b]


def test_greedy_takes_no_notice_of_the_seed(ready):
    drawn = ids(draw(ready, range(3), temperature=0.0))
    assert all(len({tuple(i) for i in group}) == 1 for group in drawn)


@pytest.mark.parametrize("most", [1, 3])
def test_max_tokens_is_the_longest_a_completion_gets(ready, most):
    drawn = draw(ready, range(3), max_tokens=most)
    assert {len(a.ids) for group in drawn for a in group} == {most}
    assert {a.finish_reason for group in drawn for a in group} == {"length"}


def test_a_stop_id_ends_a_completion_and_belongs_to_it(ready):
    stops = [*range(0, len(tokenizer()), 8)]
    drawn = draw(ready, range(8), stop_token_ids=stops, max_tokens=6)
    answers = [answer for group in drawn for answer in group]
    assert {a.finish_reason for a in answers} == {"stop", "length"}
    for answer in answers:
        assert not {*answer.ids[:-1]} & {*stops} and len(answer.ids) == len(answer.logp)
        assert answer.finish_reason == "stop" or len(answer.ids) == 6
        assert (answer.finish_reason == "stop") == (answer.ids[-1] in stops)


def test_each_connection_takes_the_server_over(client, ready, there):
    second = client()
    second.connect()
    assert second.sync_weights(weights(), "other:1") == "other:1"
    assert draw(second, [1], PROMPTS[:1])[0][0].weight_versions == ["other:1"]


def test_a_pause_that_was_left_is_undone(client, ready, there):
    assert raw(there, "POST", "/pause?mode=abort")[0] == 200
    assert raw(there, "GET", "/is_paused") == (200, {"is_paused": True})
    second = client()
    second.connect()
    assert raw(there, "GET", "/is_paused") == (200, {"is_paused": False})
    assert second.sync_weights(weights(), "other:2") == "other:2"
    assert draw(second, [1], PROMPTS[:1])[0][0].weight_versions == ["other:2"]


def test_an_update_that_was_left_open_is_closed(client, ready, there):
    assert raw(there, "POST", "/pause?mode=abort")[0] == 200
    assert raw(there, "POST", "/start_weight_update")[0] == 200
    status, said = raw(there, "POST", "/start_weight_update")
    assert status == 500 and said["error"]["code"] == 500 and said["error"]["message"]
    second = client()
    second.connect()
    assert second.sync_weights(weights(), "other:3") == "other:3"
    assert draw(second, [1], PROMPTS[:1])[0][0].weight_versions == ["other:3"]


def test_what_is_not_open_cannot_be_closed(ready, there):
    status, said = raw(there, "POST", "/finish_weight_update", {})
    assert status == 500 and said["error"]["code"] == 500
    assert raw(there, "GET", "/weight_info") == (200, {"weight_version": "run:1"})


def test_a_finish_without_a_label_leaves_the_label(ready, there):
    ready.label = ""  # as the fault sync.version=skip does
    ready.weight_sender.send_weights()
    assert raw(there, "GET", "/weight_info") == (200, {"weight_version": "run:1"})


@pytest.mark.parametrize("token", ["", "another", None])
def test_without_the_token_nothing_but_health_is_answered(client, there, token, monkeypatch):
    if token is not None:
        monkeypatch.setenv("RLOO_SERVER_TOKEN", token)
        with pytest.raises(GenerationError, match="401 from"):
            client().connect()
    for path in ("/weight_info", "/rloo", "/nothing", "/v1/models"):
        assert raw(there, "GET", path, token=token or "-")[0] == 401
    assert raw(there, "POST", "/pause", token=token or "-")[0] == 401
    assert raw(there, "GET", "/health", token=token or "-")[0] == 200


def test_other_paths_and_methods_are_refused(there):
    status, said = raw(there, "GET", "/nothing")
    assert status == 404 and {"error", "detail"} & said.keys()
    assert raw(there, "GET", "/pause")[0] == raw(there, "POST", "/weight_info")[0] == 405


def test_a_cache_is_reset_and_says_so(ready, there):
    assert raw(there, "POST", "/reset_prefix_cache") == (200, {"success": True})


def test_requests_that_were_aborted_are_asked_again(client, ready):
    first = client(request_timeout_s=0.001)
    first.connect()
    with pytest.raises(Exception, match="no answer within"):
        draw(first, range(4))
    assert len(draw(ready, range(4))) == len(PROMPTS)


def test_a_fake_without_facts_is_a_plain_vllm(fake, tmp_path):
    assert isinstance(fake, Fake)
    fake.facts = None
    assert raw(fake, "GET", "/rloo")[0] == 404
    found = engine(config(fake.url), tmp_path)
    found.connect()
    found.close()


def test_rewards_are_asked_while_other_groups_are_still_being_drawn(there, tmp_path):
    # One request at a time: the groups come one after the other.
    generator = sampler(config(there.url, max_in_flight=1), tmp_path, lambda note: None)
    generator.load(policy(), 1)
    chosen, begun, drawn = groups(PROMPTS), [], []

    def score(completions):
        begun.append(len(drawn))  # groups that were there
        return [0.0] * len(completions)

    def arrived(index):
        drawn.append(index)
        stage.submit_group(index)
        while len(begun) < len(drawn):  # the reward is called now, not when all are there
            time.sleep(0.01)

    stage = ScoringStep([reward(score, scope="group")], chosen, PLAIN_CONTEXT, 2)
    try:
        generator.generate(chosen, [[1, 2]] * len(chosen), arrived=arrived)
    finally:
        generator.close()
    assert stage.wait_for_scores().raw.shape == (1, len(PROMPTS), 2)
    assert begun == [1, 2, 3]


def test_a_forced_answer_has_the_same_parts_as_from_the_trainers_own_sampler(there, tmp_path):
    text, ends = tokenizer().encode("answer"), [*range(0, 258, 8)]
    served = sampler(changed(config(there.url), stop_token_ids=ends), tmp_path)
    served.load(policy(), 1)
    keys = transformers_config(max_completion_length=16, stop_token_ids=ends)
    here = TransformersGenerator(policy().model, tokenizer(), keys, 2048)
    parts = []
    try:
        for inner in (served, here):
            budget, chosen = AnswerBudget(at=4, text="answer", tokens=3), groups(PROMPTS)
            source = ForcedAnswers(inner, budget, tokenizer(), text)
            source.generate(chosen, [[*range(20)]] * len(chosen))
            rows = [r for group in chosen for r in group.rollouts]
            parts.append(set())
            for r in rows:
                told = [not math.isnan(x) for x in r.behaviour_logp]
                assert told == [bool(m) for m in r.mask or [1] * len(r.completion_ids)]
                answer = len(r.completion_ids) - 4 - len(text)
                if r.has_forced_answer:
                    assert r.completion_ids[4 : 4 + len(text)] == text and "answer" in r.text
                    assert r.mask == [1] * 4 + [0] * len(text) + [1] * answer
                else:
                    assert r.terminated and r.length <= 4 and r.mask is None
                parts[-1].add((r.has_forced_answer, r.terminated, r.finish_reason, r.turns))
                assert r.terminated or answer == 3
    finally:
        served.close()
    assert parts[0] == parts[1] and len(parts[0]) == 3  # in time; forced and ended; forced and cut

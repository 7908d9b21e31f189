"""A teacher's server against a fake one: what is asked, what is checked, what is lost."""

import itertools
import math
import socket
import time

import pytest
from assert_refused import assert_refused
from fake_server import SCORE
from vllm_cases import tokenizer

from rloo_cli.config.teacher import TeacherConfig
from rloo_cli.data.batch import Rollout, Turn
from rloo_cli.data.packing import sampled_positions
from rloo_cli.generation.vllm.teacher import TeacherServer, probe_ids
from rloo_cli.utils import signals
from rloo_cli.utils.errors import ConfigError, GenerationError, Stopped

ROWS = [([5, 6, 7, 8], [2, 3]), ([9, 10], [1]), ([11, 12, 13], [1, 2]), ([14, 15], [])]
NAMED = "RLOO_TEACHER_TOKEN"


@pytest.fixture
def teacher(fake, monkeypatch):
    """Clients of the fake server; closed in the end."""
    monkeypatch.setenv(NAMED, fake.token)
    fake.texts = [tokenizer().decode([i]) for i in range(fake.vocabulary)]
    made = []

    def one(**keys):
        given = {
            "base_url": fake.url, "model": None, "api_key_env": NAMED, "max_in_flight": None,
            "ready_timeout_s": 5.0, "request_timeout_s": 30.0, "reconnect_timeout_s": 5.0,
            "retries": 2,
        }  # fmt: skip
        made.append(TeacherServer(TeacherConfig(**given | keys), lambda note: None))
        return made[-1]

    yield one
    for found in made:
        found.close()


@pytest.fixture
def ready(teacher, fake):
    """A client that has made its checks, and what it has asked forgotten."""

    def one(**keys):
        found = teacher(**keys)
        found.connect(tokenizer(), 40)
        fake.asked.clear()
        fake.drawn = fake.most = 0
        return found

    return one


def by_id(ids):
    """Log-probabilities that tell the id and its place."""
    return [-i - n / 64 for n, i in enumerate(ids[1:], 1)]


def asked_rows(fake):
    return [body["prompt"] for path, body in fake.asked if path == SCORE]


def refused(act, kind=GenerationError):
    with pytest.raises(kind) as caught:
        act()
    return caught.value.problems[0]


def test_each_row_gets_the_numbers_of_the_ids_that_were_asked_for(ready, fake):
    fake.teach, client = by_id, ready()
    found = client.logprobs(ROWS)
    assert found == [[-7 - 2 / 64, -8 - 3 / 64], [-10 - 1 / 64], [-12 - 1 / 64, -13 - 2 / 64], []]
    assert sorted(asked_rows(fake)) == [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
    body = next(body for path, body in fake.asked if path == SCORE)
    assert (body["model"], body["max_tokens"], body["prompt_logprobs"]) == ("fake", 1, 0)


def test_ids_behind_the_last_sampled_one_are_not_sent(ready, fake):
    ready().logprobs([([5, 6, 7, 8, 9], [1, 2])])
    assert asked_rows(fake) == [[5, 6, 7]]


def test_rows_of_an_episode_are_asked_as_the_student_read_them():
    turns = [
        Turn([], [20, 21], None, "", "stop", 0), Turn([30], [22], None, "", "stop", 0),
        Turn([40, 41], [23, 24], None, "", "stop", 0, begins_row=True),
    ]  # fmt: skip
    episode = Rollout.from_turns(turns, True, 0)
    rows = sampled_positions([1, 2], episode)
    assert rows == [([1, 2, 20, 21, 30, 22], [2, 3, 5]), ([40, 41, 23, 24], [2, 3])]
    assert [ids[n] for ids, at in rows for n in at] == episode.sampled_ids
    plain = Rollout([20, 21], "", "stop", True, 0, 0)
    assert sampled_positions([1, 2], plain) == [([1, 2, 20, 21], [2, 3])]


def test_the_one_model_of_a_server_is_the_teacher_and_another_name_is_refused(teacher, fake):
    assert teacher().connect(tokenizer(), 40) == "fake"
    problem = refused(lambda: teacher(model="other").connect(tokenizer(), 40), ConfigError)
    assert fake.url in problem.what and problem.fix == "algorithm.teacher.model=fake"
    fake.models = ["base", "fake"]
    problem = refused(lambda: teacher().connect(tokenizer(), 40), ConfigError)
    assert "2 models" in problem.what and "base, fake" in problem.why
    assert teacher(model="fake").connect(tokenizer(), 40) == "fake"


@pytest.mark.parametrize(("longest", "fits"), [(47, True), (48, False)])
def test_a_prompt_its_completion_and_one_token_more_must_fit(teacher, longest, fits):
    if fits:
        assert teacher().connect(tokenizer(), longest)
        return
    problem = refused(lambda: teacher().connect(tokenizer(), longest), ConfigError)
    assert "its limit is 48" in problem.why and "--max-model-len 49" in problem.fix


def test_other_tokens_behind_the_same_ids_are_refused(teacher, fake):
    fake.texts = ["?", *fake.texts[:-1]]
    problem = refused(lambda: teacher().connect(tokenizer(), 40), ConfigError)
    assert "different vocabularies" in problem.what and fake.url in problem.what
    assert "here and" in problem.why


def test_a_vocabulary_that_lacks_ids_of_the_students_is_refused(teacher, fake):
    fake.vocabulary -= 1
    problem = refused(lambda: teacher().connect(tokenizer(), 40), ConfigError)
    assert "different vocabularies" in problem.what and "out of vocabulary" in problem.why


def test_a_larger_vocabulary_and_a_server_without_texts_are_taken(teacher, fake):
    fake.vocabulary, fake.texts = fake.vocabulary + 7, None
    assert teacher().connect(tokenizer(), 40) == "fake"


def test_the_ids_that_are_compared_are_from_all_over_the_vocabulary():
    ids, size = probe_ids(tokenizer(), 46), len(tokenizer())
    assert len(ids) == len({*ids}) == 46 and ids[0] == 0 and ids[-1] == size - 1
    assert max(b - a for a, b in itertools.pairwise(ids)) <= size / 40
    assert len(probe_ids(tokenizer(), 10**6)) == size


@pytest.mark.parametrize("token", ["", "another"])
def test_another_token_is_named_by_its_variable(teacher, monkeypatch, token):
    monkeypatch.setenv(NAMED, token)
    problem = refused(lambda: teacher().connect(tokenizer(), 40))
    assert "401 from" in problem.what and problem.where == "algorithm.teacher"
    assert NAMED in problem.fix and "algorithm.teacher.api_key_env" in problem.fix


def test_a_server_that_is_away_ends_the_start_with_6_and_its_address(teacher):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(GenerationError) as caught:
        teacher(base_url=url, ready_timeout_s=0.3).connect(tokenizer(), 40)
    problem = assert_refused(caught, 6, url, where="algorithm.teacher.base_url")
    assert "0.3 s" in problem.why


def test_what_is_no_server_of_vllms_is_said_at_once(teacher, fake):
    fake.page, began = 404, time.monotonic()
    problem = refused(lambda: teacher(ready_timeout_s=60.0).connect(tokenizer(), 40))
    assert "is not a teacher's server" in problem.what and time.monotonic() - began < 10


def test_a_lost_server_is_asked_again_for_what_is_missing(ready, fake):
    client, rows = ready(max_in_flight=1), [([i, i + 1], [1]) for i in range(20, 26)]
    fake.teach, fake.dies_at = by_id, {3}
    assert client.logprobs(rows) == [[-i - 1 - 1 / 64] for i in range(20, 26)]
    assert asked_rows(fake).count([20, 21]) == 1 and asked_rows(fake).count([22, 23]) == 2


def test_errors_of_the_server_are_repeated_and_end_with_6_and_its_address(ready, fake):
    client = ready(retries=1, max_in_flight=1)
    fake.fails_at = {1: 500}
    assert len(client.logprobs(ROWS)) == len(ROWS)
    fake.fails_at = dict.fromkeys(range(1000), 503)
    with pytest.raises(GenerationError) as caught:
        client.logprobs(ROWS)
    (problem,) = caught.value.problems
    assert caught.value.code == 6 and fake.url in problem.what and "lost 2 times" in problem.what
    assert "3 of 4 rows" in problem.why and "503" in problem.why


def test_a_server_that_stays_away_ends_the_step(ready, fake):
    client = ready(reconnect_timeout_s=0.3)
    fake.close()
    problem = refused(lambda: client.logprobs(ROWS))
    assert fake.url in problem.what and "does not answer" in problem.what


def test_a_server_that_comes_back_with_another_model_is_refused(ready, fake):
    client = ready(max_in_flight=1)  # else another request may be told so first
    fake.fails_at, fake.models = {1: 500}, ["other"]
    assert "another model" in refused(lambda: client.logprobs(ROWS)).what


@pytest.mark.parametrize("most", [1, 3])
def test_no_more_requests_are_under_way_than_the_key_says(ready, fake, most):
    client, fake.slow_s = ready(max_in_flight=most), 0.02
    client.logprobs([([i, i + 1], [1]) for i in range(20, 32)])
    assert fake.most == most


def test_requests_are_made_side_by_side(ready, fake):
    client, fake.slow_s = ready(), 0.3
    began = time.monotonic()
    client.logprobs([([i, i + 1], [1]) for i in range(20, 40)])
    assert fake.most > 10 and time.monotonic() - began < 20 * 0.3


def test_a_request_that_hangs_has_a_deadline(ready, fake):
    client = ready(request_timeout_s=0.2, retries=0)
    fake.hangs = {SCORE}
    problem = refused(lambda: client.logprobs(ROWS))
    assert "no answer within 0.2 s" in problem.why


def test_a_signal_ends_the_wait(ready, fake, monkeypatch):
    client, fake.hangs = ready(), {SCORE}

    def stop():
        raise Stopped("stopped")

    monkeypatch.setattr(signals, "raise_if_stopped", stop)
    with pytest.raises(Stopped):
        client.logprobs(ROWS)


def test_an_answer_about_other_ids_is_refused(ready, fake, monkeypatch):
    client = ready()
    score = fake.score
    monkeypatch.setattr(
        fake, "score", lambda p, b: score(p, b | {"prompt": [*b["prompt"][:-1], 3]})
    )
    problem = refused(lambda: client.logprobs(ROWS))
    assert fake.url in problem.what and "KeyError" in problem.why


def test_a_server_that_ignores_prompt_logprobs_is_refused(ready, fake, monkeypatch):
    client = ready()
    monkeypatch.setattr(fake, "score", lambda p, b: (200, {"choices": [{"text": "x"}]}))
    assert "prompt_logprobs" in refused(lambda: client.logprobs(ROWS)).fix


@pytest.mark.parametrize("value", [-9999.0, math.nan, -math.inf])
def test_a_token_without_a_probability_is_not_trained_on(ready, fake, value):
    client, fake.teach = ready(), lambda ids: [value] * (len(ids) - 1)
    assert "probability 0" in refused(lambda: client.logprobs(ROWS)).what


def test_an_address_to_listen_on_is_called_on_this_machine(teacher, fake):
    url = fake.url.replace("127.0.0.1", "0.0.0.0")
    assert teacher(base_url=url).url == fake.url

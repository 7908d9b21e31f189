"""The client of rollout servers against a fake one: what is wrong is named, and ends in time."""

import copy
import math
import signal
import socket
import threading
import time
from itertools import chain
from pathlib import Path

import loop_cases
import pytest
import torch
from fake_server import GENERATE, GROUP, Fake
from vllm_cases import (
    PROMPTS,
    SEEDS,
    WORDS,
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
from rloo_cli.generation.vllm import required_parts
from rloo_cli.generation.vllm.engine import EngineLost, EngineRequest
from rloo_cli.generation.vllm.http import HttpClient
from rloo_cli.generation.vllm.http_engine import parse_completion, parse_group_completions
from rloo_cli.policy.model import Policy
from rloo_cli.utils import signals
from rloo_cli.utils.errors import ConfigError, GenerationError, Stopped

COUNT = sum(map(len, SEEDS))
PROBES = len(PROMPTS)  # completions that parity asks for first


@pytest.fixture
def make(fake, tmp_path):
    """Generators of runs on the fake server; closed in the end."""
    made = []

    def one(run=None, note=lambda text: None, at=0):
        made.append(sampler(run or config(fake.url), tmp_path, note))
        made[-1].load(policy(), at)
        return made[-1]

    yield one
    for generator in made:
        generator.close()


@pytest.fixture
def client(fake, tmp_path):
    """Engines on the fake server; closed in the end."""
    made = []

    def one(run=None, **other):
        made.append(engine(run or config(fake.url), tmp_path, **other))
        return made[-1]

    yield one
    for found in made:
        found.close()


def draw(generator, seeds=SEEDS, prompts=PROMPTS, **how):
    chosen = groups(prompts)
    generator.generate(chosen, seeds, **how)
    return [group.rollouts for group in chosen]


def refused(act):
    """What a refusal with exit code 6 says."""
    with pytest.raises(GenerationError) as caught:
        act()
    assert caught.value.code == 6
    return str(caught.value)


def ask(seed, prompt=(5, 6, 7), **params):
    given = {"temperature": 1.0, "max_tokens": 8, "stop_token_ids": [], "logprobs": 0, "seed": seed}
    return EngineRequest(list(prompt), given | params)


def test_each_group_is_told_of_once_and_whole_also_when_the_server_was_lost(fake, make):
    generator = make()
    for lost in (False, True):
        chosen, got = groups(PROMPTS), []
        if lost:
            fake.dies_at = {fake.drawn + COUNT - 1}

        def arrived(index, chosen=chosen, got=got):
            got.append((index, len(chosen[index].rollouts)))

        generator.generate(chosen, SEEDS, arrived=arrived)
        assert sorted(got) == [(i, len(seeds)) for i, seeds in enumerate(SEEDS)]


@pytest.mark.parametrize("routes", [[], [GROUP]], ids=["plain", "groups"])
def test_a_server_that_was_started_again_between_two_requests_gets_the_weights_again(
    fake, make, routes
):
    fake.facts["routes"] = routes
    said = []
    generator = make(note=said.append)
    before = draw(generator)
    fake.label = "default"  # a new process behind the same address: no connection was lost
    assert draw(generator) == before
    assert fake.label != "default" and "restarted" in " ".join(said)


def test_a_server_that_samples_from_its_first_weights_whatever_it_is_sent_ends_the_run(fake, make):
    generator = make()
    draw(generator)
    fake.says = "default"
    said = refused(lambda: draw(generator))
    assert "its first weights" in said


def test_whole_groups_are_asked_for_in_one_request_and_are_the_same(fake, make):
    alone = draw(make())
    single = len(fake.draws())
    assert single == COUNT + PROBES
    fake.facts["routes"] = [GROUP]
    assert draw(make()) == alone
    asked = [body for path, body in fake.asked if path == GROUP]
    assert len(asked) == len(PROMPTS) + PROBES and len(fake.draws()) == single
    assert [p["seed"] for p in asked[-1]["sampling_params"]] in SEEDS


def test_of_a_group_that_was_lost_on_the_way_only_what_is_missing_is_drawn_again(fake, make):
    fake.facts["routes"] = [GROUP]
    generator, got = make(), []
    before = draw(generator)
    fake.dies_at = {fake.drawn + COUNT - 1}
    chosen = groups(PROMPTS)
    generator.generate(chosen, SEEDS, arrived=got.append)
    assert [group.rollouts for group in chosen] == before and sorted(got) == [0, 1, 2, 3]


# The first are nine bytes.
NO_NUMBERS = {"ids": "AAwAAAAEAAAA", "logp": "", "finish_reason": "stop", "versions": ["1"]}


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"completions": []},
        {"completions": [{"ids": "!", "logp": "", "versions": []}]},
        None,
        {"completions": [NO_NUMBERS]},
    ],
)
def test_a_group_in_another_form_is_named_with_its_server(said):
    with pytest.raises(GenerationError, match=r"http://b.* response format"):
        parse_group_completions(said, "http://b", 1)


# BM 4 and 5: what answers is not the server that the config says.


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ws://127.0.0.1:8000", "grpc://x"])
def test_bm_4_a_wrong_scheme_is_refused_with_the_config(url):
    with pytest.raises(ConfigError, match="expected http://HOST:PORT") as caught:
        loop_cases.checked((), (*WORDS, f"generation.server.base_url='{url}'"))
    assert url in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("model", "make:addition"), ("dtype", "bfloat16"), ("tokenizer", "0123456789abcdef")],
)
def test_bm_4_a_server_of_another_model_names_both(fake, client, name, value):
    fake.facts[name] = value
    said = refused(client().connect)
    assert f"expected {right()[name]}, found {value}" in said and fake.url in said


def test_a_server_on_a_gpu_of_the_trainer_is_refused_and_one_beside_it_is_shown(
    fake, client, tmp_path
):
    fake.facts["devices"] = ["GPU-b", "GPU-c"]
    with pytest.raises(ConfigError) as caught:
        client(trainer_gpus=("GPU-a", "GPU-b")).connect()
    (problem,) = caught.value.problems
    assert problem.where == "generation.server.base_url" and "GPU GPU-b" in problem.what
    noted = []
    fake.facts["vllm"] = "0.22.1"  # tried on GPUs
    beside = client(trainer_gpus=("GPU-a",))
    beside.finder.note = noted.append
    beside.connect()
    assert len(noted) == 1 and all(gpu in noted[0] for gpu in ("GPU-a", "GPU-b", "GPU-c"))
    fake.facts["devices"] = ["0"]  # a number, which no nvidia-smi resolved: of whichever machine
    client(trainer_gpus=("0",)).connect()


def noted(client):
    """A client that connects, and what it noted."""
    found, said = client(), []
    found.finder.note = said.append
    found.connect()
    return [line for line in said if line.startswith("warning")]


@pytest.mark.parametrize("version", ["0.21.0", "0.31.2", "0.33.0", "1.0"])
@pytest.mark.parametrize("plain", [False, True])
def test_bm_4_another_vllm_with_every_route_is_accepted_with_one_warning(
    version, plain, fake, client
):
    fake.version = version
    fake.facts = None if plain else fake.facts | {"vllm": version}
    (warning,) = noted(client)
    assert f"vLLM {version}" in warning and "untested" in warning and fake.url in warning
    assert "0.32" in warning and "0.22" in warning


def test_bm_4_a_version_that_was_tried_on_cpus_alone_has_a_warning_on_gpus(fake, client):
    fake.facts["devices"] = ["GPU-b"]
    (warning,) = noted(client)
    assert "vLLM 0.32.0" in warning and "0.22 on GPUs" in warning


def test_bm_4_a_version_that_was_tried_has_no_warning_and_is_not_asked(fake, client):
    assert not noted(client) and "/start_weight_update" not in {path for path, _ in fake.asked}


@pytest.mark.parametrize("route", required_parts.SERVER_ROUTES)
@pytest.mark.parametrize("plain", [False, True])
def test_bm_4_another_vllm_without_a_route_is_refused_by_that_route(route, plain, fake, client):
    fake.version, fake.lacks = "0.33.0", {route.partition(" ")[2]}
    fake.facts = None if plain else fake.facts | {"vllm": "0.33.0"}
    said = refused(client().connect)
    assert f"(vLLM 0.33.0) lacks {route}\n" in said and "0.32" in said
    changed_state = [path for path, _ in fake.asked if path == "/finish_weight_update"]
    assert len(changed_state) <= 1  # it was asked for, and not called


def test_bm_4_a_plain_vllm_is_asked_for_its_routes_whatever_its_version(fake, client):
    fake.facts, fake.version = None, "0.22.1"
    fake.lacks = {"/weight_info", "/shutdown_weight_transfer_engine"}
    said = refused(client().connect)
    assert "lacks GET /weight_info, POST /shutdown_weight_transfer_engine" in said
    assert "VLLM_SERVER_DEV_MODE=1" in said


def test_bm_4_the_route_of_completions_is_needed_where_there_is_none_for_groups(fake, client):
    fake.facts |= {"vllm": "0.33.0"}
    fake.lacks = {GENERATE}
    assert f"lacks POST {GENERATE}" in refused(client().connect)
    fake.facts |= {"routes": [GROUP]}
    client().connect()


def test_bm_4_a_plain_vllm_has_room_for_prompt_and_completion(fake, client):
    fake.facts = None
    client().connect()
    assert "48" in refused(client(max_model_len=64).connect)


def test_bm_4_raw_log_probabilities_and_too_little_room_are_told_together(fake, client, sentence):
    fake.facts |= {"logprobs_mode": "raw_logprobs", "max_model_len": 47}
    sentence(refused(client().connect).replace(fake.url, "URL"))


@pytest.mark.parametrize("status", [404, 200])
def test_bm_4_a_page_of_html_is_no_rollout_server(fake, client, status):
    fake.page = status
    said = refused(client().connect)
    assert "not a rollout server" in said and fake.url in said
    assert "nginx" in said and (status == 200 or "404" in said)


def test_bm_4_a_refused_connection_is_named_within_its_limit(fake, make):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        began = time.monotonic()
        said = refused(lambda: make(config(url, ready_timeout_s=0.5)))
    assert url in said and "within 0.5 s" in said and "onnect" in said
    assert time.monotonic() - began < 60  # and not once for each of `retries`


@pytest.mark.parametrize("token", ["", "another"])
def test_bm_5_a_401_names_the_variable_to_set(client, token, monkeypatch):
    monkeypatch.setenv("RLOO_SERVER_TOKEN", token)
    said = refused(client().connect)
    assert "401 from" in said and "set RLOO_SERVER_TOKEN" in said


def test_bm_5_the_variable_is_that_of_the_config(fake, client, monkeypatch):
    run = config(fake.url, api_key_env="MY_TOKEN")
    assert "set MY_TOKEN" in refused(client(run).connect)
    monkeypatch.setenv("MY_TOKEN", fake.token)
    client(run).connect()


def test_bm_6_an_address_to_listen_on_is_replaced_by_loopback_with_a_note(fake, make):
    notes = []
    url = fake.url.replace("127.0.0.1", "0.0.0.0")
    generator = make(config(url), notes.append)
    assert [s.url for s in generator.engine.servers] == [fake.url]
    assert any("0.0.0.0" in n and fake.url in n for n in notes)


def test_proxies_of_the_environment_are_not_used(fake, client, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    client().connect()


# What is sent.


def test_every_completion_has_its_own_seed_and_its_group_its_order(fake, make):
    rollouts = draw(make())
    assert [[r.seed for r in group] for group in rollouts] == SEEDS
    sent = {(tuple(b["token_ids"]), b["sampling_params"]["seed"]) for b in fake.draws()[PROBES:]}
    assert sent == {(tuple(p), s) for p, own in zip(PROMPTS, SEEDS, strict=True) for s in own}
    assert len({tuple(r.completion_ids) for r in chain(*rollouts)}) == COUNT
    assert {r.weight_version for r in chain(*rollouts)} == {0}
    assert all(len(r.behaviour_logp) == r.length for r in chain(*rollouts))


def test_filters_and_limits_reach_the_server(fake, make):
    wanted = {"top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 2}
    run = changed(config(fake.url), temperature=0.7, max_completion_length=5, **wanted)
    generator = make(run)
    generator.weight_sync.parity_checked = True  # the policy's temperature is another
    draw(generator)
    for body in fake.draws():
        sent = body["sampling_params"]
        assert wanted.items() <= sent.items() and sent["temperature"] == 0.7
        assert sent["max_tokens"] == 5 and sent["logprobs"] == 0 and sent["ignore_eos"] is True
        assert sent["stop_token_ids"] == [tokenizer().eos_token_id]


def test_greedy_is_temperature_0_without_filters_and_a_temperature_given_is_sent(fake, make):
    generator = make(changed(config(fake.url), top_p=0.5, top_k=3, min_p=0.2))
    generator.weight_sync.parity_checked = True
    draw(generator, greedy=True)
    bare = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    assert all(bare.items() <= body["sampling_params"].items() for body in fake.draws())
    draw(generator, temperature=0.3)
    assert fake.draws()[-1]["sampling_params"]["temperature"] == 0.3
    assert fake.draws()[-1]["sampling_params"]["top_k"] == 3


def test_no_more_than_max_in_flight_are_under_way_at_once(fake, make):
    fake.slow_s = 0.02
    draw(make(config(fake.url, max_in_flight=3)))
    assert fake.most == 3


def test_several_servers_share_the_prompts_and_all_have_the_weights(fake, make):
    other = Fake(right(), len(tokenizer()), fake.token)
    try:
        alone = draw(make())
        before = len(fake.draws())
        generator = make(config(fake.url, other.url))
        assert draw(generator) == alone
        assert fake.label == other.label == generator.weight_sync.label
        assert len(other.draws()) == len(fake.draws()) - before == (COUNT + PROBES) // 2
        read = [{tuple(b["token_ids"]) for b in s.draws()[-COUNT // 2 :]} for s in (fake, other)]
        assert not read[0] & read[1]  # siblings share a prefix cache
        other.keeps_label = True
        said = refused(lambda: generator.load(policy(), 1))
        assert f"{generator.weight_sync.run_id}:0 and {generator.weight_sync.run_id}:1" in said
    finally:
        other.close()


# What is answered.


def test_nothing_is_drawn_before_sync_and_parity(fake, make):
    notes = []
    generator = make(note=notes.append, at=3)
    assert (
        not fake.draws() and fake.label == generator.weight_sync.label and fake.label.endswith(":3")
    )
    assert not fake.paused and not fake.open
    order = [path for path, _ in fake.asked if path != "/health"]
    order = order[order.index("/pause") :]
    assert order == [
        "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update",
        "/reset_prefix_cache", "/weight_info", "/resume",
    ]  # fmt: skip
    draw(generator)
    assert len(fake.draws()) == COUNT + PROBES and any("parity" in n for n in notes)
    draw(generator)
    assert len(fake.draws()) == 2 * COUNT + PROBES  # it is not asked again


def test_parity_that_fails_stops_with_both_values(fake, make):
    fake.shift = -0.03
    said = refused(lambda: draw(make()))
    ours = -math.log(len(tokenizer()))
    assert f"{ours:.5f} here, {ours - 0.03:.5f} there" in said and "rms 0.03" in said
    assert "expected at most 0.02" in said and "other weights" in said
    assert len(fake.draws()) == PROBES


def test_parity_lets_differences_of_numerics_pass(fake, make):
    fake.shift = -0.01
    assert len(draw(make())) == len(PROMPTS)


def test_an_answer_of_other_weights_stops_naming_both(fake, make):
    generator = make()
    draw(generator)
    fake.says = "stranger.1:7"
    said = refused(lambda: draw(generator))
    assert "stranger.1:7" in said and generator.weight_sync.label in said


def test_weights_that_were_changed_behind_our_back_are_noticed_by_their_label(fake, make):
    generator = make()
    draw(generator)
    fake.label = "stranger.1:7"
    assert "it reports stranger.1:7" in refused(lambda: draw(generator))


def test_a_label_that_stays_as_it_was_stops_before_anything_is_drawn(fake, make):
    fake.keeps_label = True
    said = refused(make)
    assert "it reports default" in said and not fake.draws()


def test_a_prefix_cache_that_was_not_reset_stops(fake, make):
    fake.resets = False
    assert "prefix cache" in refused(make)


def test_completions_without_log_probabilities_stop(fake, make):
    generator = make()
    fake.tells_logp = False
    assert "response format" in refused(lambda: draw(generator))


def test_a_log_probability_that_is_no_number_stops(fake, make):
    generator = make()
    generator.weight_sync.parity_checked = True
    fake.shift = math.nan
    assert "with 0 finite log-probabilities" in refused(lambda: draw(generator))


def test_an_answer_in_another_form_stops(fake, make, monkeypatch):
    generator = make()
    monkeypatch.setattr(fake, "generate", lambda path, body: (200, {"choices": []}))
    assert "response format" in refused(lambda: draw(generator))


# What is lost.


def test_a_completion_that_was_aborted_is_lost_and_no_completion():
    content = [{"token_id": 5, "logprob": -1.0}]
    choice = {"token_ids": [5], "logprobs": {"content": content}, "weight_versions": []}
    whole = {"choices": [choice | {"finish_reason": "length"}]}
    assert parse_completion(whole, "http://x").ids == [5]
    with pytest.raises(EngineLost, match=r"http://x: .* abort"):
        parse_completion({"choices": [choice | {"finish_reason": "abort"}]}, "http://x")


def test_a_server_that_never_answers_is_lost_within_the_deadline(fake, client):
    found = client(config(fake.url, request_timeout_s=0.4))
    found.connect()
    fake.hangs.add(GENERATE)
    began = time.monotonic()
    with pytest.raises(EngineLost, match=r"no answer within 0\.4 s"):
        found.generate([ask(1)], lambda i, answer: None)
    assert 0.4 <= time.monotonic() - began < 30


@pytest.mark.parametrize("path", ["/update_weights", "/start_weight_update"])
def test_a_sync_that_hangs_is_lost_within_its_deadline(fake, client, path, monkeypatch):
    monkeypatch.setattr("rloo_cli.generation.vllm.http_engine.SERVER_RESET_TIMEOUT_S", 0.4)
    found = client(config(fake.url, sync_timeout_s=0.4))
    found.connect()
    fake.hangs.add(path)
    with pytest.raises(EngineLost, match=r"no answer|not finished"):
        found.sync_weights(weights(), "run:1")


def test_a_server_that_is_lost_gives_back_only_what_is_missing(fake, make):
    alone = draw(make())
    before = len(fake.draws())
    notes = []
    generator = make(config(fake.url, max_in_flight=2), notes.append)
    fake.dies_at = {before + PROBES + 7}
    assert draw(generator) == alone
    seeds = [b["sampling_params"]["seed"] for b in fake.draws()[before:]]
    asked = [s for s in seeds if s in chain(*SEEDS)]
    again = {s for s in asked if asked.count(s) > 1}
    assert set(asked) == set(chain(*SEEDS)) and len(asked) == COUNT + len(again)
    assert 1 <= len(again) <= 2  # those that were under way
    assert len(seeds) == len(asked) + 2 * PROBES  # parity, and again after it was lost
    assert fake.label == generator.weight_sync.label and generator.metrics["vllm/restarts"] == 1
    assert sum("was lost" in n for n in notes) == 1


def test_a_server_that_is_lost_too_often_ends_the_run(fake, make):
    generator = make(config(fake.url, retries=1))
    fake.dies_at = {*range(1, 100)}
    said = refused(lambda: draw(generator))
    assert "lost 2 times" in said and f"of {COUNT} completions" in said


def test_a_server_that_stays_away_ends_the_run_after_one_wait(fake, make):
    generator = make(config(fake.url, reconnect_timeout_s=0.5))
    draw(generator)
    fake.dead = True
    said = refused(lambda: draw(generator))
    assert f"at {fake.url} does not answer" in said and "within 0.5 s" in said


def test_a_request_that_fails_on_a_well_server_is_not_repeated(fake, make):
    generator = make(config(fake.url, max_in_flight=1))
    fake.fails_at = {PROBES + 3: 500}
    assert "500 it went wrong" in refused(lambda: draw(generator))
    # The next one may have been on its way.
    assert len(fake.draws()) <= PROBES + 4 and no_seed_twice(fake)


def test_a_request_that_is_refused_is_not_repeated(fake, make):
    generator = make(config(fake.url, max_in_flight=1))
    fake.fails_at = {1: 400}
    assert "400 it went wrong" in refused(lambda: draw(generator))
    assert len(fake.draws()) <= 2 and no_seed_twice(fake)


def no_seed_twice(fake):
    seeds = [body["sampling_params"]["seed"] for body in fake.draws()]
    return len(seeds) == len(set(seeds))


def test_a_signal_ends_the_wait_and_closes_the_requests(fake, make):
    generator = make(config(fake.url, request_timeout_s=5.0))
    draw(generator)
    fake.hangs.add(GENERATE)
    begun = threading.Timer(
        0.3, signals._received_signals.append, [(signal.SIGTERM, time.monotonic())]
    )
    began = time.monotonic()
    begun.start()
    try:
        with pytest.raises(Stopped, match="SIGTERM"):
            draw(generator)
        assert time.monotonic() - began < 4, "it waited for the request's own limit of 5 s"
        assert until(lambda: not connections(fake))
    finally:
        begun.join()
        signals.forget_signals()
        fake.ended.set()


def test_a_signal_ends_a_sync_that_hangs_and_the_next_trainer_undoes_it(fake, make):
    generator = make(config(fake.url, sync_timeout_s=5.0))
    fake.hangs.add("/update_weights")
    begun = threading.Timer(
        0.3, signals._received_signals.append, [(signal.SIGTERM, time.monotonic())]
    )
    begun.start()
    try:
        with pytest.raises(Stopped, match="SIGTERM"):
            generator.load(policy(), 1)
    finally:
        begun.join()
        signals.forget_signals()
        fake.hangs.clear()
    assert fake.paused and fake.open
    second = make(at=5)
    assert fake.label == second.weight_sync.label and not fake.paused and not fake.open


def until(found, limit=10):
    end = time.monotonic() + limit
    while not found() and time.monotonic() < end:
        time.sleep(0.02)
    return found()


def connections(fake):
    """Connections to the fake server that this process holds open."""
    port = f"{fake.http.server_address[1]:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row for row in rows if row[2].endswith(f":{port}") and row[3] == "01"]


def test_what_another_trainer_left_is_undone(fake, make):
    fake.paused, fake.open = True, 2
    fake.label = "another:9"
    generator = make()
    assert fake.label == generator.weight_sync.label and not fake.paused and not fake.open
    assert len(draw(generator)) == len(PROMPTS)


def test_closing_leaves_the_server_as_it_was_and_no_thread(fake, tmp_path):
    before = {t.name for t in threading.enumerate()}
    generator = sampler(config(fake.url), tmp_path)
    generator.load(policy(), 0)
    generator.close()
    assert fake.asked[-1][0] == "/shutdown_weight_transfer_engine"
    assert not fake.paused and not fake.open
    assert {t.name for t in threading.enumerate() if t.name == "http"} <= before
    generator.close()  # twice is once


def test_the_token_is_in_no_error(fake, client):
    fake.locked = True
    assert fake.token not in refused(client().connect)
    assert fake.token not in repr(client().servers)


def test_a_connection_is_used_again_but_not_one_that_was_idle(fake, make, monkeypatch):
    monkeypatch.setattr("rloo_cli.generation.vllm.http.KEEPALIVE_S", 0.3)
    generator = make()
    draw(generator)
    count, used = len(fake.callers), set(fake.callers)
    assert len(used) < count == len(fake.asked)
    time.sleep(0.6)
    # One that the server closes meanwhile would look like a server that died.
    draw(generator)
    assert not used & {*fake.callers[count:]}


def test_a_completion_is_asked_for_again_where_the_server_hung_up_on_a_kept_connection(fake):
    wire = HttpClient()
    try:
        body = {"token_ids": [5], "sampling_params": ask(1).params}

        def one(keep):
            asked = wire.request("POST", fake.url, GENERATE, fake.token, body, 5, keep_alive=keep)
            return wire.run(asked, 10)["choices"]

        first = one(True)
        fake.hangs_up = 1  # once, without an answer
        assert one(True) == first
        fake.hangs_up = 1
        with pytest.raises(EngineLost):
            one(False)  # and what changes a server never is
    finally:
        wire.close()


def test_a_wire_takes_no_answer_from_a_redirect(fake):
    wire = HttpClient()
    try:
        fake.page = 302
        with pytest.raises(GenerationError, match="not a rollout server"):
            wire.get(fake.url, "/health", fake.token, 5)
    finally:
        wire.close()


def test_a_policy_in_another_dtype_loosens_parity(fake, make):
    generator = make()
    assert generator.tolerance == 0.02
    half = Policy(copy.deepcopy(policy().model).to(torch.bfloat16), 1.0)
    generator.load(half, 1)
    assert generator.tolerance == 0.1


def test_a_server_that_is_lost_before_the_forced_answers_is_asked_for_no_more_than_these(
    fake, make
):
    text = tokenizer().encode("ab")
    budget = AnswerBudget(at=4, text="ab", tokens=3)

    def answered():
        return draw(ForcedAnswers(make(), budget, tokenizer(), text))

    whole = answered()
    fake.asked.clear()
    fake.dies_at = {fake.drawn + PROBES + COUNT + 2}
    assert repr(answered()) == repr(whole)
    asked = [(body["token_ids"], body["sampling_params"]["max_tokens"]) for body in fake.draws()]
    begun = [most for ids, most in asked if ids in PROMPTS]
    later = [most for ids, most in asked if ids not in PROMPTS]
    assert set(begun[PROBES:]) == {4} and set(later) == {3}
    assert fake.deaths == 1 and len(later) > COUNT  # parity was checked again with these prompts

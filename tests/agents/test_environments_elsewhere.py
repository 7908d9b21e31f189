"""agent=http: environments of a server, its protocol, and servers that misbehave."""

import time

import pytest
from agent_cases import call_text, episode_generator, play, remote_agent
from assert_refused import assert_refused
from environment_servers import ADD, OddServer, page_server_started

from rloo_cli.agents import http
from rloo_cli.utils.errors import ConfigError, MachineError

AGENT = {"max_tool_s": 20.0, "max_observation_tokens": 60, "max_turns": 4}


@pytest.fixture
def odd():
    """Starts servers that misbehave: (faults, tools) -> server."""
    started = []

    def start(*arguments, **options):
        started.append(OddServer(*arguments, **options))
        return started[-1]

    yield start
    for server in started:
        server.close()


def once(text, seed):
    """A call, and after whatever it was told an answer."""
    return "the end" if "<tool_response>" in text else call_text("add", by=2)


@pytest.mark.process
def test_the_server_that_the_page_shows_plays_an_episode(tmp_path):
    def script(text, seed):
        return call_text("add", by=-1 if text.count("<tool_response>") == 1 else 4)

    with page_server_started(tmp_path) as (url, _):
        generator = episode_generator(remote_agent("http", url, **AGENT), script)
        (group,) = play(generator, {"start": 2}, k=2)
    decode = generator.rules.renderer.tokenizer.decode
    assert "at 2." in decode(group.prompt_ids)
    for row in group.rollouts:
        told = [turn.observation[0]["content"] for turn in row.turns[1:]]
        assert told == ["6", '{"error": "it only counts upwards"}']
        assert row.episode_facts["ended_by"] == "done" and row.episode_facts["errors"] == 1
        assert row.environment_reward == 10.0 and row.environment == {"kind": "counter"}
        assert row.failed is None


def test_a_session_is_of_one_episode_and_gets_its_row_and_its_seed(odd):
    server = odd()
    generator = episode_generator(remote_agent("http", server.url, **AGENT), once)
    rows = [{"page": 3, "picture": object()}, {"page": 4}]
    groups = play(generator, *rows, k=2)
    asked = [(path, body) for path, body, _ in server.asked[1:]]
    resets = [body for path, body in asked if path == "/reset"]
    assert len({body["session"] for body in resets}) == len({body["seed"] for body in resets}) == 4
    assert sorted(body["row"]["page"] for body in resets) == [3, 3, 4, 4]
    assert all("picture" not in body["row"] for body in resets)  # JSON cannot hold it
    assert all(body["row"]["prompt"] == [{"role": "user", "content": "go"}] for body in resets)
    assert sorted(p for p, _ in asked) == ["/close"] * 4 + ["/reset"] * 4 + ["/step"] * 4
    # The rewards that a step and the end say are added up.
    assert [[r.environment_reward for r in g.rollouts] for g in groups] == [[1.5] * 2] * 2


# (path, what the server does there) -> the failure of the row
GONE = {
    ("/reset", "never_answers"): "no answer within 2 s",
    ("/step", "never_answers"): "no answer within 2 s",
    ("/step", "trickles"): "no answer within 2 s",
    ("/step", "garbage"): "is not a JSON object",
    ("/step", "list"): "is not a JSON object",
    ("/step", "deep"): "is not a JSON object",
    ("/step", "huge"): "it answered over",
    ("/step", "status"): "status 500: out of worlds",
    ("/step", "redirect"): "redirects to 'http://127.0.0.1",
    ("/step", "dies"): "the connection broke",
    ("/step", "other_session"): "answered about another session: 'another'",
    ("/step", "no_text"): 'has neither "text" nor "error"',
    ("/step", "nan"): "the reward nan is not a finite number",
    ("/close", "status"): "status 500",
    ("/close", "nan"): "the reward nan is not a finite number",
}


@pytest.mark.slow_but(
    "/reset-never_answers", "/step-list", "/step-status", "/step-other_session", "/close-nan"
)
@pytest.mark.parametrize(("path", "fault"), GONE)
def test_a_server_that_misbehaves_leaves_the_row_out_and_its_neighbours_alone(odd, path, fault):
    server = odd({path: fault})
    began = time.monotonic()
    limits = AGENT | ({"max_tool_s": 2.0} if "no answer" in GONE[path, fault] else {})
    generator = episode_generator(remote_agent("http", server.url, **limits), once)
    bad, good = play(generator, {"bad": True}, {"bad": False})
    assert time.monotonic() - began < 28  # a deadline, not the server, ended it
    (row,) = bad.rollouts
    assert GONE[path, fault] in row.failed and row.episode_facts["ended_by"] == "failed"
    assert row.environment_reward is None  # never a zero
    assert good.rollouts[0].failed is None and good.rollouts[0].environment_reward == 1.5
    assert "/elsewhere" not in [p for p, _, _ in server.asked]  # no redirect is followed


# What a step answers that the model is told.
TOLD = {
    "error": '{"error": "no page"}', "flood": "[cut]", "surrogate": "odd ? text",
    "structure": '{"seen": [1, null]}',
}  # fmt: skip


@pytest.mark.parametrize("fault", TOLD)
def test_what_a_step_answers_is_told_to_the_model(odd, fault):
    server = odd({"/step": fault})
    generator = episode_generator(remote_agent("http", server.url, **AGENT), once)
    (group,) = play(generator, {"bad": True})
    assert TOLD[fault] in group.rollouts[0].turns[1].observation[0]["content"]
    assert group.rollouts[0].failed is None


def test_an_error_of_a_step_may_leave_the_row_out_instead(odd):
    server = odd({"/step": "error"})
    config = remote_agent("http", server.url, on_tool_error="mask", **AGENT)
    (group,) = play(episode_generator(config, once), {"bad": True})
    assert group.rollouts[0].failed == "add: no page"


def test_a_call_that_the_description_forbids_is_not_sent(odd):
    server = odd()
    said = call_text("add", by="two")
    config = remote_agent("http", server.url, **AGENT | {"max_turns": 2})
    (group,) = play(episode_generator(config, lambda *_: said))
    told = group.rollouts[0].turns[1].observation[0]["content"]
    assert "'by'" in told and "integer" in told
    assert "/step" not in [p for p, _, _ in server.asked]


def test_a_failed_episode_tells_the_server_to_forget_its_session(odd):
    server = odd({"/step": "other_session"})
    generator = episode_generator(remote_agent("http", server.url, **AGENT), once)
    play(generator, {"bad": True})
    end = time.monotonic() + 10
    while "/close" not in [p for p, _, _ in server.asked]:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_token_is_sent_to_the_server_and_masked_where_it_is_quoted(odd, monkeypatch, sentence):
    monkeypatch.setenv("WORLD_TOKEN", "sesame-7319")
    server = odd({"/step": "status"})
    server.answer = lambda path, body: {"session": body["session"], "text": "sesame-7319"}
    config = remote_agent("http", server.url, token_env="WORLD_TOKEN", **AGENT)
    play(episode_generator(config, once))
    assert {key for _, _, key in server.asked} == {"Bearer sesame-7319"}
    server.answer = lambda path, body: {"session": "sesame-7319"}
    (group,) = play(episode_generator(config, once))
    assert "'***'" in group.rollouts[0].failed
    server.tools = "sesame-7319"
    with pytest.raises(MachineError) as caught:
        http.load_tools(config)
    problem = assert_refused(caught, 3, "JSON", where="agent.url")
    assert "sesame" not in problem.render()
    monkeypatch.delenv("WORLD_TOKEN")
    with pytest.raises(MachineError) as caught:
        http.preflight(config)
    assert_refused(caught, 3, "WORLD_TOKEN", where="agent.token_env", fix="export WORLD_TOKEN=")
    sentence(caught)


def test_a_server_that_does_not_answer_at_the_start_is_one_clear_error(odd):
    server = odd()
    server.close()
    for look in (http.load_tools, http.preflight):  # the second before torch is there
        with pytest.raises(MachineError) as caught:
            look(remote_agent("http", server.url, **AGENT))
        assert_refused(caught, 3, server.url, where="agent.url", fix="agent.url=")


@pytest.mark.parametrize(
    ("tools", "key"),
    [
        ({"tools": []}, "list"),
        ({"tool": []}, "list"),
        ({"environments": {"a": [3]}}, '"function"'),
        ({"tools": [{"function": ADD | {"name": "a b"}}]}, "'a b'"),
        ({"tools": [{"function": ADD}, {"function": ADD}]}, "tool 2"),
        ({"tools": [{"function": ADD | {"description": 3}}]}, '"description"'),
        ({"tools": [{"function": ADD | {"parameters": []}}]}, '"parameters"'),
        ({"tools": [{"function": ADD | {"parameters": {"properties": {"by": 1}}}}]},
         "property of 'add'"),
        ({"tools": [{"function": ADD | {"parameters": {"properties": {}, "required": ["by"]}}}]},
         "['by']"),
    ],
)  # fmt: skip
def test_tools_that_a_server_describes_wrongly_are_refused_by_name(odd, tools, key):
    server = odd(tools=tools)
    with pytest.raises(ConfigError) as caught:
        http.load_tools(remote_agent("http", server.url, **AGENT))
    problem = assert_refused(caught, 2, key, where="agent.url", fix="docs/agents_elsewhere.md")
    assert f"{server.url}/tools" in problem.what


def test_the_row_chooses_among_the_environments_of_a_server(odd):
    tools = {"environments": {"a": [{"function": ADD}], "b": [{"function": ADD | {"name": "sub"}}]}}
    server = odd(tools=tools)
    generator = episode_generator(remote_agent("http", server.url, **AGENT), lambda *_: "none")
    play(generator, {"environment": "a"}, {"environment": "b"})
    resets = [body for path, body, _ in server.asked if path == "/reset"]
    assert sorted(body["environment"] for body in resets) == ["a", "b"]
    assert list(generator.rules.tools.environments["b"].specs) == ["sub"]

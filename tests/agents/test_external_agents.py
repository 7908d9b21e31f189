"""Agents behind the proxy: what they are answered, what is trained, and how their episodes end."""

import json
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request

import psutil
import pytest
from agent_cases import call_text
from assert_refused import assert_refused
from proxy_cases import agent_command, play_agents, proxy_generator, row_groups

from rloo_cli.utils.errors import GenerationError
from rloo_cli.utils.rng import turn_seed

pytestmark = pytest.mark.process

CALL = call_text("add", a=1, b=2)


def counted(text, seed):
    """An answer that says how often it was asked."""
    return f"answer {text.count('assistant')}"


def test_the_trainers_ids_are_the_samplers_ids(tmp_path):
    generator = proxy_generator(agent_command(tmp_path, "played(3)"), counted)
    groups = play_agents(generator, {}, {}, k=2)
    asked = [ids for wave in generator.inner.asked for ids in wave]
    decode = generator.rules.renderer.tokenizer.decode
    for group in groups:
        for row in group.rollouts:
            whole = group.prompt_ids + row.completion_ids
            assert row.failed is None and row.episode_facts["ended_by"] == "answer"
            assert [t.text for t in row.turns] == ["answer 1", "answer 2", "answer 3"]
            assert row.episode_facts["retokenised"] == row.episode_facts["refused"] == 0
            end = len(group.prompt_ids)
            for turn in row.turns:
                end += len(turn.prompt_ids)
                assert whole[:end] in asked
                end += len(turn.sampled_ids)
            assert end == len(whole) and sum(row.mask) == sum(len(t.sampled_ids) for t in row.turns)
            assert "<|im_start|>system\nbrief<|im_end|>" in decode(group.prompt_ids)
            assert row.turns[1].observation == [{"role": "user", "content": "and then? 0"}]
    # The prompt once for its group, whichever wave it was in; each turn's seed is its own.
    seeds = {turn_seed(s, t) for s in (0, 1, 100, 101) for t in range(3)}
    assert {*generator.inner.seeds} == seeds and len(generator.inner.seeds) == 12


SHAPES = """
tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
messages = [{"role": "developer", "content": [{"type": "text", "text": "use add"}]}, *ROW["prompt"]]
said = chat(messages, tools=tools, temperature=0.1)
(call,) = said["tool_calls"]
assert said["content"] is None and json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": "3<|im_end|>"}]
assert chat(messages, tools=tools)["content"] == "the end"
post("/rloo/reward", {"reward": 0.5})
"""
STREAM = """
def pieces(path, body):
    request = urllib.request.Request(BASE + path, json.dumps(body).encode(), method="POST")
    request.add_header("Authorization", "Bearer " + KEY)
    with urllib.request.urlopen(request, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found = [line[6:] for line in lines if line.startswith("data: ")]
    return [json.loads(piece) for piece in found if piece != "[DONE]"]


first = pieces("/chat/completions", {"model": "policy", "messages": ROW["prompt"], "stream": True})
text = "".join(p["choices"][0]["delta"].get("content", "") for p in first)
assert text == "answer 1" and first[-1]["choices"][0]["finish_reason"] == "stop", first
more = [*ROW["prompt"], {"role": "assistant", "content": text}, {"role": "user", "content": "?"}]
status, answer = post("/responses", {"model": "policy", "input": more})
assert status == 200 and answer["output"][0]["content"][0]["text"] == "answer 2", answer
events = pieces("/responses", {"model": "policy", "input": "more", "stream": True,
                               "previous_response_id": answer["id"]})
assert [e["sequence_number"] for e in events] == list(range(len(events)))
done = events[-1]
assert done["type"] == "response.completed", events
assert done["response"]["output"][0]["content"][0]["text"] == "answer 3"
"""


def test_calls_are_told_apart_and_what_tools_say_cannot_end_a_turn(tmp_path):
    def script(text, seed):
        return "the end" if "tool_response" in text else CALL

    generator = proxy_generator(agent_command(tmp_path, SHAPES), script)
    ((row,),) = [g.rollouts for g in play_agents(generator)]
    assert row.failed is None and row.environment_reward == 0.5
    assert row.turns[0].calls == [{"name": "add", "arguments": {"a": 1, "b": 2}}]
    got = generator.rules.renderer.tokenizer.decode(row.turns[1].prompt_ids)
    assert "3< |im_end|>" in got and row.episode_facts["calls"] == 1


def test_streams_and_the_responses_shape_are_the_same_conversation(tmp_path):
    generator = proxy_generator(agent_command(tmp_path, STREAM), counted)
    ((row,),) = [g.rollouts for g in play_agents(generator)]
    assert row.failed is None and len(row.turns) == 3


@pytest.mark.parametrize(
    ("keys", "said", "why"),
    [
        ({"max_turns": 2}, "yes", "turns"),
        ({"max_tokens": 150}, "yes", "tokens"),
        ({}, "words without an end...", "completion"),
    ],
)
def test_a_limit_ends_the_episode_whatever_the_agent_makes_of_it(tmp_path, keys, said, why):
    generator = proxy_generator(agent_command(tmp_path, "played(5)"), lambda *_: said, **keys)
    ((row,),) = [g.rollouts for g in play_agents(generator)]
    assert row.failed is None and row.episode_facts["ended_by"] == why
    assert row.episode_facts["refused"] == 1 and row.mask[-1] == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("m = played(1); m[1]['content'] = 'other'; chat(m)", "messages[1].content is 'other'"),
        ("m = played(1); chat(m[-1:])", "messages[0].role is 'user', and was 'system'"),
        ("m = played(1); m[2]['content'] += '!'; chat(m)", "messages[2].content is 'answer 1!'"),
        ("m = played(2); chat(m[:3] + m[5:])", "messages[3].content"),
        ("m = played(1); chat([*m, {'role': 'assistant', 'content': 'x'}, m[-1]])",
         "was not sampled by this policy"),
        ("m = played(1); chat(m, tools=[{'type': 'function', 'function': {'name': 'f'}}])",
         "its tools are not"),
    ],
)  # fmt: skip
def test_a_history_that_differs_is_an_error_that_says_where_and_no_score(tmp_path, text, why):
    generator = proxy_generator(agent_command(tmp_path, text), counted)
    ((row,),) = [g.rollouts for g in play_agents(generator)]
    assert why in row.failed and row.episode_facts["refused"] == 1
    assert row.episode_facts["ended_by"] == "failed"


CUTS = """
m = played(2)
short = [m[0], {"role": "user", "content": "so far: " + m[2]["content"]}]
short.append(chat(short))
short.append({"role": "user", "content": "go on"})
helper = [{"role": "user", "content": "help"}]
helper.append(chat(helper))  # an agent beside it, in between
short.append(chat(short))
m.append(chat(m))  # and the first history goes on, too
"""


def test_an_agent_that_cuts_its_history_or_has_another_beside_it_has_several_rows(tmp_path):
    generator = proxy_generator(agent_command(tmp_path, CUTS), counted, max_rows=3, max_turns=6)
    groups = play_agents(generator, {}, k=2)
    asked = [ids for wave in generator.inner.asked for ids in wave]
    (group,) = groups
    decode = generator.rules.renderer.tokenizer.decode
    for row in group.rollouts:
        assert row.failed is None and row.episode_facts["retokenised"] == 0
        assert row.episode_facts["turns"] == 6 and len(row.row_starts) == 2
        bounds = [0, *row.row_starts, len(row.completion_ids)]
        begun = [group.prompt_ids, [], []]
        shown = [t.observation[-1]["content"] for t in row.turns[1:]]
        assert shown == [
            "and then? 0",
            "and then? 1",
            "so far: answer 1",
            "go on",
            "help",
        ]  # row by row, and in time within each
        turns = iter(row.turns)
        for begin, end, base in zip(bounds[:-1], bounds[1:], begun, strict=True):
            ids, at = [*base, *row.completion_ids[begin:end]], len(base)
            while at < len(ids):
                turn = next(turns)
                at += len(turn.prompt_ids)
                assert ids[:at] in asked  # what a row's turn was sampled from is that row alone
                at += len(turn.sampled_ids)
            assert at == len(ids)
        assert "help" not in decode(row.completion_ids[: row.row_starts[1]])
        assert row.length == sum(len(t.sampled_ids) for t in row.turns) == sum(row.mask)


def test_more_rows_than_the_key_allows_are_refused(tmp_path):
    generator = proxy_generator(agent_command(tmp_path, CUTS), counted, max_rows=2)
    ((row,),) = [g.rollouts for g in play_agents(generator)]
    assert "agent.max_rows" in row.failed and row.episode_facts["ended_by"] == "failed"


def test_a_request_that_is_sent_again_gets_the_answer_that_it_had(tmp_path):
    text = "assert chat(ROW['prompt']) == chat(ROW['prompt'])"
    generator = proxy_generator(agent_command(tmp_path, text), counted)
    ((row,),) = [g.rollouts for g in play_agents(generator)]
    assert row.failed is None and len(row.turns) == 1 and len(generator.inner.seeds) == 1


def test_a_slow_agent_delays_its_own_episode_alone(tmp_path):
    text = "m = played(1)\nif ROW['slow']: time.sleep(2)\nm.append(chat(m))"
    generator = proxy_generator(agent_command(tmp_path, text), counted)
    groups = row_groups(generator, {"slow": True}, {"slow": False})
    done = []
    generator.generate(groups, [[0], [1]], arrived=lambda i: done.append((i, time.monotonic())))
    generator.close()
    assert [i for i, _ in done] == [1, 0] and done[1][1] - done[0][1] > 1.0


def test_a_long_wave_neither_spares_an_agent_that_hangs_nor_counts_for_one_that_is_done(tmp_path):
    got = tmp_path / "pid"
    hangs = f"open({str(got)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    text = f"played(1)\nif ROW['kind'] == 'asks': played(2)\nif ROW['kind'] == 'hangs': {hangs}"
    died = []

    def script(text, seed):
        if text.count("assistant") == 2:  # the wave of the second turn
            end = time.monotonic() + 10
            while not died and time.monotonic() < end:
                time.sleep(0.05)
                if got.exists() and got.read_text() and not _runs(int(got.read_text())):
                    died.append(time.monotonic())
            time.sleep(0.2)
        return counted(text, seed)

    generator = proxy_generator(agent_command(tmp_path, text), script, max_seconds=3.0)
    kinds = ({"kind": "asks"}, {"kind": "hangs"}, {"kind": "ends"})
    asks, hangs, ends = (g.rollouts[0] for g in play_agents(generator, *kinds))
    assert died  # while the wave was sampled
    assert "took more than 3 s" in hangs.failed
    assert asks.failed is None and ends.failed is None and len(asks.turns) == 2


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


LATE = (
    "played(1); time.sleep(60)",
    "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)); time.sleep(60)",  # and never asks
    "played(1)\nwhile True: print('x' * 10000)",
)


def test_agents_that_do_not_end_harm_their_own_episodes_alone(tmp_path, monkeypatch):
    parts = [f"if ROW['n'] == {n}:\n    " + t.replace("\n", "\n    ") for n, t in enumerate(LATE)]
    text = "\n".join([*parts, f"if ROW['n'] == {len(LATE)}: played(2)"])
    generator = proxy_generator(agent_command(tmp_path, text), counted, max_seconds=6.0)
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    rows = [{"n": n} for n in range(len(LATE) + 1)]
    *late, good = (g.rollouts[0] for g in play_agents(generator, *rows))
    assert all("took more than 6 s" in row.failed for row in late)
    assert good.failed is None and [t.text for t in good.turns] == ["answer 1", "answer 2"]
    assert not [p for p in psutil.process_iter() if _is_of_test(p, tmp_path)]


# Misbehaving agents: what they do -> (the reason of a row without a score, or None; refusals).
MISBEHAVING = {
    "floods": ("played(1)\nwhile True: post('/chat/completions', {'model': 'no'})",
               "more than 64 of its requests", 65),
    "wrong_key": ("played(1); assert post('/chat/completions', {}, 'rloo-no')[0] == 401", None, 0),
    "other_key": ("k = os.environ['OTHER']\nplayed(1)\n"
                  "assert post('/chat/completions', {'model': 'policy'}, k)[0] == 403", None, 0),
    "asks_another_model": ("played(1); assert post('/chat/completions', {'model': 'gpt-5',"
                           " 'messages': ROW['prompt']})[0] == 404", None, 1),
    "sends_images": ("m = played(1); m[-1]['content'] = [{'type': 'image_url', 'image_url': {}}]\n"
                     "chat(m)", "exited with code 1: 400 invalid_request: messages[3] has a"
                     " part of type 'image_url'", 1),
    "cuts_the_stream": ("s = socket.create_connection(BASE.split('/')[2].split(':'))\n"
                        "b = json.dumps({'model': 'policy', 'messages': ROW['prompt'],"
                        " 'stream': True})\n"
                        "s.sendall(f'POST {BASE[BASE.index(\"/episodes\"):]}/chat/completions"
                        " HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer {KEY}\\r\\n"
                        "Content-Length: {len(b)}\\r\\n\\r\\n{b}'.encode())\n"
                        "s.recv(10); s.close(); time.sleep(0.5)",
                        "closed the connection before its last answer", 0),
    "calls_itself": ("codes = []\n"
                     "def ask(i): codes.append(post('/chat/completions', {'model': 'policy',"
                     " 'messages': [{'role': 'user', 'content': str(i)}]})[0])\n"
                     "ts = [threading.Thread(target=ask, args=(i,)) for i in range(8)]\n"
                     "[t.start() for t in ts]; [t.join() for t in ts]\n"
                     "assert codes.count(200) == 1 and codes.count(409) == 7, codes", None, 7),
    "sends_too_much": ("played(1); assert post('/chat/completions', {'model': 'policy',"
                       " 'messages': [], 'x': 'y' * (16 << 20)})[0] == 413", None, 1),
    "sends_no_json": ("r = urllib.request.Request(BASE + '/chat/completions', b'[1')\n"
                      "r.add_header('Authorization', 'Bearer ' + KEY)\n"
                      "try: urllib.request.urlopen(r)\n"
                      "except urllib.error.HTTPError as e: assert e.code == 400, e.code\n"
                      "played(1)", None, 1),
    "kills_itself": ("played(1); os.kill(os.getpid(), 9)", "was killed by SIGKILL", 0),
    "leaves_a_process": ("played(1)\nif not os.fork():\n    os.setsid(); time.sleep(60)", None, 0),
}  # fmt: skip


@pytest.mark.slow_but("floods", "asks_another_model", "sends_too_much", "leaves_a_process")
@pytest.mark.parametrize("name", MISBEHAVING)
def test_an_agent_that_misbehaves_harms_its_own_episode_alone(tmp_path, monkeypatch, name):
    text, why, refused = MISBEHAVING[name]
    text = "if ROW['bad']:\n    " + text.replace("\n", "\n    ") + "\nelse: played(2)"

    def script(text, seed):
        if name == "cuts_the_stream":
            time.sleep(0.4)
        if name == "calls_itself" and "brief" not in text:  # its own turn
            time.sleep(1.5)
        return counted(text, seed)

    generator = proxy_generator(agent_command(tmp_path, text), script, max_seconds=60.0)
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    if name == "other_key":  # the key of an episode that is on its way, and not this one's
        other = generator.queue.open_conversation(row_groups(generator, {})[0], 0, 0)
        generator.queue.add_live(other, offer=False)
        monkeypatch.setenv("OTHER", other.key)
    port = int(generator.server.url.rpartition(":")[2])
    bad, good = (g.rollouts[0] for g in play_agents(generator, {"bad": True}, {"bad": False}))
    assert good.failed is None and [t.text for t in good.turns] == ["answer 1", "answer 2"]
    assert (bad.failed is None) if why is None else why in (bad.failed or ""), bad.failed
    found = bad.episode_facts["refused"]
    assert found >= refused if name == "floods" else found == refused
    # One that floods may still ask when its episode has ended.
    assert name == "floods" or generator.metrics["agent/wrong_keys"] == name.endswith("_key")
    assert not [p for p in psutil.process_iter() if _is_of_test(p, tmp_path)]
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))


def _is_of_test(process, folder):
    try:
        return process.environ().get("TEST_FOLDER") == str(folder)
    except (psutil.Error, OSError):  # gone, a zombie, or somebody else's
        return False


def _posted(url, body, key):
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, {}


def test_the_proxy_listens_on_the_address_of_the_config_alone():
    generator = proxy_generator(None, counted)
    host, _, port = generator.server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), 5):
        pass
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", int(port)), 5)
    generator.close()


def test_no_route_of_the_proxy_answers_without_a_key():
    token = "this run's"
    generator = proxy_generator(None, counted, token=token)
    routes = {(r.method, r.resource.canonical) for r in generator.server.runner.app.router.routes()}
    assert len(routes) >= 8
    heard = []

    def agent():
        _, got = _posted(f"{generator.server.url}/rloo/next", {}, token)
        base = got["base_url"].removesuffix("/v1").rpartition("/")
        slug = base[2]
        for method, path in routes:
            url = generator.server.url + path.replace("{slug}", slug)
            for key in ("", "another", got["api_key"] + "x", token):
                if key == token and path == "/rloo/next":
                    continue
                request = urllib.request.Request(url, method=method, data=None)
                request.add_header("Authorization", f"Bearer {key}")
                try:
                    with urllib.request.urlopen(request, timeout=5) as answer:
                        heard.append((method, path, key, answer.status))
                except urllib.error.HTTPError as error:
                    if error.code not in (401, 403, 404):
                        heard.append((method, path, key, error.code))
        _posted(f"{got['base_url']}/rloo/reward", {"reward": 1.0}, got["api_key"])
        _posted(f"{got['base_url']}/rloo/done", {"error": "nothing was asked"}, got["api_key"])

    thread = threading.Thread(target=agent)
    thread.start()
    play_agents(generator, {"n": 1})
    thread.join()
    assert heard == []


def test_an_agent_that_comes_by_itself_gets_an_episode_for_the_runs_token():
    token = "the token of this run"
    generator = proxy_generator(None, counted, token=token)
    heard = []

    def agent():
        heard.append(_posted(f"{generator.server.url}/rloo/next", {}, "another")[0])
        for end in ({}, {"error": "lost"}):
            _, got = _posted(f"{generator.server.url}/rloo/next", {}, token)
            url, key = got["base_url"], got["api_key"]
            ask = {"model": got["model"], "messages": got["row"]["prompt"]}
            _, answer = _posted(f"{url}/chat/completions", ask, key)
            heard.append(answer["choices"][0]["message"])
            _posted(f"{url}/rloo/reward", {"reward": got["row"]["n"]}, key)
            _posted(f"{url}/rloo/done", end, key)

    thread = threading.Thread(target=agent)
    thread.start()
    first, second = (g.rollouts[0] for g in play_agents(generator, {"n": 1}, {"n": 2}))
    thread.join()
    assert heard[0] == 401 and heard[1]["content"] == "answer 1"
    assert first.failed is None and first.environment_reward == 1.0
    assert second.failed == "the agent: lost"


def test_a_run_does_not_wait_for_ever_for_agents_that_come_by_themselves():
    generator = proxy_generator(None, counted, token="the token of this run", max_seconds=1.0)
    heard = []

    def agent():
        for key in ("the token of another run", "the token of this run"):
            status, got = _posted(f"{generator.server.url}/rloo/next", {}, key)
            heard.append(status)
        ask = {"model": "policy", "messages": got["row"]["prompt"]}
        _posted(f"{got['base_url']}/chat/completions", ask, got["api_key"])
        _posted(f"{got['base_url']}/rloo/done", {}, got["api_key"])  # and never comes again

    thread = threading.Thread(target=agent)
    thread.start()
    with pytest.raises(GenerationError) as caught:
        play_agents(generator, {}, {})
    thread.join()
    problem = assert_refused(caught, 6, "within 1 s, and 1", where="agent.max_seconds")
    assert heard == [401, 200] and "/rloo/next; 1 " in problem.why


NODE = """
const {OPENAI_BASE_URL: base, OPENAI_API_KEY: key, RLOO_ROW, RLOO_MODEL} = process.env;
const messages = [...JSON.parse(RLOO_ROW).prompt];
for (let turn = 0; turn < 2; turn++) {
  const answer = await fetch(`${base}/chat/completions`, {
    method: "POST", headers: {Authorization: `Bearer ${key}`, "Content-Type": "application/json"},
    body: JSON.stringify({model: RLOO_MODEL, messages})});
  if (!answer.ok) throw new Error(await answer.text());
  messages.push((await answer.json()).choices[0].message, {role: "user", content: `${turn}`});
}
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node in the PATH")
def test_an_agent_may_be_written_in_another_language(tmp_path):
    path = tmp_path / "agent.mjs"
    path.write_text(NODE)
    generator = proxy_generator(["node", str(path)], counted)
    ((row,),) = [g.rollouts for g in play_agents(generator)]
    assert row.failed is None and [t.text for t in row.turns] == ["answer 1", "answer 2"]
    assert row.episode_facts["retokenised"] == 0

"""External agents for tests: real processes that talk to the proxy with nothing but the library."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_cases import ScriptedSampler, chat_tokenizer, write_file

from rloo_cli.agents.common import call_parsers
from rloo_cli.agents.common.turn_rendering import TurnRenderer
from rloo_cli.agents.external.conversation import ExternalRules
from rloo_cli.agents.external.generator import AgentLaunch, ProxyGenerator
from rloo_cli.agents.proxy import Config
from rloo_cli.data.batch import Group
from rloo_cli.data.render import render_prompt

# An agent of up to three turns; one in a few asks once and fails.
SHORT_TALKS = """
messages = list(ROW["prompt"])
for turn in range(3):
    status, answer = post("/chat/completions", {"model": "policy", "messages": messages})
    if status != 200 or answer["choices"][0]["finish_reason"] == "length":
        break
    messages += [answer["choices"][0]["message"], {"role": "user", "content": f"more {turn}"}]
    if int(os.environ["RLOO_SEED"]) % 7 == 0:
        raise SystemExit(3)
post("/rloo/reward", {"reward": len(messages[-1]["content"]) % 5})
"""
# What every agent of the tests begins with; without site-packages a Python starts at once.
HEAD = """
import json, os, signal, socket, sys, threading, time, urllib.error, urllib.request
BASE, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
ROW = json.loads(os.environ["RLOO_ROW"])


def post(path, body, key=KEY, base=BASE):
    request = urllib.request.Request(base + path, json.dumps(body).encode(), method="POST")
    request.add_header("Authorization", "Bearer " + key)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def chat(messages, **more):
    status, answer = post("/chat/completions", {"model": "policy", "messages": messages, **more})
    if status != 200:
        raise SystemExit(f"{status} {answer['error']['code']}: {answer['error']['message']}")
    return answer["choices"][0]["message"]


def played(turns=2):
    messages = [{"role": "system", "content": "brief"}, *ROW["prompt"]]
    for turn in range(turns):
        messages.append(chat(messages))
        messages.append({"role": "user", "content": f"and then? {turn}"})
    return messages


"""
KEYS: dict[str, Any] = {
    "max_turns": 6, "max_episode_tokens": None, "parser": "hermes", "max_seconds": 20.0,
    "renderer": "difference", "max_rows": 1,
    "host": "127.0.0.1", "port": 0, "workers": 16, "token_env": None, "lifetime": "episode",
}  # fmt: skip
Script = Callable[[str, int], str]


def agent_command(folder: Path, text: str, name: str = "agent.py") -> list[str]:
    """The command of an agent that is written in Python, after HEAD."""
    return [sys.executable, "-I", "-S", write_file(folder, HEAD + text, name)]


def proxy_generator(
    command: list[str] | None, script: Script, template: str = "chatml", max_tokens: int = 4000,
    token: str = "", per_run: bool = False, **keys: Any,
) -> ProxyGenerator:  # fmt: skip
    """Episodes of agents with this command, sampled by a script."""
    tokenizer = chat_tokenizer(template)
    config = Config(kind="proxy", command="x", **KEYS | keys)
    renderer = TurnRenderer(tokenizer, {}, {tokenizer.eos_token_id})
    parser = call_parsers.choose_parser(config.parser, tokenizer)[1]
    rules = ExternalRules(renderer, parser, config.max_turns, config.max_rows, 64, max_tokens)
    launch = AgentLaunch(command, token, per_run)
    return ProxyGenerator(ScriptedSampler(tokenizer, script), rules, config, launch)


def row_groups(generator: ProxyGenerator, *rows: dict[str, object]) -> list[Group]:
    """A group for each row, whose prompt is `go`."""
    prompt = [{"role": "user", "content": "go"}]
    ids = render_prompt(prompt, generator.rules.renderer.tokenizer, {})
    return [Group(i, dict(row), prompt, ids) for i, row in enumerate(rows)]


def play_agents(
    generator: ProxyGenerator, *rows: dict[str, object], k: int = 1, close: bool = True
) -> list[Group]:
    """Episodes of these rows, K each."""
    groups = row_groups(generator, *(rows or ({},)))
    try:
        generator.generate(groups, [[100 * i + j for j in range(k)] for i in range(len(groups))])
    finally:
        if close:
            generator.close()
    return groups

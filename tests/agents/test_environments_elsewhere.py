"""The environment of a server that docs/agents.md shows, with its client."""

import re

import pytest
from agent_cases import call_text, class_agent, episode_generator, play
from environment_servers import program_started

from rloo_cli.utils.paths import PACKAGE

PAGE = PACKAGE.parent / "docs" / "agents.md"

pytestmark = pytest.mark.process


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Writes both files of the page, and has the token that it names. -> (server, class)"""
    for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / name).write_text(text)
    server = tmp_path / "counter_server.py"
    assert server.read_text().count("8080") == 1
    server.write_text("import sys\n" + server.read_text().replace("8080", "int(sys.argv[1])"))
    monkeypatch.setenv("COUNTER_TOKEN", "sesame-7319")
    return server, f"{tmp_path / 'counter_client.py'}:Counter"


def counted(spec, monkeypatch, url, parse=call_text, **keys):
    """A group of two episodes that count 4 up, 1 down and then 4 up, from 2."""

    def script(text, seed):
        return parse("add", by=-1 if text.count("<tool_response>") == 1 else 4)

    monkeypatch.setenv("COUNTER_URL", url)
    config = class_agent({"counter": spec}, **keys)
    return play(episode_generator(config, script), {"start": 2}, k=2)[0].rollouts


def test_the_page_plays_an_episode(page, monkeypatch):
    server, spec = page
    with program_started(server, "PORT") as (url, _):
        for row in counted(spec, monkeypatch, url):
            got = [turn.observation[0]["content"] for turn in row.turns[1:]]
            assert got[0] == "6" and "it only counts upwards" in got[1]
            assert row.episode_facts["ended_by"] == "done" and row.failed is None
            assert row.environment_reward == 10.0


def test_a_server_that_dies_in_mid_episode_and_one_that_wants_another_token_give_no_score(
    page, monkeypatch
):
    server, spec = page
    with program_started(server, "PORT", COUNTER_TOKEN="another") as (url, process):
        assert all("401" in row.failed for row in counted(spec, monkeypatch, url))
    with program_started(server, "PORT") as (url, process):

        def kill_then_call(name, **arguments):
            process.kill()
            process.wait()
            return call_text(name, **arguments)

        for row in counted(spec, monkeypatch, url, kill_then_call):
            assert "Connection refused" in row.failed and row.environment_reward is None
            assert len(row.turns) > 1

"""Tools that misbehave: each is an error that the model is told of, or a row without a score."""

import os
import resource
import threading
import time
from pathlib import Path

import pytest
from agent_cases import call_text, class_agent, episode_generator, play, tools_agent, write_file

from rloo_cli.agents.common.tool_processes import ToolProcesses

pytestmark = pytest.mark.process

HEAD = "import os, signal, sys, time\n\n"
FUNCTION = '''
def tool(items: list[int]) -> str:
    """Does something.

    Args:
        items: Numbers.
    """
    BODY
'''
# What it does -> (its body, what the model is told).
TOLD = {
    "raises": ("raise ValueError('gone')", "ValueError: gone"),
    "leaves": ("sys.exit(3)", "SystemExit: 3"),
    "hangs": ("time.sleep(60)", "no answer within 1 s"),
    "hangs_in_c": ("signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)); time.sleep(60)",
                   "no answer within 1 s"),
    "returns_a_lot": ("return 'x' * 50_000_000", "[cut]"),
    "returns_no_string": ("return {'a': [1, None]}", "{'a': [1, None]}"),
    "returns_odd_text": ("return '\\udc80 \\x00 ok'", "ok"),
    "kills_its_process": ("os.kill(os.getpid(), 9)", "its process exited during the call"),
    "kills_what_forked_it": ("os.kill(os.getppid(), 9); time.sleep(60)", "its process exited"),
    "forks": ("os.fork(); return 'both'", "both"),
    "prints": ("print('noise' * 1000); sys.stderr.write('more'); return 'said'", "said"),
    "changes_its_arguments": ("items.clear(); return str(items)", "[]"),
    "closes_stdout": ("os.close(1); os.close(2); return 'quiet'", "quiet"),
    "closes_everything": ("os.closerange(0, 256); return 'gone'", "exited during the call"),
}  # fmt: skip
AGENT = {"max_tool_s": 20.0, "max_observation_tokens": 60, "max_turns": 3}


def function(tmp_path, body):
    path = write_file(tmp_path, HEAD + FUNCTION.replace("BODY", body))
    return f"{path}:tool"


def once(text, seed):
    """A call, and after whatever it was told an answer."""
    got = text.count("<tool_response>") > 0
    return "the end" if got else call_text("tool", items=[1, 2])


@pytest.mark.slow_but("raises", "hangs_in_c", "returns_odd_text", "kills_what_forked_it")
@pytest.mark.parametrize("name", TOLD)
def test_a_tool_that_misbehaves_is_an_answer_and_the_run_goes_on(tmp_path, name):
    body, got = TOLD[name]
    limits = AGENT | ({"max_tool_s": 1.0} if "no answer" in got else {})
    generator = episode_generator(tools_agent([function(tmp_path, body)], **limits), once)
    groups = play(generator, {}, {"prompt": "again"})
    for (row,) in (group.rollouts for group in groups):
        assert got in row.turns[1].observation[0]["content"]
        assert row.failed is None and row.episode_facts["ended_by"] == "answer"
        assert row.turns[0].calls == [{"name": "tool", "arguments": {"items": [1, 2]}}]


def test_what_a_tool_prints_is_labelled_on_the_screen_and_in_the_log(tmp_path, capsys, caplog):
    caplog.set_level("INFO")
    spec = function(tmp_path, TOLD["prints"][0])
    generator = episode_generator(tools_agent([spec], **AGENT), once)
    play(generator)
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert lines and all(line.startswith("printed by a tool: ") for line in lines)
    assert "noise" in lines[0] and said.out == ""
    assert any(lines[0][:80] in record.getMessage() for record in caplog.records)


def test_an_error_may_leave_the_row_out_instead(tmp_path):
    spec = function(tmp_path, "raise ValueError('gone')")
    generator = episode_generator(tools_agent([spec], on_tool_error="mask", **AGENT), once)
    (group,) = play(generator)
    assert group.rollouts[0].failed == "tool: ValueError: gone"
    assert group.rollouts[0].episode_facts["ended_by"] == "failed"


CLASS = '''
class World:
    def reset(self, **row):
        RESET
        self.count = 0

    def tool(self, items: list[int]) -> str:
        """Does something.

        Args:
            items: Numbers.
        """
        self.count += 1
        TOOL
        return "fine"

    def get_reward(self) -> float:
        REWARD
        return 1.0
'''


@pytest.mark.slow_but(
    "RESET-os.kill(os.getpid(), 9)-reset: its process exited", "REWARD-return float('nan')-None"
)
@pytest.mark.parametrize(
    ("where", "body", "why"),
    [
        ("RESET", "os.kill(os.getpid(), 9)", "reset: its process exited"),
        ("RESET", "raise KeyError('column')", "reset: KeyError: 'column'"),
        ("TOOL", "os.kill(os.getpid(), 9)", "tool: its process exited during the call"),
        ("TOOL", "time.sleep(60)", "tool: no answer within 2 s"),
        ("REWARD", "raise ValueError('no reward')", "get_reward: ValueError: no reward"),
        ("REWARD", "return float('nan')", None),
    ],
)
def test_an_environment_that_dies_leaves_its_row_out_and_its_siblings_alone(
    tmp_path, where, body, why
):
    guard = f"if row.get('bad'):\n            {body}" if where == "RESET" else body
    text = HEAD + CLASS.replace(where, guard)
    for rest in ("RESET", "TOOL", "REWARD"):
        text = text.replace(rest, "pass")
    path = write_file(tmp_path, text)
    limits = AGENT | ({"max_tool_s": 2.0} if why is not None and "no answer" in why else {})
    generator = episode_generator(class_agent({"world": f"{path}:World"}, **limits), once)
    groups = play(generator, {"bad": True}, {"bad": False}, k=2)
    failed = [[row.failed for row in group.rollouts] for group in groups]
    if why is None:
        why = "get_reward: it is nan, not a finite number"
    assert all(text is not None and text.startswith(why) for text in failed[0])
    if where == "RESET":
        assert failed[1] == [None, None]
        assert [row.environment_reward for row in groups[1].rollouts] == [1.0, 1.0]
        assert [row.length for row in groups[0].rollouts] == [1, 1]  # a token stands for the row


def test_kill_9_of_an_environment_in_mid_episode_leaves_its_row_out_alone(tmp_path):
    got = tmp_path / "pid"
    body = f"""if self.bad:
            open({str(got)!r} + ".new", "w").write(str(os.getpid()))
            os.rename({str(got)!r} + ".new", {str(got)!r})
            time.sleep(60)"""
    text = HEAD + CLASS.replace("RESET", "self.bad = row.get('bad')").replace("TOOL", body)
    path = write_file(tmp_path, text.replace("REWARD", "pass"))

    def kill_when_told() -> None:
        limit = time.monotonic() + 30
        while not got.exists() and time.monotonic() < limit:
            time.sleep(0.01)
        os.kill(int(Path(got).read_text()), 9)

    killer = threading.Thread(target=kill_when_told)
    killer.start()
    config = class_agent({"world": f"{path}:World"}, **AGENT | {"max_tool_s": 40.0})
    groups = play(episode_generator(config, once), {"bad": True}, {"bad": False})
    killer.join()
    assert groups[0].rollouts[0].failed.startswith("tool: its process")
    assert groups[0].rollouts[0].episode_facts["ended_by"] == "failed"
    assert groups[1].rollouts[0].failed is None and groups[1].rollouts[0].environment_reward == 1.0


def test_a_run_may_hold_more_files_than_select_takes(tmp_path):
    path = write_file(tmp_path, HEAD + CLASS.replace("RESET", "pass").replace("TOOL", "pass"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    pool = ToolProcesses([f"{path}:World"], keep=1)
    try:
        message = {"do": "reset", "spec": f"{path}:World", "row": {}, "seed": 1}
        answer = pool.take_new().request(message | {"max_characters": 100}, 60.0)
        assert answer["text"] is None
    finally:
        pool.close()
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

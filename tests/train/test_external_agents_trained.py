"""Training on episodes of external agents, among them one that is written with OpenAI's client."""

import math
import sys
from pathlib import Path

import loop_cases
import pytest
import torch
from agent_cases import CHATML, write_file
from assert_refused import assert_refused

from rloo_cli.agents import proxy
from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.process

AGENT = """
import json, os
import openai

client, row = openai.OpenAI(), json.loads(os.environ["RLOO_ROW"])
model = os.environ["RLOO_MODEL"]
assert [m.id for m in client.models.list()] == [model]
messages = [{"role": "system", "content": "short"}, *row["prompt"]]
for turn in range(1):
    stream = client.chat.completions.create(model=model, messages=messages, stream=True)
    choices = [piece.choices[0] for piece in stream]
    if choices[-1].finish_reason == "length":
        break
    said = "".join(choice.delta.content or "" for choice in choices)
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    answer = client.responses.create(model=model, input=messages)
    if answer.incomplete_details is not None:
        break
    messages += [{"role": "assistant", "content": answer.output_text}]
    messages += [{"role": "user", "content": "more"}]
if int(os.environ["RLOO_SEED"]) % 5 == 0:
    os.kill(os.getpid(), 9)
"""
WORDS = (
    "data.path=make:tiny_chat", "agent=proxy", "generation.max_completion_length=6",
    "train.prompts_per_step=2", "algorithm.num_generations=4", "data.eval_split=null",
    "agent.max_seconds=120",
)  # fmt: skip


@pytest.mark.slow
def test_a_loop_that_is_written_with_openais_client_trains_two_steps(tmp_path):
    pytest.importorskip("openai", reason="the agent is written with the package openai")
    command = f"{sys.executable} {write_file(tmp_path, AGENT, 'agent.py')}"
    template = write_file(tmp_path, CHATML.replace("<|im_end|>", "<eos>"), "chat.jinja")
    run = loop_cases.make(
        tmp_path, *WORDS, f"agent.command='{command}'", f"model.chat_template={template}",
        loop_cases.ENDS,
    )  # fmt: skip
    asked, inner = [], run.generator.inner
    whole_waves = inner.generate

    def listen(groups, *arguments, **options):
        whole_waves(groups, *arguments, **options)
        asked.extend(g.prompt_ids + r.completion_ids for g in groups for r in g.rollouts)

    inner.generate = listen
    try:
        for _ in range(2):
            moved, line, batch = loop_cases.step(run)
            rows = [(g, r) for g in batch.groups for r in g.rollouts]
            assert float(moved.norm()) > 0 and math.isfinite(line["grad_norm"])
            assert line["agent/retokenised"] == line["agent/refused"] == 0
            killed = [r.failed for _, r in rows if r.seed % 5 == 0]
            assert all("killed by SIGKILL" in why for why in killed)
            assert line["agent/failures"] == len(killed) / len(rows)
            for group, row in rows:
                assert (row.failed is None) == (row.seed % 5 != 0)
                assert group.prompt_ids + row.completion_ids in asked  # the engine's own ids
        assert max(len(r.turns) for _, r in rows) == 2
    finally:
        run.generator.close()


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["agent.command=no-such-program x"],
        ['agent.command="python \\"x"'],
        ["agent.token_env=NO_SUCH_TOKEN"],
        ["agent.command=python x", "agent.token_env=HOME"],
        ["agent.lifetime=run"],
        ["agent.command=python x", "agent.host=192.0.2.1"],
    ],
    ids=["nothing", "no program", "one quote", "no token", "both", "run", "host"],
)
def test_an_agent_that_could_not_be_started_is_refused_before_weights_load(words, sentence):
    run = check.check_config(compose_config(["+recipe=smoke", "agent=proxy", *words]))
    with pytest.raises(ConfigError) as refused:
        proxy.load_tools(run.agent)
    problem = assert_refused(refused, 2, where="agent.")
    if "Errno" not in problem.why:  # the system's own words
        sentence(refused)


CUTTING = """
import json, os, urllib.request
BASE, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
row = json.loads(os.environ["RLOO_ROW"])


def chat(messages):
    body = json.dumps({"model": os.environ["RLOO_MODEL"], "messages": messages}).encode()
    request = urllib.request.Request(BASE + "/chat/completions", body, method="POST")
    request.add_header("Authorization", "Bearer " + KEY)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["choices"][0]["message"]


chat(row["prompt"])
chat([{"role": "user", "content": "so far: a summary"}])
chat([{"role": "user", "content": "and another one"}])
"""


def test_rows_of_an_agent_that_cuts_its_history_train_as_one_episode(tmp_path):
    """The trainer's log-probabilities of all rows are the sampler's: each reads itself alone."""
    command = f"{sys.executable} -I -S {write_file(tmp_path, CUTTING, 'agent.py')}"
    template = write_file(tmp_path, CHATML.replace("<|im_end|>", "<eos>"), "chat.jinja")
    run = loop_cases.make(
        tmp_path, *WORDS, f"agent.command='{command}'", f"model.chat_template={template}",
        "agent.max_rows=3", "generation.ignore_eos=false", loop_cases.ENDS,
    )  # fmt: skip
    try:
        moved, line, batch = loop_cases.step(run)
        rollouts = [r for g in batch.groups for r in g.rollouts if r.failed is None]
        assert float(moved.norm()) > 0 and line["sampling/logp_diff_max"] < 1e-4
        cut = [r for r in rollouts if r.row_starts]
        assert cut and {len(r.row_starts) for r in cut} <= {1, 2}
        for group in batch.groups:
            for k, rollout in enumerate(group.rollouts):
                if rollout.failed is None:
                    got = torch.tensor(rollout.sampled_logp)
                    assert (group.old_logp[k] - got).abs().max() < 1e-4
    finally:
        run.generator.close()


PROXY = ("+recipe=smoke", "agent=proxy", "agent.command=python x")
PAIR = ("distributed=ddp", "distributed.num_processes=2")


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["agent.max_tool_s=3"], "agent.max_tool_s"),
        (["agent.port=4000", *PAIR], "agent.port = 4000"),
        (["agent.command=null", *PAIR], "2 ranks"),
        (["agent.command=null", "distributed=ddp"], "agent.command"),
        (["agent.max_seconds=600", *PAIR], "agent.max_seconds = 600"),
        (["agent=tools", "agent.tools=[a.py:b]", "agent.max_tool_s=80", *PAIR],
         "agent.max_tool_s = 80"),
    ],
    ids=["tools", "port", "two ranks", "ranks", "rollout", "calls"],
)  # fmt: skip
def test_keys_of_tools_and_what_several_ranks_cannot_have_are_refused(words, key, sentence):
    kept = [w for w in (*PROXY, *words) if not ("agent=tools" in words and "command" in w)]
    with pytest.raises(ConfigError) as refused:
        check.check_config(compose_config(kept))
    assert_refused(refused, 2, key)
    sentence(refused, folder=Path.cwd())

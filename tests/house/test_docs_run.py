"""Every `rloo` command of the pages runs as printed, without a network.

The commands of a page run one after the other in a folder that holds the files the pages show.
Where a model or data set would be fetched, `+debug=cpu` stands behind the words, with `root=runs`
so that later commands find the run. SHORTER has what else differs from the printed words, and why.
Servers of vLLM, Slurm and several processes have tests of their own (WHERE).
"""

import os
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from endpoint_cases import chats
from fork_cases import Forked
from test_docs import PAGES, Command, of_rloo, shown_files

from rloo_cli.utils.errors import FOUND_CODE, RunError

FINDING_VERBS = (
    "doctor",
    "reward",
    "replay",
    "record",
)  # that say by their exit code that they found something
VERBS = ("train", "eval", "sft", "reward-model")  # that would load a model
# What is run in place of printed words: runs of +debug=cpu have two steps, and names are stand-ins.
SHORTER = {
    "checkpoint-200": "checkpoint-2",
    "--step 200": "--step 2",
    "ORG/NAME": "make:tiny",
    "--multirun +recipe=compare": "--multirun +recipe=compare algorithm=rloo,grpo seed=1",
    "algorithm=rloo,grpo,reinforce,remax seed=1,2,3": "algorithm=rloo,remax seed=1",
    "data.path=openai/gsm8k data.name=main data.prompt_column=question": "data.path=make:tiny",
    " distributed=fsdp2 distributed.num_processes=8": "",  # +debug=cpu has one process
    "text: ' The answer is '": "text: 'is'",  # of the tiny tokenizer's ids, it has too many
    "algorithm=dapo": "algorithm=dapo algorithm.zero_std_groups=keep",  # a random model scores 0
    "'runs/compare/quickstart/compare-*' --out runs/compare/quickstart/comparison": "'compare-*'",
}
# Commands that are run elsewhere, by what stands in them -> where.
WHERE = {
    "vllm": "test_vllm_quickstart.py, test_vllm_serve.py: real servers",
    "teacher.base_url": "test_teacher_on_server.py: a real server",
    "slurm submit": "test_slurm_runs.py: a real Slurm",
    "submitit": "test_slurm_runs.py",
    "rloo fetch": "test_fetch.py: it is for machines with a network",
    "rloo push tracked --repo": "test_push.py: it is for machines with a network",
    "judge=openai": "test_eval_judge.py: a judge that answers",
    "rloo sweep": "test_sweep.py: trials are processes of their own",
    "distributed.num_processes=2": "test_ranks_command.py: two ranks",
    "accelerate_config": "test_accelerate_file.py: its eight processes are too many for +debug=cpu",
    "tldr_mini": "test_tldr_mini.py: the whole pipeline takes minutes",
    "vision_mini": "test_vision_mini.py: the whole recipe, and its control",
    "compare_tldr": "bench/compare.py makes these runs",
    "hydra/sweeper=optuna": "test_multirun.py, where Optuna is there",
    "quantization=4bit": "test_quantized.py, where bitsandbytes is there",
    "verify-resume": "test_resume_proof.py: three trainings",
    "rloo samples vowels": "test_samples.py: two steps write none of its samples",
    "kill-orphans": "test_leftovers.py: it wants a run that was killed",
    "runs/tldr_1b": "scripts of a cluster",
    "agent=proxy": "test_external_agents_trained.py: an agent in a process of its own",
    "agent.tools=": "test_episodes.py: +debug=cpu leaves an agent out",
    "agent=class": "test_episodes.py: +debug=cpu leaves an agent out",
    "agent=rollout": "test_rollout_function.py: +debug=cpu leaves an agent out",
    "turn_rewards=credit": "test_turn_credit.py: a run of several turns, which +debug=cpu has not",
    "runs/real_model": "bench/real_model.py makes these runs",
}
if find_spec("reasoning_gym") is None:
    WHERE["reasoning_gym"] = "test_tasks.py: its package is not installed here"
if find_spec("tensorboard") is None:
    WHERE["rloo sync"] = "test_trackers.py: its package is not installed here"


def elsewhere(command: Command) -> bool:
    return any(words in command.text for words in WHERE)


def words_of(command: Command) -> list[str]:
    """The printed words as they are run."""
    text = command.text
    for printed, shorter in SHORTER.items():
        text = text.replace(printed, shorter)
    words = shlex.split(text)[1:]
    verb = words[0]
    planned = "--dry-run" in words
    named = any(w.startswith("+recipe=") for w in words)
    if verb in VERBS and named and not planned and "+debug=cpu" not in words:
        words += ["+debug=cpu", "root=runs"]
    return words


def run(command: Command, forked: Forked) -> None:
    """Run it; one that the page shows with an `error:` is refused with just that line."""
    try:
        code = forked(*words_of(command))
        refusal = ""
    except RunError as error:
        code, refusal = error.code, error.render()
    said = refusal + forked.said()
    shown = f"{command.line}: {command.text}\n{said[-3000:]}"
    if command.said.startswith("error:"):
        assert code and command.said in said.splitlines(), shown
    else:
        finds = words_of(command)[0] in FINDING_VERBS
        assert code in ((0, FOUND_CODE) if finds else (0,)), shown


QUICK = ("README.md", "start.md")  # test_docs.py composes the commands of all pages


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in PAGES
        if any(not elsewhere(c) for c in of_rloo(name))
    ],
)
def test_the_commands_of_a_page_run(
    name: str,
    forked: Forked,
    serve: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown_files(forked.folder)
    judge = serve(chats(lambda text: "A"))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert judge and os.environ["HF_HUB_OFFLINE"]
    for command in of_rloo(name):
        if not elsewhere(command):
            run(command, forked)


def test_what_runs_elsewhere_names_a_test_that_is_there() -> None:
    tests = {path.name for path in Path(__file__).parents[1].rglob("test_*.py")}
    for where in WHERE.values():
        for named in where.replace(":", ",").split(","):
            if named.strip().startswith("test_"):
                assert named.strip() in tests, named

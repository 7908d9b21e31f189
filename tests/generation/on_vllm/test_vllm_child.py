"""What runs inside the process of a colocated engine, with vLLM's real engine core in it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from assert_refused import assert_refused

from rloo_cli.config import check as config
from rloo_cli.config.compose import compose_config
from rloo_cli.generation.vllm import arguments, child_engine
from rloo_cli.generation.vllm.engine import EngineLost
from rloo_cli.utils.errors import GenerationError

pytestmark = pytest.mark.vllm

# One process for all that needs vLLM here: its imports and its engine take most of the time.
SCRIPT = """
import json, sys
from types import SimpleNamespace
from rloo_cli.config import check as config
from rloo_cli.config.compose import compose_config
from rloo_cli.generation.vllm import arguments

words = ["+recipe=smoke", "generation=vllm_colocate", "model.path=make:tiny"]
run = config.check_config(compose_config(words))
keys = run.generation.colocate
import os
os.environ.update(arguments.engine_environment(run.model, run.generation))
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM
from rloo_cli.generation.vllm import child_main as child
from rloo_cli.generation.vllm.engine import EngineRequest

given = arguments.build_engine_arguments(run, keys, 0)
given |= {"weight_transfer_config": {"backend": "rloo_gloo"}}
llm = LLM(**given)
sent = []
pipe = SimpleNamespace(send_pickled=sent.append, has_input=lambda: False)
engine = child.ChildEngineCalls(llm, pipe)
params = {"seed": 1, "temperature": 1.0, "max_tokens": 4, "logprobs": 0, "detokenize": False,
          "ignore_eos": True}
short = EngineRequest([8, 9], params | {"max_tokens": 2})
engine.generate([EngineRequest([5, 6, 7], params), short])
scheduler = llm.llm_engine.engine_core.engine_core.scheduler
before = scheduler.has_requests()
child.drain_scheduler(llm.llm_engine)
after = scheduler.has_requests()
answers = {m[1]: m[2] for m in sent if m[0] == "done"}

from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from rloo_cli.generation.vllm.receive import incomplete_layers, shard_vocab_size
import torch
from vllm.config import set_current_vllm_config

def shares(vocabulary, size):
    found = []
    with set_current_vllm_config(llm.llm_engine.vllm_config):
        for rank in range(size):
            group = SimpleNamespace(rank_in_group=rank, world_size=size)
            layer = VocabParallelEmbedding(vocabulary, 8, parallel_group=group)
            found.append([shard_vocab_size(layer), layer.num_embeddings_per_partition])
    return found

from vllm.distributed.device_communicators import shm_broadcast
from vllm.utils.network_utils import get_open_zmq_ipc_path
import zmq
reader = shm_broadcast.SpinCondition(True, zmq.Context(), get_open_zmq_ipc_path())

print("FOUND " + json.dumps({
    "spin_s": reader.busy_loop_s, "look_ms": shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS,
    "before": before, "after": after,
    "lengths": [len(answers[i].ids) for i in (0, 1)],
    "finite": all(-50 < x <= 0 for a in answers.values() for x in a.logp),
    "same": all(len(a.ids) == len(a.logp) for a in answers.values()),
    "shares": {str(v): shares(v, 2) for v in (50257, 49155, 128, 130)},
}))
"""


def colocated(folder: Path, **arguments_: Any) -> child_engine.ColocatedEngine:
    """An engine of these arguments that was not started yet."""
    words = ["+recipe=smoke", "generation=vllm_colocate", "generation.colocate.max_restarts=1"]
    run = config.check_config(compose_config(words))
    keys = cast(Any, run.generation).colocate
    environment = arguments.engine_environment(run.model, run.generation)
    return child_engine.ColocatedEngine(
        keys, arguments_, environment, folder / "engine.log", "gloo"
    )


def test_an_engine_that_cannot_start_says_why_at_once(tmp_path: Path) -> None:
    engine = colocated(tmp_path, model=str(tmp_path / "none"), nonsense=1)
    with pytest.raises(GenerationError) as refused:
        engine.connect()
    engine.close()
    assert engine.restarts == 0
    assert_refused(refused, 6, "argument 'nonsense'")
    assert "Traceback" in (tmp_path / "engine.log").read_text()


def test_a_lost_engines_last_word_is_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence
) -> None:
    class Dead:
        def __init__(self, environment: dict[str, str], log: Path) -> None:
            log.write_text("the log's last line\n")

        def send(self, message: object) -> None:
            raise EngineLost("the engine's process exited with -11")

        def kill(self) -> None:
            pass

    monkeypatch.setattr(child_engine, "ChildPipe", Dead)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    engine = colocated(tmp_path)
    for _ in range(2):
        with pytest.raises(EngineLost) as lost:
            engine.connect()
        engine.discard_engine(str(lost.value))
    with pytest.raises(GenerationError) as given_up:
        engine.connect()
    sentence(given_up)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the script found in its process."""
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env, timeout=300
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    values: dict[str, Any] = json.loads(lines[0].removeprefix("FOUND "))
    return values


@pytest.mark.slow
def test_a_scheduler_remembers_finished_requests_until_it_is_drained(found: Any) -> None:
    assert found["before"] is True and found["after"] is False


@pytest.mark.slow
def test_log_probabilities_come_in_plain_lists_one_for_each_token(found: Any) -> None:
    assert found["lengths"] == [4, 2] and found["same"] and found["finite"]


@pytest.mark.slow
def test_the_padding_of_a_vocabulary_is_all_in_the_last_share(found: Any) -> None:
    for vocabulary, shares in found["shares"].items():
        assert sum(sent for sent, _ in shares) == int(vocabulary)
    assert found["shares"]["50257"] == [[25152, 25152], [25105, 25152]]
    assert found["shares"]["130"] == [[96, 96], [34, 96]]


@pytest.mark.slow
def test_a_waiting_process_of_an_engine_without_a_gpu_leaves_its_core_to_others(
    found: Any,
) -> None:
    assert found["spin_s"] == 0.01, "1 s of spinning starves whoever has something to do"
    assert found["look_ms"] == 250, "a sleeper whose word was lost would lie for 5 s"


def child() -> Any:
    import rloo_cli.generation.vllm.child_main as module

    return module


def test_a_batch_that_is_still_on_its_way_is_taken_in_before_sleep() -> None:
    """With asynchronous scheduling, which no CPU has."""
    queue, steps = ["batch", "batch"], []

    def step() -> None:
        steps.append(queue.pop())

    core = SimpleNamespace(scheduler=SimpleNamespace(has_requests=lambda: False), batch_queue=queue)
    engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core), step=step)
    child().drain_scheduler(engine)
    assert len(steps) == 2 and not queue
    child().drain_scheduler(
        SimpleNamespace(engine_core=SimpleNamespace())
    )  # a core of its own drains itself


@pytest.mark.parametrize(("adapter", "level"), [("a LoRA", 1), (None, 2)])
def test_weights_that_are_sent_only_once_survive_sleep(adapter: Any, level: int) -> None:
    """Of a base under an adapter only the adapter is sent again."""
    slept: list[int] = []
    core = SimpleNamespace(scheduler=SimpleNamespace(has_requests=lambda: False), batch_queue=None)
    llm = SimpleNamespace(
        sleep=lambda level: slept.append(level),
        llm_engine=SimpleNamespace(engine_core=SimpleNamespace(engine_core=core)),
    )
    engine = SimpleNamespace(llm=llm, adapter=adapter)
    child().ChildEngineCalls.sleep(engine, "weights")
    assert slept == [level]

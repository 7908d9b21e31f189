"""A policy, the config of a run with rollout servers, and servers: a fake one each, a real one for
all (the fixture `server` of conftest.py).
"""

import functools
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import loop_cases
import pytest
import torch
from cli_cases import Rloo, surroundings
from fake_server import Fake
from transformers import AutoModelForCausalLM

from rloo_cli.config.schema import RunConfig
from rloo_cli.data.batch import Group
from rloo_cli.data.synthetic import tiny
from rloo_cli.distributed.device_count import gpu_uuids, visible_gpus
from rloo_cli.generation.vllm import handshake, server_file
from rloo_cli.generation.vllm.generator import VllmGenerator, build_server_generator
from rloo_cli.generation.vllm.handshake import ExpectedServer
from rloo_cli.generation.vllm.http_engine import HttpEngine
from rloo_cli.generation.vllm.weights import ModelWeightSource
from rloo_cli.policy.model import Policy
from rloo_cli.utils import child_process

WORDS = (
    "model.path=make:tiny", "model.dtype=float32", "data.max_prompt_length=32",
    "generation.max_completion_length=16", "generation=vllm_server",
)  # fmt: skip
PLACES = 48  # of prompt and completion, in that config
PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12], [13, 14]]
SEEDS = [[100 * i + k for k in range(4)] for i in range(len(PROMPTS))]


@dataclass(frozen=True)
class Real:
    """The session's real server, which `rloo vllm-serve` started."""

    url: str
    token: str
    folder: Path  # of its server.json
    model: str  # path of what it loaded first


def server_record(**changes: Any) -> server_file.ServerRecord:
    """What server.json says of a server that somebody started here; its process is init."""
    known = {
        "url": "http://127.0.0.1:1", "token": "t" * 32, "pid": 1, "group": 1,
        "pid_started": child_process.process_start_time(1), "host": platform.node(),
        "by": "vllm-serve", "model": "make:tiny", "dtype": "float32", "vllm": "0.32.0",
        "transfer": "gloo", "devices": [], "log": "",
    }  # fmt: skip
    return server_file.ServerRecord(**known | changes)


@functools.cache
def tokenizer() -> Any:
    """The tiny model's."""
    return tiny.tiny_tokenizer()


@functools.cache
def policy() -> Policy:
    """A tiny model whose head is zero: every token has the same probability, as the fake says."""
    os.environ.setdefault("RLOO_CACHE", loop_cases.cache())
    model = AutoModelForCausalLM.from_pretrained(
        tiny.tiny_model_folder(), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    return Policy(model, 1.0)


def config(*urls: str, **server: Any) -> RunConfig:
    """A run on these servers; `server` changes keys of generation.server. Waits are short."""
    run = loop_cases.checked((), WORDS)
    short = {"ready_timeout_s": 5.0, "reconnect_timeout_s": 5.0, "request_timeout_s": 30.0}
    given = {"base_url": list(urls)} | short | server
    keys = run.generation.server.model_copy(update=given)  # type: ignore[attr-defined]
    return changed(run, server=keys)


def changed(run: RunConfig, **keys: Any) -> RunConfig:
    """A run with other keys of `generation`."""
    return run.model_copy(update={"generation": run.generation.model_copy(update=keys)})


def right() -> dict[str, Any]:
    """What GET /rloo of a server for that config answers."""
    return {
        "protocol": 1, "model": "make:tiny", "dtype": "float32", "vllm": "0.32.0",
        "tokenizer": handshake.tokenizer_fingerprint(tokenizer()), "max_model_len": PLACES,
        "logprobs_mode": "processed_logprobs", "transfer": "gloo",
        "devices": gpu_uuids(visible_gpus()[:1]),
    }  # fmt: skip


def engine(run: RunConfig, folder: Path, **other: Any) -> HttpEngine:
    """The client's side; `other` changes what it expects."""
    expects = {
        "model": "make:tiny",
        "dtype": "float32",
        "max_model_len": PLACES,
        "transfer": "gloo",
    }
    expects |= {"tokenizer": handshake.tokenizer_fingerprint(tokenizer())} | other
    return HttpEngine(run.generation.server, folder, ExpectedServer(**expects))  # type: ignore[attr-defined]


def weights() -> ModelWeightSource:
    """The policy's weights as an engine takes them."""
    return ModelWeightSource(policy().model, torch.float32)


def groups(prompts: list[list[int]] = PROMPTS) -> list[Group]:
    """A group for each prompt, without rollouts."""
    return [Group(i, {}, "", prompt) for i, prompt in enumerate(prompts)]


def sampler(run: RunConfig, folder: Path, note: Any = lambda text: None) -> VllmGenerator:
    """The generator of such a run."""
    model = policy().model  # before the cache is asked for
    return build_server_generator(model, tokenizer(), run, 2048, folder, note)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """A fake server of one's own, whose token is in the environment."""
    made = Fake(right(), len(tokenizer()))
    monkeypatch.setenv("RLOO_SERVER_TOKEN", made.token)
    monkeypatch.setenv("RLOO_CACHE", loop_cases.cache())
    yield made
    made.close()


@contextmanager
def serving(root: Path, base: Path, *words: str) -> Iterator[Real]:
    """A real server of the tiny model in float32, in a folder of its own, while inside."""
    rloo = Rloo(root, surroundings(base))
    verb = rloo.start("vllm-serve", "+recipe=smoke", *WORDS, *words)
    folder, until = root / "runs" / "smoke", time.monotonic() + 300
    try:
        while (there := server_file.running_server(folder)) is None:
            said = (root / "out").read_text()
            assert verb.poll() is None and time.monotonic() < until, said
            time.sleep(0.2)
        yield Real(there.url, there.token, folder, there.model)
    finally:
        verb.terminate()
        verb.wait(60)

"""Sampling by a vLLM engine on the trainer's own device, in a child process that listens nowhere.

A child, because an engine inside the trainer's process re-seeds its random state. On a GPU the
weights are handed over by CUDA IPC, which copies nothing twice; without one by gloo.
"""

from collections.abc import Iterator
from typing import Any, Literal

from rloo_cli.config.schema import GenerationConfig, key
from rloo_cli.generation.vllm.config import EngineKeys, engine_key_problems
from rloo_cli.utils.errors import Problem

IMPLEMENTATION = "rloo_cli.generation.vllm.generator:build_colocate_generator"


class ColocateSection(EngineKeys):
    """`generation.colocate`: the engine's keys, and how it is started."""

    sleep: Literal["none", "kv", "weights"] = key(
        "What the engine lets go of while the trainer trains: nothing, its KV cache, all (GPUs)"
    )
    core_process: bool | None = key(
        "vLLM's scheduler and model in a process apart from what feeds them; null = on GPUs, where"
        " that would wait for Python",
        since="0.2",
        before=None,
    )
    ready_timeout_s: float = key("Until the engine is loaded", gt=0, le=1e6)
    sync_timeout_s: float = key("One weight update", gt=0, le=1e6)
    request_timeout_s: float = key("Without a token from the engine", gt=0, le=1e6)
    max_restarts: int = key("Times the engine is started again in a run", ge=0)


class Config(GenerationConfig):
    backend: Literal["vllm_colocate"] = key("Who samples: vLLM on the trainer's device")
    allow_untested: bool = key(
        "Use what nobody has tried: a vLLM below 0.32, or on GPUs what is refused until it was"
    )
    colocate: ColocateSection


def rules(run: Any) -> Iterator[Problem]:
    """What this backend forbids."""
    yield from engine_key_problems("generation.colocate", run.generation.colocate, run)
    if run.generation.colocate.transfer == "nccl":
        yield Problem(
            "generation.colocate.transfer = nccl cannot join two processes on one GPU",
            "generation.colocate.transfer",
            "NCCL wants a GPU for each of its members",
            "generation.colocate.transfer=auto",
        )

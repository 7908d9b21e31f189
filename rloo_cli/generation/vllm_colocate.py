"""Sampling by a vLLM engine on the trainer's own device, in a child process without open ports.

It is a child because an engine inside the trainer's process would reseed its random state. On a
GPU the weights are sent by CUDA IPC, which copies nothing twice; without a GPU by gloo.
"""

from collections.abc import Iterator
from typing import Literal

from rloo_cli.config.schema import key
from rloo_cli.generation.vllm.config import EngineConfig, EngineKeys, engine_key_problems
from rloo_cli.generation.vllm.sampling_params import sampling_kwargs_problems
from rloo_cli.utils.errors import Problem, value_problem

IMPLEMENTATION = "rloo_cli.generation.vllm.generator:build_colocate_generator"


class ColocateSection(EngineKeys):
    """`generation.colocate`: the engine's keys, and how it is started."""

    sleep: Literal["none", "kv", "weights"] = key(
        "What the engine frees while the trainer trains: nothing, its KV cache, all (GPUs)"
    )
    core_process: bool | None = key(
        "Run vLLM's scheduler and model in a separate process; null = only on GPUs, where"
        " they would otherwise wait for Python"
    )
    ready_timeout_s: float = key("Seconds until the engine is loaded", gt=0, le=1e6)
    sync_timeout_s: float = key("Seconds for one weight update", gt=0, le=1e6)
    request_timeout_s: float = key("Seconds without a token from the engine", gt=0, le=1e6)
    max_restarts: int = key("Most restarts of the engine in a run", ge=0)

    @property
    def freed_between_steps(self) -> str:
        return self.sleep


class Config(EngineConfig):
    section, shares_device = "colocate", True

    backend: Literal["vllm_colocate"] = key("Sampler: vLLM on the trainer's device")
    colocate: ColocateSection


def rules(config: Config, max_prompt_length: int | None) -> Iterator[Problem]:
    """The settings that this backend refuses. `max_prompt_length`: of data; None = unknown."""
    colocate, need = config.colocate, (max_prompt_length or 1) + config.max_completion_length
    yield from engine_key_problems("generation.colocate", colocate, need)
    yield from sampling_kwargs_problems(config.kwargs)
    if colocate.transfer == "nccl":
        what, why = "cannot join processes on one GPU", "NCCL needs a GPU for each of its ranks"
        yield value_problem("generation.colocate.transfer", "nccl", what, "auto", why)

"""Sampling by vLLM servers over HTTP, in their own processes, on their own GPUs or nodes.

There are three kinds: running servers named by `server.base_url`; one that `rloo
vllm-serve` started for the run, with a live `server.json` in its folder; or one that `rloo train`
starts, watches, restarts when it dies, and ends. Weights go from trainer to server directly, never
through HTTP, and every request needs the server's token.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from rloo_cli.config.schema import Positive, Text, key
from rloo_cli.generation.vllm.config import EngineConfig, EngineKeys, engine_key_problems
from rloo_cli.generation.vllm.sampling_params import sampling_kwargs_problems
from rloo_cli.utils.errors import Problem, value_problem

IMPLEMENTATION = "rloo_cli.generation.vllm.generator:build_server_generator"
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
WILDCARD_HOSTS = ("0.0.0.0", "::", "*", "")  # as an address to listen on: every interface


class ServerSection(EngineKeys):
    """`generation.server`: the engine's keys, and how it is reached."""

    only_with: ClassVar = {
        ".base_url": ("api_key_env", "reconnect_timeout_s"),
        ".base_url=null": (  # keys for starting a server
            "port", "data_parallel_size", "tensor_parallel_size", "gpu_memory_utilization",
            "kv_cache_gb", "max_num_seqs", "max_num_batched_tokens", "enforce_eager",
            "kv_cache_dtype", "enable_prefix_caching", "quantization", "model_impl",
            "batch_invariant", "extra", "max_restarts",
        ),
    }  # fmt: skip
    base_url: Text | list[Text] | None = key(
        "Addresses of running servers, e.g. http://node7:8000; null = the run's own"
    )
    num_nodes: int = key(
        "Nodes with one rloo vllm-serve each; 0 = rloo train starts its own",
        ge=0, le=1024,
    )  # fmt: skip
    api_key_env: Text = key("Environment variable that holds the token of base_url's servers")
    host: Text = key("Address that a server listens on, and that weights are sent from")
    port: int = key("Port of the server; 0 = a free one", ge=0, lt=65536)
    allow_remote: bool = key("Listen on an address that other machines reach")
    data_parallel_size: Positive = key("Copies of the model in one server")
    api_server_count: Positive | None = key(
        "API processes of one server; null = one for each copy of the model"
    )
    max_in_flight: Positive | None = key(
        "Most requests in flight on each server; null = 1024 for each copy of the model"
    )
    ready_timeout_s: float = key("Seconds until a server answers", gt=0, le=1e6)
    init_timeout_s: float = key("Seconds until trainer and server connect", gt=0, le=1e6)
    sync_timeout_s: float = key("Seconds for one weight update", gt=0, le=1e6)
    request_timeout_s: float = key("Seconds for one completion", gt=0, le=1e6)
    reconnect_timeout_s: float = key("Seconds until a lost server answers again", gt=0, le=1e6)
    retries: int = key("Retries of a batch after a server was lost", ge=0)
    max_restarts: int = key("Most restarts of the run's own server", ge=0)

    @property
    def is_external(self) -> bool:
        return self.base_url is not None

    @property
    def is_local(self) -> bool:
        return self.host in LOOPBACK_HOSTS

    @property
    def num_api_processes(self) -> int:
        return self.api_server_count or 1


class Config(EngineConfig):
    section, is_server = "server", True

    backend: Literal["vllm_server"] = key("Sampler: vLLM servers")
    server: ServerSection


def rules(config: Config, max_prompt_length: int | None) -> Iterator[Problem]:
    """The settings that this backend refuses. `max_prompt_length`: of data; None = unknown."""
    server, need = config.server, (max_prompt_length or 1) + config.max_completion_length
    section = "generation.server"
    yield from engine_key_problems(section, server, need)
    yield from sampling_kwargs_problems(config.kwargs)
    if server.transfer == "ipc":
        why = "CUDA IPC handles are pickled; only a child without open ports may take them"
        what, instead = "would send pickles to a server", "auto, or generation=vllm_colocate"
        yield value_problem(f"{section}.transfer", "ipc", what, instead, why)
    if server.host not in LOOPBACK_HOSTS and not server.allow_remote:
        what, why = "is reached from other machines", "anyone with the token can change the weights"
        instead = "127.0.0.1, or generation.server.allow_remote=true"
        yield value_problem(f"{section}.host", repr(server.host), what, instead, why)
    elif server.host in WILDCARD_HOSTS:
        what, why = "is every interface of the machine", "including those that face the internet"
        instead = "ADDRESS of the cluster's interface"
        yield value_problem(f"{section}.host", repr(server.host), what, instead, why)
    if server.num_nodes and server.base_url is not None:
        why = "base_url names running servers; this run's own are found by server.json"
        what = f"does not go with {section}.base_url"
        yield value_problem(f"{section}.num_nodes", server.num_nodes, what, 0, why)
    for url in [server.base_url] if isinstance(server.base_url, str) else server.base_url or []:
        if not url.startswith(("http://", "https://")):
            what, instead = "is not the address of a server", f"http://{url.rpartition('://')[2]}"
            yield value_problem(
                f"{section}.base_url", repr(url), what, instead, "expected http://HOST:PORT"
            )

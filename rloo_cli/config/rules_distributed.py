"""What the keys of several processes forbid each other, whatever machine they are for."""

from collections.abc import Iterator

from rloo_cli.utils.errors import Problem
from rloo_cli.config.schema import RunConfig

SHARDS = ("zero3", "fsdp2")  # of weights
OFFLOADS = {"optimizer": ("zero1", "zero2", "zero3"), "parameters": ("zero3", "fsdp2")}


def problems(run: RunConfig) -> Iterator[Problem]:
    """Everything wrong with `distributed` as it is written."""
    given = run.distributed
    processes = (given.num_processes or 1) * given.num_nodes
    for key in ("num_processes", "num_nodes") if given.engine == "single" else ():
        number = getattr(given, key)
        if (number or 1) > 1:
            yield Problem(
                f"distributed.{key} = {number}, and distributed.engine = single is one process",
                f"distributed.{key}",
                "single trains in one process on one device",
                f"distributed=ddp (or zero2, fsdp2) distributed.{key}={number}",
            )
    if given.engine != "single":
        yield from enough_prompts(run, processes)
    if given.engine not in OFFLOADS.get(given.offload, (given.engine,)):
        can = OFFLOADS[given.offload]
        yield Problem(
            f"distributed.offload = {given.offload} is nothing that {given.engine} does",
            "distributed.offload",
            f"distributed.engine = {given.engine}; it needs one of: {', '.join(can)}",
            f"distributed={can[-1]} distributed.offload={given.offload}",
        )
    yield from _shards(run)
    if given.rdzv is not None and address(given.rdzv) is None:
        yield Problem(
            f"distributed.rdzv = {given.rdzv!r} is not host:port",
            "distributed.rdzv",
            "the port is a number from 0 (any that is free) to 65535",
            "distributed.rdzv=null, or distributed.rdzv=HOST:29500",
        )


def _shards(run: RunConfig) -> Iterator[Problem]:
    """What is done with whole weights alone."""
    engine, model = run.distributed.engine, run.model
    if engine not in SHARDS:
        return
    whole = {
        "model.lora": (model.lora is not None, "model.lora=null, or distributed=zero2"),
        "model.quantization": (model.quantization is not None, "distributed=ddp"),
        "model.ref_sync.every": (model.ref_sync.every > 0, "distributed=zero2"),
        "model.ref_offload": (model.ref_offload, "model.ref_offload=false: it is in shards"),
    }
    for key, (wanted, fix) in whole.items():
        if wanted:
            what = f"{key} and distributed.engine = {engine} do not go together"
            why = f"{engine} keeps the weights in shards, and this needs them whole on each process"
            yield Problem(what, key, why, fix)


def enough_prompts(run: RunConfig, processes: int) -> Iterator[Problem]:
    """A process without a single prompt of a step would have nothing to train on."""
    prompts = run.train.prompts_per_step
    if prompts < processes:
        yield Problem(
            f"train.prompts_per_step = {prompts} is less than the {processes} processes",
            "train.prompts_per_step",
            f"a prompt's completions stay on one process: {processes - prompts} would have none",
            f"train.prompts_per_step={processes}, or train in {prompts} processes: "
            "distributed.num_processes and distributed.num_nodes",
        )


def address(text: str) -> tuple[str, int] | None:
    """host:port, or [host]:port -> (host, port); None where it is neither."""
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    fits = colon and host and port.isascii() and port.isdigit() and int(port) < 65536
    return (host, int(port)) if fits and (":" not in host or text.startswith("[")) else None

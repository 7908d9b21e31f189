"""What a rollout server's API takes: requests a second, and seconds to send weights.

    python bench/api_rate.py                          rates, then syncs of 1, 6 and 25 M parameters
    python bench/api_rate.py --only rate --prompts 32 --k 4 --length 8 --rounds 5
    python bench/api_rate.py --only sync --sizes 1 6

Rates: the client of a run (`http_engine.OverHttp`) asks for the same completions by vLLM's own
route, which takes one in each request, and by ours, which takes a whole group; of a server with one
API process and of one with two. Rounds go A B C D A B C D after one round that is not counted.
Medians are shown, and every round. Client, API and engine share the machine's cores: where there
are few, rounds differ much.

Syncs: one broadcast to two servers together, against each of them in turn on a connection of its
own, which is how it was done before; and one server alone. Three updates each time a connection is
made, of which the first is not counted.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import rollout
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from rloo_cli.generation.vllm import arguments, handshake, sampling_params
from rloo_cli.generation.vllm.engine import EngineCompletion, EngineRequest
from rloo_cli.generation.vllm.handshake import ExpectedServer
from rloo_cli.generation.vllm.http_engine import HttpEngine
from rloo_cli.generation.vllm.weights import ModelWeightSource
from rloo_cli.launch import rollout_server

TOKEN = "a token for the bench"
UPDATES = 2  # counted, of each connection


@contextmanager
def servers(folder: Path, args: Any, processes: Sequence[int]) -> Iterator[list[str]]:
    """The addresses of servers of the model in `folder`, with so many API processes each."""
    os.environ["RLOO_SERVER_TOKEN"] = TOKEN
    started = []
    try:
        for number, count in enumerate(processes):
            place = folder / f"server-{number}"
            place.mkdir()
            word = f"generation.server.api_processes={count}"
            run = rollout.run_of("vllm_server", folder, place, args, word)
            started.append((rollout_server.start_server(place, run, "bench"), run))
        there = [rollout_server.wait_for_server(process, run) for process, run in started]
        yield [server.url for server in there if server is not None]
    finally:
        for process, _ in started:
            rollout_server.stop_server(process)


def client(folder: Path, args: Any, *urls: str) -> HttpEngine:
    """A run's client of these servers, connected."""
    run = rollout.run_of("vllm_server", folder, folder / "none", args)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    keys = run.generation.server
    given = arguments.build_engine_arguments(run, keys, run.seed)
    expected = ExpectedServer(
        model=run.model.path,
        dtype=given["dtype"],
        tokenizer=handshake.tokenizer_fingerprint(tokenizer),
        max_model_len=given.get("max_model_len", 0),
        transfer=arguments.weight_transfer_backend(run, keys),
        allow_untested=True,
    )
    named = keys.model_copy(update={"base_url": list(urls)})
    found = HttpEngine(named, folder, expected, lambda note: None)
    found.connect()
    return found


def asks(folder: Path, args: Any, number: int) -> list[EngineRequest]:
    """A batch: K completions of `--length` tokens for each prompt, with seeds of this round."""
    run = rollout.run_of("vllm_server", folder, folder / "none", args)
    found = []
    for i, prompt in enumerate(rollout.prompts(args.prompts)):
        for j in range(args.k):
            seed = number * 10**6 + i * args.k + j
            params = sampling_params.completion_params(run.generation, [], seed, False, None)
            found.append(EngineRequest(prompt, params))
    return found


def draw(
    engine: HttpEngine, batch: list[EngineRequest], groups: bool, length: int
) -> list[EngineCompletion | None]:
    """Every completion of a batch; `groups`: by our route."""
    answers: list[EngineCompletion | None] = [None] * len(batch)
    for server in engine.servers:
        server.has_group_route = groups
    engine.generate(batch, answers.__setitem__)
    assert all(a is not None and len(a.ids) == length for a in answers)
    return answers


def rates(args: Any) -> list[dict[str, Any]]:
    """Each way to ask; a row each."""
    with tempfile.TemporaryDirectory(prefix="rloo-bench-") as place:
        folder = Path(place) / "model"
        rollout.model(args.sizes[0], folder)
        with servers(folder, args, (1, 2)) as urls:
            engines = [client(folder, args, url) for url in urls]
            ways = [(p, groups) for groups in (False, True) for p in range(len(engines))]
            seconds: dict[tuple[int, bool], list[float]] = {way: [] for way in ways}
            for number in range(args.rounds + 1):
                batch, drawn = asks(folder, args, number), []
                for way in ways:
                    began = time.perf_counter()
                    drawn.append(draw(engines[way[0]], batch, way[1], args.length))
                    seconds[way].append(time.perf_counter() - began)
                same = [[a.ids for a in one if a is not None] for one in drawn]
                assert all(ids == same[0] for ids in same), "the ways drew other tokens"
            for engine in engines:
                engine.close()
    return [rate(p + 1, groups, seconds[p, groups][1:], args) for p, groups in ways]


def rate(processes: int, groups: bool, seconds: list[float], args: Any) -> dict[str, Any]:
    """One way's row."""
    middle, count = statistics.median(seconds), args.prompts * args.k
    return {
        "what": "rate", "route": handshake.GROUP_ROUTE if groups else "/inference/v1/generate",
        "api_processes": processes, "requests_per_s": (args.prompts if groups else count) / middle,
        "completions_per_s": count / middle, "tokens_per_s": count * args.length / middle,
        "s_batch": middle, "rounds": [round(s, 3) for s in seconds],
    }  # fmt: skip


def syncs(size: int, args: Any) -> list[dict[str, Any]]:
    """Seconds for the weights of one model to reach one server, or two in two ways."""
    with tempfile.TemporaryDirectory(prefix="rloo-bench-") as place:
        folder = Path(place) / "model"
        trained = rollout.model(size, folder)
        source, count = (
            ModelWeightSource(trained, torch.float32),
            sum(p.numel() for p in trained.parameters()),
        )
        with servers(folder, args, (1, 1)) as urls:
            ways: dict[str, Callable[[], list[HttpEngine]]] = {
                "one server": lambda: [client(folder, args, urls[0])],
                "two, one after the other": lambda: [client(folder, args, url) for url in urls],
                "two, one broadcast": lambda: [client(folder, args, *urls)],
            }
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(args.rounds):
                for way, connected in ways.items():
                    seconds[way] += updated(connected(), source)
    return [
        {"what": "sync", "way": way, "parameters": count, "s_sync": statistics.median(found),
         "rounds": [round(s, 3) for s in found]}
        for way, found in seconds.items()
    ]  # fmt: skip


def updated(engines: list[HttpEngine], source: Any) -> list[float]:
    """Seconds of each of UPDATES updates of all engines, one after the other."""
    found = []
    try:
        for number in range(UPDATES + 1):
            began = time.perf_counter()
            for engine in engines:
                assert engine.sync_weights(source, f"bench:{number}") == f"bench:{number}"
            found.append(time.perf_counter() - began)
    finally:
        for engine in engines:
            engine.close()
    return found[1:]


def show(rows: list[dict[str, Any]]) -> None:
    """The tables."""
    table = Table("route", "API processes", "requests/s", "completions/s", "tokens/s", "rounds, s")
    other = Table("weights", "M parameters", "median s", "rounds, s")
    for r in rows:
        if r["what"] == "sync":
            size = f"{r['parameters'] / 1e6:.1f}"
            other.add_row(r["way"], size, f"{r['s_sync']:.3f}", str(r["rounds"]))
            continue
        table.add_row(
            r["route"], str(r["api_processes"]), f"{r['requests_per_s']:.1f}",
            f"{r['completions_per_s']:.1f}", f"{r['tokens_per_s']:.0f}", str(r["rounds"]),
        )  # fmt: skip
    for one in (table, other):
        if one.row_count:
            Console(width=120).print(one)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=["rate", "sync"])
    parser.add_argument("--sizes", type=int, nargs="+", choices=rollout.SHAPES, default=[1, 6, 25])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("--out", type=Path, help="append a line of JSON for each row to this file")
    args = parser.parse_args()
    rows = [] if args.only == "sync" else rates(args)
    for size in [] if args.only == "rate" else args.sizes:
        rows += syncs(size, args)
    for r in rows:
        r |= {
            "vllm": arguments.installed_vllm_version(),
            "cores": os.cpu_count(),
            "loadavg": os.getloadavg()[0],
        }
    if args.out is not None:
        with args.out.open("a") as file:
            file.writelines(json.dumps(r) + "\n" for r in rows)
    show(rows)


if __name__ == "__main__":
    main()

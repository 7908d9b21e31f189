"""Requests a second of the two HTTP clients, many in flight, against a server that does little.

    python bench/http_rate.py                              this checkout
    python bench/http_rate.py --before ../older-checkout   side by side: before, now, before, now

`rewards` is the client of served rewards and judges, `rollouts` that of rollout servers. Server and
client share the machine's cores, so the figures are of this machine, and to be compared within one
call. Each round is a process of its own; medians and every round are shown.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from aiohttp import web

HERE = Path(__file__).resolve().parent.parent


def serve(ready: threading.Event, ports: list[int]) -> None:
    """Answer every POST with a small JSON, on a thread of its own."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"scores": [1.0]})

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/score", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
        await site.start()
        ports.append(runner.addresses[0][1])
        ready.set()
        await asyncio.Event().wait()

    asyncio.run(run())


def ask(kind: str, url: str, requests: int, in_flight: int) -> float:
    """Requests a second of one client."""
    body = {"prompts": ["a prompt of some words"] * 4, "completions": ["a completion"] * 4}

    async def ask_rewards() -> float:
        from rloo_cli.rewards.common.http_client import HttpService, JsonClient

        service = HttpService(url, None, in_flight, 60.0)
        async with JsonClient(service, 600.0) as client:
            start = time.perf_counter()
            await asyncio.gather(*(client.post("/score", body) for _ in range(requests)))
            return requests / (time.perf_counter() - start)

    def ask_rollouts() -> float:
        from rloo_cli.generation.vllm.http import HttpClient

        client, gate = HttpClient(), asyncio.Semaphore(in_flight)

        async def one() -> None:
            async with gate:
                await client.request("POST", url, "/score", "", body, 60.0, keep_alive=True)

        async def everything() -> None:
            await asyncio.gather(*(one() for _ in range(requests)))

        start = time.perf_counter()
        client.run(everything(), 600.0)
        rate = requests / (time.perf_counter() - start)
        client.close()
        return rate

    return asyncio.run(ask_rewards()) if kind == "rewards" else ask_rollouts()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout, with the same names")
    parser.add_argument("--requests", type=int, default=8192)
    parser.add_argument("--in-flight", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ask", nargs=2, metavar=("CLIENT", "URL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask:
        print(ask(*args.ask, args.requests, args.in_flight))
        return
    ready, ports = threading.Event(), list[int]()
    threading.Thread(target=serve, args=(ready, ports), daemon=True).start()
    ready.wait()
    url = f"http://127.0.0.1:{ports[0]}"
    checkouts = {"before": args.before, "now": HERE} if args.before else {"now": HERE}
    for kind in ("rewards", "rollouts"):
        rates: dict[str, list[float]] = {name: [] for name in checkouts}
        for _ in range(args.rounds):
            for name, path in checkouts.items():
                sizes = ["--requests", str(args.requests), "--in-flight", str(args.in_flight)]
                command = [sys.executable, __file__, *sizes, "--ask", kind, url]
                env = os.environ | {"PYTHONPATH": str(path)}
                done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
                rates[name].append(float(done.stdout))
        for name, found in rates.items():
            shown = " ".join(f"{rate:.0f}" for rate in found)
            print(f"{kind:9} {name:7} {statistics.median(found):6.0f} requests/s   ({shown})")


if __name__ == "__main__":
    main()

"""The scoring stage: 64 completions, a reward that sleeps for each.

    python bench/scoring.py [--sleep 0.2] [--rows 64] [--rounds 3]

Ways to run the same reward, in turns (A B C A B C ...), medians of the stage's wall time. Then the
same beside generation: how long a step waits for its rewards once its completions are there, with
the reward called when all of them are (scope batch) and as each group comes (scope group).
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rloo_cli.config import check, compose
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.rewards.engine import worker_calls
from rloo_cli.rewards.engine.arguments import RewardContext, TrainerState
from rloo_cli.rewards.engine.build import Reward, build_reward
from rloo_cli.rewards.engine.scoring import ScoringStep, score_groups
from rloo_cli.utils.worker_pool import close_worker_pools

CODE = """
import asyncio, time
SLEEP = {sleep}

def sync(completions):
    scores = []
    for completion in completions:
        time.sleep(SLEEP)
        scores.append(float(len(completion)))
    return scores

async def one(completion):
    await asyncio.sleep(SLEEP)
    return float(len(completion))

async def together(completions):
    return await asyncio.gather(*(one(c) for c in completions))
"""
PLAIN = RewardContext(False, TrainerState(0, 0, 1, 0.0, 0, 0, 1.0))
K = 4


def groups(rows: int) -> list[Group]:
    """`rows` completions, K for each prompt."""
    rollout = Rollout([1, 2], "a completion", "stop", True, 0, 0)
    return [
        Group(i, {}, "prompt", [1], [replace(rollout) for _ in range(K)]) for i in range(rows // K)
    ]


def reward(path: Path, name: str, **keys: Any) -> Reward:
    """A reward of CODE, its other keys as conf/ has them."""
    words = ["+recipe=smoke", "reward=function", f"reward.function.path={path}:{name}"]
    words += [f"reward.function.{key}={value}" for key, value in keys.items()]
    return build_reward(name, check.check_config(compose.compose_config(words)).rewards["function"])


def beside(one: Reward, rows: int, every: float) -> float:
    """Seconds that a step waits once its last group is there; a group comes each `every` s."""
    made = groups(rows)
    stage = ScoringStep([one], made, PLAIN, K)
    for index in range(len(made)):
        time.sleep(every)
        stage.submit_group(index)
    begun = time.perf_counter()
    stage.wait_for_scores()
    return time.perf_counter() - begun


def timed(act: Any) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def show(title: str, found: dict[str, list[float]]) -> None:
    """Print the seconds of each way, with their median."""
    table = Table("way", "s (median)", "each", title=title)
    for name, seconds in found.items():
        each = " ".join(f"{s:.2f}" for s in seconds)
        table.add_row(name, f"{statistics.median(seconds):.2f}", each)
    Console(width=100).print(table)


def main() -> None:
    """Print the two tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sleep", type=float, default=0.2)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "slow.py")
        path.write_text(CODE.format(sleep=given.sleep))
        total = given.rows * given.sleep
        ways = {
            f"sync, one thread (limit: {total:.1f})": reward(path, "sync", timeout_s=600),
            f"sync, 8 workers, scope row (limit: {total / 8 + 1:.1f})": reward(
                path, "sync", workers=8, scope="row"
            ),
            f"sync, 16 workers, scope row (limit: {total / 16 + 1:.1f})": reward(
                path, "sync", workers=16, scope="row"
            ),
            "async, one call (limit: 1.0)": reward(path, "together"),
            "async, scope row (limit: 1.0)": reward(path, "together", scope="row"),
        }
        begun = time.perf_counter()
        worker_calls.start_reward_workers([*ways.values()])
        for one in ways.values():
            if one.config.workers:
                score_groups([one], groups(one.config.workers * K), PLAIN)
        warm = time.perf_counter() - begun
        stage: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(given.rounds):
            for name, one in ways.items():
                stage[name].append(
                    timed(lambda one=one: score_groups([one], groups(given.rows), PLAIN))
                )
        show(f"{given.rows} completions, {given.sleep} s each, {given.rounds} rounds", stage)
        print(f"24 workers started and first asked in {warm:.1f} s, once a run")
        _waits(path, given)
        close_worker_pools()


def _waits(path: Path, given: argparse.Namespace) -> None:
    every = given.sleep
    ways = {
        "async, scope batch": reward(path, "together", scope="batch"),
        "async, scope group": reward(path, "together", scope="group"),
        "sync, 1 worker, scope batch": reward(path, "sync", workers=1, timeout_s=600),
        "sync, 8 workers, scope group": reward(path, "sync", workers=8, scope="group"),
    }
    worker_calls.start_reward_workers([*ways.values()])
    for one in ways.values():
        score_groups([one], groups(one.config.workers * K or K), PLAIN)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(given.rounds):
        for name, one in ways.items():
            found[name].append(beside(one, given.rows, every))
    show(f"beside generation, a group of {K} each {every} s: left to wait for", found)


if __name__ == "__main__":
    main()

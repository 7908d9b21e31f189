"""What two ranks do of a step, without a run around it: processes that meet over gloo."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fork_cases import on_ranks
from policy_cases import fresh, groups
from reward_cases import PLAIN, reward
from test_optim import config
from torch.distributed.tensor.debug import CommDebugMode

from rloo_cli.config.registry import registered_module
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.distributed.fsdp import FSDPEngine
from rloo_cli.distributed.optimizer import gather_full_tensor
from rloo_cli.distributed.world import World
from rloo_cli.generation import GeneratorBase
from rloo_cli.generation.common import across_ranks
from rloo_cli.generation.common.rank0_proxy import Rank0Proxy
from rloo_cli.policy.model import Policy
from rloo_cli.rewards.engine.scoring import ScoringStep
from rloo_cli.train import build
from rloo_cli.utils.timers import StepTimer

pytestmark = pytest.mark.ranks

# fsdp2's two ways to reduce.

RATE = 0.1
TRAIN = {"optimizer": "torch.optim:SGD", "learning_rate": RATE, "lr_scheduler": "constant",
         "weight_decay": 0.0, "max_grad_norm": None, "warmup_steps": 0}  # fmt: skip
SHARES = [(3, 0), (2, 1)]  # of each rank: real micro-batches of an update, and passes over nothing


def losses(policy: Policy, rank: int) -> list[Any]:
    """An update's losses on one rank, each when it is asked for: the last may be of nothing."""
    real, nothing = SHARES[rank]

    def loss(number: int) -> Any:
        micro = policy.pack(groups(), [((rank + number) % 3, (0, 1))])
        total = policy.logp(micro, want_entropy=False).logp.sum()
        return total * (0.1 * (1 + number) if number < real else 0.0)

    return [lambda n=n: loss(n) for n in range(real + nothing)]


def sharded(world: World) -> dict[str, Any]:
    """Two updates each way: reduce-scatters of each micro-batch, and the weights they lead to."""
    found: dict[str, Any] = {}
    for reduce in ("each", "last"):
        spread = SimpleNamespace(
            engine="fsdp2", reduce=reduce, master_weights="float32", offload="none", timeout_s=60
        )
        engine: Any = FSDPEngine(world, config(**TRAIN), cast(Any, spread))
        policy = Policy(fresh(), 1.0)
        optimizer, sent = engine.distribute_policy(policy, 10), []
        for _ in range(2):
            parts = losses(policy, world.rank)
            for number, part in enumerate(parts, 1):
                loss = part()
                with CommDebugMode() as heard:
                    engine.backward(loss, number == len(parts))
                counts = heard.get_comm_counts()
                sent.append(sum(n for op, n in counts.items() if "reduce_scatter" in str(op)))
            optimizer.step(optimizer.grad_norm())
        weights = [
            gather_full_tensor(p.detach()).flatten().tolist() for p in policy.model.parameters()
        ]
        found[reduce] = {"sent": sent, "weights": weights}
    return found


def alone() -> list[Any]:
    """The weights that one process gets from both ranks' micro-batches."""
    policy = Policy(fresh(), 1.0)
    parameters = [*policy.model.parameters()]
    for _ in range(2):
        for rank in range(2):
            for part in losses(policy, rank):
                part().backward()
        for parameter in parameters:
            parameter.data -= RATE * parameter.grad
            parameter.grad = None
    return [p.detach().flatten().tolist() for p in parameters]


def test_reducing_last_gives_the_update_of_reducing_each_and_sends_gradients_once(fast, tmp_path):
    one, other = on_ranks(fast, tmp_path, f"{__file__}:sharded")
    wanted = alone()
    for reduce in ("each", "last"):
        assert one[reduce]["weights"] == other[reduce]["weights"]
        for mine, right in zip(one[reduce]["weights"], wanted, strict=True):
            assert mine == pytest.approx(right, rel=1e-4, abs=1e-5)
    units = one["each"]["sent"][0]
    assert units == 3  # two layers, and what is around them
    assert one["each"]["sent"] == other["each"]["sent"] == [units] * 6
    assert one["last"]["sent"] == other["last"]["sent"] == [0, 0, units] * 2


# Rewards that begin while others are still being drawn for.

GROUPS = 4  # of two ranks: two for each


class Slow(GeneratorBase):
    """A sampler that draws the last group once others have been scored, or not at all soon."""

    tolerance = 1.0

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    def generate(self, groups: Any, seeds: Any, greedy: Any, temperature: Any, heard: Any) -> None:
        end = time.monotonic() + 10
        for index, group in enumerate(groups):
            while index == GROUPS - 1 and not (scored(0) and scored(2)):
                if time.monotonic() > end:
                    self.metrics["waited_in_vain"] = 1.0
                    break
                time.sleep(0.01)
            group.rollouts = [
                Rollout([index, k], f"{index}", "stop", True, 0, 0, [-1.0, -1.0]) for k in range(2)
            ]
            heard(index)


def scored(index: int) -> str:
    """The rank that has begun to score a group; "" before one has."""
    path = Path(f"scored_{index}")
    return path.read_text() if path.exists() else ""


def first_token(completion_ids: Any, **_: Any) -> list[float]:
    """A reward that leaves a file, of each group that it is called for."""
    for index in {ids[0] for ids in completion_ids}:
        written = Path(f"scored_{index}.{os.getpid()}")
        written.write_text(os.environ["RANK"])
        written.replace(f"scored_{index}")
    return [float(ids[0]) for ids in completion_ids]


def overlapped(world: World) -> dict[str, Any]:
    """One step with a sampler that only rank 0 talks to."""
    generator = Rank0Proxy(world, None, lambda: [], Slow)
    chosen = [Group(i, {}, "Say", [1, 2], []) for i in range(GROUPS)]
    one = reward(first_token, scope="row")
    scores = across_ranks.sample_and_score(
        world, generator, chosen,
        lambda places, arrived: generator.generate(
            [chosen[i] for i in places], [[0, 1]] * len(places), arrived=arrived
        ),
        lambda own: ScoringStep([one], own, PLAIN, 2),
        StepTimer(),
    )  # fmt: skip
    return {"raw": scores.raw.tolist(), "facts": generator.metrics,
            "by": [scored(index) for index in range(GROUPS)]}  # fmt: skip


def test_the_first_groups_of_each_rank_are_scored_before_the_last_group_is_drawn(fast, tmp_path):
    one, other = on_ranks(fast, tmp_path, f"{__file__}:overlapped")
    assert "waited_in_vain" not in one["facts"]
    assert one["by"] == ["0", "0", "1", "1"]  # by the rank whose group it is
    assert one["raw"] == other["raw"] == [[[float(p)] * 2 for p in range(GROUPS)]]


class Engine(GeneratorBase):
    """A sampler that notes whether it may start a lost engine again."""

    restarts = True

    def forbid_recovery(self) -> None:
        self.restarts = False


def test_with_several_ranks_an_engine_that_is_lost_is_not_started_again(monkeypatch):
    for check in ("_check_adapter", "_check_kv_cache", "stop_ids"):
        monkeypatch.setattr(build, check, lambda *_: [])
    monkeypatch.setattr(build.agent_build, "load_episode_vision", lambda *_: None)
    monkeypatch.setattr(build.vocabulary, "check_stop_tokens", lambda *_: None)
    keys = registered_module("generation", "vllm_colocate").Config.model_construct(
        backend="vllm_colocate"
    )
    for size in (1, 2):
        sampler = Engine()
        builder: Any = SimpleNamespace(
            config=SimpleNamespace(generation=keys), world=World(0, size, torch.device("cpu")),
            policy=SimpleNamespace(model=None, vocab_size=4), tokenizer=None,
            engine=SimpleNamespace(sharded=False), log=SimpleNamespace(phase=lambda text: None),
            _build_backend=lambda sampler=sampler: sampler,
        )  # fmt: skip
        build.RunBuilder.start_generator(builder)
        assert builder.generator is sampler and sampler.restarts == (size == 1)

"""A tower that `model.freeze` keeps is sent to an engine once, and again where that lost it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vision_cases as v
from torch import nn

from rloo_cli.generation.vllm.engine import EngineLost
from rloo_cli.generation.vllm.weight_sync import WeightSync
from rloo_cli.policy.vision import freeze_parts, frozen_names


class Engine:
    """Notes the names of each update."""

    restarts = 0

    def __init__(self) -> None:
        self.sent: list[set[str]] = []

    def connect(self) -> None:
        pass

    def sync_weights(self, source: Any, label: str) -> str:
        got = [meta.name for meta in source.metadata()]
        names = [name for name, _ in source]
        assert names == got
        self.sent.append({*names})
        return label

    def sleep(self) -> bool:
        return True

    def is_healthy(self) -> bool:
        return False

    def discard_engine(self, why: str) -> None:
        pass


@pytest.mark.parametrize("parts", [["vision"], ["vision", "projector"], []], ids=len)
def test_what_is_frozen_is_sent_again_to_an_engine_that_lost_it_alone(parts: list[str]) -> None:
    model, _ = v.fresh("idefics3")
    freeze_parts(model, parts)
    engine = Engine()
    sync = WeightSync(engine, torch.float32, "run", print)  # type: ignore[arg-type]
    policy: Any = SimpleNamespace(model=model, dtype=torch.float32, gather_weights=None)

    def update(version: int) -> None:
        sync.set_policy(policy, version)
        sync.ensure_synced()

    for version in (0, 1, 2):
        update(version)
    sync.sleep()
    update(3)
    update(4)
    sync.handle_engine_loss(EngineLost("gone"))
    update(5)
    update(6)
    whole, part = {n for n, _ in model.named_parameters()}, frozen_names(model)
    assert bool(part) == bool(parts)
    assert [len(names) for names in engine.sent] == [
        len(whole), *[len(whole - part)] * 2, len(whole), len(whole - part), len(whole),
        len(whole - part),
    ]  # fmt: skip


def test_a_part_that_trains_anything_is_not_left_out() -> None:
    model, _ = v.fresh("idefics3")
    assert frozen_names(model) == set()
    freeze_parts(model, ["vision"])
    frozen = frozen_names(model)
    assert frozen and all("vision_model" in name for name in frozen)
    next(w for n, w in model.named_parameters() if n in frozen).requires_grad_(True)
    assert frozen_names(model) == set()


@pytest.mark.vllm
def test_an_engine_takes_a_tower_left_out_whole_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rloo_cli.generation.vllm import receive

    model = nn.ModuleDict({
        "visual": nn.ModuleDict({"merger": nn.Linear(2, 2), "a": nn.Linear(2, 2)}),
        "language": nn.Linear(2, 2),
    })  # fmt: skip
    takes = lambda layer: isinstance(layer, nn.Linear)  # noqa: E731
    monkeypatch.setattr(receive, "_takes_weights", takes)
    assert receive.parts_left_out(model, {"visual.a"}) == set()  # it does not say what is a tower
    parts = SimpleNamespace(connector=["visual.merger"], tower_model=["visual."])
    monkeypatch.setattr(model, "get_mm_mapping", lambda: parts, raising=False)
    left = receive.parts_left_out
    assert left(model, set()) == set()
    assert left(model, {"language"}) == set()
    assert left(model, {"visual.a"}) == {"visual.a"}
    assert left(model, {"visual.merger", "language"}) == {"visual.merger"}
    assert left(model, {"visual.a", "visual.merger"}) == {"visual.a", "visual.merger"}
    model["visual"]["b"] = nn.Linear(2, 2)  # type: ignore[index]
    assert left(model, {"visual.a"}) == set()

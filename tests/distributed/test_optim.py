"""The optimizer, its schedule and the step."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rloo_cli.config.schema import TrainConfig
from rloo_cli.distributed.optimizer import Optimizer, can_use_fused, gather_full_tensor
from rloo_cli.distributed.zero import DeepSpeedEngine
from rloo_cli.distributed.zero_optimizer import restore_counters
from rloo_cli.utils.errors import ConfigError

YAML = Path(__file__).parents[2] / "conf/config.yaml"
half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def config(**changes):
    return TrainConfig(**yaml.safe_load(YAML.read_text())["train"] | changes)


class Weights(nn.Module):
    """Two parameters, one of them frozen."""

    def __init__(self, values, dtype=torch.float32):
        super().__init__()
        self.free = nn.Parameter(torch.tensor(values, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)


def optimizer(values=(1.0, 2.0), updates=100, dtype=torch.float32, **changes):
    model = Weights(list(values), dtype)
    return model, Optimizer(model, config(**changes), updates)


def step(model, found, gradient):
    (model.free * torch.tensor(gradient, dtype=model.free.dtype)).sum().backward()
    norm = found.grad_norm()
    found.step(norm)
    return float(norm)


CONSTANT = {"lr_scheduler": "constant", "max_grad_norm": None}


def after(dtype, steps=200, **changes):
    model, found = optimizer((1.0, -2.0), dtype=dtype, learning_rate=1e-6, **CONSTANT, **changes)
    for _ in range(steps):
        step(model, found, [1.0, -1.0])
    return model, found


@half
def test_small_updates_of_half_precision_weights_add_up(dtype):
    exact, _ = after(torch.float32)
    model, found = after(dtype)
    assert model.free.dtype is dtype and found.masters[0].dtype is torch.float32
    torch.testing.assert_close(found.masters[0].detach(), exact.free.detach(), rtol=0, atol=1e-9)
    assert abs(float(found.masters[0].detach()[0]) - (1 - 200e-6)) < 1e-5


def test_small_updates_reach_the_weights_once_they_are_large_enough():
    model, found = after(torch.bfloat16, steps=6000)  # 6e-3; bfloat16 below 1 goes in steps of 4e-3
    assert float(model.free.detach()[0]) < 1.0
    assert torch.equal(model.free, found.masters[0].bfloat16())


def test_without_masters_they_would_be_lost():
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))
    inner = torch.optim.AdamW([weight], lr=1e-6, weight_decay=0.0)
    for _ in range(200):
        weight.grad = torch.ones_like(weight)
        inner.step()
    assert torch.equal(weight, torch.ones_like(weight))


@half
def test_gradients_of_many_micro_batches_add_up_in_float32(dtype):
    model, found = optimizer((1.0, 1.0), dtype=dtype)
    model.free.sum().backward()
    for _ in range(1000):
        (model.free * 2.0**-12).sum().backward()  # lost in bfloat16 beside a 1
    assert float(found.grad_norm()) == pytest.approx(2**0.5 * (1 + 1000 * 2.0**-12))


def test_float32_weights_are_their_own_masters():
    model, found = optimizer()
    assert found.masters[0] is model.free and len(found.masters) == 1


def test_frozen_weights_are_left_alone():
    model, found = optimizer(weight_decay=0.1, learning_rate=0.1)
    step(model, found, [1.0, 1.0])
    assert torch.equal(model.frozen, torch.ones(2))


def test_it_is_seen_whether_an_update_changed_the_weights_in_their_dtype():
    for dtype, changed in ((torch.float32, 2), (torch.bfloat16, 0)):
        _, found = after(dtype, steps=1)
        changes = {name: int(value) for name, value in found.weight_changes.items()}
        assert changes == {"changed_weights": changed, "sampled_weights": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_of_the_gradient_before_clipping(dtype):
    model, found = optimizer(dtype=dtype, max_grad_norm=1.0)
    assert step(model, found, [3.0, -4.0]) == 5.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "most, moved", [(1.0, [0.6, -0.8]), (10.0, [3.0, -4.0]), (None, [3.0, -4.0])]
)
def test_a_gradient_is_clipped_to_the_norm(dtype, most, moved, tmp_path):
    (tmp_path / "mine.py").write_text("import torch\nsgd = torch.optim.SGD\n")
    settings = {"optimizer": f"{tmp_path / 'mine.py'}:sgd", "learning_rate": 1.0}
    constant = CONSTANT | {"max_grad_norm": most}
    model, found = optimizer((0.0, 0.0), dtype=dtype, **settings, **constant)
    step(model, found, [3.0, -4.0])
    torch.testing.assert_close(found.masters[0].detach(), -torch.tensor(moved), rtol=0, atol=1e-5)


def test_adamw_is_torchs_own_with_decay():
    model, found = optimizer(
        learning_rate=0.1, weight_decay=0.5, optimizer_kwargs={"betas": [0.5, 0.6]}, **CONSTANT
    )
    theirs = nn.Parameter(torch.tensor([1.0, 2.0]))
    inner = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.5, betas=(0.5, 0.6))
    for gradient in ([1.0, -1.0], [0.3, 2.0]):
        step(model, found, gradient)
        theirs.grad = torch.tensor(gradient)
        inner.step()
    assert torch.equal(model.free, theirs)


def rates(updates=10, **changes):
    model, found = optimizer(updates=updates, learning_rate=1.0, **changes)
    seen = []
    for _ in range(updates):
        seen.append(round(found.learning_rate, 4))
        step(model, found, [1.0, 1.0])
    return seen


def test_the_rate_falls_in_a_line_to_nothing_after_the_last_update():
    assert rates(lr_scheduler="linear") == [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]


def test_the_rate_rises_in_a_line_while_it_warms_up():
    assert rates(5, lr_scheduler="constant_with_warmup", warmup_steps=2) == [0, 0.5, 1, 1, 1]


@pytest.mark.parametrize("name", ["cosine", "polynomial", "inverse_sqrt", "constant"])
def test_every_schedule_of_transformers_goes_by_its_name(name):
    found = rates(lr_scheduler=name, warmup_steps=1)
    assert (found[-1] < 1.0) is (name != "constant") and max(found) == 1.0


def test_a_schedule_gets_its_kwargs():
    given = {"lr_scheduler": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.5}}
    assert min(rates(100, **given)) >= 0.5


MINE = """
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR


def sgd(parameters, lr, weight_decay, momentum=0.0):
    return SGD(parameters, lr=lr, weight_decay=weight_decay, momentum=momentum)


def halving(optimizer, every=1):
    return LambdaLR(optimizer, lambda step: 0.5 ** (step // every))


def last(optimizer, num_training_steps, num_warmup_steps):
    return LambdaLR(optimizer, lambda step: float(step == num_training_steps - 1))
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def test_an_optimizer_of_ones_own_gets_rate_decay_and_kwargs(mine):
    given = {"optimizer": f"{mine}:sgd", "optimizer_kwargs": {"momentum": 0.5}}
    model, found = optimizer((1.0, 2.0), learning_rate=0.1, weight_decay=1.0, **given, **CONSTANT)
    assert type(found.inner) is torch.optim.SGD
    group = found.inner.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.1, 1.0, 0.5)
    step(model, found, [1.0, 0.0])
    torch.testing.assert_close(model.free.detach(), torch.tensor([0.8, 1.8]))


def test_a_schedule_of_ones_own_gets_what_it_asks_for(mine):
    assert rates(3, lr_scheduler=f"{mine}:halving") == [1.0, 0.5, 0.25]
    kwargs = {"lr_scheduler_kwargs": {"every": 2}}
    assert rates(3, lr_scheduler=f"{mine}:halving", **kwargs) == [1.0, 1.0, 0.5]
    assert rates(3, lr_scheduler=f"{mine}:last") == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("kwargs", [{"betta": 1}, {"betas": [2.0, 0.9]}, {"eps": "x"}])
def test_wrong_arguments_of_the_optimizer_are_a_mistake_of_the_config(kwargs):
    with pytest.raises(ConfigError, match=r"train\.optimizer_kwargs") as caught:
        optimizer(optimizer_kwargs=kwargs)
    assert next(iter(kwargs)) in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"lr_scheduler": "lineer"},
        {"lr_scheduler_kwargs": {"betta": 1}},
        {"lr_scheduler": "cosine_with_min_lr"},  # it must be told one
        {"lr_scheduler": "mine:halving", "lr_scheduler_kwargs": {"betta": 1}},
    ],
)
def test_a_schedule_that_cannot_be_made_is_a_mistake_of_the_config(changes, mine):
    if "mine:" in changes.get("lr_scheduler", ""):
        changes = changes | {"lr_scheduler": f"{mine}:halving"}
    with pytest.raises(ConfigError, match=r"train\.lr_scheduler") as caught:
        optimizer(**changes)
    assert "cosine" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forgotten_gradients_are_never_applied(dtype):
    model, found = optimizer(dtype=dtype, learning_rate=0.1, **CONSTANT)
    before = model.free.detach().clone()
    model.free.sum().backward()
    found.zero_grad()
    assert model.free.grad is None
    model.free.sum().backward()
    assert float(found.grad_norm()) > 0
    found.zero_grad()
    assert model.free.grad is None and found.masters[0].grad is None
    assert float(found.grad_norm()) == 0.0
    found.step(found.grad_norm())
    assert torch.equal(model.free, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_forgets_its_gradients(dtype):
    model, found = optimizer(dtype=dtype)
    step(model, found, [1.0, 1.0])
    assert model.free.grad is None and found.masters[0].grad is None


def test_how_the_optimizer_is_computed_is_this_machines_whatever_the_checkpoint_says():
    _, first = optimizer()
    tensors, facts = first.dump()
    assert facts["groups"][0]["fused"] is True
    _, second = optimizer()
    second.inner.param_groups[0]["fused"] = None  # as on a device that torch has no such kernel for
    second.restore(tensors, facts)
    assert second.inner.param_groups[0]["fused"] is None
    assert second.inner.param_groups[0]["lr"] == first.inner.param_groups[0]["lr"]


def test_torchs_fused_adamw_is_for_weights_that_are_all_in_one_kind_of_memory():
    def weight(kind, floating=True):
        return SimpleNamespace(device=torch.device(kind), is_floating_point=lambda: floating)

    assert can_use_fused([weight("cuda")] * 2) and can_use_fused([weight("cpu")] * 2)
    assert not can_use_fused([weight("cuda"), weight("cpu")]) and not can_use_fused([])
    assert not can_use_fused([weight("cuda", floating=False)])
    assert not can_use_fused([weight("mps")])


# Fused AdamW in the CPU's memory: of a model that computes there or on a GPU.

DECAYED = {"learning_rate": 1e-2, "weight_decay": 0.1, "optimizer_kwargs": {"betas": [0.8, 0.99]}}


@pytest.fixture
def mesh():
    """One process's mesh, for tensors in shards."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def drawn(mesh=None):
    """A model of one weight, and five gradients of it; in shards with a mesh."""
    draw = torch.Generator().manual_seed(0)
    model = Weights([[0.0]])
    values = [torch.randn(40, 30, generator=draw) for _ in range(6)]
    if mesh is not None:
        values = [distribute_tensor(value, mesh, [Shard(0)]) for value in values]
    model.free = nn.Parameter(values[0])
    return model, values[1:]


def made(model, fused=None):
    own = {} if fused is None else {"fused": fused}
    kwargs = DECAYED["optimizer_kwargs"] | own
    return Optimizer(model, config(**DECAYED | CONSTANT | {"optimizer_kwargs": kwargs}), 100)


def walk(model, found, gradients):
    for gradient in gradients:
        model.free.grad = gradient.clone()
        found.step(found.grad_norm())


@pytest.mark.parametrize("sharded", [False, True])
def test_a_fused_adamw_makes_the_steps_of_torchs_plain_one(sharded, request):
    (plain, gradients), (model, shards) = (
        drawn(), drawn(request.getfixturevalue("mesh") if sharded else None),
    )  # fmt: skip
    found = made(model)
    assert found.inner.param_groups[0]["fused"] is True
    inner = torch.optim.AdamW([plain.free], lr=1e-2, weight_decay=0.1, betas=(0.8, 0.99))
    walk(model, found, shards)
    for gradient in gradients:
        plain.free.grad = gradient
        inner.step()
    torch.testing.assert_close(
        gather_full_tensor(model.free.detach()), plain.free.detach(), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("first", [False, True])
def test_a_checkpoint_goes_on_whether_the_optimizer_is_fused_or_not(first):
    model, gradients = drawn()
    one = made(model, first)
    walk(model, one, gradients[:2])
    tensors, facts = one.dump()
    assert {name.partition("/")[0] for name in tensors} == {"step", "exp_avg", "exp_avg_sq"}
    other, _ = drawn()
    other.free.data.copy_(model.free.data)
    second = made(other, not first)
    second.restore({n: t.clone() for n, t in tensors.items()}, facts)
    assert bool(second.inner.param_groups[0].get("fused")) is not first
    walk(model, one, gradients[2:])
    walk(other, second, gradients[2:])
    torch.testing.assert_close(other.free, model.free, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("device", "offload", "offloads"),
    [("cuda", "optimizer", True), ("cuda", "none", False), ("cpu", "parameters", False)],
)
def test_what_is_offloaded_is_pinned_for_a_gpu_alone(device, offload, offloads):
    spread = SimpleNamespace(offload=offload, engine="zero3")
    engine = DeepSpeedEngine(SimpleNamespace(device=torch.device(device)), config(), spread)
    assert engine.offloads is offloads
    zero = engine._deepspeed_config(torch.float32)["zero_optimization"]
    pinned = {"device": "cpu", "pin_memory": device == "cuda"}
    assert zero.get("offload_optimizer") == (None if offload == "none" else pinned)


def test_counters_of_a_fused_optimizer_lie_beside_the_share_that_they_count_for():
    flat = torch.zeros(3, device="meta")  # where a GPU's would be
    for fused, where in ((True, "meta"), (None, "cpu")):
        inner = SimpleNamespace(param_groups=[{"fused": fused}], state={flat: {}})
        restore_counters(inner, {"step": torch.tensor(3.0)})
        assert inner.state[flat]["step"].device.type == where

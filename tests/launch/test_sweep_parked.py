"""What a trial leaves its device with, and comes back with."""

import pytest
import torch
from torch import nn

from rloo_cli.policy import offload


class Held:
    """The parts of `optimizer.Optimizer` that are of use here, over half-precision weights."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = list(model.parameters())
        self.masters = [p.detach().float().requires_grad_() for p in self.weights]
        self.inner = torch.optim.AdamW(self.masters, lr=0.1)

    def step(self) -> None:
        for number, master in enumerate(self.masters):
            master.grad = torch.full_like(master, float(number + 1))
        self.inner.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.data.copy_(master)
            master.grad = None


def model(device: str) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    made[2].weight = made[0].weight  # tied
    return made.to(device, torch.bfloat16)


def tensors(made: nn.Module, held: Held) -> list[torch.Tensor]:
    return [*offload.iter_model_tensors([made, made]), *offload.iter_optimizer_tensors(held)]


def test_all_that_a_trial_holds_is_moved_each_once() -> None:
    made = model("cpu")
    held = Held(made)
    held.step()
    found = tensors(made, held)
    wanted = {id(t) for t in (*made.parameters(), *held.masters)}
    wanted |= {id(b) for b in made.buffers() if b.is_floating_point()}
    moments = [s for state in held.inner.state.values() for s in state.values()]
    assert {id(t) for t in found} == wanted | {id(t) for t in moments}
    assert len(found) == len({id(t) for t in found})
    assert offload.offload_tensors(found) == []  # on the CPU they are there already


@pytest.mark.gpu
def test_a_trial_leaves_the_gpu_empty_and_goes_on_as_if_it_had_stayed() -> None:
    pair = [(made, Held(made)) for made in (model("cuda"), model("cuda"))]
    for _, held in pair:
        held.step()
    made, held = pair[0]
    before = torch.cuda.memory_allocated()
    moved = offload.offload_tensors(tensors(made, held))
    assert moved and all(t.device.type == "cpu" for t in made.parameters())
    assert torch.cuda.memory_allocated() < 0.6 * before
    offload.reload_tensors(moved)
    assert torch.cuda.memory_allocated() == before
    for _, other in pair:
        other.step()
    for one, two in zip(made.parameters(), pair[1][0].parameters(), strict=True):
        assert one.device.type == "cuda" and torch.equal(one, two)

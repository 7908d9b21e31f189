"""Gradients of ranks are summed while backward still runs, in one order, and to the same bits."""

from typing import Any

import pytest
import torch
from fork_cases import Forked
from resume_cases import weights
from test_ranks import WORDS, spread
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from two_ranks import two_ranks

from rloo_cli.distributed.overlap import GradientReducer
from rloo_cli.distributed.world import World

WIDTH = 8
ONE = WIDTH * WIDTH * 4  # bytes of a layer: one bucket each


class Layers(nn.Module):
    """Three layers; `log` hears when backward has passed each. One more is only used if asked."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.some = nn.Linear(WIDTH, WIDTH, bias=False)
        self.never = nn.Linear(WIDTH, WIDTH, bias=False)
        self.log: list[str] = []
        drawn = torch.Generator().manual_seed(1)  # two threads share torch's own
        for parameter in self.parameters():
            parameter.data = torch.randn(WIDTH, WIDTH, generator=drawn) / 3

    def forward(self, x: Tensor, some: bool = False) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            x.register_hook(lambda _, n=number: self.log.append(f"backward {n}"))
        return (self.some(x) if some else x).square().sum()


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * rank + number))


class Rank:
    """A model and its reduction on one rank; `update` is one update's backward passes."""

    def __init__(self, world: World, model: Layers | None = None, size: int = ONE):
        self.world, self.model = world, model or Layers()
        self.named = dict(self.model.named_parameters())
        found = [*self.named.values()]
        self.reduction = GradientReducer(world, found, found, group=self, bucket_bytes=size)
        self.found = found

    def allreduce_coalesced(self, gradients: list[Tensor], options: Any) -> Any:
        """The group that the reduction sees: it writes down what is sent."""
        names = {id(p.grad): n for n, p in self.named.items()}
        self.model.log.append("sent " + " ".join(names[id(g)] for g in gradients))
        # In a run, too, it is not the group in which ranks ask each other.
        return self.world.long_timeout_group.allreduce_coalesced(gradients, options)

    def update(self, micros: int, of: int, some: bool = False) -> None:
        self.model.log.clear()
        for parameter in self.found:
            parameter.grad = None
        for number in range(1, of + 1):
            if number > micros:
                self.reduction.skip_micro_batch(number == of)
            else:
                loss = self.model(batch(self.world.rank, number), some)
                self.reduction.backward(loss, number == of)

    def gradients(self) -> dict[str, Tensor | None]:
        return {n: None if p.grad is None else p.grad.clone() for n, p in self.named.items()}


def alone(rank: int, micros: int, some: bool = False) -> dict[str, Tensor | None]:
    """The gradients that a rank has before any sum."""
    model = Layers()
    for number in range(1, micros + 1):
        model(batch(rank, number), some).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def added(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    none = torch.zeros(WIDTH, WIDTH)
    return {
        n: None if a[n] is None and b[n] is None else (a[n] if a[n] is not None else none)
        + (b[n] if b[n] is not None else none)
        for n in a
    }  # fmt: skip


def same(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> bool:
    return a.keys() == b.keys() and all(
        b[n] is None if v is None else b[n] is not None and torch.equal(v, b[n])
        for n, v in a.items()
    )


def test_sums_begin_before_backward_has_ended_and_in_one_order():
    def work(world: World) -> Any:
        own = Rank(world, Only())
        own.update(2, 2)
        before = [*own.model.log]
        own.reduction.finalize_reduce(own.found)
        return before, [*own.model.log], own.gradients()

    (before, log, found), (_, other, theirs) = two_ranks(work)
    last = len(log) - 1 - log[::-1].index("backward 0")
    begun = [n for n, said in enumerate(log) if said.startswith("sent")]
    assert begun[0] < last, log  # while the first layer was still to come
    assert log == before  # nothing was left for the end
    assert [s for s in log if "sent" in s] == [s for s in other if "sent" in s]
    assert [s for s in log if "sent" in s] == [f"sent layers.{n}.weight" for n in (2, 1, 0)]
    assert same(found, theirs)


class Only(Layers):
    """Without the layers that are not always used."""

    def __init__(self) -> None:
        super().__init__()
        del self.some, self.never


@pytest.mark.parametrize("micros", [(3, 2), (2, 3), (3, 1), (2, 0), (0, 1), (0, 0)])
@pytest.mark.parametrize("some", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("size", [ONE, 3 * ONE, 100 * ONE])
def test_ranks_with_unequal_numbers_of_micro_batches_have_the_same_sums(micros, some, size):
    def work(world: World) -> Any:
        own, found = Rank(world, size=size), []
        for _ in range(2):  # the first update of a run shows which gradients come whole
            own.update(micros[world.rank], max(micros), some[world.rank])
            own.reduction.finalize_reduce(own.found)
            found.append(own.gradients())
        return found

    wanted = added(*(alone(rank, micros[rank], some[rank]) for rank in range(2)))
    for found in two_ranks(work):
        assert same(found[0], wanted) and same(found[1], wanted)
    assert wanted["never.weight"] is None


def test_half_precision_is_summed_in_float32():
    def work(world: World) -> Tensor:
        weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        weight.grad_dtype = torch.float32
        master = weight.detach().float().requires_grad_()
        reduction = GradientReducer(world, [weight], [master], group=world.group)
        for _ in range(2):
            given = torch.full((4,), 1.0 if world.rank else 2.0**-12)
            reduction.backward((weight.float() * given).sum(), True)
            assert len(reduction.pending_works) == 1  # it was sent before the master had it
            master.grad, weight.grad = weight.grad.float(), None
            reduction.finalize_reduce([master])
        return master.grad

    for found in two_ranks(work):
        assert torch.equal(found, torch.full((4,), 1 + 2.0**-12))


class Tied(Layers):
    """One weight at both ends, and layers that run a backward pass of their own within it."""

    def __init__(self) -> None:
        super().__init__()
        del self.never  # nothing waits for it: the weight at the end is the first to be sent

    def forward(self, x: Tensor, some: bool = False) -> Tensor:
        x = self.some(x)
        for layer in self.layers:
            x = checkpoint(lambda y, f=layer: torch.tanh(self.some(f(y))), x, use_reentrant=True)
        return self.some(x).square().sum()


def test_a_gradient_that_comes_in_parts_is_sent_when_it_is_whole():
    def work(world: World) -> Any:
        own = Rank(world, Tied())
        for _ in range(2):
            own.update(1, 1)
            own.reduction.finalize_reduce(own.found)
        return own.gradients(), {
            own.reduction.weights[i] for i in own.reduction.multi_fire_gradients
        }

    parts = []
    for rank in range(2):
        model = Tied()
        model(batch(rank, 1)).backward()
        parts.append({n: p.grad for n, p in model.named_parameters()})
    for found, several in two_ranks(work):
        assert same(found, added(*parts))
        assert len(several) == 1  # the tied one


def test_a_gradient_that_changes_after_it_was_sent_is_an_error():
    def work(world: World) -> str:
        own = Rank(world, Only())
        own.update(2, 2)
        with pytest.raises(RuntimeError, match="it was whole"):
            own.model(batch(world.rank, 3)).backward()
        own.reduction.abort_reduce()
        return "told"

    assert two_ranks(work) == ["told", "told"]


def test_an_update_that_is_given_up_leaves_nothing_under_way():
    def work(world: World) -> Any:
        own = Rank(world, Only())
        own.update(1, 1)  # since then each knows what there is to send
        own.reduction.finalize_reduce(own.found)
        own.update(2 - world.rank * 2, 2)  # one rank has nothing at all
        own.reduction.abort_reduce()
        assert not own.reduction.pending_works and not own.reduction.num_buckets_sent
        own.reduction.abort_reduce()  # once is enough: the other rank would be waited for
        own.update(1, 1)
        own.reduction.finalize_reduce(own.found)
        return own.gradients()

    for found in two_ranks(work):
        both = added(alone(0, 1), alone(1, 1))
        assert same(found, {n: both[n] for n in found})


def test_the_gradients_of_a_second_model_are_there_before_the_policys_backward():
    def work(world: World) -> list[str]:
        own, beside = Rank(world, Only()), Only()
        second = dict(beside.named_parameters(prefix="value"))
        own.named |= second
        own.found += [*second.values()]
        own.reduction = GradientReducer(world, own.found, own.found, [*second.values()], own, ONE)
        for _ in range(2):
            own.model.log.clear()
            own.reduction.backward(beside(batch(world.rank, 1)), False)
            own.reduction.backward(own.model(batch(world.rank, 1)), True)
            log = [*own.model.log]
            own.reduction.finalize_reduce(own.found)
        return log

    for log in two_ranks(work):
        sent = [s for s in log if s.startswith("sent")]
        assert sent[:3] == [f"sent value.layers.{n}.weight" for n in (2, 1, 0)]
        assert log.index(sent[2]) < log.index("backward 0") and len(sent) == 6


@pytest.fixture(scope="module")
def home(fast, tmp_path_factory):
    return Forked(fast, tmp_path_factory.mktemp("overlap"))


@pytest.mark.slow_cases("words0")
@pytest.mark.parametrize(
    "words",
    [
        ("model.dtype=bfloat16", "max_steps=2"),
        pytest.param(("max_steps=3",), marks=pytest.mark.slow),
        pytest.param(("lora=default", "max_steps=2"), marks=pytest.mark.slow),
    ],
)
def test_a_run_whose_sums_begin_early_has_the_same_weights(home, words):
    # torch's DETAIL, which other tests of ranks have on, lets no sum begin early.
    name = "run_" + words[0].partition("=")[2]
    for debug in ("DETAIL", "OFF"):
        got = [*WORDS, *spread("ddp"), *words, f"root={debug}", f"name={name}"]
        env = {"TORCH_DISTRIBUTED_DEBUG": debug}
        assert home(*got, "data.eval_split=null", ranks=2, env=env) == 0, home.said()
    early, late = (weights(home.folder / debug / name) for debug in ("OFF", "DETAIL"))
    assert early.keys() == late.keys()
    assert all(torch.equal(early[n], late[n]) for n in early)

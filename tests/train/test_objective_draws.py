"""Switches drawn at random: the fast way is the plain way, and both are what the formulas say.

Each draw is one step of a tiny model under a config that the command accepts. Its updates are made
as they come (`train.old_logp=auto`, `train.forward_all=false`), once more the plain way
(`separate`, `true`), and computed by `objective_reference`, which shares no code with the package.
`RLOO_DRAWS=17,40` tries only these.
"""

import os
import random
import traceback
from typing import Any

import pytest
import torch
from draw_cases import (
    ALGORITHMS,
    DIALECTS,
    Bench,
    Recorder,
    Sampled,
    draw,
    given_of,
    one_thread,
    plain_settings,
)
from objective_reference import Given, Reference
from torch import Tensor

from rloo_cli.algorithms import rloo
from rloo_cli.algorithms.common import forward_plan
from rloo_cli.algorithms.common.base import load_algorithm
from rloo_cli.utils.errors import NumbersError

pytestmark = pytest.mark.wide

DRAWS, PARTS, PLAIN_DRAWS = 200, 4, 50
ONLY = [int(n) for n in os.environ.get("RLOO_DRAWS", "").split(",") if n]
PLAINLY = {"old_logp": "separate", "forward_all": True}
CLOSE = 1e-5  # relative, of the gradients of an update in float32


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with one_thread():
        yield Bench(tmp_path_factory.mktemp("draws"))


def apart(found: Tensor, expected: Tensor, scale: float) -> float:
    """Relative distance; of what is smaller than `scale`, relative to that."""
    expected = expected.double()
    return float((found.double() - expected).norm()) / max(float(expected.norm()), scale)


def flat_gradient(loss: Tensor, parameters: list[Any]) -> Tensor:
    """(all parameters,), 0 where the loss does not depend on one."""
    if not loss.requires_grad:  # no completion has a token that is trained on
        return torch.cat([torch.zeros_like(p).reshape(-1) for p in parameters])
    parts = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(parameters, parts, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for p, g in pairs])


def expected_gradients(bench: Bench, settings: Any, given: Given, run: Recorder) -> list[Tensor]:
    """By the formulas, at the weights that each of the run's updates began from."""
    values = settings.algorithm.name == "ppo"
    reference = Reference(settings.algorithm.model_dump(), given)
    ref, found = bench.reference_logp(given, settings), []
    shares = [s for shares in reference.shares() for s in shares if reference.learns(s)]
    assert len(shares) == len(run.before), f"{len(run.before)} updates instead of {len(shares)}"
    old = None
    for share, weights in zip(shares, run.before, strict=True):
        parameters = bench.twins(weights, values)
        now = bench.forward(given, settings, values)
        if old is None:
            old = now
            with torch.no_grad():
                reference.advantages(old, ref)
        found.append(flat_gradient(reference.loss(now, old, ref, share), parameters))
    return found


def say_behaviour(bench: Bench, settings: Any, sampled: Sampled) -> None:
    """What the sampler says of its tokens: about what the policy does, with gaps."""
    if not sampled.behaves:
        return
    rounds = settings.algorithm.max_resample
    resamples = settings.algorithm.zero_std_groups == "resample"
    count = settings.train.prompts_per_step * (1 + rounds * resamples)
    given = given_of(list(range(count)), sampled, settings, {})
    with torch.no_grad():
        bench.twins(bench.start, False)
        logp = bench.forward(given, settings, False).logp
    for d in range(count):
        for k, column in enumerate(logp[d]):
            rng = sampled.rng(d, k, "behaviour")
            said = [x + rng.gauss(0, sampled.behaves) for x in column.tolist()]
            said = [float("nan") if rng.random() < 0.05 else x for x in said]
            sampled.behaviour[d, k] = None if rng.random() < 0.1 else said


def try_draw(bench: Bench, number: int, settings: Any = None) -> str:
    """Try one draw, or other settings with what it samples; "" or what is wrong with it."""
    settings, rng = settings or draw(number).settings, random.Random(f"{number}/more")
    sampled = Sampled(number, settings.algorithm.num_generations)
    say_behaviour(bench, settings, sampled)
    memory = rng.choice([{}, {"ema": 0.2, "ema_weight": 0.271}])
    length = rng.choice([0.001, 0.01])
    plain = settings.model_copy(update={"train": settings.train.model_copy(update=PLAINLY)})
    try:
        fast, batch = bench.trained(settings, sampled, length, memory)
    except NumbersError:  # no group of those that were drawn again has unequal scores
        with pytest.raises(NumbersError):
            bench.trained(plain, sampled, length, memory)
        return ""
    slow, _ = bench.trained(plain, sampled, length, memory)
    given = given_of([g.prompt_offset for g in batch.groups], sampled, settings, memory)
    expected = expected_gradients(bench, settings, given, slow)
    if len(fast.gradients) != len(expected):
        return f"the fast way makes {len(fast.gradients)} updates instead of {len(expected)}"
    # Of an update whose terms cancel, rounding is as large as of the step's others.
    scale = max([0.01, *(0.1 * float(e.norm()) for e in expected)])
    for n, (f, s, e) in enumerate(zip(fast.gradients, slow.gradients, expected, strict=True)):
        off, wrong = apart(f, s, scale), apart(s, e, scale)
        if not (off < CLOSE and wrong < CLOSE):
            return (
                f"update {n}: the fast way is {off:.2g} from the plain way, which is {wrong:.2g}"
                f" from the formulas (gradient {float(e.norm()):.3g})"
            )
    return ""


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize(
    "part", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, PARTS))]
)
def test_an_update_is_what_the_formulas_say_under_any_switches_the_fast_way_too(bench, part):
    numbers = ONLY[part::PARTS] if ONLY else range(part, DRAWS, PARTS)
    wrong = []
    for number in numbers:
        try:
            found = try_draw(bench, number)
        except Exception:  # a config that is accepted may not crash either
            found = traceback.format_exc(limit=-4)
        if found:
            wrong.append(f"RLOO_DRAWS={number}: {found}\n{draw(number).words}")
    assert not wrong, f"{len(wrong)} of {len(numbers)} draws:\n" + "\n".join(wrong)


@pytest.mark.parametrize("by_family", [False, True], ids=["rloo.py", "family.py"])
def test_plain_rloo_is_what_the_formulas_say_in_its_own_file_and_with_switches(
    bench, monkeypatch, by_family
):
    """No draw of all switches is plain RLOO; these are, and both ways are held to the formulas."""
    if by_family:
        monkeypatch.setattr(rloo, "PLAIN", {"name": "no config is plain"})
    for number in range(PLAIN_DRAWS):
        settings = plain_settings(number)
        assert load_algorithm(settings.algorithm).is_plain is not by_family
        assert try_draw(bench, number, settings) == "", number


def test_clipped_advantages_have_no_one_factor(bench):
    assert try_draw(bench, 83) == ""  # it fails without the guard; its part of the 200 is slow


@pytest.mark.slow
def test_draws_meet_every_algorithm_and_dialect_and_the_corners_and_few_are_refused():
    draws = [draw(number) for number in range(DRAWS)]
    assert sum(len(d.refused) for d in draws) < 2 * DRAWS
    words = " ".join(d.words for d in draws)
    wanted = {f"algorithm={name}" for name in ALGORITHMS} | {f"dialect={n}" for n in DIALECTS}
    assert [text for text in wanted if f"{text}'" not in words] == []
    keys: list[Any] = [d.settings.algorithm for d in draws]
    bonus = [
        k
        for k in keys
        if k.normalize_advantages and k.entropy_coef and not forward_plan.needs_no_logprobs(k)
    ]
    masked = [k for k in keys if k.by_token and k.mask_truncated_completions is True]
    clipped = [k for k in keys if k.normalize_advantages and k.clips_advantages]
    again = [k for k in keys if k.zero_std_groups == "resample" and k.multi_reward != "sum"]
    assert min(map(len, (bonus, masked, clipped))) >= 8 and len(again) >= 2

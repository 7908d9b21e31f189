"""Completions that are interrupted go on from what they have, on a fake server and a real one."""

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_server import GENERATE, GROUP
from vllm_cases import changed, config, groups, policy, sampler, tokenizer

from rloo_cli.data.sampling_mask import SamplingMask
from rloo_cli.generation.common.open_groups import OpenCompletion, OpenGroup
from rloo_cli.generation.vllm.engine import EngineLost
from rloo_cli.generation.vllm.generator import VllmGenerator
from rloo_cli.utils.errors import GenerationError

MOST = 32  # tokens of a completion
PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12]]


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.vllm)])
def there(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = request.getfixturevalue("fake" if request.param == "fake" else "server")
    monkeypatch.setenv("RLOO_SERVER_TOKEN", found.token)
    return found


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    made: list[VllmGenerator] = []

    def one(server: Any, version: int = 0, **keys: Any) -> VllmGenerator:
        if hasattr(server, "slow_s"):
            server.slow_s = 0.2
        run = changed(config(server.url, retries=1), max_completion_length=MOST, **keys)
        shorter = run.data.model_copy(update={"max_prompt_length": 16})  # both fit into 48
        made.append(sampler(run.model_copy(update={"data": shorter}), tmp_path))
        made[-1].load(policy(), version)
        return made[-1]

    yield one
    for generator in made:
        generator.close()


def begun(k: int = 4) -> list[OpenGroup]:
    return [
        OpenGroup(group, [OpenCompletion(100 * i + j) for j in range(k)], 2)
        for i, group in enumerate(groups(PROMPTS))
    ]


def interrupt(generator: VllmGenerator, found: list[OpenGroup], after_s: float) -> None:
    stop = threading.Event()
    timer = threading.Timer(after_s, stop.set)
    timer.start()
    try:
        generator.extend(found, lambda group: None, stop)
    finally:
        timer.cancel()


def interrupt_all(generator: VllmGenerator, fake: Any, found: list[OpenGroup]) -> None:
    """Stop when the server has every request and has answered none, whatever the machine does."""
    stop, asked = threading.Event(), sum(len(g.unfinished) for g in found)
    before, fake.slow_s = fake.slow_s, 60.0

    def wait() -> None:
        with fake.lock:
            fake.lock.wait_for(lambda: fake.now == asked, 60)
        stop.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        generator.extend(found, lambda group: None, stop)
    finally:
        waiting.join()
        fake.slow_s = before


def test_what_was_cut_goes_on_under_other_weights_and_every_token_is_told(
    there: Any, make: Any
) -> None:
    generator, ended = make(there), []
    for version in range(20):  # a server that is fast may have ended before it was interrupted
        found = begun()
        generator.load(policy(), 2 * version)
        generator.make_ready([g.group for g in found])
        interrupt(generator, found, 0.03)
        cut = {c.seed: (list(c.ids), list(c.logp)) for g in found for c in g.unfinished if c.ids}
        generator.load(policy(), 2 * version + 1)
        generator.extend(found, ended.append, threading.Event())
        if cut:
            break
    assert cut and ended
    for group in found:
        assert not group.unfinished
        for c in group.completions:
            ids, logp = cut.get(c.seed, ([], []))
            assert c.ids[: len(ids)] == ids and c.logp[: len(logp)] == logp
            assert len(c.ids) == len(c.logp) <= MOST
            assert c.finish_reason == ("length" if len(c.ids) == MOST else "stop")
            if ids:
                spans = [(2 * version, len(ids)), (2 * version + 1, len(c.ids) - len(ids))]
                assert c.version_spans == spans
            # The zero head says how likely each token is, wherever it was cut.
            assert c.logp == pytest.approx([-math.log(len(tokenizer()))] * len(c.ids), abs=1e-4)


def test_the_rest_is_asked_for_with_prompt_and_tokens_so_far(fake: Any, make: Any) -> None:
    generator, found = make(fake), begun(1)
    interrupt_all(generator, fake, found)
    asked = len(fake.draws())
    cut = [list(g.completions[0].ids) for g in found]
    assert all(0 < len(ids) < MOST for ids in cut)
    generator.extend(found, lambda group: None, threading.Event())
    # They are asked for together, and arrive in any order.
    bodies = {tuple(body["token_ids"]): body for body in fake.draws()[asked:]}
    for group, ids in zip(found, cut, strict=True):
        body = bodies.pop((*group.group.prompt_ids, *ids))
        assert body["sampling_params"]["max_tokens"] == MOST - len(ids)
        assert body["sampling_params"]["seed"] != group.completions[0].seed
    assert not bodies


def test_siblings_without_a_token_share_a_request_and_others_do_not(fake: Any, make: Any) -> None:
    fake.facts["routes"] = [GROUP]
    generator, found = make(fake), begun(3)
    found[0].completions[0].add_tokens([20, 21], [-1.0, -1.0], 0, None)
    before = len(fake.asked)
    generator.extend(found, lambda group: None, threading.Event())
    bodies = [body for path, body in fake.asked[before:] if path == GROUP]
    sizes = sorted((tuple(b["token_ids"]), len(b["sampling_params"])) for b in bodies)
    assert sizes == sorted(
        [((*PROMPTS[0], 20, 21), 1), (tuple(PROMPTS[0]), 2)]
        + [(tuple(prompt), 3) for prompt in PROMPTS[1:]]
    )


def test_a_stop_string_across_a_cut_ends_the_completion(fake: Any, make: Any) -> None:
    generator = make(fake, stop=["ab"])
    a, b = (tokenizer().convert_tokens_to_ids(letter) for letter in "ab")
    first, rest = [[a, 9]], [[b, 3], [a], [a, b]]
    completion = OpenCompletion(1, [a], [-1.0], [(0, 1)])
    completion.sampling_mask = SamplingMask.from_lists(first)
    answer = type("Answer", (), {"ids": [b, a, a], "logp": [-2.0, -3.0, -4.0],
                                 "sampling_mask": SamplingMask.from_lists(rest),
                                 "finish_reason": "length"})  # fmt: skip
    generator._add_answer(completion, answer, 1)
    assert completion.ids == [a, b] and completion.logp == [-1.0, -2.0]
    assert completion.finish_reason == "stop" and completion.version_spans == [(0, 1), (1, 1)]
    assert completion.sampling_mask == SamplingMask.from_lists([*first, rest[0]])
    assert completion.to_rollout(generator.stop_rule).text == ""


def test_a_lost_server_leaves_what_was_kept_and_is_given_up_when_it_is_lost_again(
    fake: Any, make: Any
) -> None:
    generator, found = make(fake), begun(1)
    interrupt_all(generator, fake, found)
    kept = [list(g.completions[0].ids) for g in found]
    fake.dies_at = {fake.drawn + 1}
    with pytest.raises(EngineLost) as lost:
        generator.extend(found, lambda group: None, threading.Event())
    assert [g.completions[0].ids for g in found] == kept
    generator.handle_engine_loss(lost.value)
    generator.make_ready([g.group for g in found])  # it has the weights again
    generator.extend(found, lambda group: None, threading.Event())
    assert all(g.completions[0].ids[: len(ids)] == ids for g, ids in zip(found, kept, strict=True))
    generator.handle_engine_loss(EngineLost("gone"))
    with pytest.raises(GenerationError, match="2 times in a row"):
        generator.handle_engine_loss(EngineLost("gone"))


def test_tokens_of_other_weights_are_no_part_of_a_completion(fake: Any, make: Any) -> None:
    generator, found = make(fake), begun(1)
    fake.says = "somebody:7"
    with pytest.raises(GenerationError, match="other weights"):
        generator.extend(found, lambda group: None, threading.Event())
    assert not any(c.ids for g in found for c in g.completions)
    assert GENERATE in [path for path, _ in fake.asked]

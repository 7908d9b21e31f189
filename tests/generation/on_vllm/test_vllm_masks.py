"""Sampling masks from vLLM: asked for, checked, refused where an engine sends none.

No CPU runs a vLLM that sends masks (its model runner V2 is made of Triton kernels): the client is
held to vLLM's own protocol classes here, and a fake server sends what they say.
"""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loop_cases
import pytest
import torch
import vllm_cases
from assert_refused import assert_refused
from fake_server import GROUP, Fake
from vllm_cases import SEEDS

from rloo_cli.config.schema import RunConfig
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.generation.vllm import arguments, http_engine, model_runner, sampling_params
from rloo_cli.generation.vllm.generator import VllmGenerator
from rloo_cli.launch import preflight
from rloo_cli.utils.errors import ConfigError, GenerationError

KEPT = 8


def masked(*urls: str, **keys: Any) -> RunConfig:
    """A run that keeps masks, of 8 ids a token unless `keys` of `generation` say otherwise."""
    keys = {"return_sampling_mask": True, "top_k": KEPT} | keys
    return vllm_cases.changed(vllm_cases.config(*urls), **keys)


@pytest.fixture
def source(fake: Fake, tmp_path: Path) -> Iterator[Callable[..., VllmGenerator]]:
    """Makes generators of such runs on the fake server; they are closed in the end."""
    made = []

    def one(**keys: Any) -> VllmGenerator:
        made.append(vllm_cases.sampler(masked(fake.url, **keys), tmp_path))
        made[-1].load(vllm_cases.policy(), 0)
        return made[-1]

    yield one
    for generator in made:
        generator.close()


@pytest.fixture
def sending(fake: Fake) -> Fake:
    """A server that sends masks, and has the group route where a test says so."""
    assert fake.facts is not None
    fake.facts["sampling_mask"] = True
    return fake


@pytest.mark.parametrize("routes", [[], [GROUP]], ids=["vLLM's route", "the group route"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 0, "top_p": 0.02}], ids=["top_k", "top_p"])
def test_completions_bring_their_masks_and_the_trainer_agrees_with_them(
    sending: Fake, source: Any, routes: list[str], filters: dict[str, Any]
) -> None:
    sending.facts["routes"] = routes  # type: ignore[index]
    found, groups = source(**filters), vllm_cases.groups()
    found.generate(groups, SEEDS)
    batch = vllm_cases.policy().pack(groups, whole_group_slices(groups, range(len(groups))))
    assert batch.kept is not None and batch.behaviour_logp is not None
    gap = vllm_cases.policy().frozen_logp(batch).logp - batch.behaviour_logp
    assert gap.abs().max() < 1e-5
    for rollout in (r for group in groups for r in group.rollouts):
        assert rollout.sampling_mask is not None
        assert len(rollout.sampling_mask) == len(rollout.completion_ids)


def test_held_out_answers_have_no_mask_and_are_asked_for_as_such_an_engine_wants_it(
    sending: Fake, source: Any
) -> None:
    found, groups = source(top_k=0, top_p=0.02), vllm_cases.groups()
    for options in ({"greedy": True}, {"temperature": 0.5}):
        found.generate(groups, SEEDS, **options)
        assert all(r.sampling_mask is None for group in groups for r in group.rollouts)
    asked = [body["sampling_params"] for body in sending.draws()]
    greedy = {(p["temperature"], p["top_k"]) for p in asked if p["top_k"] == 1}
    assert greedy == {(1.0, 1)}
    whole = [p for p in asked if p["top_k"] == sampling_params.WHOLE_VOCABULARY]
    assert len(whole) == 16 and {p["temperature"] for p in whole} == {0.5}


def test_a_top_p_that_keeps_more_than_the_limit_ends_the_run(sending: Fake, source: Any) -> None:
    found = source(top_k=0, top_p=0.5, max_sampling_mask_ids=KEPT)
    with pytest.raises(GenerationError) as caught:
        found.generate(vllm_cases.groups(), SEEDS)
    assert_refused(caught, 6, str(KEPT + 1), where="generation.max_sampling_mask_ids")
    asked = {body["sampling_params"]["top_k"] for body in sending.draws()}
    assert asked == {KEPT + 1}  # one more than the limit: no mask is cut without a word


def test_a_server_that_sends_no_masks_is_refused_with_exit_2(fake: Fake, source: Any) -> None:
    assert fake.facts is not None
    fake.facts["sampling_mask"] = False
    with pytest.raises(ConfigError) as caught:
        source()
    assert_refused(caught, 2, "VLLM_USE_V2_MODEL_RUNNER=1")
    assert not fake.draws()


def test_a_vllm_of_another_hand_that_sends_none_is_refused_at_its_first_answer(
    sending: Fake, source: Any
) -> None:
    sending.sends_masks = False
    found = source()
    with pytest.raises(ConfigError) as caught:
        found.generate(vllm_cases.groups(), SEEDS)
    assert_refused(caught, 2, "VLLM_USE_V2_MODEL_RUNNER=1")


def test_a_server_that_sends_masks_to_a_run_that_keeps_none_is_refused(
    sending: Fake, source: Any, sentence
) -> None:
    with pytest.raises(ConfigError) as caught:
        source(return_sampling_mask=False)
    sentence(str(caught.value).replace(sending.url, "URL"))


def test_a_mask_that_its_own_token_is_not_in_is_refused(sending: Fake, source: Any) -> None:
    found = source()
    sending.bends_masks = True
    with pytest.raises(GenerationError, match="own sampling mask"):
        found.generate(vllm_cases.groups(), SEEDS)


def test_an_engine_is_started_with_what_masks_need_and_without_it_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RLOO_CACHE", loop_cases.cache())
    for run, wanted in ((masked(), True), (vllm_cases.config(), False)):
        keys: Any = run.generation.server  # type: ignore[attr-defined]
        given = arguments.build_engine_arguments(run, keys, 1)
        assert given.get("return_sampling_mask", False) is wanted
        environment = arguments.engine_environment(run.model, run.generation)
        assert (environment.get("VLLM_USE_V2_MODEL_RUNNER") == "1") is wanted


@pytest.mark.parametrize(
    ("gpus", "triton", "version", "words"),
    [
        ([], False, "0.32.0", "triton-cpu"),
        ([], True, "0.32.0", ""),
        (["0"], False, "0.32.0", ""),
        (["0"], False, "0.22.1", "no sampling masks"),
    ],
)
def test_a_machine_whose_vllm_cannot_send_masks_is_refused_with_exit_2(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], triton: bool, version: str, words: str
) -> None:
    monkeypatch.setattr(arguments, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(model_runner, "has_triton", lambda on_gpu: triton)
    monkeypatch.setattr(arguments, "installed_vllm_version", lambda: version)
    own = vllm_cases.changed(vllm_cases.config(base_url=None), return_sampling_mask=True, top_k=9)
    found = [problem.why for problem in arguments.mask_problems(own.generation)]
    assert not found if not words else words in found[0]
    assert not [
        *arguments.mask_problems(masked("http://elsewhere:1").generation)
    ]  # asked when it answers
    if words:
        for check in (preflight.check_machine, preflight.check_server_machine):
            with pytest.raises(ConfigError) as caught:
                check(own)
            assert_refused(caught, 2, "vLLM's model runner V2")


def recorded_output() -> Any:
    """A completion of two tokens as vLLM's engine hands it out."""
    from vllm.logprobs import FlatLogprobs, Logprob
    from vllm.outputs import CompletionOutput, SamplingMask

    got = FlatLogprobs()
    for token, logp in ((5, -0.25), (7, -1.5)):
        got.append({token: Logprob(logp, 1)})
    return CompletionOutput(
        0, "", [5, 7], -1.75, got, finish_reason="length",
        sampling_mask=SamplingMask([[5, 9], [3, 7, 8]]),
    )  # fmt: skip


@pytest.mark.vllm
def test_vllms_own_protocol_classes_are_read_by_every_route() -> None:
    protocol = pytest.importorskip("vllm.entrypoints.scale_out.token_in_token_out.protocol")
    from rloo_cli.generation.vllm import child_main, group_route

    wanted = [[5, 9], [3, 7, 8]]
    choice = protocol.GenerateTokensChoice(
        index=0, token_ids=[5, 7], finish_reason="length", sampling_mask=wanted,
        weight_versions=[{"version": "v", "start": 0, "end": 2}],
        logprobs={"content": [
            {"token_id": i, "logprob": x, "rank": 1, "top_logprobs": []}
            for i, x in ((5, -0.25), (7, -1.5))
        ]},
    )  # fmt: skip
    answer = {"request_id": "1", "choices": [json.loads(choice.model_dump_json())]}
    plain = http_engine.parse_completion(answer, "http://x")
    child = child_main._to_engine_completion(recorded_output(), "v")

    async def engine(*arguments: Any, **named: Any) -> Any:
        yield SimpleNamespace(outputs=[recorded_output()])

    state = SimpleNamespace(engine_client=SimpleNamespace(generate=engine), rloo_label="v")
    prompt: Any = None
    params = {"max_tokens": 2, "logprobs": 0, "top_k": 3}
    item = asyncio.run(group_route._generate_completion(state, prompt, params, None, None, "1"))
    item = json.loads(json.dumps(item)) | {"versions": ["v"]}
    (grouped,) = http_engine.parse_group_completions({"completions": [item]}, "http://x", 1)
    for found in (plain, child, grouped):
        assert found.ids == [5, 7] and found.logp == pytest.approx([-0.25, -1.5])
        mask = found.sampling_mask
        assert mask is not None
        assert [*map(list, torch.tensor(mask.ids).split(list(mask.counts)))] == wanted


@pytest.mark.vllm
def test_the_installed_vllm_takes_the_argument_that_asks_for_masks() -> None:
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    assert "return_sampling_mask" in {f.name for f in dataclasses.fields(arg_utils.EngineArgs)}

"""What is sent is what answers: real vLLM, weights changed family by family."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vllm_kills import members
from transformers import (
    AutoTokenizer,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rloo_cli.config import check, synthetic
from rloo_cli.config.compose import compose_config
from rloo_cli.data.batch import Group
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.generation.vllm.engine import EngineLost, EngineRequest
from rloo_cli.generation.vllm.generator import VllmGenerator, build_colocate_generator
from rloo_cli.generation.vllm.sampling_params import parity_params
from rloo_cli.policy.model import Policy
from rloo_cli.utils.errors import GenerationError

pytestmark = pytest.mark.vllm
SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
QWEN = "embed_tokens q_proj k_proj v_proj o_proj gate_proj up_proj down_proj norm lm_head"
NEOX = "embed_in query_key_value attention.dense h_to_4h 4h_to_h layer_norm lm_head"


def build(kind: str, folder: Path) -> Any:
    """A tiny random model in `folder`, with the tokenizer of make:tiny."""
    tokenizer = AutoTokenizer.from_pretrained(synthetic.resolve_model_path("make:tiny"))
    family, tied = kind.split("-")
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    given = SHAPE | ids | {"vocab_size": len(tokenizer), "tie_word_embeddings": tied == "tied"}
    torch.manual_seed(3)
    model: Any
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**given, num_key_value_heads=1, head_dim=32))
    else:
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**given))
    for parameter in model.parameters():
        parameter.data.mul_(2.0)  # far from uniform, so that a stale tensor is seen
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


class Pair:
    """A trainer's model and the engine that samples for it."""

    def __init__(self, kind: str, folder: Path, *more: str, device: str = "cpu"):
        self.model = build(kind, folder)
        words = ["+recipe=smoke", "generation=vllm_colocate", f"model.path={folder}"]
        words += ["generation.max_completion_length=8", "generation.temperature=0.7"]
        words += ["data.max_prompt_length=64", *more]
        self.run = check.check_config(compose_config(words))
        if device != "cpu":
            self.model.to(device, getattr(torch, self.run.model.dtype))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.said: list[str] = []
        self.generator: VllmGenerator = build_colocate_generator(
            self.model, tokenizer, self.run, 128, folder, self.said.append
        )
        self.policy = Policy(self.model, 0.7)
        self.version = 0

    def load(self) -> None:
        self.version += 1
        self.generator.load(self.policy, self.version)

    def sample(self, seeds: list[int]) -> list[Group]:
        prompts = [[5 + i, 9, 30 + i, 7] for i in range(3)]
        groups = [Group(i, {}, "", prompt) for i, prompt in enumerate(prompts)]
        self.generator.generate(groups, [seeds for _ in groups])
        return groups

    def gap(self, groups: list[Group]) -> float:
        """Largest difference of the log-probabilities of what was sampled."""
        micro = self.policy.pack(groups, whole_group_slices(groups, range(len(groups))))
        assert micro.behaviour_logp is not None
        return float((self.policy.frozen_logp(micro).logp - micro.behaviour_logp).abs().max())


# Nats that two programs may be apart by rounding, whatever the CPU; other weights are above 1e-3.
ROUNDING = 1e-4
# Two of the engines have their core in a process of its own, as on a GPU; they lose it at the end.
KINDS = [
    "qwen3-tied", "qwen3-untied", pytest.param("neox-untied", marks=pytest.mark.slow),
    pytest.param("neox-tied", marks=pytest.mark.slow),
]  # fmt: skip
APART = ("qwen3-untied", "neox-untied")


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    apart = str(request.param in APART).lower()
    words = f"generation.colocate.core_process={apart}"
    found = Pair(request.param, tmp_path_factory.mktemp(request.param), words)
    yield found
    found.generator.close()


@pytest.mark.slow_but("neox-untied", "neox-tied")
def test_an_update_of_each_family_of_tensors_reaches_the_engine(pair: Pair) -> None:
    pair.load()
    assert pair.gap(pair.sample([1, 2])) < ROUNDING
    families = QWEN if isinstance(pair.model, Qwen3ForCausalLM) else NEOX
    for family in families.split():
        chosen = [p for n, p in pair.model.named_parameters() if family in n]
        assert chosen or pair.model.config.tie_word_embeddings
        before = pair.sample([3])
        with torch.no_grad():
            for parameter in chosen:
                parameter.add_(torch.randn_like(parameter) * parameter.std().clamp(min=0.2))
        if chosen:
            assert pair.gap(before) > 1e-3, f"{family}: the change is too small to be seen"
        pair.load()
        assert pair.gap(pair.sample([3])) < ROUNDING, family


@pytest.mark.slow_cases("qwen3-tied")
def test_a_seed_draws_the_same_tokens_again_and_in_another_batch(pair: Pair) -> None:
    pair.load()
    first = [r.completion_ids for r in pair.sample([11, 12, 13])[1].rollouts]
    again = [r.completion_ids for r in pair.sample([13, 11])[1].rollouts]
    assert again == [first[2], first[0]]
    assert len({tuple(ids) for ids in first}) > 1


@pytest.mark.slow_cases("qwen3-tied")
def test_an_engine_leaves_the_trainers_random_state_and_threads_alone(pair: Pair) -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    pair.load()
    pair.sample([4])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


@pytest.mark.slow_cases("qwen3-tied")
def test_weights_that_do_not_all_arrive_are_refused_with_their_names(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rloo_cli.generation.vllm import weights

    name = next(n for n, _ in pair.model.named_parameters() if "layers.1." in n and "norm" in n)
    every = weights.ModelWeightSource._to_checkpoint_names
    monkeypatch.setattr(
        weights.ModelWeightSource,
        "_to_checkpoint_names",
        lambda self, given: [row for row in every(self, given) if row[0] != name],
    )
    with pytest.raises(GenerationError, match=r"weights are missing: .*layers\.1"):
        pair.load()
    monkeypatch.undo()
    pair.load()
    assert pair.gap(pair.sample([5])) < ROUNDING


@pytest.mark.slow_cases("qwen3-tied")
def test_a_tensor_that_the_engine_does_not_know_is_refused_by_name(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rloo_cli.generation.vllm import weights

    every = weights.ModelWeightSource._to_checkpoint_names
    more = ("model.layers.0.surplus.weight", torch.zeros(4, 4))
    monkeypatch.setattr(
        weights.ModelWeightSource,
        "_to_checkpoint_names",
        lambda self, given: [*every(self, given), more],
    )
    with pytest.raises(GenerationError, match="surplus"):
        pair.load()
    monkeypatch.undo()
    pair.load()
    assert pair.gap(pair.sample([6])) < ROUNDING


def cores(pair: Pair) -> list[int]:
    """Processes of vLLM's core among those of the engine."""
    process = pair.generator.engine.pipe.process  # type: ignore[attr-defined]
    return [pid for pid, line in members(process.pid).items() if "EngineCore" in line]


@pytest.mark.slow_cases("qwen3-tied")
def test_the_engines_core_is_where_the_key_says_and_is_missed_when_it_is_killed(
    pair: Pair, request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["pair"]
    pair.load()
    assert len(cores(pair)) == (kind in APART)
    engine = pair.generator.engine
    assert engine.is_healthy()
    if kind in APART:
        began = time.monotonic()
        os.kill(cores(pair)[0], signal.SIGKILL)
        with pytest.raises(EngineLost, match="exited with 70"):
            engine.generate(
                [EngineRequest([5, 6], parity_params(pair.run.generation, [], 1, 4))],
                lambda *_: None,
            )
        assert not engine.is_healthy() and time.monotonic() - began < 60  # of 900 s without a token


@pytest.mark.slow
def test_a_core_that_was_killed_is_replaced_with_the_same_weights(tmp_path: Path) -> None:
    pair = Pair("qwen3-tied", tmp_path, "generation.colocate.core_process=true")
    try:
        pair.load()
        first = pair.sample([1, 2])
        os.kill(cores(pair)[0], signal.SIGKILL)
        again = pair.sample([1, 2])
        assert pair.generator.engine.restarts == 1
        assert [[r.completion_ids for r in g.rollouts] for g in again] == [
            [r.completion_ids for r in g.rollouts] for g in first
        ]
        assert pair.gap(again) < ROUNDING
    finally:
        pair.generator.close()


@pytest.mark.slow_cases("qwen3-tied")
def test_nothing_of_an_engine_is_left(pair: Pair) -> None:
    process = pair.generator.engine.pipe.process  # type: ignore[attr-defined]
    pair.generator.close()
    until = time.monotonic() + 10  # a killed core is nobody's child for a moment
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < until:
            os.killpg(process.pid, 0)
            time.sleep(0.02)

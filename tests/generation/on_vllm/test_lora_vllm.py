"""Adapters into a real vLLM server: only their bytes cross, and its base stays what it was."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_cases
from loop_cases import make
from lora_cases import frozen, move, same
from vllm_cases import Real

from rloo_cli.data.packing import whole_group_slices
from rloo_cli.generation.vllm import sampling_params, server_file, transfer_gloo
from rloo_cli.generation.vllm.server import SCRATCH_VARIABLE
from rloo_cli.policy import lora
from rloo_cli.run import Run
from rloo_cli.train.loop import run_training_loop
from rloo_cli.utils.errors import GenerationError

pytestmark = pytest.mark.vllm
STEPS = 20


@pytest.fixture(scope="module")
def adapting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    """A server with a place for an adapter."""
    base = tmp_path_factory.getbasetemp()
    with vllm_cases.serving(tmp_path_factory.mktemp("adapting"), base, "lora=default") as real:
        yield real


@pytest.fixture
def run(adapting: Real, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run in this process that trains an adapter and samples there."""
    monkeypatch.setenv("RLOO_SERVER_TOKEN", adapting.token)
    words = (
        *vllm_cases.WORDS, f"generation.server.base_url={adapting.url}", "lora=default",
        f"max_steps={STEPS}", "train.learning_rate=0.01", "data.eval_split=null",
        "checkpoint.every=1000", "generation.server.reconnect_timeout_s=5",
    )  # fmt: skip
    found = make(tmp_path, *words, noise=0.0)
    yield found
    found.generator.close()


def base_says(run: Run, adapting: Real) -> list[Any]:
    """Tokens and log-probabilities of the engine's base: requests that name no adapter."""
    engine, rule = run.generator.engine, run.generator.stop_rule  # type: ignore[attr-defined]
    params = sampling_params.parity_params(run.config.generation, rule.stop_ids, 7, 12)
    said = []
    for prompt in vllm_cases.PROMPTS:
        body = {"token_ids": prompt, "sampling_params": params}
        path = "/inference/v1/generate"
        choice = engine.http_client.post(adapting.url, path, adapting.token, body, 60)["choices"][0]
        said.append([choice["token_ids"], [e["logprob"] for e in choice["logprobs"]["content"]]])
    return said


def server_files(adapting: Real) -> dict[str, int]:
    """All that the server has written for itself, an adapter's files among it, and their sizes."""
    record = server_file.running_server(adapting.folder)
    assert record is not None
    got = Path(f"/proc/{record.pid}/environ").read_text().split("\0")
    scratch = Path(dict(text.split("=", 1) for text in got if text)[SCRATCH_VARIABLE])
    return {str(p.relative_to(scratch)): p.stat().st_size for p in scratch.rglob("*")}


def served_names(run: Run, adapting: Real) -> list[str]:
    """What the server says it serves: its base, and its adapters."""
    http = run.generator.engine.http_client  # type: ignore[attr-defined]
    said = http.get(adapting.url, "/v1/models", adapting.token, 60)
    return [model["id"] for model in said["data"]]


@pytest.mark.slow
def test_only_the_adapter_crosses_and_neither_base_changes_over_a_hundred_syncs(
    run: Run, adapting: Real, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossed: list[int] = []
    broadcast = transfer_gloo.broadcast_buffer
    monkeypatch.setattr(
        transfer_gloo,
        "broadcast_buffer",
        lambda group, b: (crossed.append(b.nbytes), broadcast(group, b)),
    )
    model = run.policy.model
    own = sum(tensor.nbytes for tensor in lora.adapter_tensors(model).values())
    ours, groups = frozen(model), vllm_cases.groups()
    run.generator.load(run.policy, 0)
    theirs = base_says(run, adapting)
    run.generator.generate(groups, vllm_cases.SEEDS)
    micro = run.policy.pack(groups, whole_group_slices(groups, range(len(groups))))
    assert run.reference is not None
    reference = run.reference.frozen_logp(micro).logp
    crossed.clear()
    run_training_loop(run)
    assert run.state.updates == STEPS
    rows = [row for row in run.log.metrics_lines if "step_time" in row]
    assert len(crossed) == STEPS and set(crossed) == {own}  # and none for weights it has
    assert {row["vllm/synced_bytes"] for row in rows} == {float(own)}
    assert own < sum(tensor.nbytes for tensor in ours.values())
    assert same(frozen(model), ours)
    assert base_says(run, adapting) == theirs
    assert torch.equal(run.reference.frozen_logp(micro).logp, reference)
    # Under one number and one name, each version's files were what answered.
    assert max(row["sampling/logp_diff_max"] for row in rows) < 1e-4
    assert (run.policy.frozen_logp(micro).logp - reference).abs().max() > 0.1
    assert run.generator.metrics["vllm/weight_version"] == STEPS
    # After a hundred there is one adapter, in the files of one, and it is the last.
    files, names = server_files(adapting), served_names(run, adapting)
    assert any(name.endswith("safetensors") for name in files) and len(names) == 2
    for version in range(STEPS + 1, 101):
        move(model, 0.005)
        run.generator.load(run.policy, version)
    assert server_files(adapting) == files and served_names(run, adapting) == names
    groups = vllm_cases.groups()
    run.generator.generate(groups, vllm_cases.SEEDS)
    micro = run.policy.pack(groups, whole_group_slices(groups, range(len(groups))))
    assert {r.weight_version for g in groups for r in g.rollouts} == {100}
    assert (run.policy.frozen_logp(micro).logp - micro.behaviour_logp).abs().max() < 1e-4


@pytest.mark.slow
def test_half_an_adapter_or_one_of_other_layers_is_refused_by_name(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = lora.adapter_tensors

    def but(change: Any) -> None:
        monkeypatch.setattr(lora, "adapter_tensors", lambda *given: change(every(*given)))

    but(lambda named: dict(list(named.items())[1:]))
    with pytest.raises(GenerationError, match=r"self_attn\.\w+ \(one factor of two\)"):
        run.generator.load(run.policy, 1)
    name = "base_model.model.model.layers.0.surplus.lora_A.weight"
    but(lambda named: named | {name: torch.zeros(16, 32)})
    with pytest.raises(GenerationError, match="surplus"):
        run.generator.load(run.policy, 1)
    but(lambda named: {n: t.new_zeros(32, 32) for n, t in named.items()})
    with pytest.raises(GenerationError, match=r"rank 32 .* 16"):
        run.generator.load(run.policy, 1)
    monkeypatch.setattr(lora, "adapter_tensors", every)
    run.generator.load(run.policy, 1)
    groups = vllm_cases.groups()
    run.generator.generate(groups, vllm_cases.SEEDS)


@pytest.mark.slow
def test_a_trainer_of_whole_models_is_refused_by_a_server_for_an_adapter(
    adapting: Real, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLOO_SERVER_TOKEN", adapting.token)
    sampler = vllm_cases.sampler(vllm_cases.config(adapting.url), tmp_path)
    with pytest.raises(GenerationError, match="has another transfer"):
        sampler.load(vllm_cases.policy(), 1)
    sampler.close()


OVERLAPPED = {
    "ahead": (),
    "carry": ("generation.max_lag=2",),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", OVERLAPPED)
def test_an_adapter_is_trained_while_the_server_samples(
    mode: str, adapting: Real, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLOO_SERVER_TOKEN", adapting.token)
    found = make(
        tmp_path, *vllm_cases.WORDS, f"generation.server.base_url={adapting.url}", "lora=default",
        "max_steps=4", "train.learning_rate=0.01", "data.eval_split=null", "checkpoint.every=1000",
        f"generation.overlap={mode}", *OVERLAPPED[mode], noise=0.0,
    )  # fmt: skip
    before = {n: t.clone() for n, t in lora.adapter_tensors(found.policy.model).items()}
    run_training_loop(found)  # it stops where a token is of other weights than it is told to be
    found.generator.close()
    after = lora.adapter_tensors(found.policy.model)
    assert found.state.updates == 4 and any(not torch.equal(before[n], after[n]) for n in after)
    assert max(row["staleness/mean"] for row in found.log.metrics_lines) > 0

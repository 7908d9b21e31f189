"""Trials of a sweep that sample with vLLM, each with an engine of its own, are what they would be
alone."""

from typing import Any

import pytest
from cli_cases import Rloo, strict
from resume_cases import untimed
from safetensors.torch import load_file
from sweep_cases import SMOKE, trials

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.launch.sweep import rules

SERVER, COLOCATE = "generation=vllm_server", "generation=vllm_colocate"
HERE = "generation.server.base_url=http://127.0.0.1:1"
PROBLEMS: dict[str, tuple[tuple[str, ...], bool, str]] = {
    "one server for all": ((SERVER, HERE), False, "generation.server.base_url=null"),
    "servers of other nodes": (
        (SERVER, "generation.server.num_nodes=1", "distributed=ddp", "distributed.num_nodes=1"),
        False, "generation.server.num_nodes=0"),
    "servers on GPUs": ((SERVER,), True, "generation.colocate.sleep=weights"),
    "an engine that keeps its weights": (
        (COLOCATE, "generation.colocate.sleep=kv"), True, "generation.colocate.sleep=weights"),
    "an engine on a GPU": (
        (COLOCATE, "generation.colocate.sleep=weights"), True, "generation.allow_untested=true"),
}  # fmt: skip
TAKEN = [
    ((SERVER,), False),
    ((COLOCATE,), False),
    ((COLOCATE, "generation.colocate.sleep=weights", "generation.allow_untested=true"), True),
]


def found(words: tuple[str, ...], has_gpu: bool) -> list[Any]:
    run = check.check_config(compose_config(["+recipe=smoke", *words]))
    return [*rules.vllm_trial_problems(run.generation, has_gpu)]


@pytest.mark.parametrize(("words", "gpu", "way_out"), PROBLEMS.values(), ids=PROBLEMS)
def test_an_engine_that_trials_would_share_is_refused_with_the_way_out(words, gpu, way_out):
    (problem,) = found(words, gpu)
    assert way_out in str(problem.fix) and problem.what.startswith(str(problem.where))


@pytest.mark.parametrize(("words", "gpu"), TAKEN)
def test_an_engine_of_a_trials_own_is_taken(words, gpu):
    assert found(words, gpu) == []


def test_trials_whose_engines_sleep_beside_them_need_twice_the_room():
    assert rules.max_open_trials(1, 80e9) == 21 and rules.max_open_trials(1, 80e9, True) == 11


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("backend", [SERVER, COLOCATE])
def test_interleaved_trials_with_vllm_equal_the_same_runs_alone(quick: Rloo, backend: str) -> None:
    words = (*SMOKE, backend, "max_steps=4", "train.lr_scheduler=cosine", "data.eval_split=null",
             "algorithm.beta=0.0,0.05")  # fmt: skip
    ended = quick("sweep", *words, "--chunk", "2", "--name", "s", timeout=500)
    assert ended.code == 0 and ended.out.endswith("2 trials, 0 failed\n"), ended.said
    order = [line.split()[0] for line in ended.out.splitlines() if "  step 2/4  " in line]
    assert order == ["1", "2"]  # in turns, and none to its end at once
    for trial in trials(quick):
        name = trial["name"]
        ended = quick("train", *trial["words"], f"name={name}", "root=alone")
        assert ended.code == 0, ended.said
        one, other = (quick.folder / root / name for root in ("runs", "alone"))
        a, b = (load_file(run / "final" / "model.safetensors") for run in (one, other))
        assert max(float((a[n] - b[n]).abs().max()) for n in a) < 1e-4
        rows = [strict(run / "metrics.jsonl") for run in (one, other)]
        for ours, theirs in zip(*rows, strict=True):
            assert ours["vllm/weight_version"] == theirs["vllm/weight_version"]
            assert untimed(ours)["reward"] == pytest.approx(untimed(theirs)["reward"], abs=1e-4)

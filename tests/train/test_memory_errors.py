"""Memory that runs out: the phase, the longest sequence and the key that this phase reads."""

import re
from pathlib import Path

import pytest
from resume_cases import attempt

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.train import memory_errors
from rloo_cli.utils import fault_injection
from rloo_cli.utils.errors import OutOfMemory

WORDS = ("max_steps=2", "checkpoint.every=1", "eval.every=1", "eval.at_start=false")
FOUND = {  # a point of a run -> the phase that is said, and a key of it
    "load@1": ("while the run was built, loading the model", "lora=default"),
    "gen.chunk@1": ("generation", "generation.transformers.batch_tokens"),
    "loss@1": ("update", "train.micro_batch_tokens"),
    "step@1": ("optimizer", "lora=default"),
    "eval@1": ("evaluation", "eval.batch_size lower than"),
    "ckpt.write@1": ("save", "train.micro_batch_tokens"),
}


@pytest.fixture
def fault(monkeypatch):
    """`fault(point)`: memory runs out there."""

    def arm(point: str) -> None:
        monkeypatch.setenv("RLOO_ALLOW_FAULTS", "1")
        monkeypatch.setenv("RLOO_FAULTS", f"{point}=oom")
        fault_injection.arm_faults()

    yield arm
    monkeypatch.setenv("RLOO_FAULTS", "")
    fault_injection.arm_faults()


@pytest.mark.slow_but("gen.chunk@1", "loss@1", "ckpt.write@1")
@pytest.mark.parametrize("point", FOUND)
def test_memory_that_runs_out_is_said_with_phase_sequence_and_key(
    point: str, fault, tmp_path: Path
) -> None:
    phase, key = FOUND[point]
    fault(point)
    with pytest.raises(OutOfMemory) as error:
        attempt(tmp_path, *WORDS)
    assert error.value.code == 9
    (problem,) = error.value.problems
    assert phase in problem.what and key in problem.fix
    assert "fault at" in problem.why
    got = "the longest sequence of the step has" if point in ("loss@1", "step@1") else "tokens"
    assert got in problem.why


def settings(*words: str):
    return check.check_config(compose_config(["+recipe=smoke", *words]))


def test_a_phase_names_no_key_that_the_run_has_not() -> None:
    plain = " ".join(memory_errors.memory_keys("update", settings()))
    assert "gradient_checkpointing" in plain and "colocate" not in plain
    again = settings("model.gradient_checkpointing=true")
    assert "gradient_checkpointing" not in " ".join(memory_errors.memory_keys("update", again))
    loading = " ".join(memory_errors.memory_keys("loading the model", settings("lora=default")))
    assert "lora" not in loading and "quantization=4bit" in loading
    server = settings("generation=vllm_server")
    assert "batch_tokens" not in " ".join(memory_errors.memory_keys("generation", server))
    beside = " ".join(memory_errors.memory_keys("sync", settings("generation=vllm_colocate")))
    assert "generation.colocate.gpu_memory_utilization" in beside


def test_before_a_batch_the_limits_stand_for_its_longest_sequence() -> None:
    said = memory_errors.describe_longest(16, 64, None)
    assert re.findall(r"\d+", said) == ["16", "64"]

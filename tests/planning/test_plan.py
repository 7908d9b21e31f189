"""`rloo plan`: what it prints, what it refuses, and that it needs neither torch nor weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from assert_refused import assert_refused
from cli_cases import Rloo
from plan_cases import SMALL, checked, lora

from rloo_cli.cli import main
from rloo_cli.cli import plan as verb
from rloo_cli.config import check
from rloo_cli.planning import device, plan
from rloo_cli.utils.errors import ConfigError, MachineError, Problem

GPU = "--gpu=80GiB"


def plans(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What `rloo plan --json` says."""
    assert verb.run([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_imports_no_torch_and_leaves_nothing(rloo_without_torch: Rloo) -> None:
    ended = rloo_without_torch("plan", "+recipe=qwen2_5_72b", GPU)
    assert (ended.code, ended.err) == (0, "")
    for word in ("72.71 B parameters (built in)", "32 processes on 4 machines, zero3", "fits",
                 "8 GPUs of their own, 8 for a copy", "gpu_memory_utilization=", "+0.05 or +0.1",
                 "disk", "assumed", "float32 masters", "gradient checkpointing"):  # fmt: skip
        assert word in ended.out, word
    assert rloo_without_torch.left() == []


def test_the_layout_for_72_b_fits_4_x_8_x_80_gib_and_one_machine_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = plans(capsys, "+recipe=qwen2_5_72b", GPU)
    assert found["fits"] and found["ranks"] == 32 and found["engine"] == "zero3"
    states = {"weights": 2, "optimizer": 12, "gradients": 4}  # bytes a number
    update, count = found["phases_bytes"]["update"], found["model"]["parameters"]
    for part, each in states.items():
        assert update[part] == pytest.approx(each * count / 32)
    assert found["vllm"]["gpus"] == 8 and found["vllm"]["tensor_parallel_size"] == 8
    assert found["smallest_gpus"] <= 32
    with pytest.raises(MachineError, match="8 x GPU of 80GiB"):
        verb.run(["+recipe=qwen2_5_72b", GPU, "--gpus", "8"])


RECIPES = {"qwen2_5_7b_lora": [], "tldr_1b": ["--gpus=8"], "tldr_6_9b": []}


@pytest.mark.slow_cases("tldr_6_9b")
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_for_gpus_fit_80_gib(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = plans(capsys, f"+recipe={recipe}", GPU, *RECIPES[recipe])
    assert found["fits"], found["phases_bytes"]


# Refusals.


def refused(*words: str) -> Problem:
    with pytest.raises(MachineError) as error:
        verb.run(["+recipe=smoke", "model.path=Qwen/Qwen2.5-7B", *words])
    return error.value.problems[0]


def test_a_run_that_cannot_fit_is_refused_with_two_keys_that_bring_most() -> None:
    error = refused("--gpu=24GiB")
    assert "1 x GPU of 24GiB" in error.what and "GiB usable" in error.why
    keys = [line for line in error.fix.splitlines() if "=" in line and "--gpus" not in line]
    assert 1 <= len(keys) <= 2
    for line in keys:
        assert checked(line.split()[0]).name == "smoke"  # a word that composes


@pytest.mark.slow
def test_a_key_that_would_do_is_named_and_does() -> None:
    words = ("generation=vllm_server", "train.micro_batch_tokens=65536",
             "train.prompts_per_step=512", "distributed=zero3")  # fmt: skip
    error = refused(*words, "--gpu=80GiB", "--gpus=8", "model.gradient_checkpointing=false",
                    "generation.max_completion_length=512")  # fmt: skip
    first = error.fix.split()[0]
    assert first.startswith(("model.gradient_checkpointing=true", "train.micro_batch_tokens="))
    given = [w for w in words if w.partition("=")[0] != first.partition("=")[0]]
    assert verb.run(["+recipe=smoke", "model.path=Qwen/Qwen2.5-7B", *given, first, "--gpu=80GiB",
                     "--gpus=8", "generation.max_completion_length=512"]) == 0  # fmt: skip


def test_a_sharded_engine_says_on_how_many_gpus_it_would_fit() -> None:
    words = ("distributed=zero3", "generation=vllm_server", "--gpu=80GiB")
    error = refused(*words, "--gpus=1")
    count = int(error.fix.rpartition("--gpus ")[2])
    base = ["+recipe=smoke", "model.path=Qwen/Qwen2.5-7B", *words]
    assert count > 1 and verb.run([*base, f"--gpus={count}"]) == 0


def test_vllm_without_room_for_a_sequence_is_named() -> None:
    words = ("generation=vllm_colocate", "generation.colocate.gpu_memory_utilization=0.1")
    error = refused(*words, lora(), "--gpu=80GiB")
    assert "vLLM has 0 MiB" in error.why


WRONG = {
    "--gpu=H1000": "--gpu H1000",
    "--gpu=0GiB": "--gpu 0GiB",
    "--gpus=0": "--gpus",
    "--gpus=two": "--gpus",
    "--gpus=4": "needs several processes",
    "--prompts=-1": "--prompts",
    "--gpuu=4": "--gpuu",
}


@pytest.mark.parametrize("flag", WRONG)
def test_a_flag_that_is_wrong_is_a_mistake_of_the_command_line(flag: str) -> None:
    with pytest.raises(ConfigError, match=WRONG[flag]):
        verb.run(["+recipe=smoke", flag])


def test_a_plan_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a recipe"):
        verb.run(["--json"])


def test_a_model_that_is_not_here_says_how_to_get_its_config() -> None:
    with pytest.raises(MachineError) as error:
        verb.run(["+recipe=smoke", "model.path=some/model"])
    fix = "rloo fetch +recipe=smoke model.path=some/model"
    assert_refused(error, 3, key="some/model", fix=fix)


# Steps, tokens, disk, time.


def test_steps_tokens_and_disk_are_the_runs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+recipe=smoke", "max_steps=null", "train.epochs=2", GPU, "model.dtype=bfloat16"]
    found = plans(capsys, *words, "--prompts=64", "--prompt-tokens=10", "--completion-tokens=8")
    assert found["steps"] == 2 * 64 / 4
    assert found["tokens_per_step"] == 4 * (10 + 4 * 8)
    count = found["model"]["parameters"]
    assert found["checkpoint_bytes"] == count * (2 + 4 + 8)
    assert found["disk_bytes"] == 3 * found["checkpoint_bytes"] and not found["rollouts_kept"]
    assert plans(capsys, *words)["steps"] is None


def test_an_adapters_checkpoint_is_the_adapter_and_its_moments() -> None:
    made = plan.make_run_plan(checked(lora(), "model.dtype=bfloat16"), device.find_device("80GiB"))
    (_, adapter) = plan.trained_params(made.inputs)
    assert made.checkpoint_bytes == 12 * adapter


@pytest.mark.slow
def test_a_faster_gpu_and_more_of_them_take_less_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+recipe=tldr_1b", "distributed=zero2"]
    seconds = [
        plans(capsys, *words, f"--gpu={gpu}", f"--gpus={count}")["step_seconds"]
        for gpu, count in (("A100-80GB", 1), ("H100", 1), ("H100", 8))
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_the_cost_model_gives_its_own_example(capsys: pytest.CaptureFixture[str]) -> None:
    """Pythia-1B, 128 x 4, prompts of 380, completions of 53, one H200: 2.5 s of which updates are
    most, here with nothing dropped."""
    words = ["+recipe=tldr_1b", "train.prompts_per_step=128", "algorithm.num_generations=4",
             "algorithm.num_iterations=1", "algorithm.num_minibatches=1", "distributed=single",
             "generation=vllm_colocate", "--gpu=H200"]  # fmt: skip
    found = plans(capsys, *words, "--prompt-tokens=380", "--completion-tokens=53")
    assert found["step_seconds"] == pytest.approx(2.5, rel=0.2)


# Beside the other verbs.


def test_a_dry_run_has_the_plan_in_short(capsys: pytest.CaptureFixture[str]) -> None:
    text = verb.dry_run_text(checked())
    for word in ("\nmodel      make:tiny", "\nmemory     ", ": fits\n", "\ndisk       "):
        assert word in text
    lost = verb.dry_run_text(checked("model.path=some/model"))
    assert "config.json of some/model" in lost and "\nalgorithm:" in lost


def test_a_dry_run_without_a_gpu_plans_for_this_machine_where_the_run_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_local_gpu", lambda: None)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    (tmp_path / "large").mkdir()
    words = ("data.max_prompt_length=32", "model.tokenizer=make:tiny")
    text = verb.dry_run_text(checked(f"model.path={tmp_path}", *words))
    assert "\ndevice     CPU with" in text and "--gpu NAME" in text
    large = json.dumps(SMALL | {"num_hidden_layers": 45, "hidden_size": 8192})
    (tmp_path / "large" / "config.json").write_text(large)
    text = verb.dry_run_text(checked(f"model.path={tmp_path}/large", *words))
    assert "\ndevice     H100-80GB" in text


def test_a_dry_run_shows_what_a_run_reads() -> None:
    shown = yaml.safe_load(verb.dry_run_text(checked()).rpartition("\n\n")[2])
    run = checked()
    whole = check.dump_config(run)
    assert {k: v for k, v in whole.items() if k not in shown} == {
        k: whole[k] for k in ("sft", "reward_model", "slurm")
    }


def test_made_models_are_planned_for_this_machines_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_local_gpu", lambda: None)
    assert "CPU with" in plans(capsys, "+recipe=smoke")["device"]["name"]
    found = plans(capsys, "+recipe=gsm8k")["device"]
    assert found["name"] == "H100-80GB" and found["source"].startswith("assumed: ")


def test_this_machines_gpu_is_taken_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "#!/bin/sh\necho 'NVIDIA H200, 143771'\n"
    (tmp_path / "nvidia-smi").write_text(said)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(device.device_count, "visible_gpus", lambda: ["0"])
    found = device.find_device(None)
    assert found.name == "NVIDIA H200" and found.memory_bytes == 143771 * 2**20
    assert found.flops_per_s == device.GPUS["H200"].flops_per_s and found.source == "this machine"


def test_a_plan_for_a_cpu_says_what_the_process_holds_and_how_busy_the_cpu_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.os, "getloadavg", lambda: (6.25, 0.0, 0.0))
    text, images = (plans(capsys, f"+recipe={r}", "--gpu", "cpu") for r in ("smoke", "vision_mini"))
    assert text["process_bytes"] > 0 and "load of 6.2" in text["device"]["source"]
    libraries = [found["phases_bytes"]["update"]["libraries"] for found in (text, images)]
    assert libraries[1] > libraries[0]
    on_gpu = plans(capsys, "+recipe=smoke", "--gpu", "H100")
    assert on_gpu["process_bytes"] == 0 and "libraries" not in on_gpu["phases_bytes"]["update"]


def test_plan_is_a_verb_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.find_verb(["plan", "+recipe=smoke"])() == 0
    assert "memory     " in capsys.readouterr().out


def test_debug_drops_a_recipes_other_backend_and_not_the_command_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["+recipe=qwen2_5_72b", "+debug=cpu"]
    assert verb.run(words) == 0
    with pytest.raises(ConfigError, match=r"generation\.server"):
        verb.run([*words, "generation.server.port=5"])

"""`rloo migrate`: what it reads of commands, configs and launchers becomes a recipe that composes.

The blog's and TRL's own commands are in published_pages.yaml and migrate_corpus.yaml.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from assert_refused import assert_refused
from migrate_cases import flags

from rloo_cli.cli import migrate as verb
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.wide

SWIFT = r"""
NPROC_PER_NODE=8 \
swift rlhf --rlhf_type grpo --advantage_estimator rloo --kl_in_reward true \
    --model Qwen/Qwen2.5-3B-Instruct --train_type full --torch_dtype bfloat16 \
    --reward_funcs accuracy format --reward_weights 1 0.5 \
    --dataset 'AI-MO/NuminaMath-TIR#1000' --max_length 1024 \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --num_generations 16 \
    --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.4 \
    --dynamic_sample true --max_resample_times 2 --overlong_filter true \
    --rollout_importance_sampling_mode token_mask --num_train_epochs 1 --deepspeed zero2
"""


def test_a_command_may_be_given_word_by_word_with_num_processes(migrate):
    words = flags("accelerate launch --num_processes 8 --mixed_precision bf16 x/rloo_tldr.py")
    words += flags("--rloo_k 2 --per_device_train_batch_size 8 --gradient_accumulation_steps 8")
    found = migrate(*words, "--num_mini_batches", "2", "--total_episodes=1000000")
    assert found.keys["train.prompts_per_step"] == 512
    assert found.keys["model.dtype"] == "bfloat16"
    assert found.keys["algorithm.num_iterations"] == 4  # its default
    assert found.keys["train.learning_rate"] == 5e-5  # its default
    assert migrate("--", *words, "--num_mini_batches", "2").keys["train.prompts_per_step"] == 512


@pytest.mark.parametrize(
    ("launcher", "prompts", "said"),
    [
        ("accelerate launch --config_file two.yaml", 8, "2 processes, from two.yaml"),
        ("accelerate launch --config_file zero2.yaml", 32, "8 processes, from TRL's zero2.yaml"),
        ("torchrun --nproc_per_node 4", 16, "4 processes, from nproc_per_node"),
        ("--world-size 3 python", 12, ""),
        ("python", 4, "assuming 1"),
    ],
)
def test_the_launcher_says_how_many_processes_there_were(migrate, launcher, prompts, said):
    Path("two.yaml").write_text("num_processes: 2\nmixed_precision: bf16\n")
    found = migrate(*flags(f"{launcher} x.py --rloo_k 2"))
    assert found.keys["train.prompts_per_step"] == prompts and said in found.text


@pytest.mark.process
def test_no_torch_is_imported():
    code = (
        "import sys; from rloo_cli.cli.migrate import run;"
        "run(['x.py', '--rloo_k', '2', '--kl_coef', '.1']);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_trl_config_file_is_converted(migrate, suffix):
    values = {
        "model_name_or_path": "org/model",
        "dataset_name": "org/data",
        "num_generations": 8,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 8,
        "num_iterations": 2,
        "max_steps": 1001,
        "learning_rate": "1e-6",
        "warmup_ratio": 0.1,
        "save_steps": 100,
        "bf16": True,
        "reward_funcs": ["accuracy_reward", "pkg.mod.brief"],
        "reward_weights": [1.0, 0.2],
    }
    path = Path(f"old{suffix}")
    path.write_text(json.dumps(values) if suffix == ".json" else yaml.safe_dump(values))
    found = migrate(str(path), "--world-size", "2", "--from", "rloo")
    expected = {
        "train.prompts_per_step": 8,  # 4 * 2 * 8 / 8
        "algorithm.num_minibatches": 2,  # 8 / 4, not 8
        "max_steps": 251,  # updates / (2 * 2), rounded up
        "train.warmup_steps": 101,  # in updates
        "train.learning_rate": 1e-6,
        "reward.accuracy.weight": 1.0,
        "reward.brief.path": "pkg.mod:brief",
        "reward.brief.weight": 0.2,
        "checkpoint.every": 25,
    }
    assert {key: found.keys[key] for key in expected} == expected


def test_a_config_named_on_the_command_line_is_read_and_overridden(migrate):
    Path("c.yaml").write_text("model_name_or_path: org/a\nbeta: 0.1\nnum_generations: 8\n")
    command = "trl rloo --config c.yaml --beta 0.2 --accelerate_config zero2"
    found = migrate(*flags(command))
    assert found.keys["algorithm.beta"] == 0.2
    assert found.keys["model.path"] == "org/a"
    assert found.keys["train.prompts_per_step"] == 8  # 8 * 8 processes / 8


def test_ms_swift_flags_and_defaults_are_converted(migrate):
    found = migrate(SWIFT)
    expected = {
        "train.prompts_per_step": 4,  # 2 * 4 * 8 / 16
        "algorithm.num_generations": 16,
        "algorithm.beta": 0.04,
        "algorithm.ratio_level": "token",
        "algorithm.loss_agg": "sequence_mean",
        "algorithm.zero_std_groups": "resample",
        "algorithm.max_resample": 2,
        "algorithm.mask_truncated_completions": True,
        "generation.temperature": 0.9,
        "generation.max_completion_length": 512,
        "generation.colocate": {"gpu_memory_utilization": 0.4},
        "data.path": "AI-MO/NuminaMath-TIR",
        "data.max_samples": 1000,
        "data.max_prompt_length": 1024,
        "data.overlong": "truncate_left",
        "model.path": "Qwen/Qwen2.5-3B-Instruct",
        "model.dtype": "bfloat16",
        "train.learning_rate": 1e-5,  # full training; 1e-4 is its LoRA default
        "train.lr_scheduler": "cosine",
        "train.weight_decay": 0.1,
        "train.epochs": 1.0,
        "reward.accuracy.weight": 1.0,
        "reward.answer_tags.weight": 0.5,
    }
    assert {key: found.effective(key) for key in expected} == expected
    assert found.groups == {
        "override /reward": ["accuracy", "answer_tags"],
        "override /generation": "vllm_colocate",
    }
    correction = found.keys["algorithm.correction"]
    assert (correction["mode"], correction["level"], correction["cap"]) == ("mask", "token", 2.0)
    assert "unknown" not in found.text


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\xff\xfe beta: 1\n", id="another-encoding"),
        pytest.param(b"[" * 500, id="nested-too-deep"),
        pytest.param(b"beta: 2026-13-45\n", id="a-date-that-is-none"),
    ],
)
def test_settings_that_cannot_be_read_are_one_clear_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        verb.run([str(path)])
    assert_refused(caught, 2, "old.yaml")

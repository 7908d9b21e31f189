"""`rloo migrate`: old commands and configs become recipes of ours that compose."""

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

BLOG_1B = r"""
# 1B RLOO experiment
accelerate launch --config_file examples/accelerate_configs/deepspeed_zero2.yaml \
    examples/scripts/rloo/rloo_tldr.py \
    --output_dir models/minimal/rloo_tldr \
    --num_ppo_epochs 2 \
    --num_mini_batches 2 \
    --learning_rate 3e-6 \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 8 \
    --total_episodes 1000000 \
    --model_name_or_path EleutherAI/pythia-1b-deduped \
    --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr \
    --reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr \
    --local_rollout_forward_batch_size 16 \
    --non_eos_penalty \
    --stop_token eos \
    --kl_coef 0.03
"""
BLOG_7B = (
    BLOG_1B.replace("train_batch_size 8", "train_batch_size 1")
    .replace("steps 8", "steps 256")
    .replace("forward_batch_size 16", "forward_batch_size 2")
    .replace("1b-deduped", "6.9b-deduped")
    .replace("zero2", "zero3")
    .replace("rloo_tldr \\", "rloo_tldr_6.9b \\")
)
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


# The blog's commands


def test_the_blogs_1b_command_has_the_published_numbers(migrate):
    found = migrate("--world-size", "8", BLOG_1B)
    expected = {
        "train.prompts_per_step": 512,
        "algorithm.num_generations": 2,
        "algorithm.num_iterations": 2,
        "algorithm.num_minibatches": 2,
        "algorithm.beta": 0.03,
        "algorithm.epsilon": 0.2,
        "algorithm.missing_eos_penalty": {"mode": "replace", "value": -1.0},
        "generation.temperature": 0.7,
        "generation.max_completion_length": 53,
        "train.learning_rate": 3e-6,
        "train.lr_scheduler": "linear",
        "train.max_grad_norm": None,
        "train.micro_batch_size": 8,
        "train.no_grad_batch_size": 16,
        "total_episodes": 1_000_000,
        "model.path": "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr",
        "model.tokenizer": "EleutherAI/pythia-1b-deduped",
        "data.path": "trl-internal-testing/tldr-preference-sft-trl-style",
        "data.template": " {prompt}",
        "root": "models/minimal",
        "name": "rloo_tldr",
    }
    assert {key: found.effective(key) for key in expected} == expected
    assert "977 steps" in found.text and "976" in found.text
    assert "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr" in found.text


def test_the_blogs_69b_command_has_the_published_numbers(migrate):
    found = migrate("--world-size", "8", BLOG_7B)
    assert found.keys["train.prompts_per_step"] * 2 == 4096
    assert "245 steps" in found.text and "244" in found.text
    assert found.keys["train.micro_batch_size"] == 2  # a batch of 1 would split a group of 2
    assert found.keys["train.no_grad_batch_size"] == 2
    assert found.keys["name"] == "rloo_tldr_6.9b"


def test_a_command_may_be_given_word_by_word_with_num_processes(migrate):
    words = flags("accelerate launch --num_processes 8 --mixed_precision bf16 x/rloo_tldr.py")
    words += flags("--rloo_k 2 --per_device_train_batch_size 8 --gradient_accumulation_steps 8")
    found = migrate(*words, "--num_mini_batches", "2", "--total_episodes=1000000")
    assert found.keys["train.prompts_per_step"] == 512
    assert found.keys["model.dtype"] == "bfloat16"
    assert found.keys["algorithm.num_iterations"] == 4  # its default
    assert found.keys["train.learning_rate"] == 5e-5  # its default
    assert migrate("--", *words, "--num_mini_batches", "2").keys["train.prompts_per_step"] == 512


def test_trls_own_launcher_files_say_how_many_processes_there_were(migrate):
    found = migrate(BLOG_1B)
    assert found.keys["train.prompts_per_step"] == 512
    assert "8 processes" in found.text and "deepspeed_zero2.yaml" in found.text


def test_a_launcher_file_that_is_there_says_how_many_processes_there_were(migrate):
    Path("two.yaml").write_text("num_processes: 2\nmixed_precision: bf16\n")
    command = "accelerate launch --config_file two.yaml x.py --rloo_k 2"
    assert migrate(*flags(command)).keys["train.prompts_per_step"] == 8


def test_an_unsaid_number_of_processes_is_warned_about(migrate):
    found = migrate("python", "x.py", "--rloo_k", "2")
    assert "1 is assumed" in found.text
    assert found.keys["train.prompts_per_step"] == 4


# Other inputs


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
    assert found.keys["train.prompts_per_step"] == 8  # 4 * 2 * 8 / 8
    assert found.keys["algorithm.num_minibatches"] == 2  # 8 / 4, not 8
    assert found.keys["max_steps"] == 251  # updates / (2 * 2), rounded up
    assert found.keys["train.warmup_steps"] == 101  # in updates
    assert found.keys["train.learning_rate"] == 1e-6
    assert found.keys["reward.accuracy.weight"] == 1.0
    assert found.keys["reward.brief.path"] == "pkg.mod:brief"
    assert found.keys["reward.brief.weight"] == 0.2
    assert found.keys["checkpoint.every"] == 25


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
    assert found.keys["generation.colocate"] == {"gpu_memory_utilization": 0.4}
    assert "unknown" not in found.text


def test_trls_server_and_its_colocated_engine_become_backends(migrate):
    server = migrate(
        "--from", "rloo", "--use_vllm", "--vllm_mode", "server", "--vllm_server_host", "node7",
        "--vllm_server_port", "9000", "--vllm_server_timeout", "240",
        "--vllm_gpu_memory_utilization", "0.4", "--model_name_or_path", "org/model",
        composes=False,
    )  # fmt: skip
    assert server.groups["override /generation"] == "vllm_server"
    kept = {"base_url": "http://node7:9000", "ready_timeout_s": 240.0}
    assert server.keys["generation.server"] == kept
    assert "vllm_gpu_memory_utilization" in server.text
    beside = migrate(
        "--from", "rloo", "--use_vllm", "--vllm_mode", "colocate",
        "--vllm_enable_sleep_mode", "true",
        "--vllm_tensor_parallel_size", "2", "--vllm_max_model_length", "2048",
        "--model_name_or_path", "org/model", composes=False,
    )  # fmt: skip
    assert beside.groups["override /generation"] == "vllm_colocate"
    kept = {"tensor_parallel_size": 2, "max_model_len": 2048, "sleep": "weights"}
    assert beside.keys["generation.colocate"] == kept


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

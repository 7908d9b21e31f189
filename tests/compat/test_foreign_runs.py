"""Runs of OpenRLHF and verl become recipes: every setting is converted, or answered."""

from pathlib import Path

import pytest
import yaml
from migrate_cases import checked

from rloo_cli.compat.migrate import openrlhf, verl
from rloo_cli.compat.migrate.foreign_run import ForeignRun, read_foreign_run
from rloo_cli.compat.migrate.foreign_table import find_foreign_row, foreign_rows
from rloo_cli.compat.migrate.openrlhf import convert_openrlhf
from rloo_cli.compat.migrate.verl import convert_verl
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.wide

NAMES = yaml.safe_load((Path(__file__).parent / "names_of_trainers.yaml").read_text())
CONVERT = {"openrlhf": convert_openrlhf, "verl": convert_verl}
# What a setting that is more than a number or a switch may hold, by the end of its name.
EXAMPLES = {
    "estimator": "rloo", "kl_estimator": "k2", "algo.kl.estimator": "k2", "adv_estimator": "grpo",
    "betas": [0.9, 0.99], "clip_range": [-5.0, 5.0], "low_high": [0.2, 0.3],
    "is_correction_threshold": [0.5, 5.0], "loss_agg_mode": "seq-mean-token-sum",
    "loss_mode": "gspo", "kl_loss_type": "mse", "kl_penalty": "kl", "rollout_is": "token",
    "pretrain": "org/m", "path": "org/m", "name_or_path": "org/m", "prompt_data": "org/d",
    "files": "d.parquet", "dataset": "org/d", "remote_rm_url": "r.py", "remote_url": "r.py",
    "input_template": "Q: {}", "input_key": "q", "split": "train", "dtype": "bf16", "rollout.dtype":
    "bfloat16", "attn_implementation": "sdpa", "modules": "all-linear", "save_path": "out/x",
    "output_dir": "out/x", "lr_scheduler": "linear", "lr_scheduler_type": "cosine",
    "warmup_style": "cosine", "correction_type": "icepop", "loss_type": "gspo",
    "run_name": "x", "experiment_name": "x", "local_dir": "out", "logger": ["wandb", "console"],
    "rollout.name": "vllm", "project": "p", "project_name": "p", "resume_mode": "auto",
    "override_config": {"use_cache": True}, "truncation": "left", "strategy": "fsdp2",
    "kwargs": {}, "key": "prompt", "tokenizer": "org/t", "probs": "1.0", "tokenizer_path": "org/t",
    "penalty_coef": -0.5, "dropout": 0.1, "max_len": 2048, "dual_clip": 3.0, "ratio_c": 3.0,
    "prompt_max_len": 512, "generate_max_len": 512, "enable": True,
    "use_wandb": "x", "use_tensorboard": "x",
    "function.name": "compute_score", "wandb.key": "x", "tensorboard_dir": "x",
}  # fmt: skip
SWITCHES = (
    "enable", "offload", "sleep", "bf16", "flash_attn", "colocate", "use_", "load_", "enforce",
    "dynamic", "no_", "gradient_checkpointing", "norm_adv", "param_", "chat_template", "ignore_eos",
    "shuffle", "trust", "before_train", "free_cache", "filter_overlong",
)  # fmt: skip
BESIDE = {  # what a setting is converted beside
    "openrlhf": {"vllm_num_engines": 2, "colocate_all_models": True, "lora_rank": 8,
                 "n_samples_per_prompt": 4, "overlong_buffer_len": 64},
    "verl": {"actor_rollout_ref.rollout.n": 4, "algorithm.adv_estimator": "gae"},
}  # fmt: skip


def example(name: str) -> object:
    ends = [end for end in EXAMPLES if name.endswith(end)]
    if ends:
        return EXAMPLES[max(ends, key=len)]
    return True if any(part in name.rpartition(".")[2] for part in SWITCHES) else 1


@pytest.mark.parametrize("tool", ["openrlhf", "verl"])
def test_no_setting_of_the_tool_is_lost(tool):
    names = NAMES[tool].split()
    assert len(names) > 150
    for name in names:
        row = find_foreign_row(tool, name)
        assert row is not None, f"{name} is in no row"
        beside = {k: v for k, v in BESIDE[tool].items() if k != row.names[0]}
        text = CONVERT[tool](ForeignRun(tool, beside | {name: example(name)}))
        assert "# unknown flags" not in text and "in this version" not in text, name
        dropped = " ".join(text.partition("# dropped:")[2].replace("#", "").split())
        if row.key == "-":
            assert name in dropped, f"{name} is neither converted nor answered"
        elif row.key == "*":
            assert f": {' '.join(row.answer.split())}" not in dropped, f"no rule takes {name}"
        else:
            assert name in text, name


@pytest.mark.parametrize("tool", ["openrlhf", "verl"])
def test_every_row_of_the_tool_says_something_and_has_names_of_its_own(tool):
    names = [name for row in foreign_rows(tool) for name in row.names]
    assert len(names) == len(set(names))
    assert all(row.note for row in foreign_rows(tool) if row.key in ("-", "*"))


FACTS = yaml.safe_load((Path(__file__).parent / "foreign_runs.yaml").read_text())


@pytest.mark.parametrize("case", FACTS, ids=lambda case: case["is"])
def test_a_published_command_means_what_it_meant(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("gsm8k/train", "gsm8k/test", "math/train"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / f"{name}.parquet").touch()
    (tmp_path / "d.parquet").touch()
    (tmp_path / "run.sh").write_text(case["script"])
    run = read_foreign_run(["run.sh"])
    text = CONVERT[run.tool](run)
    assert "# unknown flags" not in text
    found = checked(text, tmp_path)[0]
    algorithm, generation = found.algorithm, found.generation
    means = {
        "algo": algorithm.name,
        "dialect": algorithm.dialect,
        "K": algorithm.num_generations,
        "P": found.train.prompts_per_step,
        "updates": found.updates_per_step,
        "epochs": found.train.epochs,
        "lr": found.train.learning_rate,
        "beta": algorithm.beta,
        "kl_in": algorithm.kl_in,
        "kl": algorithm.kl_estimator,
        "agg": algorithm.loss_agg,
        "delta": algorithm.delta,
        "comp": generation.max_completion_length,
        "prompt": found.data.max_prompt_length,
        "top_p": generation.top_p,
        "sampler": generation.backend,
        "correction": algorithm.correction.mode,
        "model": found.model.path,
        "engine": found.distributed.engine,
        "processes": found.distributed.num_processes,
        "epsilon_high": algorithm.epsilon_high,
        "zero_std": algorithm.zero_std_groups,
    }
    for name, value in case["want"].items():
        assert means[name] == value, f"{name} is {means[name]}, and should be {value}"
    for said in case.get("said", ()):
        assert said in " ".join(text.replace("#", "").split())


OPENRLHF = {"n_samples_per_prompt": 4, "pretrain": "org/m", "prompt_data": "org/d"}
VERL = {"actor_rollout_ref.rollout.n": 4, "data.train_files": "org/d"}
BESIDE_AN_ESTIMATOR = [  # for each tool: what changes where its KL is, and how it is spread
    ({"use_kl_loss": True, "kl_estimator": "k3"}, {"actor_rollout_ref.actor.use_kl_loss": True}),
    ({"policy_loss_type": "gspo"}, {"algorithm.use_kl_in_reward": True}),
    (
        {"lora_rank": 8, "zero_stage": 3, "actor_num_gpus_per_node": 2, "load_in_4bit": True},
        {"actor_rollout_ref.actor.fsdp_config.param_offload": True, "trainer.n_gpus_per_node": 8},
    ),
]


@pytest.mark.slow_cases("in the loss")
@pytest.mark.parametrize(
    "more",
    [
        pytest.param(BESIDE_AN_ESTIMATOR[0], id="in the loss"),
        pytest.param(BESIDE_AN_ESTIMATOR[1], id="other ratio", marks=pytest.mark.slow),
        pytest.param(BESIDE_AN_ESTIMATOR[2], id="spread", marks=pytest.mark.slow),
    ],
)
def test_a_recipe_of_every_estimator_composes(more, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for estimator in openrlhf.ESTIMATORS:
        settings = {"advantage_estimator": estimator} | OPENRLHF | more[0]
        checked(convert_openrlhf(ForeignRun("openrlhf", settings)), tmp_path)
    for estimator in verl.ESTIMATORS:
        settings = {"algorithm.adv_estimator": estimator} | VERL | more[1]
        checked(convert_verl(ForeignRun("verl", settings)), tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["python -m openrlhf.cli.train_sft --pretrain a --input_key b"], "old run was sft"),
        (["python -m openrlhf.cli.train_ppo_ray --advantage_estimator magic"], "gae"),
        (["python -m verl.trainer.main_ppo algorithm.adv_estimator=opo"], "one of rloo"),
        (["python -m openrlhf.cli.train_ppo_ray --nothing 1"], "none of its settings"),
        (["python -m openrlhf.cli.train_ppo_ray --rollout_batch_size many"], "whole number"),
        (["python -m openrlhf.cli.train_ppo_ray --prompt_data a,b --prompt_data_probs 1"], "share"),
        (["python -m verl.trainer.main_ppo algorithm.adv_estimator=rloo"], "compares completions"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_the_reason(words, said):
    with pytest.raises(ConfigError, match=said):
        run = read_foreign_run(words)
        CONVERT[run.tool](run)


def test_another_trainers_command_is_not_taken_for_one_of_these(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("num_generations: 4\nbeta: 0.1\n")
    Path("broken.yaml").write_text("a: [1\n")
    for words in (["trl grpo --model_name_or_path m"], ["a.yaml"], ["broken.yaml"], ["gone.sh"]):
        assert read_foreign_run(words) is None

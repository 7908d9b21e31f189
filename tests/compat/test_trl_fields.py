"""Every field of TRL 1.16's two configs: kept, converted, printed, or refused by its name."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from assert_refused import assert_refused
from datasets import Dataset

from rloo_cli.compat import trl, trl_settings
from rloo_cli.compat.trl_settings import TRL_FIELDS
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.wide

TRAINERS = {"RLOOConfig": trl.RLOOTrainer, "GRPOConfig": trl.GRPOTrainer}
# A value other than the default, where one more or the opposite would not be valid. The second
# part: what must be set beside it, for it acts with that alone.
VALUES = {
    "output_dir": "out/other", "max_steps": 7, "optim": "adamw_torch",
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 1}, "warmup_steps": 3, "logging_strategy": "no",
    "report_to": "wandb", "eval_strategy": "steps", "save_strategy": "no", "fsdp": "full_shard",
    "deepspeed": {"zero_optimization": {"stage": 2}}, "model_init_kwargs": {"dtype": "float32"},
    "generation_kwargs": {"top_p": 0.5}, "chat_template_kwargs": {"enable_thinking": False},
    "generation_batch_size": 16, "steps_per_generation": 2, "vllm_mode": "server",
    "vllm_model_impl": "transformers", "vllm_server_base_url": "http://127.0.0.1:9",
    "vllm_server_host": "10.0.0.1", "vllm_gpu_memory_utilization": 0.5, "num_generations": 4,
    "reward_weights": [0.5], "top_p": 0.5, "min_p": 0.1, "router_aux_loss_coef": 0.0,
    "loss_type": "grpo", "scale_rewards": "batch", "importance_sampling_level": "sequence",
    "multi_objective_aggregation": "normalize_then_sum", "reward_clip_range": [-1.0, 1.0],
    "vllm_importance_sampling_mode": "token_truncate", "adam_beta1": 0.8, "adam_beta2": 0.99,
    "adam_epsilon": 1e-7, "warmup_ratio": 0.1, "logging_steps": 5, "eval_steps": 5,
    "ref_model_mixup_alpha": 0.5, "trackio_static_space_id": "a/b", "max_grad_norm": 0.5,
    "off_policy_mask_threshold": 0.5, "delta": 2.0, "per_device_train_batch_size": 16,
    "bf16": True, "top_entropy_quantile": 0.2,
}  # fmt: skip
BESIDE = {
    "generation_batch_size": {"gradient_accumulation_steps": 2},
    "eval_steps": {"eval_strategy": "steps"},
    "ref_model_mixup_alpha": {"sync_ref_model": True, "beta": 0.1},
    "ref_model_sync_steps": {"sync_ref_model": True, "beta": 0.1}, "sync_ref_model": {"beta": 0.1},
    "vllm_server_timeout": {"vllm_mode": "server"}, "vllm_server_port": {"vllm_mode": "server"},
    "vllm_server_host": {"vllm_mode": "server"}, "vllm_server_base_url": {"vllm_mode": "server"},
}  # fmt: skip
CASES = [(config, name) for config, rows in TRL_FIELDS.items() for name in rows]


def another_value(row):
    """A value of a field that is not its default."""
    if row.name in VALUES:
        return VALUES[row.name]
    if row.type == "bool":
        return not row.default
    if row.type in ("int", "float"):
        return (row.default or 0) + (1 if row.type == "int" else 0.5)
    return {"dict": {"a": 1}, "list[str]": ["a"], "str": "a"}[row.type]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """-> a function that makes a trainer with settings; no recipe is composed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trl, "compose_run", lambda *a, **k: None)

    def make(config, **settings):
        args = getattr(trl, config)(**({"output_dir": "out"} | settings))
        data = Dataset.from_list([{"prompt": "a"}])
        return TRAINERS[config]("a/b", "c/d", args, data, data)

    return make


@pytest.mark.parametrize("config", TRAINERS)
def test_the_table_has_every_field_of_trl_with_its_default(config):
    theirs = pytest.importorskip("trl", minversion="1.16")
    fields = {f.name: f for f in dataclasses.fields(getattr(theirs, config)) if f.init}
    assert fields.keys() == TRL_FIELDS[config].keys()
    for name, row in TRL_FIELDS[config].items():
        default = fields[name].default
        if default is dataclasses.MISSING:
            default = fields[name].default_factory()
        assert getattr(default, "value", default) == row.default, name
        assert row.treatment in ("recipe", "trainer") or row.text, name


@pytest.mark.parametrize(("config", "name"), CASES, ids=[f"{c}-{n}" for c, n in CASES])
def test_a_field_is_kept_or_printed_or_refused(config, name, made, capsys):
    row = TRL_FIELDS[config][name]
    value = another_value(row)
    vllm = {"use_vllm": True} if name.startswith("vllm_") else {}
    settings = vllm | BESIDE.get(name, {}) | {name: value}
    if row.treatment == "refuse":
        with pytest.raises(ConfigError) as error:
            made(config, **settings)
        assert assert_refused(error, 2, name).fix == row.text
        assert not list(Path().rglob("recipe.yaml"))
        return
    trainer = made(config, **settings)
    recipe, said = trainer.recipe.read_text(), capsys.readouterr().out
    if row.treatment == "print":
        assert f"note: {name}=" in said and row.text in said
        assert name not in recipe
    elif row.treatment == "recipe":
        yaml_lines = [line for line in recipe.splitlines() if not line.startswith("#")]
        kept = any(name in line for line in yaml_lines)
        before = made(config, **vllm | BESIDE.get(name, {})).recipe.read_text()
        changed = yaml.safe_load(recipe) != yaml.safe_load(before)
        assert kept or changed or f"note: {name}" in said, f"{name} was dropped without a word"


@pytest.mark.parametrize("config", TRAINERS)
def test_the_defaults_are_taken_without_a_note_on_any_field(config, made, capsys):
    rows = TRL_FIELDS[config]
    made(config, **{name: row.default for name, row in rows.items() if name != "output_dir"})
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert not [n for n in notes if n.removeprefix("note: ").partition("=")[0] in rows]


def test_several_fields_that_are_refused_are_named_at_once(made):
    with pytest.raises(ConfigError) as error:
        made("GRPOConfig", vespo_k_pos=1.0, use_adaptive_entropy=True)
    assert {p.where for p in error.value.problems} == {"vespo_k_pos", "use_adaptive_entropy"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"optim": "sgd"}, "train.optimizer: sgd"),
        ({"generation_kwargs": {"num_beams": 2}}, "generation_kwargs.num_beams"),
        ({"loss_type": "no_such_loss"}, "loss_type"),
        ({"router_aux_loss_coef": 0.01}, "router_aux_loss_coef=0.01"),
    ],
)
def test_a_value_that_no_key_has_is_refused(settings, named, made):
    with pytest.raises(ValueError, match=named):
        made("GRPOConfig", **settings)


@pytest.mark.parametrize("given", ["wandb", ["wandb"], ["wandb", "tensorboard"]])
def test_report_to_becomes_trackers(given, made):
    recipe = yaml.safe_load(made("RLOOConfig", report_to=given).recipe.read_text())
    assert recipe["logging"]["trackers"] == ([given] if isinstance(given, str) else given)


def test_a_warm_up_that_is_a_share_of_the_run_is_counted_from_the_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trl, "compose_run", lambda *a, **k: None)
    data = Dataset.from_list([{"prompt": "a"}] * 40)
    args = trl.RLOOConfig("out", warmup_steps=0.1)  # 8 completions, 2 a prompt, 3 passes
    recipe = trl.RLOOTrainer("a/b", "c/d", args, data).recipe
    assert yaml.safe_load(recipe.read_text())["train"]["warmup_steps"] == 3


def test_a_field_of_a_script_s_own_config_is_left_alone(made, tmp_path, monkeypatch):
    @dataclasses.dataclass
    class Mine(trl.RLOOConfig):
        my_own: int = 3

    args = Mine(output_dir="out")
    assert args.my_own == 3
    settings, printed = trl_settings.check_fields(trl_settings.written_settings(args), "rloo")
    assert "my_own" not in settings and not printed


def test_parsers_of_dataclasses_take_the_configs():
    transformers = pytest.importorskip("transformers")
    parser = transformers.HfArgumentParser(trl.GRPOConfig)
    words = "--output_dir o --learning_rate 1e-5 --report_to wandb --bf16 True --no_shuffle_dataset"
    words += ' --generation_kwargs {"top_k":3} --loss_type grpo'
    [args] = parser.parse_args_into_dataclasses(words.split())
    assert trl_settings.written_settings(args) == {
        "output_dir": "o", "learning_rate": 1e-5, "report_to": ["wandb"], "bf16": True,
        "shuffle_dataset": False, "generation_kwargs": {"top_k": 3}, "loss_type": "grpo",
    }  # fmt: skip

"""`rloo migrate`: values that change with their names, what is left out, and what is refused."""

from pathlib import Path

import pytest
from assert_refused import assert_refused
from migrate_cases import flags

from rloo_cli.cli.migrate import run
from rloo_cli.compat.migrate import tables
from rloo_cli.compat.migrate.recipe import Recipe, fitting_value, schema_field
from rloo_cli.config.old_names import OLD_NAME_TABLE
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.wide

# Corrections with arithmetic


def test_max_steps_counted_updates(migrate):
    command = "python rloo.py --num_generations 4 --steps_per_generation 4 --num_iterations 3"
    found = migrate(*flags(command), *flags("--gradient_accumulation_steps 2 --max_steps 600"))
    assert found.keys["algorithm.num_minibatches"] == 2
    assert found.keys["max_steps"] == 100


def test_a_generation_batch_shorter_than_an_update_is_one_larger_batch(migrate):
    command = "python rloo.py --num_generations 4 --steps_per_generation 1"
    found = migrate(*flags(command), *flags("--gradient_accumulation_steps 4"))
    assert found.keys["train.prompts_per_step"] == 8  # 8 * 4 / 4
    assert found.effective("algorithm.num_minibatches") == 1


def test_a_cycle_that_ends_inside_a_batch_is_said_to_have_no_equal(migrate):
    command = "python rloo.py --num_generations 4 --steps_per_generation 3"
    found = migrate(*flags(command), *flags("--gradient_accumulation_steps 2"))
    assert "= 3/2" in found.text


def test_generation_batch_size_is_the_batch(migrate):
    found = migrate(*flags("python rloo.py --num_generations 4 --generation_batch_size 32"))
    assert found.keys["train.prompts_per_step"] == 8
    assert found.keys["algorithm.num_minibatches"] == 4


def test_old_epochs_counted_completions(migrate):
    assert migrate(*flags("python x.py --rloo_k 4")).keys["train.epochs"] == 0.75
    command = "python x.py --rloo_k 4 --num_train_epochs 2 --max_steps 10"
    found = migrate(*flags(command))
    assert found.keys["train.epochs"] == 0.5
    assert "never read it" in found.text


def test_a_batch_that_k_does_not_divide_names_the_two_nearest(migrate, sentence):
    command = "python rloo.py --num_generations 6 --per_device_train_batch_size 8"
    with pytest.raises(ConfigError) as error:
        migrate(*flags(command))
    assert "6 (P = 1) or 12 (P = 2)" in assert_refused(error, 2, "--world-size").render()
    sentence(error)


def test_minibatches_that_split_groups_are_rounded_and_said(migrate):
    command = "python x.py --rloo_k 4 --per_device_train_batch_size 2 --num_mini_batches 2"
    found = migrate(*flags(command))
    assert found.keys["train.prompts_per_step"] == 2
    assert "1 prompts" in found.text and "2 mini-batches" in found.text


def test_the_two_eos_penalties_stay_two_rules(migrate):
    key = "algorithm.missing_eos_penalty"
    found = migrate(*flags("python x.py --rloo_k 2 --missing_eos_penalty 1.0"))
    assert found.keys[key] == {"mode": "subtract", "value": 1.0}
    found = migrate(*flags("python x.py --non_eos_penalty --penalty_reward_value -5"))
    assert found.keys[key] == {"mode": "replace", "value": -5.0}
    found = migrate(*flags("python x.py --rloo_k 2 --penalty_reward_value -5"))
    assert key not in found.keys


def test_old_reward_clipping_acted_only_with_normalize_reward(migrate):
    key = "algorithm.reward_clip_range"
    found = migrate(*flags("python x.py --rloo_k 2 --reward_clip_range 5"))
    assert key not in found.keys and "with normalize_reward" in found.text
    found = migrate(*flags("python x.py --rloo_k 2 --normalize_reward --reward_clip_range 5"))
    assert found.keys[key] == [-5.0, 5.0]
    assert found.keys["algorithm.normalize_rewards"] is True
    found = migrate(*flags("python x.py --rloo_k 2 --normalize_reward true"))
    assert found.keys[key] == [-10.0, 10.0]


def test_old_runs_without_a_stop_token_trained_past_eos(migrate):
    assert migrate(*flags("python x.py --rloo_k 2")).keys["generation.ignore_eos"] is True
    found = migrate(*flags("python x.py --rloo_k 2 --stop_token eos"))
    assert "generation.ignore_eos" not in found.keys
    found = migrate(*flags("python x.py --rloo_k 2 --stop_token_id 7"))
    assert found.keys["generation.stop_token_ids"] == [7]


def test_clocks_are_converted(migrate):
    new = "python rloo.py --num_generations 2 --num_iterations 4 --logging_steps 8 --warmup_steps 8"
    found = migrate(*flags(new))
    assert (found.keys["logging.every"], found.keys["train.warmup_steps"]) == (2, 8)
    old = "python x.py --rloo_k 2 --num_ppo_epochs 4 --logging_steps 8 --warmup_steps 8"
    found = migrate(*flags(old))
    assert (found.keys["logging.every"], found.keys["train.warmup_steps"]) == (8, 32)
    found = migrate(*flags("python x.py --rloo_k 2 --total_episodes 80 --num_sample_generations 2"))
    assert found.keys["logging.samples_every"] == 5


def test_kl_in_the_loss_gets_an_estimator_with_a_gradient(migrate):
    command = "swift rlhf --advantage_estimator rloo --kl_in_reward false"
    found = migrate(*flags(command), *flags("--per_device_train_batch_size 8 --train_type full"))
    assert found.keys["algorithm.kl_in"] == "loss"
    assert found.keys["algorithm.kl_estimator"] == "k3"


def test_names_that_kept_their_word_and_changed_their_meaning(migrate):
    command = "python rloo.py --num_generations 2 --importance_sampling_level sequence"
    found = migrate(*flags(command), *flags("--scale_rewards true --loss_type dr_grpo --top_k -1"))
    assert found.keys["algorithm.ratio_level"] == "geometric"
    assert found.keys["algorithm.advantage_scale"] == "group"
    assert found.keys["algorithm.loss_agg"] == "constant"
    assert found.keys["generation.top_k"] == 0


# What is left out, and what is refused


def test_unknown_and_dropped_flags_are_listed_with_the_reason(migrate):
    command = "python x.py --rloo_k 2 --frobnicate 3 --token_level_kl --dataset_num_proc 4"
    found = migrate(*flags(command), "--use_peft", "--lora_r", "8")
    unknown = found.text.partition("unknown flags")[2]
    assert "--frobnicate 3" in unknown
    assert "--token_level_kl: did nothing" in found.text
    assert "--dataset_num_proc 4: was unused" in found.text
    assert found.groups["override /lora"] == "default"
    assert found.keys["model.lora.r"] == 8


def test_the_dialect_may_be_said(migrate):
    command = "python x.py --per_device_train_batch_size 8"
    old, new = (migrate("--from", d, *flags(command)) for d in ("trl_0_21", "rloo"))
    assert old.keys["generation.temperature"] == 0.7
    assert new.effective("generation.temperature") == 1.0
    assert migrate("--from=ms_swift", *flags(command)).keys["generation.temperature"] == 0.9


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["nowhere.yaml"], "nowhere.yaml"),
        (["list.yaml"], "list.yaml"),
        (["broken.yaml"], "broken.yaml"),
        (["plain.py"], "plain.py"),
        (["notes.sh"], "notes.sh"),
        (["notes.ipynb"], "notes.ipynb"),
        (["accelerate", "launch"], "flags"),
        (["trl rloo --model 'm"], "quote"),
        (["trl rloo --model " + "m" * 32_000], "too long"),
        (["--from", "vrel", "x.py", "--rloo_k", "2"], "vrel"),
        (["--from", "verl", "x.py", "--rloo_k", "2"], "verl"),
        (["--world-size", "none", "x.py", "--rloo_k", "2"], "none"),
        (["--world-size"], "--world-size"),
        (["trl", "rloo", "--config", "gone.yaml"], "gone.yaml"),
        (["x.py", "--rloo_k", "two"], "two"),
        (["trl", "rloo", "--top_k", "few"], "few"),
        (["trl", "grpo", "--use_vllm", "--vllm_importance_sampling_cap", "low"], "low"),
        (["x.py", "--rloo_k", "0"], "0"),
        (["rloo.py", "--reward_funcs", "a", "b", "--reward_weights", "1"], "reward_weights"),
    ],
    ids=lambda given: " ".join(given)[:60] if isinstance(given, list) else "",
)
def test_bad_input_is_a_config_error(migrate, words, key, sentence):
    Path("list.yaml").write_text("- 1\n")
    Path("broken.yaml").write_text("a: [1\n")
    Path("plain.py").write_text("x = 1\n")
    Path("notes.sh").write_text("ls --all\npython train.py\n")
    Path("notes.ipynb").write_text("{}")
    with pytest.raises(ConfigError) as error:
        migrate(*words)
    assert_refused(error, 2, key)
    if not key.startswith("broken"):  # whose reason is the parser's
        sentence(error)


@pytest.mark.parametrize("between", ["\n", " && ", "; ", " || "])
def test_several_commands_are_refused(between, sentence):
    with pytest.raises(ConfigError) as error:
        run([f"trl rloo --beta 0.1{between}trl rloo --beta 0.2"])
    assert_refused(error, 2, "several commands", fix="rloo migrate -- COMMAND")
    if between == "\n":
        sentence(error)


def test_nothing_to_migrate_is_an_error():
    with pytest.raises(ConfigError) as error:
        run([])
    assert_refused(error, 2, "rloo migrate")


def test_an_old_ppo_run_is_said_to_be_one(migrate):
    found = migrate(*flags("python ppo_tldr.py --num_ppo_epochs 4 --vf_coef 0.1"))
    assert "was PPO" in found.text


def test_ms_swifts_lora_is_a_lora_with_its_own_defaults(migrate):
    command = "swift rlhf --rlhf_type grpo --model org/m --per_device_train_batch_size 8"
    found = migrate(*flags(command))
    assert found.keys["train.learning_rate"] == 1e-4
    lora = {k.rpartition(".")[2]: v for k, v in found.keys.items() if k.startswith("model.lora.")}
    assert lora == {"r": 8, "alpha": 32.0, "dropout": 0.05, "target_modules": "all-linear"}
    assert found.groups["override /lora"] == "default"
    assert found.keys["model.disable_dropout"] is False  # its dropout would be refused
    assert "was GRPO" in found.text  # its default estimator


def test_a_run_that_says_neither_rloo_nor_grpo_is_asked_about(sentence):
    with pytest.raises(ConfigError) as error:
        run(["python", "train.py", "--num_generations", "4"])
    assert_refused(error, 2, "RLOO or GRPO", fix="--from rloo")
    sentence(error)


# Commands that do not train


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "trl vllm-serve --model Qwen/Qwen2.5-72B --tensor_parallel_size 8",
            "rloo vllm-serve model.path=Qwen/Qwen2.5-72B generation.server.tensor_parallel_size=8",
        ),
        (
            "CUDA_VISIBLE_DEVICES=1 swift rollout --model a/b --vllm_data_parallel_size 2 --use_hf",
            "rloo vllm-serve model.path=a/b generation.server.data_parallel_size=2",
        ),
        (
            "python -i examples/scripts/evals/generate_tldr.py --model_name_or_path a/b --n 1000",
            "rloo eval +recipe=tldr_judge model.path=a/b eval.max_samples=1000",
        ),
    ],
)
def test_a_server_and_an_evaluation_become_commands_of_ours(capsys, command, said):
    assert run(flags(command)) == 0
    assert capsys.readouterr().out.splitlines()[0] == said


def test_overrides_of_commands_that_do_not_train_name_keys_that_exist():
    for _, renamed in tables.OTHER_COMMANDS.values():
        for key in (text.partition("=")[0] for text in renamed.values()):
            known = schema_field(key) or schema_field(key.rpartition(".")[0])
            assert known or key.startswith("eval.judge."), key


def test_kwargs_of_sampler_and_model_get_keys_or_stay_together(migrate):
    command = "trl rloo --model_name_or_path m/m --dataset_name o/d --use_vllm"
    sampling = ["--generation_kwargs", '{"top_p": 0.9, "presence_penalty": 0.5}']
    model = ["--model_init_kwargs", '{"dtype": "bfloat16", "rope_theta": 5.0, "use_cache": false}']
    regex = ["--vllm_structured_outputs_regex", "[ab]+"]
    found = migrate(*flags(command), *sampling, *model, *regex)
    assert found.keys["generation.top_p"] == 0.9
    form = {"structured_outputs": {"regex": "[ab]+"}}
    assert found.keys["generation.kwargs"] == {"presence_penalty": 0.5} | form
    assert found.keys["model.dtype"] == "bfloat16"
    assert found.keys["model.init_kwargs"] == {"rope_theta": 5.0, "use_cache": False}
    assert found.single["generation.colocate.extra"] == {"hf_overrides": {"rope_theta": 5.0}}
    found = migrate(*flags(command.removesuffix("--use_vllm")), *sampling)
    assert "generation.kwargs" not in found.keys  # transformers has no such penalty
    assert "generation_kwargs.presence_penalty 0.5" in found.text


# One value or several

ELEMENTS = {"int": 7, "float": 0.5, "Literal": "wandb"}  # of the lists that the schema has


def list_settings():
    """Old names whose key here is a list of any length, and an element of it."""
    for row in OLD_NAME_TABLE:
        field = schema_field(row.new_key or "") if "<" not in (row.new_key or "<") else None
        kind = str(field.annotation) if field is not None else ""
        if kind.startswith("list[") and not row.fix:
            value = next((v for k, v in ELEMENTS.items() if k in kind.partition(",")[0]), "x")
            yield from ((name, row.new_key, value) for name in row.names)


@pytest.mark.parametrize(("name", "key", "value"), list_settings())
def test_a_setting_of_several_values_takes_one_and_one_in_a_list_is_a_value(name, key, value):
    for given in (value, [value]):
        recipe = Recipe({name: given})
        recipe.put_remaining()
        assert recipe.written_value(key) == [value]
    assert fitting_value("model.path", ["org/model"]) == "org/model"


@pytest.mark.parametrize(
    ("words", "trackers", "said"),
    [
        ("wandb", ["wandb"], ""),
        ("wandb tensorboard", ["wandb", "tensorboard"], ""),
        ("none", None, ""),
        ("all", None, "report_to all:"),
        ("wandb neptune", ["wandb"], "report_to neptune:"),
    ],
)
def test_report_to_takes_one_tracker_or_several_and_names_those_that_are_not_here(
    words, trackers, said, migrate
):
    found = migrate(*flags(f"python rloo.py --num_generations 4 --report_to {words}"))
    assert found.keys.get("logging.trackers") == trackers
    assert said in found.text.replace("\n#   ", " ") and "in this version" not in found.text

"""`rloo migrate`: values that change with their names, what is left out, and what is refused."""

from pathlib import Path

import pytest
from assert_refused import assert_refused
from migrate_cases import flags

from rloo_cli.cli.migrate import run
from rloo_cli.compat.migrate.recipe import Recipe, fitting_value, schema_field
from rloo_cli.compat.migrate.table import RULES
from rloo_cli.config.old_names import OLD_NAME_TABLE
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.wide

ABSENT = "absent"  # the recipe does not have the key
OLD, NEW = "python x.py --rloo_k 2", "python rloo.py --num_generations"
SWIFT = "swift rlhf --rlhf_type grpo --model org/m --per_device_train_batch_size 8"
EOS = "algorithm.missing_eos_penalty"
CLIP = "algorithm.reward_clip_range"
# A command, keys of its recipe, and what the recipe says of it.
CASES = [
    # Arithmetic
    (
        f"{NEW} 4 --steps_per_generation 4 --num_iterations 3 --gradient_accumulation_steps 2"
        " --max_steps 600",
        {"algorithm.num_minibatches": 2, "max_steps": 100},  # it counted updates
        [],
    ),
    (  # one update of several batches is one larger batch: 8 * 4 / 4
        f"{NEW} 4 --steps_per_generation 1 --gradient_accumulation_steps 4",
        {"train.prompts_per_step": 8, "algorithm.num_minibatches": 1},
        [],
    ),
    (f"{NEW} 4 --steps_per_generation 3 --gradient_accumulation_steps 2", {}, ["= 3/2"]),
    (
        f"{NEW} 4 --generation_batch_size 32",
        {"train.prompts_per_step": 8, "algorithm.num_minibatches": 4},
        [],
    ),
    ("python x.py --rloo_k 4", {"train.epochs": 0.75}, []),  # it counted completions
    (
        "python x.py --rloo_k 4 --num_train_epochs 2 --max_steps 10",
        {"train.epochs": 0.5},
        ["never read it"],
    ),
    (
        "python x.py --rloo_k 4 --per_device_train_batch_size 2 --num_mini_batches 2",
        {"train.prompts_per_step": 2},
        ["1 prompts", "2 mini-batches"],
    ),
    (
        f"{NEW} 2 --num_iterations 4 --logging_steps 8 --warmup_steps 8",
        {"logging.every": 2, "train.warmup_steps": 8},
        [],
    ),
    (
        f"{OLD} --num_ppo_epochs 4 --logging_steps 8 --warmup_steps 8",
        {"logging.every": 8, "train.warmup_steps": 32},
        [],
    ),
    (f"{NEW} 2 --eval_strategy no --eval_steps 5", {"eval.every": ABSENT}, ["did not evaluate"]),
    # Meaning
    (f"{OLD} --missing_eos_penalty 1.0", {EOS: {"mode": "subtract", "value": 1.0}}, []),
    (
        "python x.py --non_eos_penalty --penalty_reward_value -5",
        {EOS: {"mode": "replace", "value": -5.0}},
        [],
    ),
    (f"{OLD} --penalty_reward_value -5", {EOS: ABSENT}, ["only with non_eos_penalty"]),
    (f"{OLD} --reward_clip_range 5", {CLIP: ABSENT}, ["with normalize_reward"]),
    (
        f"{OLD} --normalize_reward --reward_clip_range 5",
        {CLIP: [-5.0, 5.0], "algorithm.normalize_rewards": True},
        [],
    ),
    (f"{OLD} --normalize_reward true", {CLIP: [-10.0, 10.0]}, []),
    (OLD, {"generation.ignore_eos": True}, []),  # it trained on what came after EOS, too
    (f"{OLD} --stop_token eos", {"generation.ignore_eos": ABSENT}, []),
    (f"{OLD} --stop_token_id 7", {"generation.stop_token_ids": [7]}, []),
    (
        f"{SWIFT} --advantage_estimator rloo --kl_in_reward false --train_type full",
        {"algorithm.kl_in": "loss", "algorithm.kl_estimator": "k3"},  # k1 has no gradient there
        [],
    ),
    (
        f"{NEW} 2 --importance_sampling_level sequence --scale_rewards true --loss_type dr_grpo"
        " --top_k -1",
        {
            "algorithm.ratio_level": "geometric",
            "algorithm.advantage_scale": "group",
            "algorithm.loss_agg": "constant",
            "generation.top_k": 0,
        },
        [],
    ),
    (f"{NEW} 2 --loss_type dapo --bf16 --dtype float32", {"model.dtype": "bfloat16"}, []),
    (f"{NEW} 2 --log_completions --num_completions_to_print 3", {"logging.samples": 3}, []),
    (
        f"{NEW} 2 --max_grad_norm 0 --save_total_limit 1",
        {"train.max_grad_norm": None, "checkpoint.keep_last": 2},
        [],
    ),
    (f"{NEW} 2 --run_name 'a b' --resume_from_checkpoint x", {"resume": "auto"}, []),
    (
        f"{NEW} 2 --adam_beta1 0.8",
        {"train.optimizer_kwargs": {"betas": [0.8, 0.999], "eps": 1e-8}},
        [],
    ),
    # The sampler
    (
        f"{NEW} 8 --use_vllm --vllm_mode server --vllm_server_host node7 --vllm_server_port 9000"
        " --vllm_server_timeout 240 --vllm_gpu_memory_utilization 0.4",
        {"generation.server": {"base_url": "http://node7:9000", "ready_timeout_s": 240.0}},
        ["--vllm_gpu_memory_utilization 0.4: it was the colocated engine's"],
    ),
    (
        f"{NEW} 8 --use_vllm --vllm_mode colocate --vllm_enable_sleep_mode true"
        " --vllm_max_model_length 2048 --vllm_server_port 9000",
        {"generation.colocate": {"max_model_len": 2048, "sleep": "weights"}},
        ["--vllm_server_port 9000: the engine was colocated"],
    ),
    (
        f"{NEW} 8 --vllm_max_model_length 2048 --sleep_level 1",
        {"generation.colocate": ABSENT},
        ["--vllm_max_model_length 2048: use_vllm was off", "--sleep_level 1: use_vllm was off"],
    ),
    # What is left out
    (
        f"{OLD} --frobnicate 3 --token_level_kl --dataset_num_proc 4 --use_peft --lora_r 8",
        {"model.lora.r": 8},
        ["unknown flags, ignored: - --frobnicate 3", "--token_level_kl: did nothing",
         "--dataset_num_proc 4: was unused"],
    ),
    (f"{OLD} --num_sample_generations 2", {}, ["set logging.samples_every"]),
    (f"{SWIFT} --system prompt.txt", {"data.system": ABSENT}, ["set data.system to its text"]),
    (f"{NEW} 2 --optim sgd", {}, ["not in this version: - train.optimizer: sgd"]),
    ("python ppo_tldr.py --num_ppo_epochs 4 --vf_coef 0.1", {}, ["was PPO"]),
    (f"{NEW} 4 --report_to wandb", {"logging.trackers": ["wandb"]}, []),
    (f"{NEW} 4 --report_to none", {"logging.trackers": ABSENT}, []),
    (f"{NEW} 4 --report_to all", {"logging.trackers": ABSENT}, ["report_to all:"]),
    (
        f"{NEW} 4 --report_to wandb neptune",
        {"logging.trackers": ["wandb"]},
        ["report_to neptune:"],
    ),
    # Versions
    (
        SWIFT,  # a LoRA with its own defaults; its dropout would be refused
        {
            "train.learning_rate": 1e-4, "model.lora.r": 8, "model.lora.alpha": 32.0,
            "model.lora.dropout": 0.05, "model.lora.target_modules": "all-linear",
            "model.disable_dropout": False,
        },
        ["was GRPO"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("command", "keys", "said"), CASES, ids=[case[0] for case in CASES])
def test_a_value_that_changes_with_its_name_keeps_its_meaning(migrate, command, keys, said):
    found = migrate(*flags(command))
    plain = " ".join(found.text.replace("#", "").split())
    for key, value in keys.items():
        assert found.effective(key) == value if value != ABSENT else key not in found.keys, key
    assert [text for text in said if text not in plain] == []


@pytest.mark.parametrize(
    ("dialect", "temperature"), [("trl_0_21", 0.7), ("rloo", 1.0), ("ms_swift", 0.9)]
)
def test_the_dialect_may_be_said(migrate, dialect, temperature):
    found = migrate(f"--from={dialect}", *flags("python x.py --per_device_train_batch_size 8"))
    assert found.effective("generation.temperature") == temperature


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("nowhere.yaml", "nowhere.yaml"),
        ("list.yaml", "list.yaml"),
        ("broken.yaml", "broken.yaml"),
        ("plain.py", "plain.py"),
        ("notes.sh", "notes.sh"),
        ("notes.ipynb", "notes.ipynb"),
        ("accelerate launch", "flags"),
        ("--from vrel x.py --rloo_k 2", "vrel"),
        ("--from verl x.py --rloo_k 2", "verl"),
        ("--world-size none x.py --rloo_k 2", "none"),
        ("--world-size", "--world-size"),
        ("trl rloo --config gone.yaml", "gone.yaml"),
        ("x.py --rloo_k two", "two"),
        ("trl rloo --top_k few", "few"),
        ("trl grpo --use_vllm --vllm_importance_sampling_cap low", "low"),
        ("x.py --rloo_k 0", "0"),
        ("rloo.py --reward_funcs a b --reward_weights 1", "reward_weights"),
        ("swift rlhf --rlhf_type grpo --advantage_estimator x --model m/m", "x is not known"),
        ("rloo.py --num_generations 6 --per_device_train_batch_size 8", "--world-size"),
        ("python train.py --num_generations 4", "RLOO or GRPO"),
        ("", "rloo migrate"),
    ],
)
def test_bad_input_is_a_config_error(migrate, words, key, sentence):
    Path("list.yaml").write_text("- 1\n")
    Path("broken.yaml").write_text("a: [1\n")
    for name in ("plain.py", "notes.sh", "notes.ipynb"):
        Path(name).write_text("x = 1\n")
    with pytest.raises(ConfigError) as error:
        migrate(*flags(words))
    assert_refused(error, 2, key)
    if key != "broken.yaml":  # whose reason is the parser's
        sentence(error)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("trl rloo --beta 0.1\ntrl rloo --beta 0.2", "several commands"),
        ("trl rloo --beta 0.1 && trl rloo --beta 0.2", "several commands"),
        ("trl rloo --beta 0.1; trl rloo --beta 0.2", "several commands"),
        ("trl rloo --beta 0.1 || trl rloo --beta 0.2", "several commands"),
        ("trl rloo --model 'm", "quote"),
        ("trl rloo --model " + "m" * 32_000, "too long"),
    ],
    ids=["lines", "and", "semicolon", "or", "quote", "long"],
)
def test_a_text_that_is_not_one_command_is_refused(text, key, sentence):
    with pytest.raises(ConfigError) as error:
        run([text])
    assert_refused(error, 2, key)
    sentence(error)


# Commands that do not train


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "trl vllm-serve --model Qwen/Qwen2.5-72B --tensor_parallel_size 8 --log_level debug",
            "rloo vllm-serve model.path=Qwen/Qwen2.5-72B generation.server.tensor_parallel_size=8",
        ),
        (
            "CUDA_VISIBLE_DEVICES=1 swift rollout --model a/b --vllm_data_parallel_size 2 --use_hf",
            "rloo vllm-serve model.path=a/b generation.server.data_parallel_size=2",
        ),
        (
            "trl vllm-serve --model a/b --revision r --trust_remote_code --host 0.0.0.0 --port 9",
            "rloo vllm-serve model.path=a/b model.revision=r model.trust_remote_code=true"
            " generation.server.host=0.0.0.0 generation.server.port=9",
        ),
        (
            "python -i scripts/evals/generate_tldr.py --model_name_or_path a/b --n 1000",
            "rloo eval +recipe=tldr_judge model.path=a/b eval.max_samples=1000",
        ),
    ],
)
def test_a_server_and_an_evaluation_become_commands_of_ours(capsys, command, said):
    assert run(flags(command)) == 0
    ours, *notes = capsys.readouterr().out.splitlines()
    assert ours == said
    assert all(note.startswith("# --") and ": " in note for note in notes)


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
            names = [n for n in row.names if n not in RULES or not RULES[n].drop]
            yield from ((name, row.new_key, value) for name in names)


@pytest.mark.parametrize(("name", "key", "value"), list_settings())
def test_a_setting_of_several_values_takes_one_and_one_in_a_list_is_a_value(name, key, value):
    for given in (value, [value]):
        recipe = Recipe({name: given})
        recipe.apply_table()
        assert recipe.written_value(key) == [value]
    assert fitting_value("model.path", ["org/model"]) == "org/model"

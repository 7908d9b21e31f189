"""Writes the recipe of an OpenRLHF run (train_ppo_ray of 0.5 to 0.10, both spellings of its flags).

rollout_batch_size counts prompts, train_batch_size the completions of one update; KL is charged
token by token where it is in the reward, and a group is compared without it.
"""

from rloo_cli.compat.migrate import tables
from rloo_cli.compat.migrate.foreign_recipe import (
    GROUPED,
    ForeignRecipe,
    finish_recipe,
    start_recipe,
    take_int,
    write_adapter,
    write_engine,
    write_eval_sets,
    write_folder,
    write_group_size,
    write_kl,
    write_sources,
    write_trackers,
    write_updates,
)
from rloo_cli.compat.migrate.foreign_run import ForeignRun
from rloo_cli.compat.migrate.sections import slug_name
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject

DEFAULTS: JsonObject = {
    "seed": 42,
    "data.max_prompt_length": 1024,
    "data.prompt_column": "input",
    "generation.max_completion_length": 1024,
    "generation.temperature": 1.0,
    "train.learning_rate": 1e-6,
    "train.max_grad_norm": 1.0,
    "train.weight_decay": 0.0,
    "algorithm.epsilon": 0.2,
}
WHITENED: JsonObject = {
    "algorithm.lam": 1.0,
    "algorithm.gamma": 1.0,
    "algorithm.epsilon_value": 0.5,
}
ESTIMATORS = {  # advantage_estimator -> choice of the group algorithm
    "rloo": "rloo",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
    "group_norm": "grpo",
    "dr_grpo": "grpo",
    "gae": "ppo",
}
IS_KINDS = {  # is_correction_type -> mode, level
    "tis": ("truncate", "token"),
    "icepop": ("mask", "token"),
    "seq-mask-tis": ("filter", "geometric"),
}
LORA = {"lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target_modules"}


def convert_openrlhf(run: ForeignRun) -> str:
    """The text of the recipe for a run of OpenRLHF."""
    recipe = start_recipe("openrlhf", run.settings, run.notes, "--{} {}")
    estimator = _choose_estimator(recipe)
    _write_sizes(recipe)
    _write_data(recipe)
    _write_rewards(recipe)
    _write_objective(recipe, estimator)
    _write_optimizer(recipe)
    _write_model(recipe)
    _write_generation(recipe)
    _write_run(recipe)
    more = {k: v for k, v in WHITENED.items() if recipe.algorithm == "ppo"}
    return finish_recipe(recipe, "openrlhf", DEFAULTS | more)


def _choose_estimator(recipe: ForeignRecipe) -> str:
    text = recipe.original_text("advantage_estimator")
    estimator = str(recipe.take("advantage_estimator", "gae"))
    if estimator not in ESTIMATORS:
        why = f"one of {', '.join(ESTIMATORS)}"
        fix = "--advantage_estimator rloo, or another of these"
        raise ConfigError(Problem(f"{text} is not known", "the old run", why, fix))
    recipe.algorithm = ESTIMATORS[estimator]
    why = text or "its default, gae"
    if estimator == "rloo":
        recipe.groups["algorithm/dialect"] = ("openrlhf", why)
    else:
        recipe.groups["algorithm"] = (recipe.algorithm, why)
    return estimator


def _write_sizes(recipe: ForeignRecipe) -> None:
    write_group_size(recipe, "n_samples_per_prompt")
    text = recipe.original_text("train_batch_size") or "train_batch_size 128"
    prompts = take_int(recipe, "rollout_batch_size", 1024)
    per_update = take_int(recipe, "train_batch_size", 128)
    passes = take_int(recipe, "max_epochs", 1)
    write_updates(recipe, prompts, per_update, f"{text}, completions of an update", passes)
    if "max_steps" not in recipe.flags:
        recipe.put("train.epochs", float(take_int(recipe, "num_episodes", 1)), "num_episodes")
    else:
        recipe.drop("num_episodes", "max_steps came first")


def _write_data(recipe: ForeignRecipe) -> None:
    write_sources(recipe, "prompt_data", weights=recipe.take("prompt_data_probs"))
    recipe.put("data.prompt_column", recipe.take("input_key", "input"), "input_key")
    if template := recipe.take("input_template"):
        text = recipe.original_text("input_template")
        recipe.put("data.template", str(template).replace("{}", "{prompt}"), text)
    rows = take_int(recipe, "max_samples", 10**8)
    if rows < 10**6:
        recipe.put("data.max_samples", rows, recipe.original_text("max_samples"))
    total = recipe.take("max_len")
    if total and "generate_max_len" not in recipe.flags:
        half = int(total) // 2
        recipe.put("generation.max_completion_length", half, "half of max_len")
        recipe.put("data.max_prompt_length", int(total) - half, "the other half")
        recipe.notes.append(
            f"{recipe.original_text('max_len')} counted prompt and completion together: half of it"
            " is written for each"
        )
    write_eval_sets(recipe, "eval_dataset", str(recipe.take("eval_split", "train")))
    every = recipe.take("eval_steps")
    if every is not None:
        recipe.put("eval.every", max(0, int(every)), recipe.original_text("eval_steps"))
    recipe.notes.append("prompts that are too long were cut there; here data.overlong says it")


def _write_rewards(recipe: ForeignRecipe) -> None:
    text = recipe.original_text("reward_pretrain")
    paths = str(recipe.take("reward_pretrain") or "").split(",")
    remote = recipe.take("remote_rm_url")
    if remote:
        recipe.notes += [f"{text}: remote_rm_url came first"] if paths != [""] else []
        paths, text = [], recipe.original_text("remote_rm_url")
    for index, path in enumerate(p for p in paths if p):
        name = "reward_model" if not index else f"reward_model_{index + 1}"
        recipe.put_reward(name, {"type": "model", "path": path.strip()}, text)
    for index, target in enumerate(str(remote).split(",") if remote else []):
        name = "remote" if not index else f"remote_{index + 1}"
        if target.endswith(".py"):
            recipe.put_reward(name, {"type": "function", "path": f"{target}:reward_func"}, text)
            recipe.notes.append(
                f"{target}: reward_func got (queries, prompts, labels); here a reward gets"
                " completions, prompts and the columns of the data by their names"
            )
        else:
            recipe.put_reward(name, {"type": "http", "url": target}, text)
            recipe.notes.append(f"{target}: what is asked and answered is in docs/rewards.md")


def _write_objective(recipe: ForeignRecipe, estimator: str) -> None:
    beta = float(recipe.take("init_kl_coef", 0.01))
    in_loss = bool(recipe.take("use_kl_loss"))
    kind = str(recipe.take("kl_estimator", "k1"))
    if recipe.take("use_kl_estimator_k3"):
        kind = "k3"
    place = "none" if beta <= 0 else "loss" if in_loss else "reward"
    why = recipe.original_text("init_kl_coef") or "its default"
    write_kl(recipe, place, beta, kind, why, whole=False)
    if recipe.algorithm in GROUPED and place == "reward":
        recipe.put("algorithm.kl_in_baseline", False, "a group is compared by its scores alone")
    no_std = bool(recipe.take("no_advantage_std_norm"))
    if estimator == "dr_grpo" or (no_std and estimator == "group_norm"):
        recipe.put("algorithm.advantage_scale", "none", "scores minus their group's mean")
    elif no_std:
        recipe.dropped.append("no_advantage_std_norm: tokens are whitened with their std here")
    _write_clip(recipe)
    if recipe.take("dynamic_filtering"):
        recipe.put("algorithm.zero_std_groups", "resample", "dynamic_filtering")
    clip = recipe.take("reward_clip_range", [-10.0, 10.0])
    if recipe.algorithm in ("ppo", "reinforce_pp", "rloo") and isinstance(clip, list):
        why = recipe.original_text("reward_clip_range") or "its default"
        recipe.put("algorithm.reward_clip_range", [float(x) for x in clip], why)
    weight = float(recipe.take("overlong_penalty_factor", 1.0))
    if cache := recipe.take("overlong_buffer_len"):
        length = int(recipe.flags.get("generate_max_len") or 1024)
        value = {"max_length": length, "cache": int(cache), "weight": weight}
        recipe.put("algorithm.overlong_penalty", value, "overlong_buffer_len")
    name = "reward.stop_properly_penalty_coef"
    text, penalty = recipe.original_text(name), recipe.take(name)
    if penalty is not None and float(penalty) < 0:
        replaced: JsonObject = {"mode": "replace", "value": float(penalty)}
        recipe.put("algorithm.missing_eos_penalty", replaced, text)
    elif penalty is not None:
        recipe.dropped.append(f"{text}: a score is not multiplied here")


def _write_clip(recipe: ForeignRecipe) -> None:
    both = recipe.take("eps_clip_low_high")
    low = recipe.take("eps_clip", 0.2)
    low, high = both if isinstance(both, list) and len(both) == 2 else (low, None)
    recipe.put("algorithm.epsilon", float(low), "eps_clip")
    if high is not None:
        text = recipe.original_text("eps_clip_low_high")
        recipe.put("algorithm.epsilon_high", float(high), text)
    kind = recipe.take("policy_loss_type", "ppo")
    if kind == "gspo":
        if recipe.algorithm in ("ppo", "reinforce_pp", "reinforce_pp_baseline"):
            recipe.notes.append("policy_loss_type gspo: every token has an advantage of its own")
            return
        text = recipe.original_text("policy_loss_type")
        recipe.put("algorithm.ratio_level", "geometric", text)
        recipe.put("algorithm.loss_agg", "sequence_mean", text)
        if recipe.written_value("algorithm.kl_credit") == "to_go":
            recipe.put("algorithm.kl_credit", "sequence", "one ratio a completion has one charge")


def _write_optimizer(recipe: ForeignRecipe) -> None:
    schedule = str(recipe.take("lr_scheduler", "cosine_with_min_lr"))
    recipe.put("train.lr_scheduler", schedule, "lr_scheduler")
    ratio = float(recipe.take("min_lr_ratio", 0.1))
    if schedule == "cosine_with_min_lr":
        recipe.put("train.lr_scheduler_kwargs", {"min_lr_rate": ratio}, "a tenth, where it ends")
    share = float(recipe.take("lr_warmup_ratio", 0.03))
    recipe.notes.append(
        f"lr_warmup_ratio {share}: set train.warmup_steps to that share of all updates; their"
        " number depends on the length of the data"
    )
    betas = recipe.take("adam_betas", [0.9, 0.95])
    value = {"betas": [float(b) for b in betas], "eps": float(recipe.take("actor.adam.eps", 1e-8))}
    recipe.put("train.optimizer_kwargs", value, "adam_betas")


def _write_model(recipe: ForeignRecipe) -> None:
    kind = str(recipe.take("param_dtype", "bf16" if recipe.take("bf16") else ""))
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
    if kind in names:
        recipe.put("model.dtype", names[kind], "bf16 or param_dtype")
    text, attention = (
        recipe.original_text("attn_implementation"),
        recipe.take("attn_implementation"),
    )
    attention = "flash_attention_2" if recipe.take("flash_attn") else attention
    if attention:
        recipe.put("model.attn_implementation", attention, text or "flash_attn")
    write_adapter(recipe, "lora_rank", LORA)
    if recipe.take("load_in_4bit") and "lora" in recipe.groups:
        recipe.groups["quantization"] = ("4bit", "load_in_4bit")
    elif "load_in_4bit" in recipe.original_flags:
        recipe.dropped.append("load_in_4bit: quantised weights take no gradient, only an adapter")
    if "model.path" not in recipe.lines and "pretrain" not in recipe.flags:
        recipe.notes.append("no model is named in the old settings: set model.path")
    if recipe.take("adam_offload"):
        recipe.put("distributed.offload", "optimizer", "adam_offload")
    stage = int(recipe.take("zero_stage", 2))
    gpus = recipe.take("actor_num_gpus_per_node")
    nodes = take_int(recipe, "actor_num_nodes", 1)
    processes = gpus if isinstance(gpus, int) else None
    engine = f"zero{stage}" if stage else "ddp"
    write_engine(recipe, engine, recipe.original_text("zero_stage"), nodes, processes)
    if recipe.written_value("distributed.engine") == "zero3":
        recipe.drop("ref_reward_offload", "zero3 has the reference in shards")
    elif recipe.take("ref_reward_offload"):
        recipe.put("model.ref_offload", True, recipe.original_text("ref_reward_offload"))


def _write_generation(recipe: ForeignRecipe) -> None:
    engines = recipe.take("vllm_num_engines")
    names = {
        "vllm_tensor_parallel_size": "tensor_parallel_size",
        "vllm_gpu_memory_utilization": "gpu_memory_utilization",
        "enforce_eager": "enforce_eager",
    }
    colocated, sleeps = recipe.take("colocate_all_models"), recipe.take("vllm_enable_sleep")
    if not engines:
        for name in names:
            recipe.drop(name, "vllm_num_engines was 0")
        return
    place = "colocate" if colocated else "server"
    text = "colocate_all_models" if colocated else "vllm_num_engines"
    recipe.groups["generation"] = (f"vllm_{place}", text)
    for name, key in names.items():
        text, value = recipe.original_text(name), recipe.take(name)
        if value is not None:
            recipe.put(f"generation.{place}.{key}", value, text)
    if place == "server" and isinstance(engines, int):
        text = recipe.original_text("vllm_num_engines")
        recipe.put("generation.server.data_parallel_size", engines, text)
    if sleeps and place == "colocate":
        recipe.put("generation.colocate.sleep", "weights", "vllm_enable_sleep")
    _write_correction(recipe)


def _write_correction(recipe: ForeignRecipe) -> None:
    on, kind = (
        recipe.take("enable_vllm_is_correction"),
        recipe.take("vllm_is_correction_type", "tis"),
    )
    limits = recipe.take("vllm_is_truncated_threshold", 2.0)
    value: JsonObject = dict(tables.NO_CORRECTION)
    if on:
        mode, level = IS_KINDS.get(str(kind), IS_KINDS["tis"])
        low, high = limits if isinstance(limits, list) else (0.0, limits)
        value |= {"mode": mode, "level": level, "cap": float(high), "floor": float(low)}
        if str(kind) == "seq-mask-tis":
            recipe.notes.append("seq-mask-tis: the filter leaves completions out; see docs/keys.md")
    recipe.put("algorithm.correction", value, f"vLLM's correction, {kind}" if on else "it was off")


def _write_run(recipe: ForeignRecipe) -> None:
    write_folder(recipe, "save_path")
    run_name = recipe.take("wandb_run_name")
    if run_name and "name" not in recipe.lines:
        recipe.put("name", slug_name(str(run_name)), recipe.original_text("wandb_run_name"))
    trackers = [n for n in ("wandb", "tensorboard") if recipe.take(f"use_{n}")]
    write_trackers(recipe, trackers, "use_wandb, use_tensorboard; a key stays in the environment")
    if (every := recipe.take("save_steps")) is not None:
        recipe.put("checkpoint.every", max(0, int(every)), recipe.original_text("save_steps"))
    if (kept := recipe.take("max_ckpt_num")) is not None:
        recipe.put("checkpoint.keep_last", max(2, int(kept)), recipe.original_text("max_ckpt_num"))
    if recipe.take("load_checkpoint"):
        recipe.put("resume", "auto", "load_checkpoint")

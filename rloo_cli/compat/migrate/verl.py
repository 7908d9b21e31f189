"""Writes the recipe of a verl run (verl.trainer.main_ppo, 0.3 to 0.8).

Its batch and its mini-batch count prompts; its KL is off unless one of two places asks for it.
"""

from rloo_cli.compat.migrate import tables
from rloo_cli.compat.migrate.foreign_recipe import (
    ForeignRecipe,
    finish_recipe,
    start_recipe,
    take_int,
    write_adapter,
    write_engine,
    write_eval_sets,
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

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
MODEL, OPTIM = "actor_rollout_ref.model.", "actor_rollout_ref.actor.optim."
DEFAULTS: JsonObject = {
    "data.max_prompt_length": 512,
    "generation.max_completion_length": 512,
    "generation.temperature": 1.0,
    "train.learning_rate": 1e-6,
    "train.lr_scheduler": "constant",
    "train.weight_decay": 0.01,
    "train.max_grad_norm": 1.0,
    "algorithm.epsilon": 0.2,
    "algorithm.delta": 3.0,
    "checkpoint.every": 0,
    "resume": "auto",
}
PPO_DEFAULTS: JsonObject = {
    "algorithm.lam": 1.0,
    "algorithm.gamma": 1.0,
    "algorithm.epsilon_value": 0.5,
}
ESTIMATORS = {
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "remax": "remax",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "gae": "ppo",
}
KL_NAMES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
LOSS_AGG = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant",
}
LOSS_MODES = {"gspo": "gspo", "cispo": "cispo", "sapo": "sapo"}
SAPO_KEYS = {
    "tau_pos": "algorithm.sapo_temperature_pos",
    "tau_neg": "algorithm.sapo_temperature_neg",
}
LORA = {f"{MODEL}lora_alpha": "alpha", f"{MODEL}target_modules": "target_modules"}
ENGINE_KEYS = {  # of generation.colocate
    "gpu_memory_utilization": "gpu_memory_utilization",
    "tensor_model_parallel_size": "tensor_parallel_size",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "enforce_eager": "enforce_eager",
    "dtype": "dtype",
}


def convert_verl(run: ForeignRun) -> str:
    """The text of the recipe for a run of verl."""
    recipe = start_recipe("verl", run.settings, run.notes, "{}={}")
    _choose_estimator(recipe)
    _write_sizes(recipe)
    _write_data(recipe)
    _write_rewards(recipe)
    _write_objective(recipe)
    _write_kl_place(recipe)
    _write_optimizer(recipe)
    write_adapter(recipe, f"{MODEL}lora_rank", LORA)
    _write_generation(recipe)
    _write_run(recipe)
    more = PPO_DEFAULTS if recipe.algorithm == "ppo" else {}
    return finish_recipe(recipe, "verl", DEFAULTS | more)


def _choose_estimator(recipe: ForeignRecipe) -> None:
    text = recipe.original_text("algorithm.adv_estimator")
    estimator = str(recipe.take("algorithm.adv_estimator", "gae"))
    if estimator not in ESTIMATORS:
        what, why = f"{text} is not here", f"one of {', '.join(ESTIMATORS)}"
        fix = "algorithm.adv_estimator=rloo, or another of these"
        raise ConfigError(Problem(what, "the old run", why, fix))
    recipe.algorithm = ESTIMATORS[estimator]
    why = text if "algorithm.adv_estimator" in recipe.original_flags else "its default, gae"
    if recipe.algorithm == "rloo":
        recipe.groups["algorithm/dialect"] = ("verl", why)
    else:
        recipe.groups["algorithm"] = (recipe.algorithm, why)
    if recipe.algorithm == "remax":
        for key, value in (("policy_loss", "clip"), ("ratio_level", "token")):
            recipe.put(f"algorithm.{key}", value, "verl clips every estimator alike")
    if recipe.take("algorithm.norm_adv_by_std_in_grpo") is False and recipe.algorithm == "grpo":
        recipe.put("algorithm.advantage_scale", "none", "norm_adv_by_std_in_grpo=False")


def _write_sizes(recipe: ForeignRecipe) -> None:
    k = write_group_size(recipe, f"{ROLLOUT}n")
    prompts = take_int(recipe, "data.train_batch_size", 1024)
    name = f"{ACTOR}ppo_mini_batch_size"
    text = recipe.original_text(name) if name in recipe.original_flags else f"{name}=256"
    part = take_int(recipe, name, 256)
    passes = take_int(recipe, f"{ACTOR}ppo_epochs", 1)
    write_updates(recipe, prompts, part * k, f"{text}, prompts of an update", passes)
    steps = recipe.take("trainer.total_training_steps")
    if isinstance(steps, int):
        recipe.put("max_steps", steps, "trainer.total_training_steps")
        recipe.drop("trainer.total_epochs", "total_training_steps came first")
    else:
        epochs = take_int(recipe, "trainer.total_epochs", 30)
        recipe.put("train.epochs", float(epochs), "trainer.total_epochs")


def _write_data(recipe: ForeignRecipe) -> None:
    write_sources(recipe, "data.train_files")
    write_eval_sets(recipe, "data.val_files")
    for name, key in {"train": "data", "val": "eval"}.items():
        rows = recipe.take(f"data.{name}_max_samples")
        if isinstance(rows, int) and rows > 0:
            recipe.put(f"{key}.max_samples", rows, f"data.{name}_max_samples")
    cut = str(recipe.take("data.truncation", "error"))
    if recipe.take("data.filter_overlong_prompts"):
        recipe.put("data.overlong", "filter", "data.filter_overlong_prompts")
    elif cut in ("error", "left"):
        value = "error" if cut == "error" else "truncate_left"
        recipe.put("data.overlong", value, f"data.truncation={cut}")
    else:
        recipe.notes.append(f"data.truncation={cut}: prompts are cut on the left or left out here")


def _write_rewards(recipe: ForeignRecipe) -> None:
    asked = recipe.take("reward_model.enable")
    text, path = (
        recipe.original_text("reward_model.model.path"),
        recipe.take("reward_model.model.path"),
    )
    if path and asked is not False:
        recipe.put_reward("reward_model", {"type": "model", "path": path}, text)
    file = recipe.take("custom_reward_function.path")
    name = recipe.take("custom_reward_function.name", "compute_score")
    if file:
        text = recipe.original_text("custom_reward_function.path")
        recipe.put_reward(str(name), {"type": "function", "path": f"{file}:{name}"}, text)
        recipe.notes.append(
            f"{name} got (data_source, solution_str, ground_truth, extra_info) of one row; here a"
            " reward gets completions, prompts and the columns of the data by their names"
        )
    elif not path:
        recipe.notes.append(
            "verl chose a rule by the column data_source; here rewards are named: for gsm8k"
            " reward=exact_match, for mathematics reward=accuracy"
        )


def _write_objective(recipe: ForeignRecipe) -> None:
    both = recipe.take(f"{ACTOR}clip_ratio", 0.2)
    low = recipe.take(f"{ACTOR}clip_ratio_low", both)
    high = recipe.take(f"{ACTOR}clip_ratio_high")
    recipe.put("algorithm.epsilon", float(low), "clip_ratio, clip_ratio_low")
    if high is not None:
        recipe.put("algorithm.epsilon_high", float(high), "clip_ratio_high")
    if (limit := recipe.take(f"{ACTOR}clip_ratio_c")) is not None:
        recipe.put("algorithm.delta", float(limit), "clip_ratio_c")
    name = f"{ACTOR}loss_agg_mode"
    text, mode = recipe.original_text(name), str(recipe.take(name, "token-mean"))
    why = text if name in recipe.original_flags else "its default"
    recipe.put("algorithm.loss_agg", LOSS_AGG.get(mode, mode), why)
    _write_loss_mode(recipe)
    if recipe.take("algorithm.filter_groups.enable"):
        recipe.put("algorithm.zero_std_groups", "resample", "filter_groups.enable")
        rounds = recipe.take("algorithm.filter_groups.max_num_gen_batches")
        if isinstance(rounds, int) and rounds > 0:  # 0 was: for ever
            recipe.put("algorithm.max_resample", rounds, "max_num_gen_batches")
    recipe.drop("algorithm.filter_groups.max_num_gen_batches", "filter_groups.enable was off")


def _write_loss_mode(recipe: ForeignRecipe) -> None:
    name = f"{ACTOR}policy_loss.loss_mode"
    text, mode = recipe.original_text(name), str(recipe.take(name, "vanilla"))
    if mode in LOSS_MODES and recipe.algorithm == "grpo":
        recipe.put("algorithm.loss_type", mode, text)
    elif mode == "gspo" and recipe.algorithm == "rloo":
        recipe.put("algorithm.ratio_level", "geometric", text)
    elif mode != "vanilla":
        recipe.notes.append(f"{text}: not with {recipe.algorithm} here; the ratio is clipped")
    for name, key in SAPO_KEYS.items():
        if (value := recipe.take(f"{ACTOR}{name}")) is not None and mode == "sapo":
            recipe.put(key, float(value), name)


def _write_kl_place(recipe: ForeignRecipe) -> None:
    """The KL of verl is in the reward, in the loss, or off."""
    in_loss, in_reward = (
        recipe.take(f"{ACTOR}use_kl_loss"),
        recipe.take("algorithm.use_kl_in_reward"),
    )
    loss_coef = float(recipe.take(f"{ACTOR}kl_loss_coef", 0.001))
    loss_kind = str(recipe.take(f"{ACTOR}kl_loss_type", "low_var_kl")).rstrip("+")
    coef = float(recipe.take("algorithm.kl_ctrl.kl_coef", 0.001))
    kind = str(recipe.take("algorithm.kl_penalty", "kl")).rstrip("+")
    if in_loss and in_reward:
        recipe.notes.append("KL was in the reward and in the loss: the one in the loss is left out")
    if in_reward:
        write_kl(recipe, "reward", coef, KL_NAMES.get(kind, "k1"), "use_kl_in_reward, kl_coef")
        if recipe.algorithm == "grpo":
            recipe.put("algorithm.kl_in_baseline", True, "a group is compared with its KL")
    elif in_loss:
        kind = KL_NAMES.get(loss_kind, "k3")
        write_kl(recipe, "loss", loss_coef, kind, "use_kl_loss, kl_loss_coef")
    else:
        write_kl(recipe, "none", 0.0, "k1", "neither use_kl_loss nor use_kl_in_reward")


def _write_optimizer(recipe: ForeignRecipe) -> None:
    steps, share = (recipe.take(f"{OPTIM}lr_warmup_steps{end}") for end in ("", "_ratio"))
    if isinstance(steps, int) and steps > 0:
        recipe.put("train.warmup_steps", steps, "lr_warmup_steps; in updates")
    elif share:
        recipe.notes.append(
            f"lr_warmup_steps_ratio={share}: set train.warmup_steps to that share of all updates;"
            " their number depends on the length of the data"
        )
    ratio = float(recipe.take(f"{OPTIM}min_lr_ratio", 0.0) or 0.0)
    kind = str(recipe.take(f"{OPTIM}lr_scheduler_type", "constant"))
    if kind == "cosine" and ratio:
        recipe.put("train.lr_scheduler", "cosine_with_min_lr", "cosine with min_lr_ratio")
        recipe.put("train.lr_scheduler_kwargs", {"min_lr_rate": ratio}, "min_lr_ratio")
    else:
        warm = kind == "constant" and (steps or share)
        recipe.put("train.lr_scheduler", "constant_with_warmup" if warm else kind, kind)
    if (betas := recipe.take(f"{OPTIM}betas")) is not None:
        recipe.put("train.optimizer_kwargs", {"betas": [float(b) for b in betas]}, "optim.betas")
    fsdp = f"{ACTOR}fsdp_config."
    if recipe.take(f"{fsdp}param_offload"):
        recipe.put("distributed.offload", "parameters", "param_offload")
        recipe.take(f"{fsdp}optimizer_offload")
    elif recipe.take(f"{fsdp}optimizer_offload"):
        recipe.put("distributed.offload", "optimizer", "optimizer_offload")
    if isinstance(kwargs := recipe.take(f"{MODEL}override_config"), dict) and kwargs:
        recipe.put("model.init_kwargs", kwargs, "override_config")
    if f"{MODEL}path" not in recipe.flags:
        recipe.notes.append("no model is named in the old settings: set model.path")


def _write_generation(recipe: ForeignRecipe) -> None:
    engine = str(recipe.take(f"{ROLLOUT}name", "vllm"))
    if (top_k := recipe.take(f"{ROLLOUT}top_k")) is not None:
        recipe.put("generation.top_k", max(0, int(top_k)), "-1 was off")
    heat = recipe.take(f"{ROLLOUT}val_kwargs.temperature")
    if heat:
        recipe.put("eval.temperature", float(heat), "val_kwargs.temperature")
    sleeps = recipe.take(f"{ROLLOUT}free_cache_engine", True)
    if engine == "hf":
        recipe.take(f"{ROLLOUT}name")
        for name in ENGINE_KEYS:
            recipe.drop(f"{ROLLOUT}{name}", "it was the engine's")
        return
    if engine != "vllm":
        recipe.notes.append(f"rollout.name={engine}: vLLM samples here")
    recipe.groups["generation"] = ("vllm_colocate", "its engine is beside the trainer")
    for name, key in ENGINE_KEYS.items():
        text, value = recipe.original_text(f"{ROLLOUT}{name}"), recipe.take(f"{ROLLOUT}{name}")
        if value is not None:
            recipe.put(f"generation.colocate.{key}", value, text)
    if sleeps:
        recipe.put("generation.colocate.sleep", "weights", "free_cache_engine")
    prefix = "algorithm.rollout_correction.rollout_is"
    level, cap = recipe.take(prefix), recipe.take(f"{prefix}_threshold", 2.0)
    rule: JsonObject = dict(tables.NO_CORRECTION)
    if level in ("token", "sequence"):
        rule |= {"mode": "truncate", "level": level, "cap": float(cap)}
    recipe.put("algorithm.correction", rule, "rollout_is" if level else "rollout_is was off")


def _write_run(recipe: ForeignRecipe) -> None:
    if folder := recipe.take("trainer.default_local_dir"):
        recipe.put("root", str(folder), "trainer.default_local_dir")
    if name := recipe.take("trainer.experiment_name"):
        recipe.put("name", slug_name(str(name)), "trainer.experiment_name")
    logger = recipe.take("trainer.logger", [])
    logger = logger if isinstance(logger, list) else [str(logger)]
    write_trackers(recipe, [str(n) for n in logger], "trainer.logger")
    for theirs, ours in (("save_freq", "checkpoint.every"), ("test_freq", "eval.every")):
        if (every := recipe.take(f"trainer.{theirs}")) is not None:
            recipe.put(ours, max(0, int(every)), f"trainer.{theirs}")
    if kept := recipe.take("trainer.max_actor_ckpt_to_keep"):
        recipe.put("checkpoint.keep_last", max(2, int(kept)), "max_actor_ckpt_to_keep")
    if mode := recipe.take("trainer.resume_mode"):
        recipe.put("resume", "never" if mode == "disable" else "auto", "trainer.resume_mode")
    strategy = str(recipe.take(f"{ACTOR}strategy", "fsdp"))
    nodes = take_int(recipe, "trainer.nnodes", 1)
    gpus = recipe.take("trainer.n_gpus_per_node")
    processes = gpus if isinstance(gpus, int) else None
    why = f"{strategy} there"
    write_engine(recipe, "fsdp2", why, nodes, processes)

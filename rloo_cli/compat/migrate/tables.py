"""Lists what other trainers call their settings, and their defaults by version.

TRL's defaults are those of `RLOOConfig` and `GRPOConfig` in 0.9.6, 0.14, 0.16, 0.21, 0.24, 0.26,
1.0, 1.8 and 1.16, ms-swift's those of 4.6, peft's those of 0.17. A key that is not listed has the
same default as here.
"""

from rloo_cli.utils.files import JsonObject


def _name_set(text: str) -> set[str]:
    return set(text.split())


# Defaults by dialect, under our own keys ---------------------------------------------------------
RLOO_OLD: JsonObject = {
    "algorithm.num_generations": 2,
    "algorithm.beta": 0.05,
    "algorithm.epsilon": 0.2,
    "algorithm.num_iterations": 4,
    "generation.temperature": 0.7,
    "generation.max_completion_length": 53,
    "train.learning_rate": 5e-5,
    "train.lr_scheduler": "linear",
    "train.weight_decay": 0.0,
    "train.max_grad_norm": None,  # its loop never clipped
}
RLOO: JsonObject = {
    "algorithm.num_generations": 2,
    "algorithm.beta": 0.05,
    "algorithm.epsilon": 0.2,
    "algorithm.num_iterations": 1,
    "generation.temperature": 1.0,
    "generation.max_completion_length": 512,
    "train.learning_rate": 1e-6,
    "train.lr_scheduler": "linear",
    "train.weight_decay": 0.0,
    "train.max_grad_norm": 1.0,
}
RLOO_0_28 = RLOO | {"generation.max_completion_length": 256}
GRPO: JsonObject = RLOO | {
    "algorithm.num_generations": 8,
    "algorithm.beta": 0.0,
    "algorithm.loss_type": "dapo",
    "algorithm.advantage_scale": "group",
    "algorithm.kl_ratio_weighted": True,  # use_bias_correction_kl
}
GRPO_0_28 = GRPO | {
    "generation.max_completion_length": 256,
    "algorithm.kl_ratio_weighted": False,
}
GRPO_0_16 = GRPO_0_28 | {
    "algorithm.beta": 0.04,
    "algorithm.loss_type": "bnpo",  # 0.16; 0.14 and 0.15 had what is now called grpo
    "generation.temperature": 0.9,
}
SWIFT: JsonObject = RLOO | {
    "algorithm.num_generations": 8,
    "algorithm.beta": 0.04,
    "generation.temperature": 0.9,
    "data.overlong": "truncate_left",
    "data.max_prompt_length": None,
    "train.learning_rate": 1e-4,  # of a LoRA
    "train.lr_scheduler": "cosine",
    "train.weight_decay": 0.1,
    "train.optimizer_kwargs": {"betas": [0.9, 0.95]},
}
SWIFT_FULL_LEARNING_RATE = 1e-5
# Completions of an update, from which ms-swift derives gradient_accumulation_steps if it is unset.
SWIFT_BATCH_COMPLETIONS = 16
# An estimator of ms-swift -> its algorithm here, and the defaults that only it has.
SWIFT_ESTIMATORS: dict[str, tuple[str, JsonObject]] = {
    "rloo": ("rloo", {"algorithm.ratio_level": "token", "algorithm.loss_agg": "sequence_mean"}),
    "grpo": ("grpo", {"algorithm.loss_type": "grpo", "algorithm.advantage_scale": "group"}),
    "reinforce_plus_plus": ("reinforce_pp", {"algorithm.loss_agg": "sequence_mean"}),
}
# The correction for vLLM as the sampler if the old command does not set it.
NO_CORRECTION = {
    "mode": "none", "level": "sequence", "cap": 3.0, "floor": 0.0, "geometric_range": None,
}  # fmt: skip
GRPO_CORRECTION = NO_CORRECTION | {"mode": "mask"}

# name -> title, old trainer?, kind, defaults, vllm_mode, correction
TRL_VERSIONS: dict[str, tuple[str, bool, str, JsonObject, str, JsonObject]] = {
    "trl_0_9": ("TRL <=0.10", True, "rloo", RLOO_OLD, "server", NO_CORRECTION),
    "trl_0_21": ("TRL 0.11-0.21", True, "rloo", RLOO_OLD, "server", NO_CORRECTION),
    "trl_0_28": ("TRL 0.22-0.28", False, "rloo", RLOO_0_28, "server", NO_CORRECTION),
    "trl": ("TRL 1.16", False, "rloo", RLOO, "colocate", NO_CORRECTION),
    "grpo_0_16": ("TRL 0.14-0.16, GRPO", False, "grpo", GRPO_0_16, "colocate", NO_CORRECTION),
    "grpo_0_28": ("TRL 0.22-0.28, GRPO", False, "grpo", GRPO_0_28, "server", GRPO_CORRECTION),
    "grpo": ("TRL 1.16, GRPO", False, "grpo", GRPO, "colocate", GRPO_CORRECTION),
}
# Defaults that changed between versions: noted if the default was used and no version is known.
CHANGED_DEFAULTS = {
    "max_completion_length": "256 up to TRL 1.8, 512 in 1.16",
    "vllm_mode": "server up to TRL 0.29, colocate from 1.0",
}
CHANGED_GRPO_DEFAULTS = CHANGED_DEFAULTS | {
    "beta": "0.04 up to TRL 0.17, 0.0 from 0.18",
    "use_bias_correction_kl": "false up to TRL 1.0, true in 1.16",
    "loss_type": "bnpo in TRL 0.16-0.21, dapo from 0.22",
    "temperature": "0.9 up to TRL 0.16, 1.0 from 0.17",
}

# Names that only some versions had, and which tell the version -----------------------------------
ONLY_0_9 = _name_set("non_eos_penalty penalty_reward_value")
ONLY_OLD = ONLY_0_9 | _name_set(
    """rloo_k num_ppo_epochs kl_coef cliprange num_mini_batches response_length total_episodes
    sft_model_path missing_eos_penalty local_rollout_forward_batch_size stop_token
    normalize_reward token_level_kl"""
)
ONLY_NEW = _name_set(
    """num_generations beta epsilon steps_per_generation reward_funcs max_completion_length
    num_iterations generation_batch_size"""
)
ONLY_0_16 = {"vllm_device", "vllm_dtype", "vllm_enable_prefix_caching"}
UP_TO_0_28 = _name_set(
    """max_prompt_length vllm_guided_decoding_regex wandb_log_unique_prompts use_liger_loss
    use_transformers_paged"""
)
ONLY_SWIFT = {"advantage_estimator", "rlhf_type", "kl_in_reward", "train_type", "tuner_type"}

# RLOO or GRPO ------------------------------------------------------------------------------------
ONLY_GRPO = _name_set(
    """cast_lm_head_to_fp32 delta entropy_coef importance_sampling_level
    log_completions_hub_repo loss_type max_tool_calling_iterations
    multi_objective_aggregation off_policy_mask_threshold sapo_temperature_neg
    sapo_temperature_pos scale_rewards top_entropy_quantile use_adaptive_entropy
    use_bias_correction_kl use_liger_loss vllm_device vllm_dtype vllm_enable_prefix_caching
    vllm_importance_sampling_cap vllm_importance_sampling_clip_max
    vllm_importance_sampling_clip_min vllm_importance_sampling_correction
    vllm_importance_sampling_mode vllm_max_model_len"""
)
ONLY_RLOO = ONLY_OLD | {"normalize_advantages", "reward_clip_range"}
GRPO_NAME_PARTS = {"grpo", "gspo", "dapo"}  # parts of the name of a script, a file or a run
RLOO_NAME_PARTS = {"rloo", "ppo"}
RUN_NAME_FLAGS = ("output_dir", "run_name", "hub_model_id", "exp_name")  # settings that name a run

# Methods and tools that are not migrated ---------------------------------------------------------
OTHER_METHODS = _name_set(
    """sft dpo kto orpo cpo simpo bco gkd gold xpo rm reward reward_modeling online_dpo
    dpo_online nash_md prm distillation async_grpo pt pretrain sdft dpo_vlm sft_vlm
    online_dpo_vlm kto_vlm mpo_vlm"""
)
DISTILLATIONS = ("gkd", "gold", "distillation")  # of these, which our algorithms do otherwise
TEACHER_SERVERS = ("teacher_model_server_url", "teacher_model_server")  # the address of one
# Arguments that make a command one that does not train.
NON_TRAINING_COMMANDS = _name_set(
    "vllm-serve rollout eval infer export deploy merge-lora app web-ui sample chat env skills"
)
# Commands that do not train -> our words, and the override for each of their flags.
_SERVER_KEYS = {
    name: f"generation.server.{name}={{}}"
    for name in _name_set(
        """tensor_parallel_size data_parallel_size host port gpu_memory_utilization dtype
        max_model_len enable_prefix_caching enforce_eager kv_cache_dtype"""
    )
}
OTHER_COMMANDS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "vllm-serve": (
        ("rloo", "vllm-serve"),
        _SERVER_KEYS
        | {f"vllm_{name}": key for name, key in _SERVER_KEYS.items()}
        | {
            "model": "model.path={}",
            "revision": "model.revision={}",
            "model_revision": "model.revision={}",
            "trust_remote_code": "model.trust_remote_code={}",
            "vllm_model_impl": "generation.server.model_impl={}",
            "speculative_config": "generation.server.extra.speculative_config={}",
        },
    ),
    "generate_tldr.py": (
        ("rloo", "eval", "+recipe=tldr_judge"),
        {
            "model_name_or_path": "model.path={}",
            "n": "eval.max_samples={}",
            "judge_model": "eval.judge.model={}",
            "dataset_name": "data.path={}",
        },
    ),
}
OTHER_COMMAND_NOTES = {
    "output_path": "pairs.jsonl and pairs.csv are written into the run's folder",
    "log_level": "the server's log is in the run's folder",
    "distributed_executor_backend": "vLLM chooses it",
    "use_hf": "names are those of the hub",
    "vllm_use_async_engine": "the server is always an asynchronous engine",
    "vllm_enable_lora": "an adapter is handed to vLLM anyway",
    "vllm_max_lora_rank": "the recipe's adapter says it",
}
FOREIGN_PATTERNS = {
    "openrlhf": r"\bopenrlhf\.(cli|trainer)|\btrain_ppo_ray\b|\btrain_ppo_llama",
    "verl": r"\bverl\.trainer\b|\bmain_ppo\b|\bactor_rollout_ref\.|\brecipe\.\w+\.main_",
    "megatron": r"(^|\s)megatron\s+(rlhf|sft|pt)\b",
}
FOREIGN_FLAGS = {  # two of these flags are enough
    "openrlhf": _name_set(
        """pretrain prompt_data init_kl_coef n_samples_per_prompt rollout_batch_size
        micro_rollout_batch_size micro_train_batch_size actor_learning_rate prompt_max_len
        generate_max_len reward_pretrain remote_rm_url critic_learning_rate
        actor_num_gpus_per_node colocate_all_models actor.model_name_or_path
        data.prompt_dataset rollout.batch_size rollout.n_samples_per_prompt algo.kl.init_coef
        actor.adam.lr algo.advantage.estimator reward.remote_url ckpt.output_dir"""
    ),
    "verl": set(),
    "megatron": {"micro_batch_size", "global_batch_size", "tensor_model_parallel_size"},
}
FOREIGN_TITLES = {"openrlhf": "OpenRLHF", "verl": "verl", "megatron": "ms-swift's Megatron"}
# Of those that are refused: settings whose value means the same under one of our names.
FOREIGN_EQUIVALENTS = {
    "megatron": {
        "model": "model.path",
        "num_generations": "algorithm.num_generations",
        "beta": "algorithm.beta",
        "lr": "train.learning_rate",
        "max_completion_length": "generation.max_completion_length",
    },
}
# Their estimators -> the overrides that compute the same here.
FOREIGN_ESTIMATORS = {
    "megatron": {
        "rloo": "algorithm=rloo algorithm.dialect=ms_swift",
        "grpo": "algorithm=grpo",
        "reinforce_plus_plus": "algorithm=reinforce_pp",
    },
}

# Launchers ---------------------------------------------------------------------------------------
PROCESS_COUNT_FLAGS = ("num_processes", "nproc_per_node", "num_gpus")
LAUNCHER_FLAGS = {
    *PROCESS_COUNT_FLAGS, "nnodes", "num_machines", "config_file", "accelerate_config"
}  # fmt: skip
# TRL's own launcher files; each starts 8 processes except the first.
EIGHT_PROCESS_LAUNCHERS = (
    "multi_gpu deepspeed_zero1 deepspeed_zero2 deepspeed_zero3 fsdp1 fsdp2 zero1 zero2 zero3"
)
TRL_LAUNCHERS = {"single_gpu": 1} | dict.fromkeys(EIGHT_PROCESS_LAUNCHERS.split(), 8)

# Rewards -----------------------------------------------------------------------------------------
# TRL's scripts for vision-language models, and what they set by themselves.
VISION_SCRIPTS = ("grpo_vlm.py", "rloo_vlm.py")
VISION_DATASET = "lmms-lab/multimodal-open-r1-8k-verified"
VISION_PIXELS = 512 * 512
VISION_SYSTEM = "First think about the question, between <think> and </think>, then answer it."
AGENT_SCRIPTS = ("grpo_agent.py", "rloo_agent.py")  # whose tools no flag says
TRL_REWARDS = {
    "accuracy_reward": "accuracy",
    "reasoning_accuracy_reward": "reasoning_accuracy",
    "think_format_reward": "think_format",
    "get_soft_overlong_punishment": "overlong",
}
SWIFT_REWARDS = {
    "accuracy": "accuracy",
    "format": "answer_tags",
    "cosine": "cosine_length",
    "repetition": "repetition",
    "soft_overlong": "overlong",
}

# Adapters: old name -> key of model.lora ---------------------------------------------------------
LORA_NAMES = {
    "lora_r": "r",
    "lora_rank": "r",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "lora_target_modules": "target_modules",
    "target_modules": "target_modules",
    "exclude_modules": "exclude_modules",
    "lora_modules_to_save": "modules_to_save",
    "modules_to_save": "modules_to_save",
    "lora_bias": "bias",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
QUANTIZATION_SETTINGS = (
    "use_bnb_nested_quant", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant",
    "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage",
)  # fmt: skip
LORA_TRL = {"r": 16, "alpha": 32.0, "dropout": 0.05, "target_modules": None}
LORA_SWIFT = {"r": 8, "alpha": 32.0, "dropout": 0.05, "target_modules": "all-linear"}
LORA_PEFT = {"r": 8, "alpha": 8.0, "dropout": 0.0, "target_modules": None}  # LoraConfig()
# The layers that peft chooses if none are named, by a part of the model's name.
PEFT_LAYERS = {part: ["query_key_value"] for part in ("pythia", "neox", "falcon", "bloom")}
PEFT_LAYERS |= {"phi-3": ["qkv_proj"], "phi-4": ["qkv_proj"]}
PEFT_LAYERS |= {"gpt2": ["c_attn"], "": ["q_proj", "v_proj"]}
PEFT_CONFIGS = {  # peft's class of another kind of adapter -> model.lora.peft_type
    "LoHaConfig": "LOHA", "LoKrConfig": "LOKR", "IA3Config": "IA3", "OFTConfig": "OFT",
    "HRAConfig": "HRA", "MissConfig": "MISS", "RoadConfig": "ROAD",
}  # fmt: skip
LAYER_ARGUMENTS = ("target_modules", "exclude_modules", "modules_to_save")  # of all of them
FULL_TRAINING = ("full",)  # kinds of training that train every weight
ADAPTERS = ("lora", "dora", True)

# Other values ------------------------------------------------------------------------------------
LOSS_AGG = {"grpo": "sequence_mean", "dapo": "token_mean", "dr_grpo": "constant"}
LOSS_AGG |= {"bnpo": "token_mean_local"}
ADVANTAGE_SCALES: dict[str | bool, str] = {n: n for n in ("group", "batch", "none")}
ADVANTAGE_SCALES |= {True: "group", False: "none"}
RATIO_LEVELS = {"sequence": "geometric", "sequence_token": "geometric"}
# Keys of generation_kwargs that are settings of their own here.
SAMPLING_SETTINGS = ("top_p", "top_k", "min_p", "temperature", "repetition_penalty")
# Arguments of from_pretrained that are settings of their own here.
MODEL_ARGUMENTS = ("torch_dtype", "dtype", "attn_implementation", "revision", "trust_remote_code")
SPREAD_KWARGS = {"generation_kwargs": SAMPLING_SETTINGS, "model_init_kwargs": MODEL_ARGUMENTS}
STRUCTURED_FLAGS = (
    "vllm_structured_outputs_regex", "vllm_guided_decoding_regex", "structured_outputs_regex"
)  # fmt: skip
TLDR_DATASET = "trl-internal-testing/tldr-preference-sft-trl-style"
# The text that TRL's TL;DR scripts put around a post.
TLDR_TEMPLATES = {"TRL <=0.10": " {prompt}", "TRL 0.11-0.21": "User: {prompt}\n\nAssistant:"}
# vLLM's settings: name in TRL and ms-swift -> key of generation.colocate.
COLOCATED_KEYS = {
    "vllm_gpu_memory_utilization": "gpu_memory_utilization",
    "vllm_tensor_parallel_size": "tensor_parallel_size",
    "vllm_max_model_length": "max_model_len",
    "vllm_max_model_len": "max_model_len",
    "vllm_model_impl": "model_impl",
    "vllm_enforce_eager": "enforce_eager",
    "vllm_max_num_seqs": "max_num_seqs",
}
IGNORED_FLAGS = {  # flags that need no key here, and why
    "vllm_enable_lora": "an adapter is handed to vLLM anyway",
    "vllm_limit_mm_per_prompt": "prompts are text here",
    "vllm_enable_prefix_caching": "it is on here, and changes no number",
    "dataset_num_proc": "was unused; preparing prompts needs no setting",
    "lora_task_type": "a causal language model is trained anyway",
    "num_sample_generations": "samples are written every logging.samples_every steps",
    "log_multimodal": "prompts are text here",
    "log_unique_prompts": "the prompt ledger lists every prompt",
    "move_model_batches": "weights are moved as they fit",
}

# In a Python script ------------------------------------------------------------------------------
CONFIG_CLASSES = {"RLOOConfig": "rloo", "GRPOConfig": "grpo"}
TRAINER_CLASSES = {"RLOOTrainer": "rloo", "GRPOTrainer": "grpo"}
PARSER_CLASSES = {"HfArgumentParser", "TrlParser"}
# The order of a trainer's arguments: TRL >=0.22, and <=0.21's RLOOTrainer.
TRAINER_ARGUMENTS = (
    "model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"
)  # fmt: skip
OLD_TRAINER_ARGUMENTS = (
    "config", "processing_class", "policy", "ref_policy", "reward_model", "train_dataset",
    "data_collator", "eval_dataset",
)  # fmt: skip
# What a script asks of its trainer beside the training, and what does it here.
TRAINER_METHODS = {
    "save_model": "final/ in the run's folder has the model, for transformers and vLLM",
    "push_to_hub": "rloo push RUN --repo ORG/NAME, once the run is done",
    "add_callback": "nothing is called back; each step is a line of metrics.jsonl",
    "remove_callback": "nothing is called back; each step is a line of metrics.jsonl",
    "log_metrics": "metrics.jsonl has every step",
    "save_metrics": "metrics.jsonl has every step",
    "create_model_card": "rloo push writes the card",
}
# Methods of a data set that change its rows; all others leave the rows as they are.
DATASET_METHODS = _name_set(
    """map filter select take skip shuffle train_test_split rename_column rename_columns
    remove_columns select_columns add_column cast cast_column sort flatten batch
    with_transform set_transform"""
)

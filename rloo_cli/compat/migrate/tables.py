"""Lists what TRL and ms-swift call their settings, and their defaults by version.

TRL's defaults are those of `RLOOConfig` and `GRPOConfig` in 0.9.6, 0.14, 0.16, 0.21, 0.24, 0.26,
1.0, 1.8 and 1.16, ms-swift's those of 4.6, peft's those of 0.17. A key that is not listed has the
same default as here.
"""

from dataclasses import dataclass, field

from rloo_cli.utils.files import JsonObject


@dataclass(frozen=True)
class Dialect:
    """One tool at one time: the defaults its users rely on without writing them."""

    title: str
    kind: str  # rloo or grpo
    defaults: JsonObject
    rewards: dict[str, str]  # its reward names -> ours
    vllm_mode: str = "server"
    correction: JsonObject = field(default_factory=lambda: NO_CORRECTION)  # where vLLM samples
    is_old_trl: bool = False  # the trainer of TRL <=0.21
    is_swift: bool = False
    device_batch: int = 8


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
NO_CORRECTION: JsonObject = {
    "mode": "none", "level": "sequence", "cap": 3.0, "floor": 0.0, "geometric_range": None,
}  # fmt: skip
GRPO_CORRECTION = NO_CORRECTION | {"mode": "mask"}

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
# TRL's script for tools, and the functions and the data that it names.
AGENT_SCRIPT = "grpo_agent.py"
AGENT_TOOL, AGENT_DATASET, AGENT_PROMPT = (
    "query_biogrid",
    "qgallouedec/biogrid_qa",
    "format_example",
)
AGENT_REWARDS = ("correctness_reward", "structure_reward", "query_reward")
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

# The tools and their versions -------------------------------------------------------------------
DIALECTS = {
    "trl_0_9": Dialect("TRL <=0.10", "rloo", RLOO_OLD, {}, is_old_trl=True),
    "trl_0_21": Dialect("TRL 0.11-0.21", "rloo", RLOO_OLD, {}, is_old_trl=True),
    "trl_0_28": Dialect("TRL 0.22-0.28", "rloo", RLOO_0_28, TRL_REWARDS),
    "trl": Dialect("TRL 1.16", "rloo", RLOO, TRL_REWARDS, "colocate"),
    "grpo_0_16": Dialect("TRL 0.14-0.16, GRPO", "grpo", GRPO_0_16, TRL_REWARDS, "colocate"),
    "grpo_0_28": Dialect(
        "TRL 0.22-0.28, GRPO", "grpo", GRPO_0_28, TRL_REWARDS, "server", GRPO_CORRECTION
    ),
    "grpo": Dialect("TRL 1.16, GRPO", "grpo", GRPO, TRL_REWARDS, "colocate", GRPO_CORRECTION),
    "ms_swift": Dialect("ms-swift", "grpo", SWIFT, SWIFT_REWARDS, is_swift=True, device_batch=1),
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

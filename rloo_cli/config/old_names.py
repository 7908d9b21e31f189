"""What our keys are called in other trainers, and which key a misspelt one was meant to be.

`find_old_name` answers the names of other trainers with today's key and what to mind when moving a
value (TRL changed its RLOO names once, in 0.22); `nearest_names` guesses at spelling. The table is
the one `rloo migrate` works from. `<name>` in a key stands for a name of the user's own.
Every key of the table is one of today's schema; tests/house/test_names.py walks it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher

MIN_LAST_PART_LIKENESS = 0.75  # how alike the last parts of two keys are, at least, to be a guess
MIN_KEY_LIKENESS = 0.9  # higher: a long section name alone makes two keys look alike


@dataclass(frozen=True)
class OldName:
    """One line of the migration table."""

    names: tuple[str, ...]
    source: str  # which tool, which versions
    new_key: str | None  # today's key; None = rloo has no such key, the note says what it has
    note: str = ""  # conversion or correction, one line
    fix: str = ""  # what to write where `new_key` with a value is not enough: a group's choice


def find_old_name(key: str) -> OldName | None:
    """The table's line for a name of another trainer; the last part of a dotted key decides.

    Ask only about keys that are unknown where they stand: `beta` is in the table too.
    """
    return _OLD_NAME_OF.get(key.rpartition(".")[2].replace("-", "_"))


def nearest_names(key: str, candidates: Iterable[str]) -> list[str]:
    """Up to three known keys that `key` may have been meant to be, best first; [] when none is.

    Where the key names no section, equally good guesses stay in the order of `candidates`.
    """
    scored = []
    for index, candidate in enumerate(candidates):
        whole = _alike(key, candidate)
        last = _alike(key.rpartition(".")[2], candidate.rpartition(".")[2])
        if last >= MIN_LAST_PART_LIKENESS or whole >= MIN_KEY_LIKENESS:
            mirror = candidate.startswith("eval.")  # its keys are named as those of training
            scored.append((-last, -whole if "." in key else mirror, index, candidate))
    return [candidate for *_, candidate in sorted(scored)[:3]]


def _alike(a: str, b: str) -> float:
    return SequenceMatcher(None, a.lower(), b.lower(), autojunk=False).ratio()


# source -> one line per row: old names | today's key (- = none) | note, or "fix: what to write"
_TABLE = {
    "TRL <=0.21": """
rloo_k | algorithm.num_generations | completions per prompt; its default was 2
kl_coef | algorithm.beta |
cliprange | algorithm.epsilon |
num_ppo_epochs | algorithm.num_iterations | its default was 4, ours is 1
num_mini_batches | algorithm.num_minibatches | optimizer steps per pass
exp_name | name | no time stamp is added: a requeued job must find its run
normalize_reward | algorithm.normalize_rewards | normalised scores; normalize_advantage is another
normalize_advantage | algorithm.normalize_advantages | adds 1e-4 to the std, it added 1e-8
response_length | generation.max_completion_length | its default was 53
missing_eos_penalty | algorithm.missing_eos_penalty | 0.11-0.21: {mode: subtract, value: v}
non_eos_penalty, penalty_reward_value | algorithm.missing_eos_penalty | {mode: replace, value: -1}
total_episodes | total_episodes | it stands at the top; TRL >=0.22 has max_steps, in updates
local_rollout_forward_batch_size | train.no_grad_batch_size | a matter of memory only
num_sample_generations | logging.samples_every | max(1, steps // n)
stop_token | generation.stop_token_ids | not needed: every EOS id ends a completion
stop_token_id | generation.stop_token_ids | [id], beside every EOS id
token_level_kl | algorithm.kl_credit | did nothing in old RLOO (the same sum); to_go is a real one
whiten_rewards | algorithm.whiten_rewards | only PPO's; old RLOO never read it
gamma | algorithm.gamma | only PPO's
lam | algorithm.lam | only PPO's
vf_coef | algorithm.vf_coef | only PPO's
cliprange_value | algorithm.epsilon_value | only PPO's
dataset_num_proc | - | was unused; preparing prompts needs no setting
policy, sft_model_path, base_model | model.path |
ref_policy | model.ref_path | null = a frozen copy of model.path
reward_model_path | reward.<name>.path | with type: model
data_collator | - | prompts are packed here, there is nothing to collate
sanity_check | data.max_samples | a number of examples
""",
    "TRL >=0.22": """
num_generations | algorithm.num_generations | K; its default was 2 (GRPO 8)
beta | algorithm.beta |
epsilon | algorithm.epsilon |
epsilon_high | algorithm.epsilon_high |
delta | algorithm.delta |
num_iterations | algorithm.num_iterations |
normalize_advantages | algorithm.normalize_advantages |
reward_clip_range | algorithm.reward_clip_range | [low, high]; <=0.21: x, only with normalize_reward
mask_truncated_completions | algorithm.mask_truncated_completions | drop is advised over true
steps_per_generation | algorithm.num_minibatches | divide it by gradient_accumulation_steps
generation_batch_size | train.prompts_per_step | divide it by num_generations
reward_funcs | reward.<name> | fix: reward=function reward.function.path=file.py:name
reward_model, reward_model_name_or_path | reward.<name>.path | with type: model
reward_weights | reward.<name>.weight | each reward has its own weight
reward_processing_classes | reward.<name>.tokenizer |
max_completion_length | generation.max_completion_length | its default was 256, later 512
max_prompt_length | data.max_prompt_length | TRL cut on the left: data.overlong=truncate_left
temperature | generation.temperature | its default was 1.0; .7 up to 0.21, .9 in ms-swift
top_p | generation.top_p |
top_k | generation.top_k | 0 = off
min_p | generation.min_p |
repetition_penalty | generation.repetition_penalty |
chat_template_kwargs | generation.chat_template_kwargs |
generation_kwargs | generation | fix: generation.KEY=VALUE for each of its entries
cache_implementation | - | the transformers backend has a cache of its own
ds3_gather_for_generation | - | with zero3 each rank samples with a whole copy of the weights
use_vllm, vllm_mode | generation | fix: generation=vllm_server or generation=vllm_colocate
vllm_server_base_url | generation.server.base_url |
vllm_server_host, vllm_server_port | generation.server.base_url | http://HOST:PORT
vllm_server_timeout | generation.server.ready_timeout_s |
vllm_group_port | - | a free port is found
vllm_gpu_memory_utilization | generation.colocate.gpu_memory_utilization |
vllm_tensor_parallel_size | generation.colocate.tensor_parallel_size |
vllm_max_model_length, vllm_max_model_len | generation.colocate.max_model_len |
vllm_enable_sleep_mode, sleep_level | generation.colocate.sleep | none, kv or weights
vllm_model_impl | generation.colocate.model_impl |
vllm_structured_outputs_regex, vllm_guided_decoding_regex | - | a completion may have any \
form; reward=regex scores the form
vllm_importance_sampling_correction, vllm_importance_sampling_mode | algorithm.correction.mode |
vllm_importance_sampling_cap, vllm_importance_sampling_clip_max | algorithm.correction.cap |
vllm_importance_sampling_clip_min | algorithm.correction.floor |
scale_rewards | algorithm.advantage_scale | true = group, false = none
loss_type | algorithm.loss_type | of algorithm=grpo; elsewhere policy_loss, ratio_level, loss_agg
entropy_coef | algorithm.entropy_coef |
importance_sampling_level | algorithm.ratio_level | its "sequence" is our geometric
sync_ref_model, ref_model_sync_steps | model.ref_sync.every |
ref_model_mixup_alpha | model.ref_sync.alpha |
num_generations_eval | eval.num_generations |
off_policy_mask_threshold | algorithm.off_policy_threshold |
use_bias_correction_kl | algorithm.kl_ratio_weighted |
cast_lm_head_to_fp32 | model.lm_head_fp32 |
top_entropy_quantile | - | every token of a completion is trained on
router_aux_loss_coef | - | a router has no loss of its own here
log_completions, num_completions_to_print | logging.samples | how many are printed
disable_dropout | model.disable_dropout |
shuffle_dataset, dataset_shuffle | data.shuffle |
model_init_kwargs | model | fix: model.KEY=VALUE for each of its entries
tools | agent.tools | fix: agent=tools agent.tools=[file.py:name]
environment_factory | agent.environments | fix: agent=class agent.environments={name:file.py:Class}
rollout_func, multi_turn_scheduler | agent | fix: agent=tools or agent=class (docs/agents.md)
max_tool_calling_iterations, max_turns | agent.max_turns | it counts sampled turns: iterations + 1
""",
    "ms-swift": """
model | model.path | model is a section here; ms-swift reads ModelScope unless use_hf is true
ref_model | model.ref_path | null = a frozen copy of model.path
advantage_estimator, rlhf_type | algorithm | fix: algorithm=rloo
kl_in_reward | algorithm.kl_in | true = reward, false = loss
overlong_filter | algorithm.mask_truncated_completions | drop is advised over true
dynamic_sample | algorithm.zero_std_groups | true = resample
max_resample_times | algorithm.max_resample |
soft_max_length | algorithm.overlong_penalty | its max_length
soft_cache_length | algorithm.overlong_penalty | its cache
rollout_importance_sampling_mode | algorithm.correction.mode | token_mask = level token, mode mask
rollout_importance_sampling_threshold | algorithm.correction.cap | its default was 2.0
external_plugins | reward.<name>.path | type: function, path: plugin.py:name
dataset | data.path | path:subset#n = path, name and max_samples
val_dataset | eval.sets | fix: eval.sets.NAME={path: PATH, split: SPLIT}
max_length | data.max_prompt_length | it meant the prompt in GRPO
truncation_strategy | data.overlong | delete = filter, left = truncate_left
system | data.system |
stop_words | generation.stop |
attn_impl | model.attn_implementation |
train_type, tuner_type | model.lora | fix: lora=default, for its default, lora
lora_rank, lora_r | model.lora.r |
lora_alpha | model.lora.alpha |
lora_dropout | model.lora.dropout |
target_modules, lora_target_modules | model.lora.target_modules |
offload_optimizer, offload_model | - | nothing of the trainer is moved while vLLM samples; \
generation.colocate.sleep lets go of vLLM's memory while the trainer trains
split_dataset_ratio | data.eval_split | name a split instead
use_hf, load_from_cache_file, padding_free, add_version, async_generate | - | no counterpart
""",
    "HF Trainer": """
per_device_train_batch_size | train.prompts_per_step | counted completions per device, not prompts
gradient_accumulation_steps | train.prompts_per_step | derived: the batch is prompts * completions
learning_rate, lr | train.learning_rate |
lr_scheduler_type | train.lr_scheduler |
lr_scheduler_kwargs | train.lr_scheduler_kwargs |
warmup_steps | train.warmup_steps | in updates
warmup_ratio | train.warmup_steps | multiply it by the number of updates
weight_decay | train.weight_decay |
max_grad_norm | train.max_grad_norm | null = never; old RLOO (<=0.21) never clipped
optim | train.optimizer |
adam_beta1, adam_beta2, adam_epsilon, optim_args | train.optimizer_kwargs | {betas: [...], eps: ...}
num_train_epochs, num_epochs | train.epochs | <=0.21 counted completions: divide by K there
max_steps | max_steps | it counted updates: divide by updates per step
logging_steps | logging.every | in steps
logging_strategy, logging_first_step, logging_dir | logging.every | metrics.jsonl is always written
save_steps | checkpoint.every | in steps
save_total_limit | checkpoint.keep_last |
save_strategy | checkpoint.every | in steps
eval_steps | eval.every | in steps
eval_strategy, evaluation_strategy | eval.every | 0 = only at the start and the end
eval_on_start | eval.at_start |
per_device_eval_batch_size | eval.batch_size | completions made at once
output_dir | root | runs are written under root/name
run_name | name |
report_to | logging.trackers | a list: logging.trackers=[wandb,tensorboard]
seed | seed | it stands at the top
data_seed | seed | there is one seed
bf16, fp16, dtype, torch_dtype | model.dtype | bfloat16, float16, float32 or auto
gradient_checkpointing | model.gradient_checkpointing |
deepspeed, fsdp, fsdp_config | distributed.engine |
num_processes, nproc_per_node, world_size | distributed.num_processes |
num_machines, nnodes | distributed.num_nodes |
ddp_timeout | distributed.timeout_s |
context_parallel_size, cp_size, sequence_parallel_size, sp_size, ulysses_degree | - | a sequence \
is on one device: longer ones need zero3 or fsdp2 and model.gradient_checkpointing=true
trainer_tensor_parallel_size, tp_size, pipeline_parallel_size, pp_size | - | the trainer spreads \
weights by zero3 or fsdp2; generation.server.tensor_parallel_size is the sampler's
lora_modules_to_save | model.lora.modules_to_save |
use_rslora | model.lora.use_rslora |
use_dora | model.lora.use_dora |
torch_compile | train.compile | each decoder layer by itself; not with generation=transformers
resume_from_checkpoint | resume |
model_name_or_path | model.path |
model_revision | model.revision |
trust_remote_code | model.trust_remote_code |
attn_implementation | model.attn_implementation |
dataset_name | data.path |
dataset_config, dataset_config_name | data.name |
dataset_train_split | data.split |
dataset_test_split | data.eval_split |
dataset_streaming | data.streaming |
use_peft, lora_task_type | model.lora | fix: lora=default
load_in_4bit, load_in_8bit | model.quantization | fix: quantization=4bit or quantization=8bit
push_to_hub, hub_model_id, hub_token, hub_strategy | - | a separate step, never part of a run
use_liger_kernel, remove_unused_columns, pad_to_multiple_of | - | no counterpart
gradient_checkpointing_kwargs, tf32, ddp_find_unused_parameters | - | no counterpart
dataloader_num_workers, dataloader_pin_memory, dataloader_drop_last | - | no counterpart
do_train, do_eval, overwrite_output_dir, disable_tqdm, log_level | - | no counterpart
config, args | - | the recipe holds every setting: +recipe=my.yaml
""",
}


def _parse() -> tuple[OldName, ...]:
    entries = []
    for source, text in _TABLE.items():
        for line in text.strip().splitlines():
            names, new, note = (part.strip() for part in line.split("|"))
            key = None if new == "-" else new
            fix = note.removeprefix("fix: ") if note.startswith("fix: ") else ""
            note = "" if fix else note
            entries.append(OldName(tuple(names.split(", ")), source, key, note, fix))
    return tuple(entries)


OLD_NAME_TABLE = _parse()
_OLD_NAME_OF = {name: entry for entry in OLD_NAME_TABLE for name in entry.names}

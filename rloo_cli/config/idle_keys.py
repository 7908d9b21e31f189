"""Keys that have no effect at some values of other keys, and why (`rloo config explain`)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from rloo_cli.config.synthetic import NO_HUB_PREFIXES, TASK_PREFIX
from rloo_cli.utils.files import JsonObject

SERVER_START_KEYS = (  # keys of generation.server that a server is started with
    "port", "data_parallel_size", "tensor_parallel_size", "gpu_memory_utilization", "kv_cache_gb",
    "max_num_seqs", "max_num_batched_tokens", "enforce_eager", "kv_cache_dtype",
    "enable_prefix_caching", "quantization", "model_impl", "batch_invariant", "extra",
    "max_restarts",
)  # fmt: skip


@dataclass(frozen=True)
class IdleKeys:
    """These keys have no effect while `when` holds, which is asked with a key -> value function."""

    keys: tuple[str, ...]
    when: Callable[[Callable[[str], object]], bool]
    why: str


def _is_above_length(key: str, value_of: Callable[[str], object]) -> bool:
    """Whether an interval in steps is longer than the run; 0 turns most intervals off."""
    every, max_steps = value_of(key), value_of("max_steps")
    return isinstance(every, int) and isinstance(max_steps, int) and every > max_steps


CLIP_KEYS = (
    "algorithm.epsilon", "algorithm.epsilon_high", "algorithm.epsilon_tokens", "algorithm.delta",
    "algorithm.log_ratio_clamp",
)  # fmt: skip
REFERENCE_KEYS = (
    "algorithm.kl_in", "algorithm.kl_estimator", "algorithm.kl_in_baseline", "algorithm.kl_credit",
    "algorithm.kl_temperature", "algorithm.kl_ratio_weighted", "model.ref_path",
    "model.ref_offload", "model.ref_sync.every", "model.ref_sync.alpha",
)  # fmt: skip
TEACHER_KEYS = tuple(
    f"algorithm.teacher.{name}"
    for name in (
        "model", "api_key_env", "max_in_flight", "ready_timeout_s", "request_timeout_s",
        "reconnect_timeout_s", "retries",
    )
)  # fmt: skip
EVAL_KEYS = (
    "eval.at_start", "eval.every", "eval.num_generations", "eval.max_samples", "eval.batch_size",
    "guards.held_out_falling",
)  # fmt: skip
CORRECTION_KEYS = (
    "algorithm.correction.level", "algorithm.correction.cap", "algorithm.correction.floor",
    "guards.low_ess",
)  # fmt: skip
LORA_KEYS = tuple(
    f"model.lora.{name}" for name in ("r", "alpha", "dropout", "bias", "use_rslora", "use_dora")
)
LOSS_TYPE_KEYS = ("algorithm.policy_loss", "algorithm.ratio_level", "algorithm.loss_agg")
IDLE_KEYS = (
    IdleKeys(
        (*CLIP_KEYS, "algorithm.ratio_level"),
        lambda v: v("algorithm.policy_loss") == "reinforce",
        "algorithm.policy_loss=reinforce has no ratio to clip",
    ),
    IdleKeys(
        (*CLIP_KEYS, "guards.policy_clipping"),
        lambda v: v("algorithm.num_iterations") == 1 and v("algorithm.num_minibatches") == 1,
        "with one update per step (num_iterations=1, num_minibatches=1) the ratio is exactly 1",
    ),
    IdleKeys(
        ("algorithm.sapo_temperature_pos", "algorithm.sapo_temperature_neg"),
        lambda v: (v("algorithm.policy_loss") or v("algorithm.loss_type")) != "sapo",
        "only policy_loss=sapo, or loss_type=sapo without another policy_loss, has these",
    ),
    IdleKeys(
        (*REFERENCE_KEYS, "guards.kl_rising"),
        lambda v: v("algorithm.beta") == 0 and v("algorithm.kl_in") != "none",
        "algorithm.beta=0: no reference is loaded",
    ),
    IdleKeys(
        TEACHER_KEYS,
        lambda v: not v("algorithm.teacher.base_url"),
        "algorithm.teacher.base_url is null: no server has the teacher",
    ),
    IdleKeys(
        ("model.ref_offload", "model.ref_sync.alpha"),
        lambda v: bool(v("algorithm.teacher.base_url")),
        "algorithm.teacher.base_url: no reference is loaded here",
    ),
    IdleKeys(
        LORA_KEYS,
        lambda v: v("model.lora.peft_type") not in (None, "LORA"),
        "model.lora.peft_type is not LORA: other kinds take theirs from model.lora.kwargs",
    ),
    IdleKeys(
        ("algorithm.beta",),
        lambda v: v("algorithm.kl_in") == "none",
        "algorithm.kl_in=none: the KL is only logged",
    ),
    IdleKeys(
        ("algorithm.kl_in_baseline", "algorithm.kl_credit"),
        lambda v: v("algorithm.kl_in") != "reward",
        "algorithm.kl_in is not reward",
    ),
    IdleKeys(
        ("algorithm.kl_ratio_weighted",),
        lambda v: v("algorithm.kl_in") != "loss",
        "algorithm.kl_in is not loss",
    ),
    IdleKeys(
        ("algorithm.kl_temperature",),
        lambda v: v("generation.temperature") == 1.0,
        "generation.temperature is 1: both temperatures are the same",
    ),
    IdleKeys(
        ("algorithm.allow_stale",),
        lambda v: v("algorithm.policy_loss") != "reinforce",
        "only algorithm.policy_loss=reinforce is refused with several updates per step",
    ),
    IdleKeys(
        ("algorithm.loss_type",),
        lambda v: None not in [v("algorithm.loss_type"), *map(v, LOSS_TYPE_KEYS)],
        "algorithm.policy_loss, ratio_level and loss_agg are all set",
    ),
    IdleKeys(
        ("algorithm.gamma",),
        lambda v: bool(v("algorithm.minus_group_mean")),
        "algorithm.minus_group_mean: every token has its completion's score",
    ),
    IdleKeys(
        ("algorithm.max_resample",),
        lambda v: v("algorithm.zero_std_groups") != "resample",
        "algorithm.zero_std_groups is not resample",
    ),
    IdleKeys(
        ("algorithm.missing_eos_penalty.value",),
        lambda v: v("algorithm.missing_eos_penalty.mode") == "none",
        "algorithm.missing_eos_penalty.mode=none",
    ),
    IdleKeys(
        CORRECTION_KEYS,
        lambda v: (
            v("algorithm.correction.mode") == "none"
            or (v("algorithm.correction.mode"), v("generation.backend")) == ("auto", "transformers")
        ),
        "no correction: the transformers backend samples with the trainer's own weights",
    ),
    IdleKeys(
        tuple(f"generation.server.{name}" for name in SERVER_START_KEYS),
        lambda v: bool(v("generation.server.base_url")),
        "generation.server.base_url names servers that somebody else runs",
    ),
    IdleKeys(
        ("generation.server.api_key_env", "generation.server.reconnect_timeout_s"),
        lambda v: not v("generation.server.base_url"),
        "generation.server.base_url is null: the run has a server of its own",
    ),
    IdleKeys(
        ("algorithm.loss_denominator",),
        lambda v: v("algorithm.loss_agg") == "token_mean_local",
        "algorithm.loss_agg=token_mean_local divides each micro-batch by its own tokens",
    ),
    IdleKeys(
        EVAL_KEYS,
        lambda v: v("data.eval_split") is None and not v("eval.sets"),
        "data.eval_split is null and eval.sets empty: nothing is held out",
    ),
    IdleKeys(
        ("data.eval_split",), lambda v: bool(v("eval.sets")), "eval.sets names what is held out"
    ),
    IdleKeys(
        ("eval.temperature", "eval.pass_at", "eval.pass_reward", "eval.pass_threshold"),
        lambda v: v("eval.num_generations") == 1,
        "eval.num_generations=1: answers are greedy, none are sampled",
    ),
    IdleKeys(
        ("train.micro_batch_tokens",),
        lambda v: v("train.micro_batch_size") is not None,
        "train.micro_batch_size counts completions instead",
    ),
    IdleKeys(
        ("guards.every_update_clipped",),
        lambda v: v("train.max_grad_norm") is None,
        "train.max_grad_norm is null: no update is clipped",
    ),
    IdleKeys(
        ("train.warmup_steps",),
        lambda v: v("train.lr_scheduler") == "constant",
        "train.lr_scheduler=constant has no warm-up (constant_with_warmup has)",
    ),
    *(
        IdleKeys(
            (every,),
            partial(_is_above_length, every),
            f"it is above max_steps: {instead}",
        )
        for every, instead in {
            "eval.every": "held-out scores are taken at the start and at the end alone",
            "checkpoint.every": "only the final model is saved",
            "logging.every": "steps are logged more rarely than the run is long",
            "model.ref_sync.every": "the reference stays as it is",
        }.items()
    ),
    IdleKeys(
        ("generation.top_k", "generation.top_p", "generation.min_p"),
        lambda v: v("generation.temperature") == 0,
        "generation.temperature is 0",
    ),
    IdleKeys(
        ("generation.max_sampling_mask_ids",),
        lambda v: not v("generation.return_sampling_mask"),
        "generation.return_sampling_mask is false",
    ),
    IdleKeys(
        ("generation.return_sampling_mask",),
        lambda v: (
            v("generation.top_p") == 1
            and not v("generation.top_k")
            and not v("generation.min_p")
            and not v("generation.kwargs")
        ),
        "top_p, top_k and min_p are off: each token is sampled from the whole vocabulary",
    ),
    IdleKeys(
        ("logging.samples",),
        lambda v: v("logging.console") == "panel",
        "the panel always shows one sample",
    ),
    IdleKeys(
        ("algorithm.kl_in_baseline", "algorithm.advantage_scale", "algorithm.normalize_advantages"),
        lambda v: v("algorithm.name") == "ppo",
        "algorithm=ppo: tokens have rewards of their own, a value model is the baseline, and what"
        " it leaves is whitened over the step",
    ),
    IdleKeys(
        ("model.value.path", "model.value.revision"),
        lambda v: v("algorithm.name") != "ppo",
        "only algorithm=ppo has a value model",
    ),
    IdleKeys(
        ("model.value.revision",),
        lambda v: v("model.value.path") is None,
        "model.value.path is null: the revision is that of the model it begins as",
    ),
    IdleKeys(
        ("model.ref_sync.alpha",),
        lambda v: v("model.ref_sync.every") == 0,
        "model.ref_sync.every=0: the reference stands",
    ),
    IdleKeys(
        ("model.quantization.quant_type", "model.quantization.double_quant"),
        lambda v: v("model.quantization.bits") == 8,
        "model.quantization.bits=8",
    ),
    IdleKeys(
        ("model.revision",),
        lambda v: str(v("model.path")).startswith(("make:", ".", "/")),
        "model.path is not on the hub",
    ),
    IdleKeys(
        ("data.revision", "data.name"),
        lambda v: str(v("data.path")).startswith((*NO_HUB_PREFIXES, ".", "/")),
        "data.path is not on the hub",
    ),
    IdleKeys(
        ("data.task.size", "data.task.difficulty", "data.task.curriculum", "data.task.seed"),
        lambda v: not str(v("data.path")).startswith(TASK_PREFIX),
        "data.path is no task of reasoning-gym",
    ),
)


def idle_notes(keys: Iterable[str], values: JsonObject) -> list[str]:
    """A line for each of these keys that has no effect on a run with these values."""
    reasons = {key: idle_reasons(key, values) for key in keys}
    return [f"note: {key} has no effect: {why[0]}" for key, why in reasons.items() if why]


def idle_reasons(key: str, values: JsonObject) -> list[str]:
    """The reasons for which `key` has no effect on a run with these values; [] when it has one."""

    def value_of(name: str) -> object:
        value: object = values
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    return [idle.why for idle in IDLE_KEYS if key in idle.keys and idle.when(value_of)]

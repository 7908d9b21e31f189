"""TRL's and ms-swift's defaults by version, and detection of an old run's version.

TRL's defaults are those of `RLOOConfig` and `GRPOConfig` in 0.9.6, 0.14, 0.16, 0.21, 0.24, 0.26,
1.0, 1.8 and 1.16, ms-swift's those of 4.6. A key that is not listed has the same default as here.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from rloo_cli.compat.migrate.read import OldRun
from rloo_cli.compat.trl_settings import TRL_FIELDS
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject

# The correction with vLLM as the sampler if the old command does not set it.
NO_CORRECTION: JsonObject = {
    "mode": "none", "level": "sequence", "cap": 3.0, "floor": 0.0, "geometric_range": None,
}  # fmt: skip
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


@dataclass(frozen=True)
class Dialect:
    """One tool at one time: the defaults that its users rely on without writing them."""

    title: str
    kind: str  # rloo or grpo
    defaults: JsonObject
    rewards: dict[str, str] = field(default_factory=lambda: TRL_REWARDS)  # its names -> ours
    vllm_mode: str = "server"
    correction: JsonObject = field(default_factory=lambda: NO_CORRECTION)  # where vLLM samples
    prompt_limit: int | None = None  # of the last tokens of a prompt
    is_old_trl: bool = False  # the trainer of TRL <=0.21
    is_swift: bool = False


# Defaults by dialect, under our own keys ---------------------------------------------------------
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
RLOO_OLD = RLOO | {
    "algorithm.num_iterations": 4,
    "generation.temperature": 0.7,
    "generation.max_completion_length": 53,
    "train.learning_rate": 5e-5,
    "train.max_grad_norm": None,  # its loop never clipped
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
SWIFT_FULL: JsonObject = {"train.learning_rate": 1e-5}  # if all weights are trained
# An estimator of ms-swift -> its algorithm here, and the defaults that only it has.
SWIFT_ESTIMATORS: dict[str, tuple[str, JsonObject]] = {
    "rloo": ("rloo", {"algorithm.ratio_level": "token", "algorithm.loss_agg": "sequence_mean"}),
    "grpo": ("grpo", {"algorithm.loss_type": "grpo", "algorithm.advantage_scale": "group"}),
    "reinforce_plus_plus": ("reinforce_pp", {"algorithm.loss_agg": "sequence_mean"}),
}
MASKED = NO_CORRECTION | {"mode": "mask"}
DIALECTS = {
    "trl_0_9": Dialect("TRL <=0.10", "rloo", RLOO_OLD, {}, is_old_trl=True),
    "trl_0_21": Dialect("TRL 0.11-0.21", "rloo", RLOO_OLD, {}, is_old_trl=True),
    "trl_0_28": Dialect("TRL 0.22-0.28", "rloo", RLOO_0_28, prompt_limit=512),
    "trl": Dialect("TRL 1.16", "rloo", RLOO, vllm_mode="colocate"),
    "grpo_0_16": Dialect(
        "TRL 0.14-0.16, GRPO", "grpo", GRPO_0_16, vllm_mode="colocate", prompt_limit=512
    ),
    "grpo_0_28": Dialect(
        "TRL 0.22-0.28, GRPO", "grpo", GRPO_0_28, correction=MASKED, prompt_limit=512
    ),
    "grpo": Dialect("TRL 1.16, GRPO", "grpo", GRPO, vllm_mode="colocate", correction=MASKED),
    "ms_swift": Dialect("ms-swift", "grpo", SWIFT, SWIFT_REWARDS, is_swift=True),
}


def _name_set(text: str) -> set[str]:
    return set(text.split())


# Names that only some versions had, and which identify the version -----------------------------
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
_RLOO_FIELDS, _GRPO_FIELDS = (TRL_FIELDS[name].keys() for name in ("RLOOConfig", "GRPOConfig"))
# Fields that only one of TRL's two configs has in 1.16, and that only GRPO's had before.
ONLY_GRPO = (_GRPO_FIELDS - _RLOO_FIELDS) | ONLY_0_16 | {"use_liger_loss", "vllm_max_model_len"}
ONLY_RLOO = (_RLOO_FIELDS - _GRPO_FIELDS) | ONLY_OLD
NAME_PARTS = {"grpo": {"grpo", "gspo", "dapo"}, "rloo": {"rloo", "ppo"}}  # of a script or a run
RUN_NAME_FLAGS = ("output_dir", "run_name", "hub_model_id", "exp_name")  # settings that name a run
OTHER_METHODS = _name_set(
    """sft dpo kto orpo cpo simpo bco gkd gold xpo rm reward reward_modeling online_dpo
    dpo_online nash_md prm distillation async_grpo pt pretrain sdft dpo_vlm sft_vlm
    online_dpo_vlm kto_vlm mpo_vlm"""
)
DISTILLATIONS = ("gkd", "gold", "distillation")  # of these, covered by our algorithms
TEACHER_SERVERS = ("teacher_model_server_url", "teacher_model_server")  # the address of one
FROM_HINT = (
    "rloo migrate --from rloo ... or --from grpo ..., as it was (also: --from swift; a version of"
    " TRL: rloo migrate --help)"
)


def choose_dialect(old_run: OldRun, chosen: str) -> str:
    """The key of DIALECTS for the old run's tool and version; `chosen`: the value of --from, or "".

    Raises ConfigError for a method other than RLOO or GRPO, and if nothing indicates which one.
    """
    names = set(old_run.flags)
    is_swift = not chosen and (old_run.tool == "swift" or names & ONLY_SWIFT)
    if chosen in ("swift", "ms_swift") or is_swift:
        _refuse_other_swift(old_run)
        return "ms_swift"
    if chosen in DIALECTS and chosen not in ("trl", "grpo"):
        return chosen
    kind = chosen if chosen in ("rloo", "grpo") else _algorithm_kind(old_run)
    if kind == "grpo":
        if names & ONLY_0_16:
            return "grpo_0_16"
        return "grpo_0_28" if names & UP_TO_0_28 else "grpo"
    if chosen != "trl" and names & ONLY_OLD and len(names & ONLY_OLD) >= len(names & ONLY_NEW):
        return "trl_0_9" if names & ONLY_0_9 else "trl_0_21"
    return "trl_0_28" if names & UP_TO_0_28 else "trl"


def _refuse_other_swift(old_run: OldRun) -> None:
    """Raise ConfigError for another method of ms-swift: without rlhf_type, `swift rlhf` is DPO."""
    method = str(old_run.flags.get("rlhf_type") or "grpo")
    if not {"rlhf_type", "advantage_estimator"} & set(old_run.flags) and old_run.tool == "swift":
        is_rlhf = old_run.method == "rlhf"
        method = "dpo, which swift rlhf is by default" if is_rlhf else old_run.method
    if method != "grpo":
        raise _other_method_error(method, old_run)


def _algorithm_kind(old_run: OldRun) -> str:
    """rloo or grpo, by the first clue: command, class, script, settings, names."""
    method = old_run.method if old_run.tool == "trl" else ""
    stem = Path(old_run.script).name.removesuffix(".py")
    if method in OTHER_METHODS or (stem in OTHER_METHODS and not old_run.kind):
        raise _other_method_error(method or stem, old_run)
    names = set(old_run.flags)
    by_setting = {"grpo": names & ONLY_GRPO, "rloo": names & ONLY_RLOO}
    hints = (
        {k for k in ("rloo", "grpo") if k in (old_run.kind, old_run.tool, method)},
        _kinds_in_name(stem),
        {kind for kind, settings in by_setting.items() if settings},
        _kinds_in_name(" ".join(str(old_run.flags.get(n) or "") for n in RUN_NAME_FLAGS)),
        _kinds_in_name(old_run.file),
    )
    for hint in hints:
        if len(hint) == 1:
            return hint.pop()
    why = "no clue in it: no command or class, no name, no setting that only one of them has"
    raise ConfigError(Problem("is the old run RLOO or GRPO?", "the old run", why, FROM_HINT))


def _kinds_in_name(text: str) -> set[str]:
    """The methods named by parts of a name."""
    parts = set(re.split(r"[^a-z]+", text.lower()))
    return {kind for kind, names in NAME_PARTS.items() if parts & names}


def _other_method_error(method: str, old_run: OldRun) -> ConfigError:
    what = f"the old run was {method}: rloo migrate converts RLOO and GRPO"
    fix = "--from rloo or --from grpo, if it was one of them nevertheless"
    why = "another method has another loss, whose settings do not apply to these two"
    if method in DISTILLATIONS:
        server = next((old_run.flags[n] for n in TEACHER_SERVERS if n in old_run.flags), None)
        teacher = "algorithm=gkd model.path=STUDENT model.ref_path=TEACHER"
        why = "it trains on the student's own completions (lmbda 1); beta is algorithm.jsd_beta"
        if server:  # only from the sampled tokens' log-probabilities
            teacher = f"algorithm=opd algorithm.teacher.base_url={server} model.path=STUDENT"
        fix = f"rloo train {teacher} data.path=DATA"
    return ConfigError(Problem(what, "the old run", why, fix))

"""The table of old settings whose value changes with the name.

A plain rename needs no line here: `config/old_names.txt` has the key of every old name, and
notes. The lines are applied in this order, before the plain renames; of several settings that
become one key the first one counts. Settings that become one key only together with others are in
`objective.py`, `model.py`, `rules.py` and `batch.py`, which come before the table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """How one old setting is converted; the defaults are those of its line in old_names.txt."""

    key: str = ""  # ours
    # The value here. Values that a mapping lacks stay unchanged, except false: that is off.
    convert: Mapping[Any, Any] | Callable[[Any], Any] | None = None
    note: str = ""  # written beside the value
    drop: str = ""  # why no key is needed


def _layer_names(value: Any) -> Any:
    """Names of layers, from which a shell may not have removed a quote or a comma."""
    names = [str(v).strip("\"',") for v in (value if isinstance(value, list) else [value])]
    return "all-linear" if names == ["all-linear"] else names


LAYERS = Rule(convert=_layer_names)
SLEEP = Rule(convert=lambda on: "weights" if on else "none")
DTYPE = Rule(convert=lambda name: str(name).removeprefix("torch."))
PRINTED = Rule(convert=int, note="printed")
INTERVALS = Rule(drop="eval.every, checkpoint.every and logging.every count steps")

RULES = {
    # The objective
    "kl_in_reward": Rule(convert={True: "reward", False: "loss"}),
    "importance_sampling_level": Rule(
        convert={"sequence": "geometric", "sequence_token": "geometric"},
        note="sequence is the mean over tokens, as in GSPO",
    ),
    "scale_rewards": Rule(convert={True: "group", False: "none", None: "none"}),
    "multi_objective_aggregation": Rule(convert={"sum_then_normalize": "sum"}),
    "missing_eos_penalty": Rule(
        convert=lambda value: {"mode": "subtract", "value": float(value)},
        note="subtracted from the score",
    ),
    "dynamic_sample": Rule(convert={True: "resample"}),
    "overlong_filter": Rule(convert={True: True}),
    "whiten_rewards": Rule(drop="old RLOO never read it"),
    "token_level_kl": Rule(drop="did nothing in old RLOO: the sum over tokens is the same"),
    # The model
    "bf16": Rule(convert={True: "bfloat16"}),
    "fp16": Rule(convert={True: "float16"}),
    "torch_dtype": DTYPE,
    "dtype": DTYPE,
    "lora_target_modules": LAYERS,
    "target_modules": LAYERS,
    "exclude_modules": LAYERS,
    "lora_modules_to_save": LAYERS,
    "modules_to_save": LAYERS,
    # Data and sampling
    "truncation_strategy": Rule(convert={"delete": "filter", "left": "truncate_left"}),
    "enable_thinking": Rule(convert=lambda on: {"enable_thinking": bool(on)}),
    "top_k": Rule(convert=lambda count: max(0, int(count))),
    "stop_token": Rule(drop="every EOS id ends a completion here"),
    "router_aux_loss_coef": Rule(
        "generation.allow_moe", lambda weight: weight == 0, "a router has no loss of its own here"
    ),
    "vllm_enable_sleep_mode": SLEEP,
    "sleep_level": SLEEP,
    # The run
    "max_grad_norm": Rule(convert={0: None, None: None}),
    "num_completions_to_print": PRINTED,
    "log_completions": PRINTED,
    "save_total_limit": Rule(
        convert=lambda count: max(2, int(count)), note="at least two, since one may be damaged"
    ),
    "resume_from_checkpoint": Rule(
        convert=lambda where: "auto" if where else "never",
        note="an rloo run can resume, but not from the old run's checkpoint",
    ),
    "eval_strategy": INTERVALS,
    "evaluation_strategy": INTERVALS,
    "save_strategy": INTERVALS,
    "logging_strategy": INTERVALS,
    "num_sample_generations": Rule(drop="set logging.samples_every, in steps"),
    "deepspeed": Rule(drop="one process has nothing to share"),
    "fsdp": Rule(drop="one process has nothing to share"),
}

"""What a value model (algorithm=ppo) starts from: model.value.path, a reward model, or the policy.

Read from config.json files alone, so that a plan, and a rule that is checked before torch, say what
the run will do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rloo_cli.config.schema import RunConfig
from rloo_cli.utils.files import JsonObject

VALUE_BASELINE = "value"  # the baseline of algorithms that have such a model
# Of a config.json: what makes two backbones one architecture, and their ids one vocabulary.
ARCHITECTURE_KEYS = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size",
)  # fmt: skip
ReadModelConfig = Callable[
    [str, str | None], Mapping[str, Any]
]  # path, revision -> its config.json


@dataclass(frozen=True)
class ValueInit:
    """Weights that a value model begins with."""

    path: str
    revision: str | None
    key: str  # that named them
    why: str
    reward: str | None = None  # the reward model that they are
    trust_remote_code: bool = False  # code that comes with it may run


def needs_value_model(run: RunConfig) -> bool:
    """Whether this algorithm trains a value model beside the policy."""
    return getattr(run.algorithm, "baseline", None) == VALUE_BASELINE


def choose_value_init(
    run: RunConfig, read_values: ReadModelConfig, same_token_ids: bool = True
) -> ValueInit:
    """Where the value model comes from. `same_words`: tokenizers of policy and reward agree.

    Raises what `read` raises.
    """
    own = run.model
    if own.value.path is not None:
        trust = own.trust_remote_code
        return ValueInit(own.value.path, own.value.revision, "model.value.path",
                         "model.value.path", trust_remote_code=trust)  # fmt: skip
    judges: JsonObject = {n: e for n, e in run.rewards.items() if e.type == "model"}
    why = f"{len(judges)} of the rewards are models, not one" if len(judges) != 1 else ""
    for name, entry in judges.items() if not why else ():
        ours, theirs = read_values(own.path, own.revision), read_values(entry.path, entry.revision)
        other = [
            k
            for k in ARCHITECTURE_KEYS
            if _text_config_value(ours, k) != _text_config_value(theirs, k)
        ]
        why = f"reward.{name} differs in {', '.join(other)}" if other else ""
        if not other and not same_token_ids:
            why = f"reward.{name} has another vocabulary"
        if not why:
            return ValueInit(entry.path, entry.revision, f"reward.{name}.path",
                             "the one reward model, whose backbone is the policy's", name,
                             entry.trust_remote_code)  # fmt: skip
    return ValueInit(
        own.path, own.revision, "model.path", why, trust_remote_code=own.trust_remote_code
    )


def _text_config_value(values: Mapping[str, Any], name: str) -> Any:
    text = values.get("text_config")
    return (text if isinstance(text, dict) else values).get(name, values.get(name))

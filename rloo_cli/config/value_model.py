"""What a value model (algorithm=ppo) starts from: model.value.path, a reward model, or the policy.

Only config.json files are read, so that a plan, and a rule that is checked before torch is
imported, know what the run will do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rloo_cli.config.schema import AlgorithmConfig, ModelConfig, RewardConfig
from rloo_cli.utils.files import JsonObject

VALUE_BASELINE = "value"  # `Config.baseline` of algorithms that have a value model
# Keys of a config.json that are equal where two backbones have one architecture and vocabulary.
ARCHITECTURE_KEYS = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size",
)  # fmt: skip
ReadModelConfig = Callable[[str, str | None], Mapping[str, object]]  # path, revision -> config.json


@dataclass(frozen=True)
class ValueInit:
    """Weights that a value model is initialized with."""

    path: str
    revision: str | None
    key: str  # the key that names them
    why: str
    reward: str | None = None  # the name of the reward whose model they are
    trust_remote_code: bool = False  # code that comes with it may run


def needs_value_model(algorithm: AlgorithmConfig) -> bool:
    """Whether this algorithm trains a value model beside the policy."""
    return getattr(algorithm, "baseline", None) == VALUE_BASELINE


def choose_value_init(
    policy: ModelConfig,
    rewards: Mapping[str, RewardConfig],
    read_values: ReadModelConfig,
    same_token_ids: bool = True,
) -> ValueInit:
    """Choose a value model's weights. `same_token_ids`: tokenizers of policy and reward agree.

    Raises what `read_values` raises.
    """
    value, key = policy.value, "model.value.path"
    trust = policy.trust_remote_code
    if value.path is not None:
        return ValueInit(value.path, value.revision, key, key, trust_remote_code=trust)
    models: JsonObject = {n: e for n, e in rewards.items() if e.type == "model"}
    why = f"{len(models)} of the rewards are models, not one" if len(models) != 1 else ""
    for name, entry in models.items() if not why else ():
        ours = read_values(policy.path, policy.revision)
        theirs = read_values(entry.path, entry.revision)
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
    return ValueInit(policy.path, policy.revision, "model.path", why, trust_remote_code=trust)


def _text_config_value(values: Mapping[str, object], name: str) -> object:
    text = values.get("text_config")
    return (text if isinstance(text, dict) else values).get(name, values.get(name))

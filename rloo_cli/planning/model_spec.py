"""A model as a plan needs it: parameters by part, and the memory of a token.
It is read from config.json: of a folder, of the cache, of a synthetic model, or of a well-known one
in a table. Weights are opened only if a family is not known, and then only the headers of their
files, which hold the number of elements.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from rloo_cli.config import hf_cache, synthetic
from rloo_cli.planning import model_families
from rloo_cli.planning.model_families import (
    FAMILIES,
    KNOWN_CONFIGS,
    LLAMA,
    SYNTHETIC_CONFIGS,
    ModelFamily,
    ModelSizes,
)
from rloo_cli.planning.vision_tower import TowerSpec, parse_tower_spec
from rloo_cli.utils.errors import ConfigError, MachineError, Problem
from rloo_cli.utils.files import JsonObject


@dataclass(frozen=True)
class ModelSpec:
    """A language model, as a plan sees it. Parameters are counted, not measured in bytes."""

    name: str
    source: str  # where its config.json was found
    sizes: ModelSizes
    family: ModelFamily
    embedding_params: int  # token table, and learned positions
    head_params: int  # 0 = tied to the token table
    layer_params: int  # one layer
    active_params: int  # those of a layer that one token uses
    final_params: int  # after the layers
    context_length: int | None
    tower: TowerSpec | None = None  # of a vision-language model
    guessed: bool = False  # its family is not known, and it is counted as a Llama

    @property
    def body_params(self) -> int:
        """Everything but embedding and head."""
        return self.sizes.layers * self.layer_params + self.final_params

    @property
    def total_params(self) -> int:
        """All parameters, a vision tower's too."""
        tower = 0 if self.tower is None else self.tower.total_params
        return self.embedding_params + self.head_params + self.body_params + tower

    @property
    def output_embedding_params(self) -> int:
        """The output embedding, tied or not: usually the largest tensor."""
        return self.sizes.vocab_size * self.sizes.hidden

    def saved_bytes(self, bytes_per_weight: int) -> float:
        """Bytes per token that a layer keeps for its backward pass."""
        return model_families.saved_bytes_per_token(self.family, self.sizes, bytes_per_weight)

    def transient_bytes(self, bytes_per_weight: int) -> float:
        """Bytes per token that a layer holds while it computes."""
        return model_families.transient_bytes_per_token(self.family, self.sizes, bytes_per_weight)

    def kv_bytes(self, bytes_per_weight: int) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.sizes.layers * self.sizes.kv_width * bytes_per_weight


def load_model_spec(path: str, revision: str | None = None, key: str = "model.path") -> ModelSpec:
    """The spec of a model by its path. `key`: the config key that errors name.

    Raises MachineError if no config.json was found, ConfigError if it cannot be planned.
    """
    values, source = _values(path, revision, key)
    try:
        why = hf_cache.model_config_problem(values)
        if why:
            fix = f"{key}=ORG/NAME or a folder, of a model without this"
            raise ConfigError(Problem(f"{path} cannot be planned", key, why, fix))
        return parse_model_spec(values, path, source, _weights_folder(path, revision))
    except KeyError as missing:
        why = f"its config.json has no {missing.args[0]}: not a language model that rloo knows"
        fix = f"{key}=ORG/NAME or a folder, of a language model"
        raise ConfigError(Problem(f"{path} cannot be planned", key, why, fix)) from None


def parse_model_spec(
    values: JsonObject, name: str, source: str, folder: Path | None = None
) -> ModelSpec:
    """The spec from the values of a config.json; `folder`: where weights may be.

    Raises KeyError for a missing number.
    """
    s, c = model_families.read_model_sizes(values), model_families.merge_text_config(values)
    kind = str(c.get("model_type", ""))
    family = FAMILIES.get(kind)
    chosen = family or LLAMA
    biases = bool(c.get("attention_bias", False)), bool(c.get("mlp_bias", False))
    if kind == "gpt_neox" and c.get("attention_bias") is False:
        chosen = chosen._replace(bias=("dense_h_to_4h", "dense_4h_to_h"))
    layer, active = model_families.layer_param_counts(chosen, s, *biases)
    tied = bool(c.get("tie_word_embeddings", chosen.tied))
    embedding = (s.vocab_size + s.position_rows) * s.hidden
    spec = ModelSpec(
        name=name,
        source=source,
        sizes=s,
        family=chosen,
        embedding_params=embedding,
        head_params=0 if tied else s.vocab_size * s.hidden,
        layer_params=layer,
        active_params=active,
        final_params=s.hidden * (2 if chosen.uses_layer_norm else 1),
        context_length=hf_cache.read_context_length(values),
        tower=parse_tower_spec(values, s.hidden),
        guessed=family is None,
    )
    if family is None and folder is not None and (count := _count_parameters(folder)):
        outside = spec.total_params - spec.sizes.layers * spec.layer_params
        per_layer = max(count - outside, 0) // s.layers
        return replace(spec, layer_params=per_layer, active_params=per_layer)
    return spec


def model_config_values(path: str, revision: str | None = None) -> JsonObject:
    """A model's config.json, wherever it is found. Raises MachineError, ConfigError."""
    return _values(path, revision, "model.path")[0]


def _values(path: str, revision: str | None, key: str) -> tuple[JsonObject, str]:
    if (base := hf_cache.adapter_base_path(path)) is not None:  # it is merged into its base
        path, revision = base, None
    if path.startswith(synthetic.MAKE_PREFIX):  # no synthetic model is made for a plan
        return SYNTHETIC_CONFIGS[path.removeprefix(synthetic.MAKE_PREFIX)], "made here"
    try:
        values = hf_cache.read_model_config(path, revision)
    except ValueError as error:
        fix = f"correct its config.json, or {key}=FOLDER with a whole one"
        raise ConfigError(Problem(f"{path} cannot be planned", key, str(error), fix)) from None
    if values:
        here = Path(path).expanduser().exists()
        return values, f"config.json in {path}" if here else "config.json in the hub's cache"
    if path in KNOWN_CONFIGS:
        return KNOWN_CONFIGS[path], "built in"
    cache = hf_cache.hub_cache_folder()
    why = f"no folder of that name, not in the cache {cache}, and not among the built-in ones"
    fix = f"{hf_cache.fetch_command()}, or {key}=FOLDER with its config.json (nothing else is read)"
    raise MachineError(Problem(f"the config.json of {path} was not found", key, why, fix))


def _weights_folder(path: str, revision: str | None) -> Path | None:
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    return hf_cache.snapshot_folder(path, revision) if hf_cache.is_hub_name(path) else None


def _count_parameters(folder: Path) -> int:
    """Elements in the safetensors of a folder, by the files' headers; 0 without any."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            head = json.loads(file.read(size)) if size < 10**8 else {}
        for name, tensor in head.items():
            if name != "__metadata__":
                count += math.prod(tensor["shape"])
    return count

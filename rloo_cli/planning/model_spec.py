"""What a plan must know of a model: parameters by part, and what a row of it costs.

Read from config.json: of a folder, of the cache, of a model made here, or of the well-known ones
that are written down in `known`. Weights are looked at only where a family is not known, and then
only the heads of their files, which say how many numbers there are.
"""

import json
from dataclasses import dataclass
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
from rloo_cli.utils.errors import ConfigError, MachineError, Problem
from rloo_cli.utils.files import JsonObject


@dataclass(frozen=True)
class ModelSpec:
    """A language model, as a plan sees it. Parameters are counted, not measured in bytes."""

    name: str
    source: str  # where these facts are from
    sizes: ModelSizes
    family: ModelFamily
    embedding_params: int  # token table, and learned positions
    head_params: int  # 0 = tied to the token table
    layer_params: int  # one layer
    active_params: int  # of it, what one token goes through
    final_params: int  # what stands after the layers
    context_length: int | None
    guessed: bool = False  # its family is not known, and it is counted as a Llama

    @property
    def body_params(self) -> int:
        """Everything but token table and head."""
        return self.sizes.layers * self.layer_params + self.final_params

    @property
    def total_params(self) -> int:
        """All parameters."""
        return self.embedding_params + self.head_params + self.body_params

    @property
    def output_embedding_params(self) -> int:
        """The output embedding, tied or not: usually the largest tensor there is."""
        return self.sizes.vocab_size * self.sizes.hidden

    def saved_bytes(self, bytes_per_weight: int) -> float:
        """Bytes that a layer keeps of one row for its backward pass."""
        return model_families.saved_bytes_per_token(self.family, self.sizes, bytes_per_weight)

    def transient_bytes(self, bytes_per_weight: int) -> float:
        """Bytes of one row that a layer holds while it computes."""
        return model_families.transient_bytes_per_token(self.family, self.sizes, bytes_per_weight)

    def kv_bytes(self, bytes_per_weight: int) -> int:
        """Bytes of keys and values that one token leaves in all layers."""
        return 2 * self.sizes.layers * self.sizes.kv_width * bytes_per_weight


def load_model_spec(path: str, revision: str | None = None, key: str = "model.path") -> ModelSpec:
    """The facts of a model by its path. Raises MachineError where no config.json is to be had."""
    values, source = _values(path, revision, key)
    try:
        why = hf_cache.model_config_problem(values)
        if why:
            raise ConfigError(Problem(f"{path} cannot be planned", key, why))
        return parse_model_spec(values, path, source, _weights_folder(path, revision))
    except KeyError as missing:
        why = f"its config.json has no {missing.args[0]}: it is no language model that rloo knows"
        raise ConfigError(Problem(f"{path} cannot be planned", key, why)) from None


def parse_model_spec(
    values: JsonObject, name: str, source: str, folder: Path | None = None
) -> ModelSpec:
    """Facts from the values of a config.json; `folder`: where weights may lie.

    Raises KeyError for a number that it lacks.
    """
    s = model_families.read_model_sizes(values)
    text = values.get("text_config")
    c = {**values, **text} if isinstance(text, dict) else values
    kind = str(c.get("model_type", ""))
    family = FAMILIES.get(kind)
    chosen = family or LLAMA
    biases = bool(c.get("attention_bias", False)), bool(c.get("mlp_bias", False))
    if kind == "gpt_neox" and c.get("attention_bias") is False:
        chosen = chosen._replace(bias=("dense_h_to_4h", "dense_4h_to_h"))
    layer, active = model_families.layer_param_counts(chosen, s, *biases)
    tied = bool(c.get("tie_word_embeddings", chosen.tied))
    embedding = (s.vocab_size + s.position_rows) * s.hidden
    found = ModelSpec(
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
        guessed=family is None,
    )
    if family is None and folder is not None and (count := _count_parameters(folder)):
        body = (
            max(count - found.embedding_params - found.head_params - found.final_params, 0)
            // s.layers
        )
        return ModelSpec(**{**vars(found), "layer_params": body, "active_params": body})
    return found


def model_config_values(path: str, revision: str | None = None) -> JsonObject:
    """A model's config.json, wherever it is known from. Raises MachineError, ConfigError."""
    return _values(path, revision, "model.path")[0]


def _values(path: str, revision: str | None, key: str) -> tuple[JsonObject, str]:
    if path.startswith(synthetic.MAKE_PREFIX):
        return _synthetic_config(path)
    try:
        values = hf_cache.read_model_config(path, revision)
    except ValueError as error:
        raise ConfigError(Problem(f"{path} cannot be planned", key, str(error))) from None
    if values:
        here = Path(path).expanduser().exists()
        return values, f"config.json in {path}" if here else "config.json in the hub's cache"
    if path in KNOWN_CONFIGS:
        return KNOWN_CONFIGS[path], "built in"
    cache = hf_cache.hub_cache_folder()
    why = f"no folder of that name, not in the cache {cache}, and not among the built-in ones"
    fix = f"{hf_cache.fetch_command()}, or {key}=FOLDER with its config.json (nothing else is read)"
    raise MachineError(Problem(f"the config.json of {path} is not to be had", key, why, fix))


def _synthetic_config(path: str) -> tuple[JsonObject, str]:
    """What `rloo_cli.config.synthetic` would make of it; it is not made for that."""
    return SYNTHETIC_CONFIGS[path.removeprefix(synthetic.MAKE_PREFIX)], "made here"


def _weights_folder(path: str, revision: str | None) -> Path | None:
    local = Path(path).expanduser()
    return (
        local
        if local.is_dir()
        else hf_cache.snapshot_folder(path, revision)
        if hf_cache.is_hub_name(path)
        else None
    )


def _count_parameters(folder: Path) -> int:
    """Numbers in the safetensors of a folder, by the heads of the files; 0 without any."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            head = json.loads(file.read(size)) if size < 10**8 else {}
        for name, tensor in head.items():
            if name != "__metadata__":
                count += _product(tensor["shape"])
    return count


def _product(shape: list[int]) -> int:
    found = 1
    for side in shape:
        found *= side
    return found

"""A model as a plan needs it: parameters by part, and the memory of a token.

Counts come from config.json: of a folder, of the cache, or of `known_models.json`, which has config
values and counts of well-known and synthetic models, so that their plans need neither a hub nor
torch. Any other model is counted when it is planned, with torch and transformers (`meta_model.py`).
"""

import functools
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rloo_cli.config import hf_cache, synthetic
from rloo_cli.planning.model_counts import Linear, ModelSizes, ModelSpec, TowerSpec
from rloo_cli.utils.errors import MachineError, refuse
from rloo_cli.utils.files import JsonObject

KNOWN_MODELS_FILE = Path(__file__).with_name("known_models.json")


@functools.cache
def known_models() -> Mapping[str, JsonObject]:
    """Models by path: their `config` values, and their `counted` sizes."""
    entries: list[JsonObject] = json.loads(KNOWN_MODELS_FILE.read_text(encoding="utf-8"))
    return {path: entry for entry in entries for path in entry["paths"]}


def load_model_spec(path: str, revision: str | None = None, key: str = "model.path") -> ModelSpec:
    """The spec of a model by its path. `key`: the config key that errors name.

    Raises MachineError if no config.json was found, ConfigError if it cannot be planned.
    """
    values, source = _values(path, revision, key)
    known = known_models().get(path)
    if known is not None and known["config"].items() <= values.items():
        return _spec_from_json(known["counted"], path, source)
    why = hf_cache.model_config_problem(values)
    try:
        if not why:
            return parse_model_spec(values, path, source, _weights_folder(path, revision))
    except KeyError as missing:
        why = f"its config.json has no {missing.args[0]}: not a language model that rloo knows"
    except Exception as error:  # transformers' own code, with unexpected values
        why = f"transformers cannot build it: {type(error).__name__}: {str(error)[:200]}"
    fix = f"{key}=ORG/NAME or a folder, of a language model"
    refuse(key, f"{path} cannot be planned", fix, why)


def parse_model_spec(
    values: JsonObject, name: str, source: str, folder: Path | None = None
) -> ModelSpec:
    """The spec from the values of a config.json; `folder`: where weights may be.

    Imports torch. Raises KeyError for a missing number, and what transformers raises for values
    of which it can build no model.
    """
    if "torch" not in sys.modules and sys.stderr.isatty():
        print(f"loading torch to count the parameters of {name}", file=sys.stderr, flush=True)
    spec = replace(
        _counted(json.dumps(values)),
        name=name,
        source=source,
        context_length=hf_cache.read_context_length(values),
    )
    if spec.guessed and folder is not None and (count := _count_parameters(folder)):
        added = max(count - spec.total_params, -spec.body_params)
        body = spec.body_params + added
        each = spec.layer_params + added // spec.sizes.layers
        return replace(spec, body_params=body, active_params=body, layer_params=each)
    return spec


@functools.cache
def _counted(values: str) -> ModelSpec:
    from rloo_cli.planning.meta_model import count_model  # lazy: torch, which takes seconds

    return count_model(json.loads(values))


def _spec_from_json(counted: JsonObject, name: str, source: str) -> ModelSpec:
    """The spec of a model in `known_models.json`."""
    tower = counted["tower"]
    values: JsonObject = counted | {
        "sizes": ModelSizes(*counted["sizes"]),
        "linears": tuple(Linear(*linear) for linear in counted["linears"]),
        "tower": None if tower is None else TowerSpec(*tower),
    }
    return ModelSpec(name=name, source=source, **values)


def model_config_values(path: str, revision: str | None = None) -> JsonObject:
    """A model's config.json, wherever it is found. Raises MachineError, ConfigError."""
    return _values(path, revision, "model.path")[0]


def _values(path: str, revision: str | None, key: str) -> tuple[JsonObject, str]:
    if (base := hf_cache.adapter_base_path(path)) is not None:  # merged into its base
        path, revision = base, None
    if path.startswith(synthetic.MAKE_PREFIX):  # a plan does not build synthetic models
        return known_models()[path]["config"], "synthetic"
    try:
        values = hf_cache.read_model_config(path, revision)
    except ValueError as error:
        fix = f"correct its config.json, or {key}=FOLDER with a valid one"
        refuse(key, f"{path} cannot be planned", fix, error)
    if values:
        here = Path(path).expanduser().exists()
        return values, f"config.json in {path}" if here else "config.json in the hub's cache"
    if path in known_models():
        return known_models()[path]["config"], "built in"
    cache = hf_cache.hub_cache_folder()
    why = f"not a folder, not in the cache {cache}, and not a built-in model"
    fix = f"{hf_cache.fetch_command()}, or {key}=FOLDER with its config.json (nothing else needed)"
    refuse(key, f"the config.json of {path} was not found", fix, why, error=MachineError)


def _weights_folder(path: str, revision: str | None) -> Path | None:
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    return hf_cache.snapshot_folder(path, revision) if hf_cache.is_hub_name(path) else None


def _count_parameters(folder: Path) -> int:
    """Elements in the safetensors of a folder, by the files' headers; 0 if there are none."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            head = json.loads(file.read(size)) if size < 10**8 else {}
        for name, tensor in head.items():
            if name != "__metadata__":
                count += math.prod(tensor["shape"])
    return count

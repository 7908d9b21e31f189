"""`rloo config`: list every key with type, default and meaning; explain KEY; --json: the schema."""

import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config import check
from rloo_cli.config.compose import ComposedConfig, compose_config
from rloo_cli.config.idle_keys import idle_reasons, key_conditions, key_meaning
from rloo_cli.config.messages import schema_keys, unknown_key_problem, walk_values
from rloo_cli.config.provenance import SourceLocation, yaml_value
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError, refuse
from rloo_cli.utils.files import JsonObject


def run(args: list[str]) -> int:
    """Run the verb. Raises ConfigError for an unknown key."""
    options = parse_verb("config", args)
    if options.action == "explain":
        if options.key is None:
            fix = "rloo config explain algorithm.beta +recipe=tldr_1b"
            why = f"found {' '.join(args[1:]) or 'nothing'}; expected a key without a value"
            refuse("command line", "rloo config explain needs a key", fix, why)
        explained = explain_key(options.key, options.overrides)
        print(json.dumps(_explained_values(explained), indent=2) if options.json else explained)
    elif options.json:
        print(json.dumps(recipe_json_schema(options.overrides), indent=2))
    else:
        for line in key_listing(options.overrides):
            print(line)
    return 0


def key_listing(overrides: list[str]) -> list[str]:
    """One line per key: `key  type = default  # meaning`."""
    composed, model = every_key(overrides)
    values = dict(walk_values(check.merge_defaults(composed.values)))
    conditions, lines = key_conditions(model), []
    for key, field in schema_fields(model).items():
        kind = field_type_text(field)
        if kind != "section":
            value = json.dumps(values[key]) if key in values else "-"
            meaning = key_meaning(str(field.description), conditions.get(key, ()))
            lines.append(f"{key:<44} {kind} = {value}  # {meaning}")
    return lines


def recipe_json_schema(overrides: list[str]) -> JsonObject:
    """The JSON schema of a recipe: no key is required, since a recipe holds only differences."""
    _, model = every_key(overrides)
    schema = model.model_json_schema()
    for part in (schema, *schema["$defs"].values()):
        part.pop("required", None)
    for table in ("Sets", "Mixture"):  # their entries can have any name
        part = schema["$defs"][table]
        part["additionalProperties"] = part["properties"].pop("NAME")
    rewards = schema["$defs"]["Rewards"]  # `type` gives the kind of an entry with another name
    kinds = sorted({part["$ref"] for part in rewards["properties"].values()})
    rewards["additionalProperties"] = {"anyOf": [{"$ref": kind} for kind in kinds]}
    schema["properties"]["defaults"] = {"type": "array", "description": "Choices of groups"}
    params = _single_key_schema("params", {"type": "object"})  # a recipe can have its own sweep
    schema["properties"]["hydra"] = _single_key_schema("sweeper", params)
    return schema


def _single_key_schema(name: str, inside: JsonObject) -> JsonObject:
    """The schema of a mapping with this one key."""
    return {"type": "object", "additionalProperties": False, "properties": {name: inside}}


def explain_key(key: str, overrides: list[str]) -> str:
    """One key: meaning, value and its origin, default, and whether it has an effect."""
    composed, model = every_key(overrides)
    fields = schema_fields(model)
    chosen = compose_config(overrides)
    config = check.merge_defaults(chosen.values, chosen.sources)
    if key not in fields:
        raise ConfigError(unknown_key_problem(key, schema_keys(model)))
    values = dict(walk_values(config))
    lines = [key]
    conditions = key_conditions(model).get(key, ())
    if meaning := fields[key].description:
        lines.append(f"  meaning  {key_meaning(meaning, conditions)}")
    if field_type_text(fields[key]) == "section":
        inside = [k for k in fields if k.rpartition(".")[0] == key]
        lines += ["  keys     " + ", ".join(k.rpartition(".")[2] for k in inside)]
        return "\n".join(lines)
    lines.append(f"  type     {field_type_text(fields[key])}")
    source = chosen if key in values else composed
    default = dict(walk_values(check.merge_defaults(composed.values))).get(key)
    lines.append(f"  value    {json.dumps(values.get(key, default))}")
    lines.append(f"  from     {source.sources.location_of(key) or '-'}")
    shipped = source.sources.shipped_location(key) or composed.sources.shipped_location(key)
    lines.append(f"  default  {_default_text(shipped, default)}")
    if key not in values:
        lines.append("  note     this config lacks the key: its reward or section is not chosen")
    for why in idle_reasons(conditions, config):
        lines.append(f"  idle     no effect: {why}")
    return "\n".join(lines)


def _default_text(shipped: SourceLocation | None, example: object) -> str:
    """The value in `conf/` as JSON, and its location. `example`: a value of the same kind."""
    if shipped is None or shipped.value == "???":
        return "-"
    value = shipped.value
    if value is None and shipped.text and isinstance(example, list):
        value = [yaml_value(word) for word in shipped.text.split()]
    elif value is None and isinstance(example, list | dict) and not shipped.text:
        value = type(example)()
    return f"{json.dumps(value)} ({shipped})"


def _explained_values(explained: str) -> dict[str, object]:
    """The lines of `explain_key` as values: name -> text, or a list if a name occurs twice."""
    key, *lines = explained.splitlines()
    values: dict[str, object] = {"key": key}
    for line in lines:
        name, _, text = line.strip().partition(" ")
        if name == "idle":
            values["idle"] = [*values.get("idle", []), text.strip()]  # type: ignore[misc]
        else:
            values[name] = text.strip()
    return values


def every_key(overrides: list[str]) -> tuple[ComposedConfig, type[BaseModel]]:
    """The chosen config with every possible section, and its schema.

    It has every shipped reward, a held-out set, a source of a mixture and a judge.
    """
    chosen = [w for w in overrides if not w.lstrip("+").startswith("reward=")]
    rewards = ",".join(paths.group_choices([])["reward"])
    composed = compose_config([*chosen, f"reward=[{rewards}]", "eval.sets.NAME={split: test}"])
    values = check.merge_defaults(composed.values)
    judge = {"judge": values["eval"]["judge"] or {"type": "openai"}}
    data = values["data"] | {"mixture": {"NAME": {}}}
    return composed, check.run_config_class(values | {"eval": values["eval"] | judge, "data": data})


def schema_fields(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every dotted key of a schema -> its field."""
    fields: dict[str, FieldInfo] = {}
    for name, info in model.model_fields.items():
        fields[prefix + name] = info
        for part in _models(info.annotation):
            fields |= schema_fields(part, f"{prefix}{name}.")
    return fields


def all_fields() -> dict[str, FieldInfo]:
    """Every dotted key that a config can have, sections included -> its field."""
    return schema_fields(every_key([])[1])


def value_keys() -> list[str]:
    """Every key that takes a value."""
    return [key for key, field in all_fields().items() if field_type_text(field) != "section"]


def _models(annotation: object) -> list[type[BaseModel]]:
    parts = [annotation, *get_args(annotation)]
    return [p for p in parts if isinstance(p, type) and issubclass(p, BaseModel)]


def field_type_text(field: FieldInfo) -> str:
    """A field's type and limits as text: `int >= 1`, `a | b`, `float or null`."""
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
        return "section"
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [(s, getattr(m, name, None)) for m in field.metadata for name, s in signs.items()]
    limits = [f" {sign} {bound}" for sign, bound in bounds if bound is not None]
    kind, null, _ = _annotation_text(field.annotation).partition(" or null")
    return kind + ",".join(limits) + null


def _annotation_text(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Literal:
        return " | ".join(str(a).lower() if isinstance(a, bool) else str(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_annotation_text(a) for a in args)
    if origin is Annotated:
        return field_type_text(FieldInfo.from_annotation(annotation))
    if origin in (list, dict):
        return f"{origin.__name__}[{', '.join(_annotation_text(a) for a in args)}]"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "{" + ", ".join(annotation.model_fields) + "}"
    return str(getattr(annotation, "__name__", annotation))

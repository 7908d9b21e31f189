"""`rloo config`: every key with type, default and meaning; explain KEY; --json schema."""

import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rloo_cli.config import check
from rloo_cli.config.compose import Composed, compose
from rloo_cli.config.idle_keys import why_idle
from rloo_cli.config.messages import known_keys, unknown_key, walk
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError, Problem


def run(words: list[str]) -> int:
    """The verb. Raises ConfigError for an unknown key."""
    if words[:1] == ["explain"]:
        if len(words) < 2 or "=" in words[1]:
            fix = "rloo config explain algorithm.beta +recipe=tldr_1b"
            raise ConfigError(Problem("rloo config explain needs a key", "command line", fix=fix))
        print(explain(words[1], words[2:]))
    elif "--json" in words:
        print(json.dumps(schema([w for w in words if w != "--json"]), indent=2))
    else:
        for line in listing(words):
            print(line)
    return 0


def listing(words: list[str]) -> list[str]:
    """One line per key: `key  type = default  # meaning`."""
    composed, model = _all_keys(words)
    values = dict(walk(check.merged(composed.values)))
    lines = []
    for key, field in fields(model).items():
        kind = kind_of(field)
        if kind != "section":
            value = _yaml(values[key]) if key in values else "-"
            lines.append(f"{key:<44} {kind} = {value}  # {field.description}")
    return lines


def schema(words: list[str]) -> dict[str, Any]:
    """The JSON schema of a recipe: no key is required, for a recipe holds only what differs."""
    _, model = _all_keys(words)
    found = model.model_json_schema()
    for part in (found, *found["$defs"].values()):
        part.pop("required", None)
    for named in ("Sets", "Mixture"):  # a set, and a source, has any name
        part = found["$defs"][named]
        part["additionalProperties"] = part["properties"].pop("NAME")
    found["properties"]["defaults"] = {"type": "array", "description": "Choices of groups"}
    found["properties"]["hydra"] = _only("sweeper", _only("params", {"type": "object"}))
    return found


def _only(name: str, inside: dict[str, Any]) -> dict[str, Any]:
    """The schema of a mapping with this one key: of Hydra a recipe may have its own sweep."""
    return {"type": "object", "additionalProperties": False, "properties": {name: inside}}


def explain(key: str, words: list[str]) -> str:
    """One key: what it is, its value in this config, where that came from, whether it acts."""
    composed, model = _all_keys(words)
    known = fields(model)
    chosen = compose(words)
    values = check.merged(chosen.values, chosen.sources)
    if key not in known:
        raise ConfigError(unknown_key(key, known_keys(model)))
    found = dict(walk(values))
    lines = [key]
    if known[key].description:
        lines.append(f"  meaning  {known[key].description}")
    if kind_of(known[key]) == "section":
        inside = [k for k in known if k.rpartition(".")[0] == key]
        lines += ["  keys     " + ", ".join(k.rpartition(".")[2] for k in inside)]
        return "\n".join(lines)
    lines.append(f"  type     {kind_of(known[key])}")
    source = chosen if key in found else composed
    default = dict(walk(check.merged(composed.values))).get(key)
    lines.append(f"  value    {_yaml(found.get(key, default))}")
    lines.append(f"  from     {source.sources.where(key) or '-'}")
    if key not in found:
        lines.append("  note     nothing has this key here: its reward or section is not chosen")
    for why in why_idle(key, values):
        lines.append(f"  idle     it has no effect: {why}")
    return "\n".join(lines)


def _all_keys(words: list[str]) -> tuple[Composed, type[BaseModel]]:
    """The config with every shipped reward, a held-out set, a source of a mixture and a judge
    beside what is chosen; its schema."""
    chosen = [w for w in words if not w.lstrip("+").startswith("reward=")]
    rewards = ",".join(paths.group_choices([])["reward"])
    composed = compose([*chosen, f"reward=[{rewards}]", "eval.sets.NAME={split: test}"])
    values = check.merged(composed.values)
    judge = {"judge": values["eval"]["judge"] or {"type": "openai"}}
    data = values["data"] | {"mixture": {"NAME": {}}}
    return composed, check.model_class(values | {"eval": values["eval"] | judge, "data": data})


def fields(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every dotted key of a schema -> its field."""
    found: dict[str, FieldInfo] = {}
    for name, info in model.model_fields.items():
        found[prefix + name] = info
        for part in _models(info.annotation):
            found |= fields(part, f"{prefix}{name}.")
    return found


def all_fields() -> dict[str, FieldInfo]:
    """Every dotted key there is, sections too -> its field."""
    return fields(_all_keys([])[1])


def leaves() -> list[str]:
    """Every key that takes a value."""
    return [key for key, field in all_fields().items() if kind_of(field) != "section"]


def _models(annotation: Any) -> list[type[BaseModel]]:
    parts = [annotation, *get_args(annotation)]
    return [p for p in parts if isinstance(p, type) and issubclass(p, BaseModel)]


def kind_of(field: FieldInfo) -> str:
    """A field's type and limits as people write them: `int >= 1`, `a | b`, `float or null`."""
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
        return "section"
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    limits = [
        f" {sign} {getattr(m, name)}"
        for m in field.metadata
        for name, sign in signs.items()
        if getattr(m, name, None) is not None
    ]
    kind, null, _ = _kind(field.annotation).partition(" or null")
    return kind + ",".join(limits) + null


def _kind(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Literal:
        return " | ".join(str(a).lower() if isinstance(a, bool) else str(a) for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(a) for a in args)
    if origin is Annotated:
        return kind_of(FieldInfo.from_annotation(annotation))
    if origin in (list, dict):
        return f"{origin.__name__}[{', '.join(_kind(a) for a in args)}]"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "{" + ", ".join(annotation.model_fields) + "}"
    return str(getattr(annotation, "__name__", annotation))


def _yaml(value: Any) -> str:
    return json.dumps(value)

"""Descriptions of the tools, from the user's functions and classes, and checks of calls.

A description is the JSON schema that chat templates take (`transformers.utils.get_json_schema`):
it needs a type for every argument and a docstring that describes each one.
"""

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers.utils import get_json_schema

from rloo_cli.config.user_code import load_user_code
from rloo_cli.utils.errors import DataError, refuse
from rloo_cli.utils.files import JsonObject

ENVIRONMENT_COLUMN = "environment"  # names the row's environment
NOT_TOOLS = ("reset", "get_reward", "get_turn_reward", "close")
# The Python types that a value of each JSON type may have; bool is an int, so it comes first.
JSON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "string": (str,), "boolean": (bool,),
    "array": (list,), "object": (dict,), "null": (type(None),),
}  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """The tools that some rows have. Each function has a spec; methods share their class's."""

    schemas: list[JsonObject]  # one per tool, as chat templates take them
    specs: dict[str, str]  # tool -> `file.py:name` that the process imports
    class_spec: str | None = None  # of the class; None = plain functions, without state
    has_reward: bool = False
    has_turn_reward: bool = False

    @property
    def is_stateful(self) -> bool:
        """Whether each episode has its own environment, from reset to end."""
        return self.class_spec is not None

    def check_call(self, name: str, arguments: object) -> str | None:
        """An error text for the model if a call is invalid; None if it is valid."""
        if name not in self.specs:
            return f"there is no tool {name!r}; there are: {', '.join(self.specs)}"
        if not isinstance(arguments, dict):
            return f"the arguments of {name} are not an object of names and values"
        schema = next(s["function"] for s in self.schemas if s["function"]["name"] == name)
        parameters = schema["parameters"]
        known = parameters.get("properties", {})
        if missing := [n for n in parameters.get("required", []) if n not in arguments]:
            return f"{name} needs the argument {', '.join(missing)}"
        for argument, value in arguments.items():
            if argument not in known:
                return f"{name} has no argument {argument!r}; it has: {', '.join(known) or 'none'}"
            if not _has_type(value, known[argument]):
                wanted = known[argument]["type"]
                return f"the argument {argument!r} of {name} is not of type {wanted}: {value!r:.80}"
        return None


def _has_type(value: object, schema: JsonObject) -> bool:
    wanted = schema.get("type")
    names = [wanted] if isinstance(wanted, str) else wanted
    if not isinstance(names, list) or any(name not in JSON_TYPES for name in names):
        return True  # a union, or a type unknown to JSON: the tool itself decides
    if value is None and schema.get("nullable"):
        return True
    if isinstance(value, bool):
        return "boolean" in names
    return any(isinstance(value, JSON_TYPES[name]) for name in names)


@dataclass(frozen=True)
class ToolSet:
    """All tools of a run, by environment name."""

    environments: dict[str, Environment] = field(default_factory=dict)

    def environment_of(self, example: Mapping[str, object]) -> Environment:
        """The environment of a row. Raises DataError if its column does not name one."""
        if len(self.environments) == 1:
            return next(iter(self.environments.values()))
        name = example.get(ENVIRONMENT_COLUMN)
        if name not in self.environments:
            names = ", ".join(self.environments)
            what = f"a row's column {ENVIRONMENT_COLUMN!r} is {name!r}, not an environment"
            why = f"the run has several environments, and this column selects one: {names}"
            refuse("agent.environments", what, f"a column of {names}", why, error=DataError)
        return self.environments[str(name)]

    def schemas_of(self, example: Mapping[str, object]) -> list[JsonObject]:
        """The descriptions that a row's prompt shows. Raises DataError."""
        return self.environment_of(example).schemas

    def to_json(self) -> JsonObject:
        """The environments as plain values, for recorded rollouts."""
        return {name: asdict(environment) for name, environment in self.environments.items()}

    @classmethod
    def from_json(cls, values: JsonObject) -> "ToolSet":
        """Read what `to_json` wrote, without importing any user code."""
        return cls({name: Environment(**saved) for name, saved in values.items()})

    @property
    def import_specs(self) -> list[str]:
        """Everything that a tool process imports."""
        specs = [s for e in self.environments.values() for s in (e.class_spec, *e.specs.values())]
        return list(dict.fromkeys(filter(None, specs)))


def load_functions(specs: Mapping[str, str]) -> ToolSet:
    """The tools of plain functions, `specs`: key -> `file.py:name`. Raises ConfigError."""
    schemas: list[JsonObject] = []
    by_name: dict[str, str] = {}
    for where, spec in specs.items():
        schema = tool_schema(load_user_code(spec, where), spec, where)
        name = schema["function"]["name"]
        if name in by_name:
            what, why = f"two tools have the name {name!r}", f"{by_name[name]} and {spec}"
            refuse(where, what, "rename one of them", why)
        schemas.append(schema)
        by_name[name] = spec
    return ToolSet({"": Environment(schemas, by_name)})


def load_environments(specs: Mapping[str, str]) -> ToolSet:
    """The tools of classes, `specs`: name of the environment -> `file.py:Class`.

    Raises ConfigError.
    """
    found = {}
    for name, spec in specs.items():
        where = f"agent.environments.{name}"
        found[name] = _describe_environment(load_user_code(spec, where), spec, where)
    return ToolSet(found)


def _describe_environment(factory: Callable[..., object], spec: str, where: str) -> Environment:
    methods = _public_methods(factory)
    if "reset" not in methods:
        what, why = f"{spec} has no method reset", "it is called with a row before each episode"
        refuse(where, what, "def reset(self, **row): ...", why)
    tools = {n: m for n, m in methods.items() if n not in NOT_TOOLS and not n.startswith("_")}
    if not tools:
        what, why = f"{spec} has no tool", "the model can call its public methods, and it has none"
        refuse(where, what, "a method with types and a docstring", why)
    schemas = [tool_schema(method, f"{spec}.{n}", where) for n, method in tools.items()]
    return Environment(
        schemas,
        dict.fromkeys(tools, spec),
        spec,
        has_reward="get_reward" in methods,
        has_turn_reward="get_turn_reward" in methods,
    )


def _public_methods(factory: Callable[..., object]) -> dict[str, Callable[..., object]]:
    """Name -> bound method, in the order of the class; the class itself is not called."""
    if not isinstance(factory, type):
        factory = type(factory())  # a function that makes environments
    order = [n for c in reversed(factory.__mro__) for n in vars(c)]
    members = dict(inspect.getmembers(factory, callable))
    names = [n for n in dict.fromkeys(order) if n in members and not n.startswith("_")]
    stand_in = object()  # get_json_schema leaves `self` out of bound methods only
    return {
        n: types.MethodType(m, stand_in) if inspect.isfunction(m := members[n]) else m
        for n in names
    }


def tool_schema(code: Callable[..., Any], spec: str, where: str) -> JsonObject:
    """The description of a function. Raises ConfigError if a type or docstring is missing."""
    try:
        schema: JsonObject = get_json_schema(code)
    except Exception as error:  # its own exceptions, and those of odd annotations
        what = f"{spec} cannot be described to a model"
        fix = "a type for each argument, and a Google docstring with a line for each under Args"
        refuse(where, what, fix, error)
    return schema

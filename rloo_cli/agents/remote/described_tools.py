"""The tools that a server describes, checked before any weights load.

A model is told of a tool by the JSON that chat templates take: {"type": "function", "function":
{"name", "description", "parameters": {"type": "object", "properties", "required"}}}. A server is
not trusted to write it right: what is wrong is said by name, once, at the start.
"""

import re
from collections.abc import Iterator

from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject

TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


def check_tools(found: object, where: str) -> list[JsonObject]:
    """The descriptions in a server's list. Raises ConfigError, which says what is wrong with one.

    `where`: the address that answered it.
    """
    problems = []
    if not isinstance(found, list) or not found:
        problems.append("it is not a list of at least one tool")
    else:
        names: list[str] = []
        for i, tool in enumerate(found):
            problems += [f"tool {i + 1}: {why}" for why in _tool_problems(tool, names)]
    if problems:
        what, fix = f"{where} describes its tools wrongly", "docs/agents_elsewhere.md has the form"
        raise ConfigError(*[Problem(what, "agent.url", why, fix) for why in problems])
    assert isinstance(found, list)
    return [tool | {"type": "function"} for tool in found]


def _tool_problems(tool: object, names: list[str]) -> Iterator[str]:
    """What is wrong with one description; `names`: those before it, to which it is added."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        yield 'it has no object "function"'
        return
    name = function.get("name")
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        yield f"its name is {name!r:.80}"
    elif name in names:
        yield f"there are two of the name {name!r}"
    else:
        names.append(name)
    if not isinstance(function.get("description"), str):
        yield f'{name!r:.80} has no text "description"'
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if not isinstance(parameters, dict) or not isinstance(properties, dict):
        yield f'{name!r:.80} has no "parameters" with an object "properties"'
        return
    if not all(isinstance(value, dict) for value in properties.values()):
        yield f"a property of {name!r:.80} is not an object"
    required = parameters.get("required", [])
    if not isinstance(required, list) or not set(map(str, required)) <= set(properties):
        yield f"{name!r:.80} requires {required!r:.80}, which are not its properties"


def describe_tool(name: str, description: str, schema: JsonObject) -> JsonObject:
    """The description of a tool whose arguments have this JSON schema."""
    properties = schema.get("properties", {})
    required = [n for n in schema.get("required", []) if n in properties]
    parameters: JsonObject = {"type": "object", "properties": properties}
    parameters |= {"required": required} if required else {}
    function = {"name": name, "description": description or name, "parameters": parameters}
    return {"type": "function", "function": function}

"""Templates of questions: `{name}` is filled in, `{{` and `}}` are braces, nothing else happens."""

import string
from collections.abc import Iterator, Mapping
from typing import Any

from rloo_cli.errors import Problem


def names(template: str) -> list[str]:
    """What a template names, each once. Raises ValueError for one that cannot be read."""
    found = {name: None for _, name in _parts(template) if name is not None}
    return list(found)


def fill(template: str, values: Mapping[str, Any]) -> str:
    """The template with its values: text as it is, anything else as str() shows it."""
    return "".join(
        text + ("" if name is None else str(values[name])) for text, name in _parts(template)
    )


def _parts(template: str) -> Iterator[tuple[str, str | None]]:
    for text, name, form, conversion in string.Formatter().parse(template):
        if form or conversion or (name is not None and not name.isidentifier()):
            raise ValueError(f"{{{name}}} is not the name of a column")
        yield text, name


def problems(key: str, template: str, needs: tuple[str, ...]) -> Iterator[Problem]:
    """What is wrong with the template at `key`, which has to name all of `needs`."""
    fix = "{name} for prompt, completion or a column, {{ and }} for braces"
    try:
        missing = [n for n in needs if n not in names(template)]
    except ValueError as error:
        yield Problem(f"{key} cannot be read", key, str(error), fix)
        return
    if missing:
        lost = ", ".join(f"{{{n}}}" for n in missing)
        yield Problem(f"{key} has no {lost}", key, "the model would not see it", fix)


def plain(prompt: Any) -> str:
    """A prompt as text: itself, its one message's content, or `role: content` line by line."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0].get("content") or "")
    return "\n".join(f"{m.get('role', '')}: {m.get('content') or ''}" for m in prompt)

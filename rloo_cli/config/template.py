"""Templates of prompts and of questions: `{name}` is filled in, `{{` and `}}` are braces.

A name with a dot is a nested field (column_names.py). A conversion (`{name!r}`) or a format
(`{name:>5}`) is refused.
"""

import string
from collections.abc import Iterator, Mapping, Sequence

from rloo_cli.config.column_names import field_value
from rloo_cli.utils.errors import Problem


def template_names(template: str) -> list[str]:
    """The names in a template, each once. Raises ValueError for an invalid template."""
    return list(dict.fromkeys(n for _, n in _named_parts(template) if n is not None))


def fill_template(template: str, values: Mapping[str, object]) -> str:
    """The template filled in: text unchanged, other values by str().

    Raises ValueError for an invalid template, KeyError for a name without a value.
    """
    parts = split_template(template)
    return "".join(
        text + ("" if name is None else str(field_value(values, name))) for text, name in parts
    )


def split_template(template: str) -> Iterator[tuple[str, str | None]]:
    """Text, and the name after it, if any. Raises ValueError for an invalid template."""
    for text, name, form, conversion in string.Formatter().parse(template):
        if form or conversion:
            more = (f"!{conversion}" if conversion else "") + (f":{form}" if form else "")
            raise ValueError(f"{{{name}{more}}}: a column is filled in unchanged; remove {more}")
        yield text, name


def _named_parts(template: str) -> Iterator[tuple[str, str | None]]:
    for text, name in split_template(template):
        parts = [] if name is None else name.split(".")
        if not all(part.isidentifier() and not part.startswith("__") for part in parts):
            raise ValueError(f"{{{name}}} is not a valid column name")
        yield text, name


def template_problems(
    key: str, template: str, required_names: tuple[str, ...]
) -> Iterator[Problem]:
    """Problems of the template at `key`, which must contain all of `required_names`."""
    fix = "{name} for prompt, completion or a column, {{ and }} for braces"
    try:
        missing = [n for n in required_names if n not in template_names(template)]
    except ValueError as error:
        yield Problem(f"{key} cannot be read", key, str(error), fix)
        return
    if missing:
        lost = ", ".join(f"{{{n}}}" for n in missing)
        yield Problem(f"{key} has no {lost}", key, "the model would not see it", fix)


def prompt_text(prompt: str | Sequence[Mapping[str, object]]) -> str:
    """A prompt as text: itself, its one message's content, or `role: content` line by line."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return content_text(prompt[0].get("content"))
    return "\n".join(f"{m.get('role', '')}: {content_text(m.get('content'))}" for m in prompt)


def content_text(content: object) -> str:
    """A message's content as text; in a list of parts, `[image]` replaces other parts."""
    if not isinstance(content, list):
        return str(content or "")
    return "".join(
        str(part.get("text") or "") if part.get("type") == "text" else f"[{part.get('type')}]"
        for part in content
        if isinstance(part, dict)
    )

"""`python -m rloo_cli.cli.key_values`: every key of the config and its values, as JSON.

For shell completion, which runs it once for each version of the code and caches the output: reading
all schemas takes a second, too long for a key press.
"""

import json
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from rloo_cli.cli.config import all_fields, field_type_text


def config_key_values() -> dict[str, list[str]]:
    """Every key that takes a value -> its possible values; [] if they cannot be listed."""
    return {
        key: _field_values(field)
        for key, field in all_fields().items()
        if field_type_text(field) != "section"
    }


def _field_values(field: FieldInfo) -> list[str]:
    found: list[str] = []
    for part in (field.annotation, *get_args(field.annotation)):
        if part is bool:
            found += ["true", "false"]
        elif get_origin(part) is Literal:
            found += [str(a).lower() if isinstance(a, bool) else str(a) for a in get_args(part)]
        elif part is type(None):
            found.append("null")
    return [] if found == ["null"] else list(dict.fromkeys(found))


if __name__ == "__main__":
    print(json.dumps(config_key_values()))

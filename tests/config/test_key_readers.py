"""Every key has a reader: code of the package that looks at it, beside the schema itself."""

import re
from pathlib import Path

import rloo_cli
from rloo_cli.config import messages, registry
from rloo_cli.config.schema import RunConfig

PACKAGE = Path(rloo_cli.__file__).parent
# Sections whose keys are handed on as one object, and names of rewards that are a user's own.
WHOLE = ("slurm.", "debug.", "judge.", "reward.")
LISTS = ("old_names", "idle_keys", "schema.py", "key_page", "migrate")  # name keys, read none


def all_keys() -> set[str]:
    found = set(messages.schema_keys(RunConfig))
    for kind in ("algorithms", "generation", "agents", "rewards"):
        for name in registry.registry_names(kind):
            keys = messages.schema_keys(registry.config_class(kind, name))
            found |= {f"{kind}.{key}" for key in keys}
    return {key for key in found if not key.startswith(WHOLE)}


def test_every_key_is_read_somewhere() -> None:
    texts = [
        path.read_text()
        for path in PACKAGE.rglob("*.py")
        if not any(part in str(path) for part in LISTS)
    ]
    # What a class declares (`name: type = key(`) is no reading of it.
    code = "\n".join(re.sub(r"^    \w+: [^=\n]+ = key\(", "", text, flags=re.M) for text in texts)
    words = set(re.findall(r"\.(\w+)|[\"'](\w+)[\"']", code))
    read = {word for pair in words for word in pair if word}
    keys = all_keys()
    unread = sorted(key for key in keys if key.rpartition(".")[2] not in read)
    assert len(keys) > 250
    assert not unread

"""Texts for the parsers that are ours, guided by which of their lines are reached (atheris).

    python tests/fuzz/guided.py TARGET [FLAGS of libFuzzer, such as -max_total_time=20]

TARGET: calls (of tools, in a completion), command (an old run's, for `rloo migrate`), settings (an
old run's file), yaml (a recipe), json (a file of data).
A text is read, or refused by one of our own errors; anything else ends the search with the text.
`hunt.py` runs all of them where atheris is installed: `pip install atheris`, on Linux.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["rloo_cli"]):
    from rloo_cli.agents.common import call_parsers
    from rloo_cli.compat.migrate import read
    from rloo_cli.config import provenance
    from rloo_cli.data import json_files
    from rloo_cli.utils.errors import RunError

PLACE = Path(tempfile.mkdtemp(prefix="rloo-guided-"))
# What a search begins with: a text of the right form for each.
SEEDS = {
    "calls": [
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', '[f(a=1, b="x"), g()]',
        '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g"}', '[TOOL_CALLS]f{"a": 1}',
    ],
    "command": ["python rloo.py --model_name_or_path m \\\n --beta 0.1 # x\n"],
    "settings": ["beta: 0.1\nreward_funcs: [a, b]\n"],
    "yaml": ["defaults:\n  - smoke\nreward: {a: &x {weight: 1}, b: *x}\n"],
    "json": ['{"prompt": "a"}\n[1]\n', '[{"prompt": "a"}]'],
}  # fmt: skip


def read_calls(text: str) -> None:
    """All four forms of calls; what was read goes to another process as JSON."""
    for name in ("hermes", "llama3_json", "mistral", "pythonic"):
        found = getattr(call_parsers, f"parse_{name}")(text)
        json.dumps([call["arguments"] for call in found.calls], allow_nan=False)
        assert all(type(call["name"]) is str for call in found.calls)


def of_text(read: Callable[[str], object]) -> Callable[[bytes], object]:
    """A reader of texts as one of bytes: what is no UTF-8 never comes to it."""
    return lambda data: read(data.decode("utf-8", "replace"))


def of_file(suffix: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A reader of files as one of bytes."""

    def read_bytes(data: bytes) -> None:
        path = PLACE / f"x{suffix}"
        path.write_bytes(data)
        read(path)

    return read_bytes


TARGETS: dict[str, Callable[[bytes], object]] = {
    "calls": of_text(read_calls),
    "command": of_text(lambda text: read.read_command(read.split_command([text]))),
    "settings": of_file(".yaml", read.read_settings_file),
    "yaml": of_file(".yaml", provenance.read_user_yaml),
    "json": of_file(".jsonl", lambda path: list(json_files.json_rows(path))),
}


def main() -> None:
    """Search until libFuzzer's flags end it, or something is found."""
    name, *flags = sys.argv[1:]
    read, corpus = TARGETS[name], PLACE / "corpus"
    corpus.mkdir()
    for number, text in enumerate(SEEDS[name]):
        (corpus / str(number)).write_text(text)

    def one_input(data: bytes) -> None:
        try:
            read(data)
        except RunError as error:
            error.render().encode()

    given = [sys.argv[0], *flags, f"-artifact_prefix={PLACE}/", str(corpus)]
    atheris.Setup(given, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

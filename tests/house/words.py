"""Names of the package's public functions: how many are of one word, and which are taken twice.

    make words

A name of two words says what is done to what; one of one word is for what everybody knows, and then
it is the only one of its name in the package. Methods are not counted: their class says the rest.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "rloo_cli"
# What others look up by name: verbs and processes by `run` and `main`, plug-ins by the rest.
HOOKS = {
    "run", "main", "score", "needs", "preflight", "problems", "rules", "load", "notes", "ready",
}  # fmt: skip
MOST = 0.4  # one-word names, of all


@cache
def package_trees() -> dict[str, ast.Module]:
    """Every file of the package, parsed once a process: 79,000 lines take a second or more."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in paths}


def public_functions() -> Iterator[tuple[str, str]]:
    """(file, name) of every public function at the top of a module, hooks left out."""
    for file, tree in package_trees().items():
        for node in tree.body:
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if function and not node.name.startswith("_") and node.name not in HOOKS:
                yield file, node.name


def one_word(name: str) -> bool:
    return "_" not in name


def taken_twice() -> list[str]:
    """One-word names that more than one module defines, with their files."""
    found = list(public_functions())
    counts = Counter(name for _, name in found)
    return [f"{name}: {file}" for file, name in found if one_word(name) and counts[name] > 1]


def main() -> None:
    names = [name for _, name in public_functions()]
    short = [name for name in names if one_word(name)]
    print(
        f"{len(names)} public functions, {len(short)} of one word ({len(short) / len(names):.0%})"
    )
    for line in taken_twice():
        print(f"not unique: {line}")


if __name__ == "__main__":
    main()

"""Problems of `file.py:name`, user code, found without running the file."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from rloo_cli.config import registry
from rloo_cli.config.old_names import nearest_names
from rloo_cli.utils.errors import ConfigError, Problem, value_problem

# Packages that rloo depends on: none has a reward, and some load and run their arguments.
DEPENDENCIES = (
    "torch", "transformers", "datasets", "tokenizers", "safetensors", "huggingface_hub", "numpy",
    "pandas", "pyarrow", "yaml", "hydra", "omegaconf", "pydantic", "jinja2", "accelerate",
)  # fmt: skip
REWARD_KEYS = ("reward.", "eval.judge.", "--reward")
LITERALS = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set)


def code_problems(key: str, spec: str) -> Iterator[Problem]:
    """Problems of the code that this key names; none for a module that is not a file."""
    try:
        where, name = registry.split_code_spec(spec)
    except ConfigError as error:
        yield Problem(error.problems[0].what, key, error.problems[0].why, f"{key}=file.py:name")
        return
    if not where.endswith(".py"):
        package, is_reward = where.partition(".")[0], key.startswith(REWARD_KEYS)
        if package in sys.stdlib_module_names or (package in DEPENDENCIES and is_reward):
            why = f"{package} comes with Python or rloo and is not meant for this"
            yield value_problem(key, repr(spec), "is not your own code", "file.py:name", why)
        return
    path = Path(where)
    if not path.is_file():
        looked = f"looked at {path.absolute()}"
        fix = f"{key}=FILE.py:{name}, a file that exists"
        yield Problem(f"{key}: {where} does not exist", key, looked, fix)
        return
    try:
        tree = ast.parse(path.read_bytes(), str(path))  # bytes: in the encoding the file declares
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", 1)
        what, fix = f"{key}: {where} is not valid Python", f"correct line {line} of {where}"
        yield Problem(what, f"{where}:{line}", str(error), fix)
        return
    defined = _names_bound(tree)
    if name not in defined and "*" not in defined:
        close = nearest_names(name, defined)
        names = ", ".join(sorted(n for n in defined if not n.startswith("_"))) or "nothing"
        fix = f"{key}={where}:{close[0]}" if close else f"{key}={where}:NAME, a name of these"
        yield Problem(f"{key}: {where} has no {name!r}", key, f"it defines: {names}", fix)
    elif defined.get(name) == 1:
        yield from _definition_problems(tree, key, where, name)


def _definition_problems(tree: ast.Module, key: str, where: str, name: str) -> Iterator[Problem]:
    """Problems of the single definition of this name: a literal, or an argument before a /."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, LITERALS):
            if any(isinstance(target, ast.Name) and target.id == name for target in node.targets):
                why = f"it is {ast.unparse(node.value):.80}, in line {node.lineno}"
                fix = f"{key}={where}:NAME, a function or a class"
                yield Problem(f"{where}:{name} is not callable", key, why, fix)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            before = node.args.posonlyargs  # arguments with a default are optional
            before = before[: max(0, len(before) + len(node.args.args) - len(node.args.defaults))]
            if before and not node.decorator_list and key.startswith(REWARD_KEYS):
                what = f"parameter {before[0].arg!r} cannot be passed by name"
                at = f"{where}:{node.lineno}"
                why = f"{at} has it before a /, but rewards get keyword arguments"
                yield Problem(what, key, why, "remove the / from its signature")


def _names_bound(tree: ast.Module) -> dict[str, int]:
    """Name -> how often the file binds it, wherever it does; "*": it imports names unseen."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += [(a.asname or a.name).split(".")[0] for a in node.names]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
    return {name: names.count(name) for name in names}

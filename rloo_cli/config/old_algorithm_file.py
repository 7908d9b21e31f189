"""Refuses an algorithm's file from before algorithms were classes, and shows it in the new form.

Until 0.1 a file's functions were the hooks (`def advantages(score, kl, scorable, config)`); now the
methods of a class are. The file is only parsed here, never run.
"""

import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from rloo_cli.utils.errors import ConfigError, Problem

PAGE = "docs/ADD_AN_ALGORITHM.md"
PLUGIN = "rloo_cli.plugin"
EXPORTED = (
    "AdvantageInputs", "Advantages", "Loss", "LossInputs", "Problem", "RunConfig", "StepTokens",
    "TokenAdvantages", "ValueLoss",
)  # fmt: skip


@dataclass(frozen=True)
class NewHook:
    """The method that an old hook became, and what its old arguments are called in it."""

    signature: str
    arguments: tuple[str, ...]  # of the old function, in order


HOOKS = {
    "advantages": NewHook(
        "advantages(self, inputs: AdvantageInputs) -> Advantages",
        ("inputs.score", "inputs.kl", "inputs.scorable", "self.config", "inputs"),
    ),
    "token_table": NewHook(
        "token_advantages(self, step: StepTokens) -> TokenAdvantages", ("step", "self.config")
    ),
    "loss": NewHook(
        "loss(self, inputs: LossInputs) -> Loss",
        (
            "inputs.logp", "inputs.old_logp", "inputs.ref_logp", "inputs.micro_batch",
            "inputs.advantage", "self.config", "inputs.denominator", "inputs.kl_logp",
            "inputs.entropy", "inputs.num_tokens",
        ),
    ),
    "value_loss": NewHook(
        "value_loss(self, values: Tensor, micro_batch: MicroBatch, num_tokens: float)"
        " -> ValueLoss",
        ("values", "micro_batch", "self.config", "num_tokens"),
    ),
    "remember": NewHook(
        "next_state(self, reward: Tensor, usable: Tensor, state: Mapping[str, float])"
        " -> dict[str, float]",
        ("reward", "usable", "self.config", "state"),
    ),
    "problems": NewHook("rules(self, run: RunConfig) -> Iterator[Problem]", ("run",)),
    "warnings": NewHook("warnings(self, run: RunConfig) -> Iterator[str]", ("run",)),
    "combine": NewHook(
        "combine_rewards(self, raw: Tensor, weights: Sequence[float]) -> tuple[Tensor, Tensor]",
        ("raw", "weights", "self.config"),
    ),
    "shape": NewHook(
        "shape_scores(self, scores: Tensor, scorable: Tensor, lengths: Tensor, terminated: Tensor)"
        " -> Tensor",
        ("scores", "scorable", "lengths", "terminated", "self.config"),
    ),
}  # fmt: skip
# Old hooks that are attributes of one object now, a ForwardPlan, or no hooks at all.
FORWARD_PLAN_HOOKS = ("early", "needs_whole_step", "one_factor", "why_separate", "forwarded")
REMOVED_HOOKS = (
    "truncation", "denominator", "sequence_kl", "token_advantages", "usable", "resolved",
)  # fmt: skip
OLD_HOOKS = (*HOOKS, *FORWARD_PLAN_HOOKS, *REMOVED_HOOKS)
# Text in the body of an old hook -> the text in the new form.
REPLACEMENTS = {
    r"\bknown\.memory\b": "inputs.state",
    r"\bknown\.greedy\b": "inputs.greedy_score",
    r"\bshared_problems\(run\)": "super().rules(run)",
    r"\bTokenTable\(": "TokenAdvantages(",
}


def check_algorithm_file(path: Path) -> None:
    """Raises ConfigError for an algorithm's file of the old form, with the same file in the new."""
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return  # whoever reads it next reports what is wrong
    hooks = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in OLD_HOOKS]
    bases = [ast.unparse(b) for n in tree.body if isinstance(n, ast.ClassDef) for b in n.bases]
    if not hooks or any("[Config]" in base or "Algorithm" in base for base in bases):
        return
    what = f"{path} is an algorithm as they were before 0.2: its functions are the hooks"
    why = "an algorithm is a class now, whose methods are the hooks"
    fix = f"the same file in the new form:\n\n{convert_algorithm_file(source, path)}"
    raise ConfigError(Problem(what, "algorithm.name", why, fix, PAGE))


def convert_algorithm_file(source: str, path: Path) -> str:
    """The source of an old algorithm's file with its hooks as methods of a class."""
    tree, lines = ast.parse(source), source.splitlines(keepends=True)
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    methods = [_method(n, lines) for n in functions if n.name in HOOKS]
    plans = [n.name for n in functions if n.name in FORWARD_PLAN_HOOKS]
    notes = [f"# {name}: override forward_plan" for name in plans]
    notes += [f"# {n.name} is not a hook any more" for n in functions if n.name in REMOVED_HOOKS]
    old_imports = [n for n in tree.body if isinstance(n, ast.ImportFrom) and n.module == PLUGIN]
    old = [*[n for n in functions if n.name in OLD_HOOKS], *old_imports]
    removed = {i for n in old for i in range(_first_line(n), (n.end_lineno or 0) + 1)}
    rest = [line for number, line in enumerate(lines, 1) if number not in removed]
    base = "Algorithm" if any(m.startswith("def advantages") for m in methods) else "RLOO"
    body = "\n".join(textwrap.indent(method, "    ") for method in methods)
    name = "".join(part.capitalize() for part in re.split(r"\W|_", path.stem)) or "Own"
    used = {alias.name for n in old_imports for alias in n.names} - {"Known", "shared_problems"}
    used |= {base} | {export for export in EXPORTED if re.search(rf"\b{export}\b", body)}
    ends = [n.end_lineno or 0 for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
    index = min((n.lineno for n in old_imports), default=max(ends, default=0) + 1) - 1
    rest.insert(index, f"from {PLUGIN} import {', '.join(sorted(used))}\n")
    head = "".join(rest).rstrip("\n")
    comments = "".join(f"    {note}\n" for note in notes)
    return f"{head}\n\n\nclass {name}({base}[Config]):\n{comments}{body}"


def _first_line(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return min([node.lineno, *(d.lineno for d in decorators)])


def _method(node: ast.FunctionDef, lines: list[str]) -> str:
    """An old hook as a method: its old argument names are set first, then comes its body."""
    new = HOOKS[node.name]
    names = [a.arg for a in [*node.args.posonlyargs, *node.args.args]]
    pairs = [(n, v) for n, v in zip(names, new.arguments, strict=False) if n != v]
    pairs = [(n, v) for n, v in pairs if not (n == "known" and v == "inputs")]
    first, docstring, body = node.body[0], "", node.body
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        docstring = _lines_of([first], lines)
        body = node.body[1:] or [ast.Pass(lineno=first.lineno, end_lineno=first.lineno)]
    text = _lines_of(body, lines)
    for pattern, replacement in REPLACEMENTS.items():
        text = re.sub(pattern, replacement, text)
    unpacked = "".join(f"    {name} = {value}\n" for name, value in pairs)
    return f"def {new.signature}:\n{docstring}{unpacked}{text}"


def _lines_of(body: list[ast.stmt], lines: list[str]) -> str:
    first, last = body[0].lineno, body[-1].end_lineno or body[-1].lineno
    text = textwrap.dedent("".join(lines[first - 1 : last]))
    return textwrap.indent(text if text.endswith("\n") else text + "\n", "    ")

"""1.0 if the completion's code passes the tests of its example, else 0.0 (or the share it passes).

The code is the last closed ```python block of the completion (`extract: block`) or all of its text.
No block is a wrong answer: 0.0. None where the column is None. The column holds, or holds as JSON,

    "assert f(2) == 4"                         Python, as in MBPP; a list of them are several tests
    "def check(candidate): ..."                HumanEval's `test`; `entry_point` names the column
                                               with the function it is called with
    {"input": "1 2", "output": "3"}            a program's stdin and stdout (also stdin, stdout);
                                               a list of them are several tests
    {"inputs": [...], "outputs": [...]}        APPS, TACO; with "fn_name" a function's arguments
                                               and values

Outputs are equal if their lines are, ignoring white space at the ends. A test after one that
used up the time, or left processes that cannot be ended, has failed. Nothing runs outside the
sandbox named by `sandbox`; sandbox.py says what it guarantees.
"""

import ast
import json
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

from rloo_cli.config.schema import NotEmpty, Positive, RewardConfig, key
from rloo_cli.rewards.common import sandbox
from rloo_cli.rewards.common.sandbox import SandboxLimits
from rloo_cli.rewards.common.text import Columns, Completion, gold_texts, texts
from rloo_cli.utils.errors import Problem
from rloo_cli.utils.files import JsonObject

PYTHON_BLOCK = re.compile(
    r"^```(?:python3?|py)[^\S\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE | re.I
)
MAX_OUTPUT_BYTES = 1 << 20  # bytes of a program's output, beyond which it is wrong
INPUT_KEYS, OUTPUT_KEYS = ("input", "inputs", "stdin"), ("output", "outputs", "stdout")
CALL_TEMPLATE = """
_call = getattr(Solution(), {name!r}) if "Solution" in globals() else {name}
_is, _should = _call(*{arguments!r}), {value!r}
_is = [*_is] if isinstance(_is, tuple) else _is
assert _is == _should or (isinstance(_should, list) and _should and _is == _should[0])
"""

EXTRA = "bubblewrap (sandbox=bwrap), or your own container"


class Config(RewardConfig):
    type: Literal["code_tests"] = key("code_tests")
    column: str = key("Data column with the tests")
    entry_point: str | None = key("Column with a function's name: check(NAME) ends each test")
    setup: str | None = key("Column with Python to put before each test of asserts")
    extract: Literal["block", "text"] = key("The code: the last ```python block, or all the text")
    partial: bool = key("Score the share of passed tests; false = 1.0 only if all pass")
    sandbox: Literal["bwrap", "external", "unsafe_subprocess"] | None = key(
        "Where the code runs: bwrap, external (command), or uncontained: unsafe_subprocess"
    )
    command: NotEmpty | None = key("For sandbox=external: runs {harness} in a container")
    at_once: Positive | None = key("Completions that run at once; null = one per CPU core")
    time_s: float = key("Wall-clock seconds for all tests of one completion", gt=0, le=3600)
    memory_mb: int = key("Memory of each process, and of all of them", ge=64, le=2**20)
    processes: Positive = key("Processes and threads at once")
    file_mb: int = key("Size of each file, and of the private /tmp", ge=1, le=2**16)
    open_files: int = key("Open files of each process", ge=16, le=2**16)


@dataclass(frozen=True)
class CodeTest:
    """One test of a completion's code."""

    harness_test: JsonObject  # as sandbox.run_sandboxed_tests takes it
    passes: Callable[[str], bool]  # judges the program's output, outside of the sandbox


def needs(config: Config) -> list[str]:
    return [c for c in (config.column, config.entry_point, config.setup) if c is not None]


def problems(config: Config, where: str) -> Iterator[Problem]:
    """No code runs before the user has chosen a sandbox."""
    if config.sandbox is None:
        key = f"{where}.sandbox"
        why = (
            "it runs model-written code in: bwrap (bubblewrap, contained), external (your own "
            "command, e.g. a container), or unsafe_subprocess (uncontained)"
        )
        yield Problem(f"{key} is not chosen", key, why, f"{key}=bwrap")
    elif (config.sandbox == "external") != (config.command is not None):
        why = f"sandbox={config.sandbox}, command={config.command}: they go together"
        fix = f"{where}.command='podman run ... {{harness}} ...'"
        fix = fix if config.sandbox == "external" else f"{where}.command=null"
        yield Problem(f"{where}.command does not fit", f"{where}.command", why, fix)


def preflight(config: Config) -> None:
    """Raises MachineError if the sandbox does not work here: there is no weaker fallback."""
    if config.sandbox is not None:
        sandbox.require_sandbox(config.sandbox, config.command, _sandbox_limits(config))


def notes(config: Config, where: str) -> list[str]:
    """The warning for the log that the model's code runs uncontained."""
    if config.sandbox != "unsafe_subprocess":
        return []
    return [f"warning: {where}.sandbox=unsafe_subprocess: code the model writes runs uncontained"]


def score(
    completions: list[Completion],
    columns: Columns,
    config: Config,
    log_extra: Callable[[str, list[str | None]], None],
) -> list[float | None]:
    """(B,) of 1.0, 0.0 (between with `partial`) or None.

    Raises ValueError for invalid tests, RuntimeError if the sandbox fails.
    """
    assert config.sandbox is not None
    codes = [extract_code(text, config.extract) for text in texts(completions)]
    tests = [_tests_of_completion(columns, index, config) for index in range(len(codes))]
    with ThreadPoolExecutor(config.at_once or os.cpu_count() or 1) as pool:
        scored = list(pool.map(partial(_score_code, config), codes, tests))
    log_extra("code_tests", [why for _, why in scored])
    return [value for value, _ in scored]


def extract_code(text: str, method: str) -> str | None:
    """The code in a completion; None if there is none."""
    if method == "text":
        return text
    blocks = PYTHON_BLOCK.findall(text)
    return blocks[-1] if blocks else None


def _score_code(
    config: Config, code: str | None, tests: list[CodeTest] | None
) -> tuple[float | None, str | None]:
    """A completion's score, and how its first failed test failed."""
    if tests is None:
        return None, None
    if code is None:
        return 0.0, "no code"
    assert config.sandbox is not None
    plain_tests, stop = [t.harness_test for t in tests], not config.partial
    results = sandbox.run_sandboxed_tests(
        code, plain_tests, config.sandbox, config.command, _sandbox_limits(config), stop
    )
    reasons = [
        r.failure_reason or ("" if test.passes(r.output) else "wrong output")
        for r, test in zip(results, tests, strict=True)
    ]
    first = next((reason for reason in reasons if reason), "passed")
    share = reasons.count("") / len(reasons)
    return (share if config.partial else float(share == 1)), first


def _sandbox_limits(config: Config) -> SandboxLimits:
    return SandboxLimits(
        config.time_s, config.memory_mb, config.processes, config.file_mb, config.open_files
    )


def _tests_of_completion(columns: Columns, index: int, config: Config) -> list[CodeTest] | None:
    value = columns[config.column][index]
    if not isinstance(value, list | tuple | dict) and not gold_texts(value):
        return None
    setup = columns[config.setup][index] if config.setup else None
    name = columns[config.entry_point][index] if config.entry_point else None
    if name is not None and not str(name).isidentifier():
        raise ValueError(f"column {config.entry_point!r} has {name!r}, not a function name")
    check = f"\ncheck({name})\n" if name else ""
    tests = parse_tests(value, f"{setup}\n" if setup else "", check)
    if not tests:
        raise ValueError(f"column {config.column!r} contains no test: {str(value)[:80]!r}")
    return tests


def parse_tests(value: object, prefix: str = "", suffix: str = "") -> list[CodeTest]:
    """The tests in a value of the column. Raises ValueError for an invalid one.

    `prefix` (setup code) and `suffix` (`check(NAME)`) are put around the source of each test.
    """
    if isinstance(value, str):
        if value.lstrip()[:1] in ("{", "["):
            try:
                return parse_tests(json.loads(value), prefix, suffix)
            except json.JSONDecodeError:
                pass  # Python may begin with a bracket too
        # Python without a statement passes whatever the code does.
        return [_assert_test(prefix + value + suffix)] if value.strip() else []
    if isinstance(value, dict):
        return _io_tests(value, prefix)
    if isinstance(value, list | tuple):
        return [test for part in value for test in parse_tests(part, prefix, suffix)]
    raise ValueError(f"a test is text, input and output, or a list of them, not {value!r:.80}")


def _assert_test(source: str) -> CodeTest:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError) as error:  # otherwise no completion would ever pass
        raise ValueError(f"a test is not valid Python: {error}: {source[:80]!r}") from None
    return CodeTest({"test": source}, lambda _: True)


def _io_tests(value: JsonObject, prefix: str) -> list[CodeTest]:
    inputs = next((value[k] for k in INPUT_KEYS if value.get(k) is not None), None)
    outputs = next((value[k] for k in OUTPUT_KEYS if value.get(k) is not None), None)
    if inputs is None or outputs is None:
        raise ValueError(f"a case has an input and an output; found {', '.join(value)}")
    if isinstance(inputs, str) and isinstance(outputs, str):
        inputs, outputs = [inputs], [outputs]
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError(f"inputs and outputs are not lists: {value!r:.80}")
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    pairs = zip(inputs, outputs, strict=True)
    if name := value.get("fn_name"):
        if not str(name).isidentifier():
            raise ValueError(f"fn_name is {name!r}, not a function name")
        calls = [CALL_TEMPLATE.format(name=str(name), arguments=a, value=v) for a, v in pairs]
        return [_assert_test(prefix + call) for call in calls]
    return [_io_test(_join_lines(stdin), _join_lines(expected)) for stdin, expected in pairs]


def _join_lines(value: object) -> str:
    """A program's input or output as one text; APPS has lists of lines too."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _io_test(stdin: str, expected_output: str) -> CodeTest:
    lines = _stripped_lines(expected_output)
    most = min(MAX_OUTPUT_BYTES, 2 * len(expected_output.encode("utf-8", "replace")) + (1 << 16))
    return CodeTest({"stdin": stdin, "most": most}, lambda output: _stripped_lines(output) == lines)


def _stripped_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]

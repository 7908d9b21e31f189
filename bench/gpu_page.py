"""docs/results/gpu.md from what `gpu.py` measured: machine, versions, every row, losses too."""

import re
import textwrap
from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

from gpu_table import GpuRow

Result = dict[str, Any]
LOSES = "**`rloo` loses**"
NOT_YET = "not measured yet"
HEAD = """# On a GPU

<!-- Made by `python bench/gpu.py` from bench/gpu.jsonl: change those, not this page. -->

{summary}

One command measures all rows, each in its own process, and writes this page from bench/gpu.jsonl:

```
make gpu
```

That is `python bench/gpu.py --minutes 40`. It stops in time and continues when it is started again.
`--rows NAME` measures some rows, `--again` repeats known rows, and `--show` lists the rows that
this machine cannot run, with the reason. `--rehearse` runs the same functions on a CPU with tiny
sizes, and keeps nothing.

- **confirmed**, **refuted**: the row has a criterion, and the GPU met it or did not.
- **measured**: figures without a criterion. A ratio is TRL's seconds divided by those of `rloo`.
  Rows that `rloo` loses are kept and marked.
- TRL has gradient checkpointing and bfloat16 autocast. `trl_best` has no checkpointing, bfloat16
  weights, liger-kernel if it is installed, and a static cache if transformers samples.
- MFU is the share of the data sheet's peak (989 TFLOP/s on an H100), as in the metric `perf/mfu`.
  *Of the product* is the share of a bfloat16 matrix product measured beside it.
- The floor is the time of the work at an H100's rates, and the goal is the target. The expected
  figure was written down before the first measurement.
- vLLM has two model runners, V1 and V2. A result holds for the version and runner of its row.
"""
# What the first sentences say, by the rows that would have to be measured.
CLAIMS = (
    ("kernels and layouts against float64", ("head *", "shared *", "packed *", "padded *")),
    ("the order of kernels and copies", ("order of waits",)),
    ("peak memory against the plan", ("memory, *",)),
    ("weights sent to vLLM's engine on the same GPU", ("colocate, *",)),
    ("the tests marked gpu", ("tests marked gpu",)),
    ("a whole run of `rloo train`", ("real run",)),
    ("the train phase against TRL", ("train phase *",)),
    ("a whole step against TRL", ("whole step *",)),
    ("tokens per second of vLLM", ("rollout *",)),
    ("several GPUs", ("ddp", "fsdp2*", "zero3", "colocate per rank", "*TP 2*", "server, NCCL*")),
)


def render_page(rows: Sequence[GpuRow], results: Sequence[Result]) -> str:
    """The whole page. A rehearsal's results are not on it."""
    results = [found for found in results if not found.get("rehearsed")]
    machines = list(dict.fromkeys(found["machine"] for found in results))
    parts = [HEAD.format(summary=summary(results))]
    if not machines:
        parts.append(f"## {NOT_YET.capitalize()}\n\n{rows_table(rows, [])}\n")
    for machine in machines:
        mine = latest_results([found for found in results if found["machine"] == machine])
        parts.append(machine_section(rows, machine, mine))
    return "\n".join(parts)


def summary(results: Sequence[Result]) -> str:
    """The first sentences: what has been measured, and what has not."""
    done = [found for found in results if found["status"] == "done"]
    if not done:
        return "Nothing has been measured on a GPU yet."
    names = {found["row"] for found in done}
    claims: dict[bool, list[str]] = {True: [], False: []}
    for says, patterns in CLAIMS:
        claims[any(fnmatch(name, p) for name in names for p in patterns)].append(says)
    machines = " and ".join(dict.fromkeys(found["machine"] for found in done))
    seen = sorted({found["versions"]["vllm"] for found in done if "vllm" in found["versions"]})
    vllm = f"vLLM {' and '.join(seen)}" if seen else "no vLLM"
    lines = [f"Measured, on {machines} with {vllm}: {', '.join(claims[True])}."]
    if claims[False]:
        lines.append(f"Not measured yet: {', '.join(claims[False])}.")
    if not any(version.startswith("0.32") for version in seen):
        lines.append("vLLM 0.32, the version that `pip install 'rloo-cli[vllm]'` installs, has"
                     " not run on a GPU yet.")  # fmt: skip
    return textwrap.fill(" ".join(lines), 100, break_long_words=False, break_on_hyphens=False)


def latest_results(results: Sequence[Result]) -> list[Result]:
    """The last result of each row with each vLLM; one that is done replaces all unfinished ones."""
    latest: dict[tuple[str, str], Result] = {}
    for found in results:
        key = found["row"], found["versions"].get("vllm", "")
        if found["status"] != "cannot" and not (
            found["status"] == "part" and latest.get(key, {}).get("status") == "done"
        ):
            latest[key] = found
    return list(latest.values())


def machine_section(rows: Sequence[GpuRow], machine: str, results: Sequence[Result]) -> str:
    """One machine: its rows, those that no longer exist, and the rows' own tables."""
    versions: dict[str, set[str]] = {}
    for found in results:
        for name, version in found["versions"].items():
            versions.setdefault(name, set()).add(version)
    got = ", ".join(f"{name} {' and '.join(sorted(v))}" for name, v in sorted(versions.items()))
    commits = ", ".join(sorted({str(found.get("commit")) for found in results}))
    dates = sorted(found["date"][:10] for found in results)
    lines = [f"## {machine}", "", f"{got}; commit {commits}; {dates[0]} to {dates[-1]}.", "",
             rows_table(rows, results)]  # fmt: skip
    names = {row.name for row in rows}
    if gone := [found for found in results if found["row"] not in names]:
        lines += ["", "Rows that are no longer in the program:", ""]
        lines += [f"- {found['row']}: {outcome_cell(None, found)}" for found in gone]
    for found in results:
        if (table := found.get("facts", {}).get("table")) and not found.get("beside"):
            lines += ["", f"### {found['row']}", "", *facts_table(table)]
    return "\n".join(lines) + "\n"


def rows_table(rows: Sequence[GpuRow], results: Sequence[Result]) -> str:
    """A line for each row, also for those that have not been measured."""
    lines = ["| row | what it measures | vLLM, runner | floor, goal, expected | measured | s |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        about = row.does + (" (refused without `generation.allow_untested=true` until confirmed)"
                            if row.refusal else "")  # fmt: skip
        aims = {"floor": row.floor, "goal": row.goal, "expected": row.expected}
        wanted = "; ".join(f"{name}: {text}" for name, text in aims.items() if text)
        mine: list[Any] = [found for found in results if found["row"] == row.name] or [None]
        for found in mine:
            seconds = f"{found['seconds']:.0f}" if found else ""
            said = outcome_cell(row, found) if found else missing_cell(row)
            cells = [row.name, about, runner_cell(row, found), wanted, said, seconds]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def missing_cell(row: GpuRow) -> str:
    """Of a row that has not been measured: that, and what it needs."""
    needs = [f"{row.gpus} GPUs"] if row.gpus > 1 else []
    needs += row.packages
    return NOT_YET + (f"; needs {', '.join(needs)}" if needs else "")


def runner_cell(row: GpuRow, found: Result | None) -> str:
    """The version of vLLM and the model runner that a result, or a row to come, is about."""
    if not row.vllm:
        return "without vLLM"
    if found is None:
        return f"{row.vllm} or later" + (f", {row.runner}" if row.runner else "")
    runner = found.get("facts", {}).get("runner") or row.runner
    return found["versions"].get("vllm", "") + (f", {runner}" if runner else "")


def outcome_cell(row: GpuRow | None, found: Result) -> str:
    """A result's verdict, facts, other sizes and notes."""
    whole = found["status"] == "done"
    got = found.get("verdict") if whole else found["status"]
    if found["status"] == "part":
        got = "cut"
    parts = [found["why"]] if found.get("why") else []
    if not whole and found.get("facts"):
        parts.append(f"after {found.get('rounds', 1)} rounds {found.get('verdict')}")
    parts += [facts_line(found.get("facts", {}))]
    sizes = row.sizes if row else {}
    other = {n: v for n, v in found["sizes"].items() if n in sizes and sizes[n] != v}
    other = {n: v for n, v in other.items() if not isinstance(v, dict | list)}
    if other:
        parts.append("with " + ", ".join(f"{n} {v}" for n, v in other.items()))
    if found.get("beside"):
        parts.append("beside other rows, so without times")
    parts += [found["note"]] if found.get("note") else []
    return f"**{got}**: " + table_cell("; ".join(part for part in parts if part))


def facts_line(facts: Result) -> str:
    """The plain facts of a row; tables come later."""
    kept = {n: v for n, v in facts.items() if not isinstance(v, list | dict) and v is not None}
    kept.pop("runner", None)  # it has a column
    return ", ".join(f"{n} {number_text(v)}{loss_mark(n, v)}" for n, v in kept.items())


def loss_mark(name: str, value: Any) -> str:
    """Marks a ratio of TRL's seconds over `rloo`'s that is below 1."""
    ratio = name.startswith("ratio") and isinstance(value, int | float)
    return f" {LOSES}" if ratio and value < 1 else ""


def facts_table(rows: Sequence[Result]) -> list[str]:
    """A table of a row's own."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for row in rows:
        cells = [table_cell(number_text(row.get(n))) + loss_mark(n, row.get(n)) for n in names]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def number_text(value: Any) -> str:
    """A value as a person reads it."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def table_cell(text: str) -> str:
    """Text that does not end a table's cell."""
    return re.sub(r"[\^~]{4,}", "", text).replace("|", "/").replace("\n", " ")[:600]

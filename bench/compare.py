"""RLOO, GRPO, REINFORCE, REINFORCE++, PPO compared; writes docs/results/compare.md.

    python bench/compare.py                     all of it: quickstart, TL;DR in miniature, memory
    python bench/compare.py --jobs 2            so many runs side by side, with one thread each
    python bench/compare.py --tasks quickstart  this task alone; tldr, seconds, memory, tldr_1b
    python bench/compare.py --seeds 1 2 --algorithms rloo ppo --words max_steps=10   a part of it
    python bench/compare.py --page              only write the page from what is there
    python bench/compare.py --dry-run           only print the commands

Every number comes from the command line: `rloo train`, `rloo eval`, `rloo compare`. Runs lie in
runs/compare/TASK; what is finished is not done again, and what was stopped goes on. TL;DR in
miniature has a supervised and a reward model for each seed, made once. A run that fails does not
stop the others: `rloo compare` lists it. `tldr_1b` is the same with Pythia 1B: it wants eight GPUs
a run, e.g. with `--words hydra/launcher=submitit_slurm`, and is done only if it is asked for.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import intervals
import results

HERE = Path(__file__).resolve().parents[1]
DOCS, ROOT, RAW = HERE / "docs", Path("runs/compare"), Path(__file__).with_name("compare.jsonl")
ALGORITHMS = ("rloo", "grpo", "reinforce", "reinforce_pp", "ppo")
PASSES = {"rloo": 4, "ppo": 1}  # each with the other's number
GIB = 2**30
JUDGED = ("judge=tldr_mini", "data.eval_split=test", "eval.max_samples=500")
JUDGED_1B = (  # as recipes/tldr_judge.yaml, of a run
    "judge=openai", "eval.judge.base_url=https://api.openai.com/v1",
    "eval.judge.model=gpt-4o-mini", "eval.judge.api_key_env=OPENAI_API_KEY",
    "eval.judge.reference_column=messages", "data.template=null",
    "generation.max_completion_length=200", "eval.max_samples=1000",
)  # fmt: skip
# 86 M parameters: 345 MB in float32, far above what a run needs beside its models.
SIZE = {"model_type": "qwen3", "hidden_size": 768, "intermediate_size": 2304,
        "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 12,
        "head_dim": 64, "vocab_size": 32768, "tie_word_embeddings": True}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """One command, and the files that show that it was done; without them it tells that itself."""

    words: tuple[str, ...]
    done: str = ""

    @property
    def line(self) -> str:
        """As a person types it."""
        return shlex.join(("rloo", *self.words))


Chain = list[Command]  # one after the other


@dataclass(frozen=True)
class Task:
    """One comparison."""

    recipe: str
    title: str
    seeds: tuple[int, ...]
    metric: str = ""
    says: str = ""


TASKS = {
    "quickstart": Task(
        "compare", "Two-digit addition, the quickstart's task", (1, 2, 3, 4, 5),
        says="A tiny model that was warm-started on addition learns from exact match alone. The\n"
        "held-out score is the share of 500 sums it gets right, greedily. PPO goes over each\n"
        "step's completions four times unless the row says otherwise, the others once. PPO with\n"
        "one pass and RLOO with four show how much of a difference comes from the passes.",
    ),
    "tldr": Task(
        "compare_tldr", "TL;DR in miniature", (1, 2, 3), "eval_reward/tldr_mini_gold/mean",
        "Trained on a reward model's score, judged by the hidden rule that its training data came\n"
        "from: the held-out score is that rule's mean on the validation posts, the win rate its\n"
        "verdict on 500 test posts against the careless references. Each seed has a supervised\n"
        "and a reward model of its own, the same for all five; two reward models' scores have no\n"
        "common zero, so that the training reward differs more between seeds than it means.",
    ),
    "tldr_1b": Task("compare_tldr_1b", "TL;DR with Pythia 1B", (1, 2, 3)),
}  # fmt: skip


# The commands.


def stages(name: str, given: argparse.Namespace) -> Iterator[list[Chain]]:
    """The chains of a task, stage by stage: those of one stage may run side by side."""
    task, root = TASKS[name], ROOT / name
    seeds, words = given.seeds or task.seeds, (f"root={root}", *given.words)
    if name == "tldr":
        yield [models(task, root, seed) for seed in seeds]
    if name == "tldr_1b":
        sweep = (f"algorithm={','.join(given.algorithms)}", f"seed={','.join(map(str, seeds))}")
        yield [[Command(("train", "-m", f"+recipe={task.recipe}", *sweep, *words))]]
    jobs = [(algorithm, seed) for seed in seeds for algorithm in given.algorithms]
    yield [run(name, *job, words) for job in jobs]
    if name == "quickstart":  # PPO makes four passes: what of it is that?
        passes = [(a, s, n) for s in seeds for a, n in PASSES.items() if a in given.algorithms]
        yield [run(name, a, s, (*words, f"algorithm.num_iterations={n}")) for a, s, n in passes]


def models(task: Task, root: Path, seed: int) -> Chain:
    """The supervised and the reward model of a seed; how good the first is by itself."""
    common = (f"+recipe={task.recipe}", f"root={root}", f"seed={seed}", f"name=seed-{seed}")
    sft = root / "sft" / f"seed-{seed}"
    alone = (f"+recipe={task.recipe}", f"root={root}", f"name=sft-seed-{seed}", *JUDGED)
    return [
        Command(("sft", *common)),
        Command(("reward-model", *common, f"model.path={sft}")),
        Command(("eval", *alone, f"model.path={sft}"), f"{root}/eval/sft-seed-{seed}/*/judge.json"),
    ]


def run(name: str, algorithm: str, seed: int, words: Sequence[str]) -> Chain:
    """One run of a task, and its judge."""
    task, root = TASKS[name], ROOT / name
    which = (f"+recipe={task.recipe}", f"algorithm={algorithm}", f"seed={seed}", *words)
    folder = root / f"{task.recipe}-{algorithm}-seed-{seed}"
    judge = f"{folder}/eval/*/judge.json"
    if name == "quickstart":
        return [Command(("train", "-m", *which))]  # -m: it has the name that the plain sweep gives
    if name == "tldr_1b":
        return [Command(("eval", str(folder), *JUDGED_1B), judge)]
    own = (
        f"name={folder.name}", f"model.path={root}/sft/seed-{seed}",
        f"reward.tldr_mini_rm.path={root}/reward_model/seed-{seed}",
    )  # fmt: skip
    return [Command(("train", *which, *own)), Command(("eval", str(folder), *JUDGED), judge)]


def compared(name: str) -> Command:
    """Reads the runs of a task."""
    task, root = TASKS[name], ROOT / name
    metric = ("--metric", task.metric) if task.metric else ()
    out = ("--out", str(root / "comparison"))
    return Command(("compare", str(root / f"{task.recipe}-*"), *out, *metric))


def do(chain: Chain, threads: int) -> list[str]:
    """Run a chain up to what fails; what failed, in words."""
    environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    for command in chain:
        if command.done and any(Path().glob(command.done)):
            continue
        began = time.monotonic()
        asked = [sys.executable, "-m", "rloo_cli", *command.words]
        ended = subprocess.run(asked, env=environment, capture_output=True, text=True)
        print(f"{time.monotonic() - began:7.1f} s  exit {ended.returncode}  {command.line}",
              flush=True)  # fmt: skip
        if ended.returncode:
            return [f"{command.line}: exit {ended.returncode}\n{ended.stderr[-1500:]}"]
    return []


def work(name: str, given: argparse.Namespace) -> list[str]:
    """All of a task; what failed."""
    failed: list[str] = []
    threads = 1 if given.jobs > 1 else 0
    for stage in stages(name, given):
        if given.dry_run:
            print("\n".join(command.line for chain in stage for command in chain))
            continue
        with ThreadPoolExecutor(given.jobs) as pool:
            failed += [f for found in pool.map(lambda c: do(c, threads), stage) for f in found]
    if given.dry_run:
        print(compared(name).line)
        return []
    return failed + do([compared(name)], 0)


# Memory: PPO's four models against RLOO's three.


def memory(rounds: int) -> None:
    """Two steps of each in turn, in processes of their own; appended to bench/compare.jsonl."""
    import plan
    import torch

    plan.MODELS |= {"compare": SIZE, "reward": SIZE | {"num_labels": 1}}
    began = time.strftime("%Y-%m-%dT%H:%M:%S")
    setting = plan.Setting("", "compare", (
        "reward=model", "reward.model.path=REWARD", "reward.model.batch_size=8",
        "algorithm.beta=0.05", "algorithm.num_iterations=1", "algorithm.num_generations=4",
    ))  # fmt: skip
    folder = Path(tempfile.mkdtemp(prefix="rloo-compare-"))
    try:
        plan.make(setting, folder)
        words = [w for w in plan.words(setting, folder) if not w.startswith("name=")]
        for number in range(rounds):
            for algorithm in ("rloo", "ppo"):
                name = f"{algorithm}-{number}"
                row = one_peak([f"algorithm={algorithm}", *words, f"name={name}"], folder / name)
                row |= {"kind": "memory", "algorithm": algorithm, "began": began,
                        "torch": torch.__version__, "machine": machine()}  # fmt: skip
                results.append([row], RAW)
                print(f"{name}: {row['process_bytes'] / GIB:.2f} GiB", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def one_peak(words: Sequence[str], folder: Path) -> results.Row:
    """Bytes that the largest process of a run held at most; and those above its imports."""
    said = folder.with_suffix(".txt")
    with said.open("w") as out:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "rloo_cli", "train", *words],
            stdout=out, stderr=out,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)},
        )  # fmt: skip
        _, status, usage = os.wait4(child.pid, 0)  # the largest of it and what it waited for
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"exit {child.returncode}\n{said.read_text()[-3000:]}")
    got = json.loads((folder / "run.json").read_text()).get("memory", {})
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    step_s = [row["step_time"] for row in steps if "step_time" in row][-1]  # the first one warms up
    return {"process_bytes": usage.ru_maxrss * 1024, "above_bytes": got.get("measured_bytes"),
            "step_s": step_s}  # fmt: skip


def seconds(rounds: int) -> None:
    """A dozen steps of the quickstart's task in turn; the median step, to bench/compare.jsonl."""
    began = time.strftime("%Y-%m-%dT%H:%M:%S")
    jobs = [(a, 4 if a == "ppo" else 1) for a in ALGORITHMS] + [*PASSES.items()]
    with tempfile.TemporaryDirectory(prefix="rloo-compare-") as folder:
        for number in range(rounds):
            for algorithm, passes in jobs:
                name = f"{algorithm}-{passes}-{number}"
                words = ("train", "+recipe=compare", f"algorithm={algorithm}", f"name={name}",
                         f"algorithm.num_iterations={passes}", f"root={folder}", "max_steps=12",
                         "data.eval_split=null", "resume=never")  # fmt: skip
                if failed := do([Command(words)], 0):
                    raise SystemExit(failed[0])
                lines = Path(folder, name, "metrics.jsonl").read_text().splitlines()
                steps = [json.loads(line)["step_time"] for line in lines][2:]
                row = {"kind": "seconds", "algorithm": algorithm, "passes": passes,
                       "step_s": median(steps), "began": began, "machine": machine()}  # fmt: skip
                results.append([row], RAW)


# The page.


def page(names: Sequence[str]) -> str:
    """The whole of docs/results/compare.md, from the comparisons and bench/compare.jsonl."""
    lines = [
        "# RLOO, GRPO, REINFORCE, REINFORCE++ and PPO, compared",
        "",
        "`python bench/compare.py` trains all five on the same task with the same completions,",
        "learning rate, beta and seeds. All else is usual for each of them; below each table are",
        "the keys that differ. By hand this is",
        "",
        "```",
        "rloo train --multirun +recipe=compare",
        "rloo compare 'compare-*'",
        "```",
        "",
        "No learning rate was tuned for any of them, so the tables do not say which one is better.",
        f"All runs: {machine()}. The machine did other work during",
        "the runs of the first two tables, so compare seconds in the third.",
    ]
    for name in names:
        lines += section(name)
    lines += in_time(latest("seconds"))
    lines += in_memory(latest("memory"))
    lines += [
        "",
        "## With Pythia 1B",
        "",
        "Not measured yet. The same on the real TL;DR data, with the published supervised and",
        "reward model, on eight GPUs for each run. On a cluster with Slurm:",
        "",
        "```",
        "python bench/compare.py --tasks tldr_1b --words hydra/launcher=submitit_slurm",
        "```",
        "",
        *intervals.section_lines(),
        "",
    ]
    return "\n".join(lines)


def section(name: str) -> list[str]:
    """One task: what it is, its table, its chart. Nothing where it has not been done."""
    task, folder = TASKS[name], ROOT / name / "comparison"
    if not (folder / "table.md").is_file():
        return []
    for kind in ("png", "svg"):
        shutil.copyfile(folder / f"curves.{kind}", DOCS / f"compare_{name}.{kind}")
    lines = ["", f"## {task.title}", "", *([task.says, ""] if task.says else [])]
    lines += [f"![curves](../compare_{name}.png)", "", (folder / "table.md").read_text().rstrip()]
    got = [share(path) for path in sorted((ROOT / name).glob("eval/sft-seed-*/*/judge.json"))]
    if got:
        lines += ["", f"The supervised models alone win {', '.join(got)}, by seed."]
    return [*lines, "", "```", compared(name).line, "```"]


def share(path: Path) -> str:
    """A judge's win rate."""
    got = next(iter(json.loads(path.read_text())["sets"].values()))
    return f"{got['rate']:.1%}"


def latest(kind: str) -> list[results.Row]:
    """The rows of the last bench of a kind."""
    rows = [row for row in results.read(RAW) if row["kind"] == kind] if RAW.is_file() else []
    return [row for row in rows if row["began"] == rows[-1]["began"]]


def in_time(rows: Sequence[results.Row]) -> list[str]:
    """The table of seconds per step, in turn on a machine that did nothing else."""
    if not rows:
        return []
    lines = [
        "",
        "## Seconds per step, in turn",
        "",
        "Twelve steps of the quickstart's task each, in turn, two rounds; the median of",
        f"steps 3 to 12. {rows[-1]['machine']}; `python bench/compare.py --tasks seconds`.",
        "",
        "| algorithm | passes over a step's completions | seconds per step |",
        "|---|---|---|",
    ]
    for job in dict.fromkeys((row["algorithm"], row["passes"]) for row in rows):
        own = [row["step_s"] for row in rows if (row["algorithm"], row["passes"]) == job]
        lines.append(f"| {job[0]} | {job[1]} | {', '.join(f'{s:.3f}' for s in own)} |")
    return lines


def in_memory(rows: Sequence[results.Row]) -> list[str]:
    """The table of PPO's models against RLOO's."""
    if not rows:
        return []
    lines = [
        "",
        "## Memory: PPO's four models against RLOO's three",
        "",
        "Policy, reference and reward model of 86 million parameters each, in float32; PPO has a",
        "value model beside them, which is trained, so it has gradients and Adam's two moments.",
        "Two steps of 4 prompts x 4 completions with one update each (four passes are PPO's",
        "default), in a process of its own, in turn.",
        f"{rows[-1]['machine']}; `python bench/compare.py --tasks memory`.",
        "",
        "| algorithm | whole process, GiB | above its imports, GiB | seconds of the second step |",
        "|---|---|---|---|",
    ]
    means: dict[str, float] = {}
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        own = [row for row in rows if row["algorithm"] == algorithm]
        whole, above = ([row[key] for row in own if row[key]] for key in (
            "process_bytes", "above_bytes"))  # fmt: skip
        means[algorithm] = fmean(above or whole)
        cells = [", ".join(f"{v / GIB:.2f}" for v in values) or "–" for values in (whole, above)]
        cells.append(", ".join(f"{row['step_s']:.1f}" for row in own))
        lines.append(f"| {algorithm} | {' | '.join(cells)} |")
    if {"rloo", "ppo"} <= set(means):
        times = means["ppo"] / means["rloo"]
        lines += ["", f"PPO takes {times:.2f} times what RLOO does."]
    return lines


def machine() -> str:
    """What this is measured on."""
    return f"{os.cpu_count()} CPU cores, {platform.machine()}, Python {platform.python_version()}"


MEASURED = {"seconds": seconds, "memory": memory}


def main() -> None:
    """Do what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=["quickstart", "tldr", *MEASURED],
                        choices=[*TASKS, *MEASURED])  # fmt: skip
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--algorithms", nargs="+", default=ALGORITHMS)
    parser.add_argument("--words", nargs="+", default=[], help="key=value for every training")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2, help="of the memory's A B A B")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--dry-run", action="store_true", help="only print the commands")
    given = parser.parse_args()
    failed: list[Any] = []
    for name in [] if given.page else given.tasks:
        if name not in MEASURED:
            failed += work(name, given)
        elif not given.dry_run:
            MEASURED[name](given.rounds)
    if given.dry_run:
        return
    (DOCS / "results/compare.md").write_text(page([*TASKS]), encoding="utf-8")
    print(DOCS / "results/compare.md")
    if failed:
        raise SystemExit("\n".join(["", "what failed:", *failed]))


if __name__ == "__main__":
    main()

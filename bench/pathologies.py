"""Runs with a fault really in them, and healthy ones: what `rloo doctor RUN` says of each.

    python bench/pathologies.py [--seeds 1 2]    all runs that have no row yet, one after the other
    python bench/pathologies.py --again          every row's findings anew, from its folder
    python bench/pathologies.py --page           the tables of docs/doctor.md, from the rows

The faults are a learning rate, a reward, a dtype, a data set, a tool or a key of sampling; no file
of a run is edited.
Thresholds were set on seed 1 and are shown on the others. A row of bench/pathologies.jsonl a run.
"""

import argparse
import collections
import json
import subprocess
import sys
import time
from pathlib import Path

import results

HERE = Path(__file__).resolve().parents[1]
ROWS, PAGE = Path(__file__).with_name("pathologies.jsonl"), HERE / "docs" / "doctor.md"
ROOT = Path("runs/pathologies")
BEGIN, END = "<!-- made: {} -->", "<!-- end: {} -->"
Words = tuple[str, ...]

REWARDS = """
import itertools, random
from rloo_cli.plugin import texts
calls = itertools.count()

def longer(completions, **kwargs):
    return [float(len(text)) for text in texts(completions)]

def of_the_prompt(prompts, completions, **kwargs):
    return [float(sum(map(ord, text)) % 7) for text in texts(prompts)]

def noise(completions, **kwargs):
    return [random.Random(next(calls)).random() for _ in completions]

def constant(completions, **kwargs):
    return [1.0 for _ in completions]

def one_answer(completions, **kwargs):
    said = texts(completions)
    return [sum(text[:n] == "100"[:n] for n in (1, 2, 3)) + (text == "100") for text in said]

def sevens(completions, **kwargs):
    return [text.count("7") / max(1, len(text)) for text in texts(completions)]
"""

TOOLS = '''
def multiply(x: int, y: int) -> int:
    """Multiplies two integers.

    Args:
        x: The first integer.
        y: The second integer.
    """
    return x * y
'''

SUMS: Words = (
    "+recipe=quickstart", "max_steps=30", "train.prompts_per_step=16", "eval.max_samples=50",
    "eval.every=0", "logging.samples_every=1", "resume=never",
)  # fmt: skip
WORDS: Words = (
    "+recipe=smoke", "max_steps=30", "train.prompts_per_step=8", "logging.samples_every=1",
    "train.learning_rate=1e-3", "train.lr_scheduler=constant", "algorithm.num_generations=8",
    "generation.ignore_eos=true",  # a random model never ends: all completions have one length
)  # fmt: skip


EPISODES: Words = (
    "+recipe=tools_mini", "max_steps=24", "eval.every=0", "logging.samples_every=1", "resume=never",
)  # fmt: skip


def scored_by(name: str) -> Words:
    """The words that make a function of the file above the only reward."""
    return (f"reward.NAME.path={{folder}}/rewards.py:{name}",)


SICK: dict[str, tuple[str, Words]] = {
    "length": (
        "reward hacking by length",
        (*SUMS, *scored_by("longer"), "generation.max_completion_length=24",
         "train.learning_rate=3e-4"),
    ),
    "drowned": (
        "one reward drowns the others",
        (*SUMS, "reward=[exact_match,length_chars]", "reward.length_chars.weight=100",
         "reward.exact_match.column=answer", "reward.exact_match.extract=text"),
    ),
    "flat": ("no spread within groups", (*SUMS, *scored_by("constant"))),
    "truncated": (
        "all completions are truncated",
        (*SUMS, "generation.max_completion_length=1"),
    ),
    "kl": (
        "KL runs away",
        (*SUMS, *scored_by("sevens"), "algorithm.beta=1e-6", "train.learning_rate=1e-3"),
    ),
    "entropy": (
        "entropy collapse",
        (*SUMS, "train.learning_rate=1e-2", "algorithm.beta=1e-6"),
    ),
    "rounded": (
        "updates are rounded away",
        (*SUMS, "model.dtype=bfloat16", "train.learning_rate=1e-9"),
    ),
    "overfit": (
        "the held-out score falls",
        (*SUMS, "data.path={folder}/few.jsonl", "data.eval_split=null",
         "eval.sets.other.path=make:addition", "eval.sets.other.split=test", "eval.every=10",
         "max_steps=80", "train.prompts_per_step=4", "train.learning_rate=1e-3",
         "algorithm.beta=1e-6"),
    ),
    "one": (
        "one completion for all prompts",
        (*SUMS, *scored_by("one_answer"), "train.learning_rate=1e-3", "algorithm.beta=1e-6",
         "max_steps=50"),
    ),
    "duplicates": (
        "duplicate completions",
        (*SUMS, *scored_by("sevens"), "generation.temperature=0.05"),
    ),
    "noisy": (
        "high variance",
        (*SUMS, "train.prompts_per_step=1", "algorithm.num_generations=2", "max_steps=60"),
    ),
    "top_p": ("sampling is truncated", (*SUMS, "generation.top_p=0.5")),
    "mismatch": (
        "sampler and trainer disagree",
        (*SUMS, "generation=vllm_colocate", "generation.colocate.dtype=bfloat16", "max_steps=12"),
    ),
    "too_high": (
        "learning rate too high",
        (*SUMS, "train.learning_rate=3e-2", "algorithm.num_iterations=2"),
    ),
    "too_low": ("learning rate too low", (*SUMS, "train.learning_rate=1e-9")),
    "twice": (
        "data is seen twice",
        (*SUMS, "data.path={folder}/doubled.jsonl", "data.eval_split=null"),
    ),
    # The model was taught a and b.
    "calls": (
        "tools or environments fail",
        (*EPISODES, "agent.tools=[{folder}/tools.py:multiply]", "max_steps=12"),
    ),
    "ignored": ("the reward ignores the completion", (*SUMS, *scored_by("of_the_prompt"))),
}  # fmt: skip
HEALTHY: dict[str, Words] = {
    "sums, rloo": SUMS,
    "sums, grpo": (*SUMS, "algorithm=grpo"),
    "sums, reinforce": (*SUMS, "algorithm=reinforce"),
    "sums, reinforce_pp_baseline": (*SUMS, "algorithm=reinforce_pp_baseline"),
    "sums, remax": (*SUMS, "algorithm=remax"),
    "sums, ppo": (*SUMS, "algorithm=ppo", "max_steps=15"),
    "sums, cispo": (*SUMS, "algorithm=cispo"),
    "sums, two passes": (*SUMS, "algorithm.num_iterations=2"),
    "sums, an adapter": (*SUMS, "lora=default", "train.learning_rate=1e-3"),
    "sums, bfloat16": (*SUMS, "model.dtype=bfloat16"),
    "words, two rewards": WORDS,
    "products, a tool": EPISODES,
    "words, vLLM": (*WORDS, "generation=vllm_colocate"),
}


def write_files(folder: Path) -> None:
    """The rewards, a tool, and the sums of the quickstart with every row of a few hundred twice."""
    from rloo_cli.data.synthetic.addition import addition_examples

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "tools.py").write_text(TOOLS)
    rows = addition_examples("train")[:150]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, *rows])
    (folder / "doubled.jsonl").write_text(text)
    (folder / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:4]))


def words_of(name: str, words: Words, seed: int) -> Words:
    """The words as they are run; a function stands in the place of the recipe's reward."""
    folder = str((HERE / ROOT).resolve())
    given = [word.replace("{folder}", folder) for word in words]
    scored = [word for word in given if word.startswith("reward.NAME.path=")]
    given = [word for word in given if word not in scored]
    for word in scored:
        given += ["reward=function", word.replace("NAME", "function")]
    return (*given, f"seed={seed}", f"root={ROOT}", f"name={folder_of(name, seed).name}")


def folder_of(name: str, seed: int) -> Path:
    return ROOT / f"{name.replace(', ', '-').replace(' ', '_')}-{seed}"


def run_one(name: str, kind: str, wanted: str, words: Words, seed: int) -> None:
    """Train, diagnose, and keep a row."""
    given = words_of(name, words, seed)
    began = time.perf_counter()
    trained = subprocess.run(
        [sys.executable, "-m", "rloo_cli", "train", *given], text=True, capture_output=True
    )
    found = findings_of(name, seed, trained.stderr[-2000:])
    row = {
        "kind": kind, "name": name, "seed": seed, "wanted": wanted,
        "words": [*words, f"seed={seed}"], "findings": found,
        "code": trained.returncode, "seconds": time.perf_counter() - began,
    }  # fmt: skip
    results.append([row], ROWS)
    print(f"{name} seed {seed}: {[finding['name'] for finding in found]}", flush=True)


def findings_of(name: str, seed: int, said: str = "") -> list[results.Row]:
    """What doctor says of a run's folder; `said` goes into the error where it says nothing."""
    told = subprocess.run(
        [sys.executable, "-m", "rloo_cli", "doctor", str(folder_of(name, seed)), "--json"],
        text=True, capture_output=True,
    )  # fmt: skip
    if told.returncode not in (0, 20):
        raise SystemExit(f"{name}: {said}{told.stderr}")
    return list(json.loads(told.stdout)["findings"])


def diagnose_again() -> None:
    """Every row's findings anew, from its run's folder: doctor only reads, so none is repeated."""
    from rloo_cli.inspection.diagnosis import diagnose_run

    rows = results.read(ROWS)
    for row in rows:
        found = diagnose_run(folder_of(row["name"], row["seed"])).findings
        row["findings"] = [
            {"name": one.name, "figures": one.figures, "fix": one.fix} for one in found
        ]
    ROWS.write_text("")
    results.append(rows, ROWS)


def run_all(seeds: list[int]) -> None:
    """Every run that has no row yet."""
    write_files(ROOT)
    done = {(row["name"], row["seed"]) for row in results.read(ROWS)} if ROWS.exists() else set()
    for seed in seeds:
        for name, (wanted, words) in SICK.items():
            if (name, seed) not in done:
                run_one(name, "sick", wanted, words, seed)
    for name, words in HEALTHY.items():
        if (name, 1) not in done:
            run_one(name, "healthy", "", words, 1)


def page() -> None:
    """The tables between the marks of docs/doctor.md."""
    rows = results.read(ROWS)
    text = PAGE.read_text(encoding="utf-8")
    for kind, made in (("sick", sick_table(rows)), ("healthy", healthy_table(rows))):
        begin, end = BEGIN.format(kind), END.format(kind)
        head, tail = text[: text.index(begin) + len(begin)], text[text.index(end) :]
        text = f"{head}\n\n{made}\n\n{tail}"
    PAGE.write_text(text, encoding="utf-8")


def sick_table(rows: list[results.Row]) -> str:
    """A line a fault: what was named on each seed of which every run is there."""
    ran = collections.Counter(row["seed"] for row in rows if row["kind"] == "sick")
    seeds = sorted(seed for seed, count in ran.items() if count == len(SICK))
    lines = [f"| fault | {' | '.join(f'named on seed {s}' for s in seeds)} |"]
    lines.append("|---" * (1 + len(seeds)) + "|")
    hits = dict.fromkeys(seeds, 0)
    for name, (wanted, _) in SICK.items():
        cells = []
        for seed in seeds:
            found = [r for r in rows if r["name"] == name and r["seed"] == seed]
            names = [finding["name"] for row in found[-1:] for finding in row["findings"]]
            hits[seed] += wanted in names
            others = [other for other in names if other != wanted]
            said = ("yes" if wanted in names else "**no**") if found else "not run"
            cells.append(said + (f"; also: {', '.join(others)}" if others else ""))
        lines.append(f"| {wanted} | {' | '.join(cells)} |")
    lines.append(f"| together | {' | '.join(f'{n} of {len(SICK)}' for n in hits.values())} |")
    return "\n".join(lines)


def healthy_table(rows: list[results.Row]) -> str:
    """A line a healthy run."""
    lines = ["| run | found |", "|---|---|"]
    for name in HEALTHY:
        found = [row for row in rows if row["name"] == name]
        names = [finding["name"] for row in found[-1:] for finding in row["findings"]]
        said = (", ".join(names) or "nothing") if found else "not run"
        lines.append(f"| {name} | {said} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--again", action="store_true", help="diagnose all folders anew")
    given = parser.parse_args()
    if given.again:
        diagnose_again()
    elif not given.page:
        run_all(given.seeds)
    page()


if __name__ == "__main__":
    main()

"""Runs with a fault really in them, and healthy ones: what `rloo doctor RUN` says of each.

    python bench/pathologies.py [--seeds 1 2]    all runs that have no row yet, one after the other
    python bench/pathologies.py --page           the tables of docs/doctor.md, from the rows

The faults are a learning rate, a reward, a dtype, a data set or a key of sampling; no file of a run
is edited.
Thresholds were set on seed 1 and are shown on seed 2. A row of bench/pathologies.jsonl a run.
"""

import argparse
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
    return [float(len(text) % 7) for text in texts(prompts)]

def noise(completions, **kwargs):
    return [random.Random(next(calls)).random() for _ in completions]

def constant(completions, **kwargs):
    return [1.0 for _ in completions]

def few_letters(completions, **kwargs):
    return [-float(len(set(text))) for text in texts(completions)]
"""

SUMS: Words = (
    "+recipe=quickstart", "max_steps=30", "train.prompts_per_step=16", "eval.max_samples=50",
    "eval.every=0", "logging.samples_every=1", "resume=never",
)  # fmt: skip
WORDS: Words = (
    "+recipe=smoke", "max_steps=30", "train.prompts_per_step=8", "logging.samples_every=1",
    "train.learning_rate=3e-3", "train.lr_scheduler=constant", "algorithm.num_generations=8",
)  # fmt: skip


def scored_by(name: str) -> Words:
    """The words that make a function of the file above the only reward."""
    return (f"reward.NAME.path={{folder}}/rewards.py:{name}",)


SICK: dict[str, tuple[str, Words]] = {
    "length": ("reward hacking by length", (*WORDS, *scored_by("longer"))),
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
        (*WORDS, *scored_by("few_letters"), "algorithm.beta=0", "train.learning_rate=1e-2"),
    ),
    "entropy": (
        "entropy collapse",
        (*SUMS, *scored_by("noise"), "train.learning_rate=1e-3", "algorithm.beta=0"),
    ),
    "rounded": (
        "updates are rounded away",
        (*SUMS, "model.dtype=bfloat16", "train.learning_rate=1e-9"),
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
    "words, two rewards": (*WORDS, "train.learning_rate=1e-3"),
    "words, vLLM": (*WORDS, "train.learning_rate=1e-3", "generation=vllm_colocate"),
}


def write_files(folder: Path) -> None:
    """The rewards, and the sums of the quickstart with every row of a few hundred twice."""
    from rloo_cli.data.synthetic.addition import addition_examples

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards.py").write_text(REWARDS)
    rows = addition_examples("train")[:150]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, *rows])
    (folder / "doubled.jsonl").write_text(text)


def words_of(name: str, words: Words, seed: int) -> Words:
    """The words as they are run; a function stands in the place of the recipe's reward."""
    folder = str((HERE / ROOT).resolve())
    given = [word.replace("{folder}", folder) for word in words]
    scored = [word for word in given if word.startswith("reward.NAME.path=")]
    given = [word for word in given if word not in scored]
    for word in scored:
        given += ["reward=function", word.replace("NAME", "function")]
    return (
        *given,
        f"seed={seed}",
        f"root={ROOT}",
        f"name={name.replace(', ', '-').replace(' ', '_')}-{seed}",
    )


def run_one(name: str, kind: str, wanted: str, words: Words, seed: int) -> None:
    """Train, diagnose, and keep a row."""
    given = words_of(name, words, seed)
    began = time.perf_counter()
    trained = subprocess.run(
        [sys.executable, "-m", "rloo_cli", "train", *given], text=True, capture_output=True
    )
    folder = ROOT / given[-1].removeprefix("name=")
    told = subprocess.run(
        [sys.executable, "-m", "rloo_cli", "doctor", str(folder), "--json"],
        text=True, capture_output=True,
    )  # fmt: skip
    if told.returncode not in (0, 20):
        raise SystemExit(f"{name}: {trained.stderr[-2000:]}{told.stderr}")
    found = json.loads(told.stdout)["findings"]
    row = {
        "kind": kind, "name": name, "seed": seed, "wanted": wanted, "words": list(given[:-2]),
        "findings": found, "code": trained.returncode, "seconds": time.perf_counter() - began,
    }  # fmt: skip
    results.append([row], ROWS)
    print(f"{name} seed {seed}: {[finding['name'] for finding in found]}", flush=True)


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
    """A line a fault: what was named on each seed."""
    lines = ["| fault | named on seed 1 | named on seed 2 |", "|---|---|---|"]
    hits = {1: 0, 2: 0}
    for name, (wanted, _) in SICK.items():
        cells = []
        for seed in (1, 2):
            found = [r for r in rows if r["name"] == name and r["seed"] == seed]
            names = [finding["name"] for row in found[-1:] for finding in row["findings"]]
            hits[seed] += wanted in names
            others = [other for other in names if other != wanted]
            said = ("yes" if wanted in names else "**no**") if found else "not run"
            cells.append(said + (f"; also: {', '.join(others)}" if others else ""))
        lines.append(f"| {wanted} | {' | '.join(cells)} |")
    lines.append(f"| together | {hits[1]} of {len(SICK)} | {hits[2]} of {len(SICK)} |")
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
    given = parser.parse_args()
    if not given.page:
        run_all(given.seeds)
    page()


if __name__ == "__main__":
    main()

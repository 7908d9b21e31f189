"""The size of the whole: it only goes down, or up with a line that says what the addition is worth.

`python tests/house/test_size.py` prints the lines of each folder beside its limit,
and those of the parts that docs/house.md lists. A limit is what
was reached when it was last lowered. To raise one, add to ADDITIONS what the lines are for; never
meet it by denser lines, lost docstrings or shorter names.
"""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SUFFIXES = {"rloo_cli": ".py", "tests": ".py", "bench": ".py", "docs": ".md"}
LIMITS = {"rloo_cli": 77_550, "tests": 74_010, "bench": 8_381, "docs": 6_730}
# What was added after the limits were set: (folder, lines, what they are worth to a user).
ADDITIONS: list[tuple[str, int, str]] = [
    ("rloo_cli", 108, "`rloo docs`: a wheel's users read the pages that errors name"),
    ("tests", 140, "its tests, and those of formulas and names on the site"),
    (
        "rloo_cli",
        70,
        "a sampler that is wrong in long contexts alone is named by doctor and report",
    ),
    ("tests", 60, "the same"),
    ("rloo_cli", 300, "a trust region for tokens, adaptive entropy, tokens of high entropy, MaxRL"
     " and pass@k: what peers have in common, equal to verl and TRL, in any algorithm"),
    ("tests", 560, "the same: verl's vectors, TRL's gradients, expectations, stops, two ranks"),
    ("bench", 20, "verl's own DPPO beside ours"),
    ("docs", 95, "what these compute, with their formulas, keys and metrics"),
    ("rloo_cli", 240, "another vLLM is asked what it has; transformers up to 5.22"),
    ("tests", 390, "the lowest and the newest versions, and what a vLLM may lack"),
    ("docs", 50, "the table of tested versions"),
    ("tests", 10, "a step of masked completions alone; a resumed run that is recorded"),
    ("tests", 40, "a sweep by its name in compare, one error a key, UTF-16, Slurm's unused GPUs"),
    ("rloo_cli", 210, "forced answers: a completion that thinks too long still gets a score, and no"
     " step waits for it"),
    ("tests", 460, "the same: gradients, limits, records, three samplers, refusals"),
    ("docs", 25, "the same"),
    ("bench", 10, "peaks beside versus_before; long completions and long prompts"),
    ("rloo_cli", 20, "what two readers of the reading path read twice"),
    ("rloo_cli", 560, "a run ends at a score that is sure, and others can check a record of it"),
    ("tests", 360, "the same: five ways to tamper with a record, twice; the clock over a stop"),
    ("rloo_cli", 7, "a fork bomb in the sandbox is ended on a busy machine, too"),
    ("bench", 82, "what a captured decode step of our own sampler is worth; a setting beside none"),
    ("tests", 42, "train.compile with the sampler that trains the same layers"),
    ("rloo_cli", 22, "a model file of one's own without its defaults list is one error, not 17"),
    ("tests", 19, "the same; a source of a mixture without its weight is not taken for it"),
    ("tests", 16, "the share of forced answers computed once more from what a run wrote"),
    ("tests", 8, "the package is parsed once for all checks of its source: CI on a slow host"),
    ("bench", 35, "the products of a step counted: how much of the ratio to TRL is arithmetic"),
    ("tests", 14, "the same"),
]  # fmt: skip


def folder_lines(folder: str) -> int:
    """The lines of a folder's files, of Python or of Markdown."""
    files = (ROOT / folder).rglob(f"*{SUFFIXES[folder]}")
    return sum(len(path.read_text().splitlines()) for path in files)


def line_limit(folder: str) -> int:
    """A folder's limit, with what was added since it was set."""
    return LIMITS[folder] + sum(lines for name, lines, _ in ADDITIONS if name == folder)


def test_no_folder_outgrows_its_limit() -> None:
    sizes = {folder: folder_lines(folder) for folder in LIMITS}
    print("lines:", sizes)
    assert not {f: (n, line_limit(f)) for f, n in sizes.items() if n > line_limit(f)}


def test_each_addition_says_what_it_is_worth() -> None:
    assert all(folder in LIMITS and lines > 0 and worth for folder, lines, worth in ADDITIONS)


# The parts of the table in docs/house.md -> their files.
PARTS = {
    "data": "data/*.py",
    "config": "config/*.py",
    "vLLM": "generation/vllm/**/*.py generation/vllm_*.py launch/rollout_server.py"
    " cli/vllm_serve.py",
    "agents": "agents/**/*.py config/agent.py",
    "compat": "compat/**/*.py cli/migrate.py",
    "algorithms": "algorithms/**/*.py",
    "planning": "planning/*.py cli/plan.py",
    "launcher, Slurm": "launch/*.py cli/slurm*.py",
    "distributed": "distributed/*.py",
    "packed forward": "data/packing.py data/bin_packing.py data/sampling_mask.py"
    " policy/*_attention.py policy/*_head.py policy/layout*.py policy/flash_kernels.py"
    " policy/row_selection.py",
    "sweeps": "launch/sweep/*.py cli/sweep.py cli/multirun.py",
    "checkpoint": "checkpoint/*.py",
    "made models, data": "data/synthetic/*.py",
    "evaluation": "evaluation/**/*.py cli/eval*.py",
    "images": "data/image*.py data/*media.py data/vision_processor.py data/web_files.py"
    " policy/vision.py data/synthetic/vision_model.py data/synthetic/pictures.py"
    " generation/vllm/engine_images.py",
    "reward engine": "rewards/engine/*.py",
    "report, panel": "inspection/report/*.py reporting/curves.py reporting/panel.py",
    "replay": "inspection/step_*.py inspection/replay*.py inspection/reward_what_if.py"
    " inspection/first_difference.py inspection/resume_proof.py cli/replay.py cli/verify_resume.py",
    "doctor": "inspection/environment/*.py inspection/diagnosis/*.py cli/doctor.py",
    "rewards' helpers": "rewards/common/*.py",
}  # fmt: skip


def part_lines(patterns: str) -> int:
    """The lines of a part of the package."""
    files = {path for pattern in patterns.split() for path in (ROOT / "rloo_cli").glob(pattern)}
    return sum(len(path.read_text().splitlines()) for path in files)


if __name__ == "__main__":
    for name in LIMITS:
        print(f"{name:20} {folder_lines(name):7,} of {line_limit(name):7,}")
    for name, patterns in PARTS.items():
        print(f"{name:20} {part_lines(patterns):7,}")

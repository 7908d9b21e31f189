"""What generation.overlap gains and what it costs: seconds of a step, and learning curves.

    python bench/overlap.py                    all stages; what was cut goes on
    python bench/overlap.py --stages speed     some: speed, curves, real, lengths
    python bench/overlap.py --table            only print the tables, from bench/overlap.jsonl

`speed`: real vLLM on the CPU, a random model with completions of very different lengths (stop ids
of one percent of its words), server and trainer on one core each, and `both`: without overlap, with
both cores for either. One server for all runs; rounds go A B C D A B C D and medians are shown.
Beside each the seconds that `planning/overlap_times.py` predicts from the parts of `none`: its
seconds of sampling are fitted to its steps as `a * longest + b * tokens`.

`curves`: quickstart with several seeds, held out before and after. `real`: SmolLM2-135M-Instruct
adds two numbers, 30 steps. Runs lie in runs/overlap; each that ends is a row of bench/overlap.jsonl
and is not done again.

`lengths`: the mean completion length of 2,000 prompts, with a learning rate of 0, so that a step's
lengths depend only on which groups it takes. The policy samples for itself.
"""

import argparse
import itertools
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import results

from rloo_cli.config import check, synthetic
from rloo_cli.config.compose import compose_config
from rloo_cli.launch import rollout_server
from rloo_cli.planning.overlap_times import StepParts, simulate_overlap

ROWS, ROOT = Path(__file__).with_name("overlap.jsonl"), Path("runs/overlap")
VOCABULARY, PROMPTS, K, LIMIT, STEPS, WARMUP_STEPS, ROUNDS = 8192, 32, 2, 512, 7, 2, 3
MICRO_BATCH_TOKENS = 1100  # of a group at most, and a sixth of a step
MODES = {
    "none": (),
    "ahead": ("generation.overlap=ahead",),
    "carry": ("generation.overlap=carry", "generation.max_lag=2"),
    "both": (),  # without overlap, with both cores for sampler and trainer
}
Row = results.Row
CURVES: dict[str, tuple[str, ...]] = {
    "none": (),
    "ahead": ("generation.overlap=ahead",),
    "carry": ("generation.overlap=carry", "generation.max_lag=2"),
    "carry, max_lag 1": ("generation.overlap=carry", "generation.max_lag=1"),
    "carry, max_lag 4": ("generation.overlap=carry", "generation.max_lag=4"),
    "ahead, uncorrected": (
        "generation.overlap=ahead", "algorithm.correction.mode=none",
        "generation.allow_uncorrected=true",
    ),
}  # fmt: skip
SEEDS = {"none": 5, "ahead": 5, "carry": 5}  # the others: 2
REAL = ("none", "ahead", "carry")
LENGTH_MODES = ("none", "carry", "carry, max_lag 4")
LENGTH_STEPS, LENGTH_PROMPTS = 50, 40


def make_model(folder: Path) -> None:
    """A random Qwen3 of 6 M parameters, with a byte tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=1024,
            tie_word_embeddings=True, eos_token_id=1, pad_token_id=0,
        )
    ).save_pretrained(folder)  # fmt: skip
    AutoTokenizer.from_pretrained(synthetic.resolve_model_path("make:tiny")).save_pretrained(folder)


def words_of(model: Path, *more: str) -> list[str]:
    """The command line of a run with this model and a server."""
    stops = ",".join(map(str, range(2, VOCABULARY, 100)))  # one word of a hundred ends a completion
    return [
        "+recipe=smoke", "generation=vllm_server", f"model.path={model}", f"max_steps={STEPS}",
        f"train.prompts_per_step={PROMPTS}", f"algorithm.num_generations={K}",
        f"generation.max_completion_length={LIMIT}", f"generation.stop_token_ids=[{stops}]",
        f"train.micro_batch_tokens={MICRO_BATCH_TOKENS}", "eval.at_start=false", "eval.every=0",
        "checkpoint.every=0", "logging.rollouts_every=1", "algorithm.beta=0.05",
        "reward.length_tokens.scope=group", "reward.unique_chars.scope=group", *more,
    ]  # fmt: skip


@contextmanager
def server_on_cores(model: Path, folder: Path, cores: set[int]) -> Iterator[str]:
    """A rollout server that may use these cores. -> its address"""
    everything = os.sched_getaffinity(0)
    folder.mkdir(parents=True)
    run = check.check_config(compose_config(words_of(model, f"root={folder}", "name=server")))
    os.sched_setaffinity(0, cores)
    try:
        process = rollout_server.start_server(
            folder, check.dump_config(run), "bench", {"OMP_NUM_THREADS": str(len(cores))}
        )
    finally:
        os.sched_setaffinity(0, everything)
    try:
        record = rollout_server.wait_for_server(process, run.generation.server.ready_timeout_s)
        assert record is not None
        yield record.url
    finally:
        rollout_server.stop_server(process)


def train(words: Sequence[str], cores: set[int]) -> Path:
    """Do a run on these cores. -> its folder"""
    root = next(w.removeprefix("root=") for w in words if w.startswith("root="))
    name = next(w.removeprefix("name=") for w in words if w.startswith("name="))
    command = [sys.executable, "-m", "rloo_cli", "train", *words]
    ended = subprocess.run(
        command, preexec_fn=lambda: os.sched_setaffinity(0, cores), stdout=subprocess.DEVNULL
    )
    if ended.returncode:
        raise SystemExit(f"exit {ended.returncode}: rloo train {' '.join(words)}")
    return Path(root) / name


def steps_of(folder: Path) -> list[Row]:
    """The logged training steps of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "step_time" in line]


def speed(modes: Sequence[str], rounds: int) -> None:
    """The stage `speed`: so many rounds more than there are."""
    begun = 1 + max((row["round"] for row in rows_of("speed")), default=-1)
    os.environ["RLOO_SERVER_TOKEN"] = "a token for the bench"
    with tempfile.TemporaryDirectory(prefix="rloo-overlap-") as home:
        model = Path(home) / "model"
        make_model(model)
        with (
            server_on_cores(model, Path(home) / "one", {1}) as one,
            server_on_cores(model, Path(home) / "two", {0, 1}) as two,
        ):
            for number, mode in itertools.product(range(begun, begun + rounds), modes):
                url, cores = (two, {0, 1}) if mode == "both" else (one, {0})
                words = words_of(
                    model, *MODES[mode], f"generation.server.base_url='{url}'", f"root={home}",
                    f"name={mode.replace(', ', '-')}-{number}",
                    f"distributed.threads={len(cores)}",
                )  # fmt: skip
                folder = train(words, cores)
                results.append([speed_row(mode, number, folder)], ROWS)
                shutil.rmtree(folder)
                print_speed()


def lengths(modes: Sequence[str]) -> None:
    """The stage `lengths`: a run of each of these modes."""
    with tempfile.TemporaryDirectory(prefix="rloo-overlap-") as home:
        model = Path(home) / "model"
        make_model(model)
        stops = ",".join(map(str, range(2, VOCABULARY, 16)))  # completions of 16 tokens
        for mode in modes:
            name = mode.replace(", ", "-").replace(" ", "")
            words = words_of(
                model, *CURVES[mode], f"root={home}", f"name={name}",
                "generation=transformers", "train.learning_rate=0",
                f"train.prompts_per_step={LENGTH_PROMPTS}",
                f"generation.stop_token_ids=[{stops}]", "generation.max_completion_length=128",
                f"max_steps={LENGTH_STEPS}", "logging.rollouts_every=0",
            )  # fmt: skip
            folder = train(
                [w for w in words if w != "generation=vllm_server"], os.sched_getaffinity(0)
            )
            means = [step["completions/mean_length"] for step in steps_of(folder)]
            last = json.loads((folder / "ledger.jsonl").read_text().splitlines()[-1])
            row = {"stage": "lengths", "mode": mode, "commit": commit(), "means": means,
                   "in_flight": len(last.get("pending", []))}  # fmt: skip
            results.append([row], ROWS)


def print_lengths() -> None:
    """The table of the stage `lengths`: the last run of each mode at each commit.

    The standard error of a mean is that of its steps' means, which have equally many completions.
    """
    rows = {(row["commit"], row["mode"]): row for row in rows_of("lengths") if "in_flight" in row}
    if rows:
        print("\n| commit | overlap | prompts | mean length | of the first ten steps "
              "| groups in flight at the end |\n|---|---|---|---|---|---|")  # fmt: skip
    for (measured, mode), row in rows.items():
        means = row["means"]
        error = statistics.stdev(means) / math.sqrt(len(means))
        first = ", ".join(f"{mean:.0f}" for mean in means[:10])
        print(f"| {measured} | {mode} | {LENGTH_PROMPTS * len(means)} "
              f"| {statistics.mean(means):.2f} +- {error:.2f} | {first} "
              f"| {row['in_flight']} |")  # fmt: skip


def speed_row(mode: str, number: int, folder: Path) -> Row:
    """What is kept of a run of the stage `speed`."""
    steps = steps_of(folder)[WARMUP_STEPS:]
    phases = {name for step in steps for name in step if name.startswith(("time/", "overlap/"))}
    return {
        "stage": "speed", "mode": mode, "round": number, "commit": commit(),
        "step_s": [step["step_time"] for step in steps],
        "phases": {n: statistics.median(s.get(n, 0.0) for s in steps) for n in sorted(phases)},
        "sampling_s": [step.get("time/generation", 0.0) for step in steps],
        "lengths": [lengths_of(folder, step["step"]) for step in steps],
        "cpu": platform.processor() or platform.machine(), "loadavg": os.getloadavg()[0],
    }  # fmt: skip


def lengths_of(folder: Path, step: int) -> list[list[int]]:
    """The lengths of a recorded step's completions, group by group."""
    from rloo_cli.data import rollout_record

    groups = rollout_record.read_rollout_record(folder, step).batch.groups
    return [[len(rollout.completion_ids) for rollout in group.rollouts] for group in groups]


def commit() -> str:
    """The commit that is measured."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def rows_of(stage: str) -> list[Row]:
    """The rows of one stage."""
    return [row for row in results.read(ROWS) if row["stage"] == stage]


def predicted(rows: Sequence[Row]) -> dict[str, float]:
    """Seconds of a step by mode, from the parts of `none`; {} without such a row."""
    plain = [row for row in rows if row["mode"] == "none"]
    if not plain:
        return {}
    lengths = [step for row in plain for step in row["lengths"]]
    seconds = [s for row in plain for s in row["sampling_s"]]
    per_iteration, per_token = fit_sampling(lengths, seconds)
    times = [row["phases"] for row in plain]
    sent = statistics.median(t.get("time/sync", 0.0) for t in times)
    scored = statistics.median(t.get("time/reward", 0.0) for t in times)
    step = statistics.median(s for row in plain for s in row["step_s"])
    trained = step - statistics.median(seconds) - sent - scored
    found = [
        simulate_overlap(
            StepParts(
                of_step, lambda n: per_iteration + per_token * n, PROMPTS * K, train_s=trained,
                reward_s=scored, sync_s=sent,
            )
        )
        for of_step in lengths
    ]  # fmt: skip
    return {mode: statistics.median(f[mode] for f in found) for mode in found[0]}


def fit_sampling(
    lengths: Sequence[Sequence[Sequence[int]]], seconds: Sequence[float]
) -> tuple[float, float]:
    """Least squares of seconds = a * longest + b * tokens, neither below 0. -> a, b"""
    longest = [max(map(max, step)) for step in lengths]
    tokens = [sum(map(sum, step)) for step in lengths]
    best = (math.inf, 0.0, 0.0)
    for share in range(101):  # of the seconds that are of iterations, on the mean
        a = share / 100 * statistics.fmean(seconds) / statistics.fmean(longest)
        b = (1 - share / 100) * statistics.fmean(seconds) / statistics.fmean(tokens)
        pairs = zip(longest, tokens, seconds, strict=True)
        best = min(best, (sum((a * n + b * t - s) ** 2 for n, t, s in pairs), a, b))
    return best[1], best[2]


def print_speed() -> None:
    """The table of the stage `speed`."""
    rows = rows_of("speed")
    got = predicted(rows)
    print(
        "\n| overlap | seconds a step | against none | predicted | exposed | hidden | idle | runs |"
    )
    print("|---|---|---|---|---|---|---|---|")
    medians = {
        mode: statistics.median(statistics.median(r["step_s"]) for r in rows if r["mode"] == mode)
        for mode in MODES
        if any(r["mode"] == mode for r in rows)
    }
    for mode, seconds in medians.items():
        own = [r for r in rows if r["mode"] == mode]
        cells = [
            f"{statistics.median(r['phases'].get(f'overlap/{n}_s', 0.0) for r in own):.2f}"
            for n in ("exposed", "hidden", "idle")
        ]
        ratio = f"{medians['none'] / seconds:.2f}x" if "none" in medians else "-"
        guess = f"{got[mode]:.2f}" if mode in got else "-"
        print(f"| {mode} | {seconds:.2f} | {ratio} | {guess} | {' | '.join(cells)} | {len(own)} |")


def curves(stage: str, variants: Sequence[str]) -> None:
    """The stages `curves` and `real`: runs that are not there yet."""
    done = {(row["mode"], row["seed"]) for row in rows_of(stage)}
    most = max(SEEDS.values()) if stage == "curves" else 2
    for seed, mode in itertools.product(range(1, most + 1), variants):
        if (mode, seed) in done or (stage == "curves" and seed > SEEDS.get(mode, 2)):
            continue
        recipe = ("+recipe=quickstart",)
        if stage == "real":
            recipe = ("+recipe=smollm2_arithmetic", "max_steps=30")
        name = f"{mode.replace(', ', '-').replace(' ', '')}-{seed}"
        words = (*recipe, *CURVES[mode], f"seed={seed}", f"root={ROOT / stage}", f"name={name}")
        folder = train(words, os.sched_getaffinity(0))
        results.append([curve_row(stage, mode, seed, folder)], ROWS)
        print_curves(stage)


def curve_row(stage: str, mode: str, seed: int, folder: Path) -> Row:
    """What is kept of a run of these stages."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    held_out = [(line["step"], line["eval_reward"]) for line in lines if "eval_reward" in line]
    lags = [line["staleness/mean"] for line in lines if "staleness/mean" in line]
    return {
        "stage": stage, "mode": mode, "seed": seed, "commit": commit(), "held_out": held_out,
        "rewards": [(line["step"], line["reward"]) for line in lines if "reward" in line],
        "lag": statistics.fmean(lags), "seconds": sum(s["step_time"] for s in steps_of(folder)),
    }  # fmt: skip


def print_curves(stage: str) -> None:
    """The table of `curves` or `real`: held out at the end, mean and its 95 % interval."""
    rows = rows_of(stage)
    print(f"\n| {stage}: overlap | seeds | held out at the start | at the end | mean lag |")
    print("|---|---|---|---|---|")
    for mode in CURVES:
        own = [row for row in rows if row["mode"] == mode]
        if not own:
            continue
        first, last = ([row["held_out"][i][1] for row in own] for i in (0, -1))
        lag = statistics.fmean(row["lag"] for row in own)
        start = f"{statistics.fmean(first):.3f}"
        print(f"| {mode} | {len(own)} | {start} | {interval(last)} | {lag:.2f} |")


def interval(values: Sequence[float]) -> str:
    """The mean, and half of its 95 % interval by Student's t; of one value only itself."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    student = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}[len(values)]
    half = student * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.3f} ± {half:.3f}"


def main() -> None:
    """Do the stages that were asked for, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    stages = ("speed", "curves", "real", "lengths")
    parser.add_argument("--stages", nargs="+", choices=stages, default=list(stages))
    parser.add_argument("--modes", nargs="+", choices=sorted({*MODES, *CURVES}))
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of the stage speed")
    parser.add_argument("--table", action="store_true", help="only print the tables")
    args: Any = parser.parse_args()
    chosen = args.modes or [*MODES, *CURVES]
    if not args.table:
        if "speed" in args.stages:
            speed([mode for mode in MODES if mode in chosen], args.rounds)
        if "curves" in args.stages:
            curves("curves", [mode for mode in CURVES if mode in chosen])
        if "real" in args.stages:
            curves("real", [mode for mode in REAL if mode in chosen])
        if "lengths" in args.stages:
            lengths([mode for mode in LENGTH_MODES if mode in chosen])
    print_speed()
    for stage in ("curves", "real"):
        print_curves(stage)
    print_lengths()


if __name__ == "__main__":
    main()

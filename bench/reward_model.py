"""What a reward model's scores cost: text rows, padded, against the sampled ids on shared rows.

    python bench/reward_model.py                        10 M parameters, K=4, prompts of 400 tokens
    python bench/reward_model.py --prompts 8 --length 50 --rounds 5
    python bench/reward_model.py --memory              peak memory of 16, 64 and 256 rows, by ids

One random GPT-NeoX classifier scores the same rows in every way. `text` is what a reward model
does that knows nothing of the policy: it tokenises prompt and completion of each row, and pads.
`ids` are the sampled ones. Rounds go A B C D A B C D after one round that is not counted; medians
are shown, slower ways too. Scores are compared with the first way's before anything is timed.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from rich.console import Console
from rich.table import Table
from toys import EOS, FIRST, PAD, tokenizer

from rloo_cli import __version__
from rloo_cli.data.packing import LAYOUTS
from rloo_cli.policy import shared_attention
from rloo_cli.policy.reward_scores import RewardModelScorer
from rloo_cli.rewards.common.model_inputs import PromptCompletion, RewardInputEncoder

WORDS = 8192
WAYS = [("text", "padded"), *[("ids", layout) for layout in reversed(LAYOUTS)]]


def scorer(batch_size: int) -> RewardModelScorer:
    """A random reward model of about 10 M parameters beside its tables."""
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=WORDS, hidden_size=384, intermediate_size=1536, num_hidden_layers=6,
        num_attention_heads=6, max_position_embeddings=1024, num_labels=1, eos_token_id=EOS,
        pad_token_id=PAD,
    )  # fmt: skip
    model = transformers.GPTNeoXForSequenceClassification(config).eval().requires_grad_(False)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return RewardModelScorer(model, device, PAD, EOS, batch_size)


def rows(prompts: int, k: int, prompt: int, length: int) -> list[PromptCompletion]:
    """Rows of words, prompt-major; completions of half to all of `length`, all ended."""
    drawn = torch.Generator().manual_seed(1)

    def ids(low: int, high: int) -> list[int]:
        count = int(torch.randint(low, high + 1, (), generator=drawn))
        found: list[int] = torch.randint(FIRST, WORDS, (count,), generator=drawn).tolist()
        return found

    def text(words: list[int]) -> str:
        return " ".join(f"t{i}" for i in words)

    made = []
    for _ in range(prompts):
        asked = ids(prompt * 3 // 4, prompt * 5 // 4)
        for _ in range(k):
            said = ids(length // 2, length)
            made.append(
                PromptCompletion(text(asked), " " + text(said), asked, [*said, EOS], "stop")
            )
    return made


def readers() -> dict[str, RewardInputEncoder]:
    """By text, and by ids."""
    own = tokenizer(WORDS)
    found = {}
    for name, why in (("text", "input is text"), ("ids", None)):
        found[name] = RewardInputEncoder(own, own, name, True, None)
        found[name].why_not_ids = {False: why}
    return found


def timed(arguments: Any) -> list[tuple[str, str, float, float]]:
    """(what is read, layout, median seconds, spread) of every way."""
    made = rows(arguments.prompts, arguments.k, arguments.prompt, arguments.length)
    owners = [i // arguments.k for i in range(len(made))]
    model, reading = scorer(arguments.batch_size), readers()

    def score(kind: str, layout: str) -> list[float]:
        (
            shared_attention.install_shared_attention
            if layout == "shared"
            else shared_attention.uninstall_shared_attention
        )(model.model)
        model.layout = layout
        return model.score([reading[kind].encode(row) for row in made], owners)

    truth = torch.tensor(score(*WAYS[0]))
    for way in WAYS:  # the round that is not counted
        torch.testing.assert_close(torch.tensor(score(*way)), truth, rtol=1e-3, atol=1e-4)
    seconds: dict[tuple[str, str], list[float]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way in WAYS:
            began = time.perf_counter()
            score(*way)
            seconds[way].append(time.perf_counter() - began)
    return [(*w, statistics.median(s), max(s) - min(s)) for w, s in seconds.items()]


def resident(what: str) -> float:
    """VmRSS (now) or VmHWM (peak) of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {what} on this system")


def peak_of(arguments: argparse.Namespace) -> float:
    """MiB above what the model held, while so many prompts' rows are scored once more."""
    made = rows(arguments.prompts, arguments.k, arguments.prompt, arguments.length)
    owners = [i // arguments.k for i in range(len(made))]
    model, reading = scorer(arguments.batch_size), readers()["ids"]
    model.layout = "padded"
    shared_attention.uninstall_shared_attention(model.model)
    encoded = [reading.encode(row) for row in made]
    model.score(encoded[: arguments.k], owners[: arguments.k])
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    model.score(encoded, owners)
    return resident("VmHWM") - before


def memory(arguments: argparse.Namespace) -> None:
    """Print the peak of more and more rows, each in a process of its own."""
    here = [sys.executable, __file__, "--peak", "--k", str(arguments.k)]
    here += ["--prompt", str(arguments.prompt), "--length", str(arguments.length)]
    here += ["--batch-size", str(arguments.batch_size)]
    for count in (16, 64, 256):
        own = [*here, "--prompts", str(count // arguments.k)]
        found = [float(subprocess.check_output(own, text=True)) for _ in range(3)]
        print(f"{count:>4} rows: {statistics.median(found):.0f} MiB above the model's ({found})")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, usual in (("prompts", 4), ("k", 4), ("prompt", 400), ("length", 50),
                        ("batch-size", 16), ("rounds", 5)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--peak", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print(peak_of(arguments))
        return
    if arguments.memory:
        memory(arguments)
        return
    found = timed(arguments)
    a = arguments
    title = f"{a.prompts} prompts of about {a.prompt} tokens, K={a.k}, completions to {a.length}"
    table = Table("reads", "rows", "seconds", "spread", "times as fast", title=title)
    base = found[0][2]
    for kind, layout, median, spread in found:
        factor = f"{base / median:.2f}" + (" (slower)" if median > base else "")
        table.add_row(kind, layout, f"{median:.3f}", f"{spread:.3f}", factor)
    console = Console()
    console.print(table)
    console.print(
        f"rloo {__version__}, torch {torch.__version__}, transformers {transformers.__version__},"
        f" {torch.get_num_threads()} threads, {platform.machine()},"
        f" {torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}"
    )


if __name__ == "__main__":
    main()

"""Who samples how fast: our three backends and TRL's `generate`, on the same prompts and model.

    python bench/rollout.py                      sizes 1, 6 and 25 M parameters, 3 rounds
    python bench/rollout.py --sizes 1 6 --prompts 8 --length 24
    python bench/rollout.py --sizes 1 --servers 2 --prompts 64      one batch over two servers

Two engines are loaded for each size, and compile for their first batch: minutes on two cores.

Every completion has exactly `--length` tokens (stop ids are off), so that all do the same work.
Rounds go A B C D A B C D after one round that is not counted; medians are shown, and the spread.
Seconds per sync are those of a whole update as training does it: tensors, version, cache reset and
read-back. Each line is also appended to bench/results.jsonl.

On a machine with one GPU there is no row for vllm_server, which wants a GPU of its own. No GPU has
been tried yet.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from rloo_cli import __version__
from rloo_cli.config import check, registry, synthetic
from rloo_cli.config.compose import compose_config
from rloo_cli.data.batch import Group
from rloo_cli.generation.vllm import arguments
from rloo_cli.launch import rollout_server
from rloo_cli.policy.model import Policy

RESULTS = Path(__file__).with_name("results.jsonl")
SHAPES = {  # millions of parameters -> hidden, layers, heads, MLP
    1: (128, 4, 4, 384),
    6: (256, 4, 8, 768),
    25: (512, 8, 8, 1536),
}
BACKENDS = ("transformers", "vllm_server", "vllm_colocate")
Sample = Callable[[int], None]


def model(size: int, folder: Path) -> Any:
    """A random Qwen3 (workload W1's shape at 6 M), vocabulary 8192, with a byte tokenizer."""
    hidden, layers, heads, mlp = SHAPES[size]
    torch.manual_seed(0)
    made_here = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=8192, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads // 2, head_dim=64,
            max_position_embeddings=1024, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0,
        )
    )  # fmt: skip
    made_here.save_pretrained(folder)
    AutoTokenizer.from_pretrained(synthetic.resolve_model_path("make:tiny")).save_pretrained(folder)
    if torch.cuda.is_available():
        made_here.to("cuda", torch.bfloat16)
    return made_here.eval()


def prompts(count: int) -> list[list[int]]:
    """Random ids, 128 to 256 of them."""
    drawn = torch.Generator().manual_seed(1)
    lengths = torch.randint(128, 257, (count,), generator=drawn).tolist()
    return [torch.randint(2, 256, (n,), generator=drawn).tolist() for n in lengths]


@contextmanager
def several(count: int, folder: Path, args: Any) -> Iterator[list[str]]:
    """Words of a run that samples with `count` servers, which are there meanwhile."""
    os.environ["RLOO_SERVER_TOKEN"] = "a token for the bench"
    started = []
    try:
        for number in range(1, count + 1):
            root = folder / f"server-{number}"
            root.mkdir()
            started.append(
                rollout_server.start_server(
                    root, check.dump_config(run_of("vllm_server", folder, root, args)), "bench"
                )
            )
        run = run_of("vllm_server", folder, folder / "none", args)
        there = [
            rollout_server.wait_for_server(process, run.generation.server.ready_timeout_s)
            for process in started
        ]
        urls = ",".join(f"'{server.url}'" for server in there if server is not None)
        yield [f"generation.server.base_url=[{urls}]"]
    finally:
        for process in started:
            rollout_server.stop_server(process)


def run_of(backend: str, folder: Path, root: Path, args: Any, *more: str) -> Any:
    """The config of a run in `place`."""
    words = [
        "+recipe=smoke", f"generation={backend}", f"model.path={folder}", f"root={root.parent}",
        f"name={root.name}", f"generation.max_completion_length={args.length}",
        "generation.ignore_eos=true", "data.max_prompt_length=256", *more,
    ]  # fmt: skip
    return check.check_config(compose_config(words))


@contextmanager
def ours(
    backend: str, folder: Path, trained: Any, args: Any, more: Sequence[str] = ()
) -> Iterator[tuple[Sample, Any]]:
    """Our generator of one backend: what samples one batch, and what sends new weights."""
    root = folder / f"run-{backend}"
    run = run_of(backend, folder, root, args, *more)
    root.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    build = registry.load_code(registry.registered_module("generation", backend).IMPLEMENTATION)
    with rollout_server.background_server(root, run):
        generator = build(trained, tokenizer, run, 1024, root, lambda text: None)
        policy, version = Policy(trained, 1.0), iter(range(10**6))
        ids = prompts(args.prompts)

        def sample(number: int) -> None:
            groups = [Group(i, {}, "", prompt) for i, prompt in enumerate(ids)]
            seeds = [
                [number * 10**6 + i * args.k + j for j in range(args.k)] for i in range(len(ids))
            ]
            generator.generate(groups, seeds)
            assert all(r.length == args.length for g in groups for r in g.rollouts)

        def sync() -> None:
            generator.load(policy, next(version))

        sync()
        try:
            yield sample, sync
        finally:
            generator.close()


@contextmanager
def trl(folder: Path, trained: Any, args: Any) -> Iterator[tuple[Sample, Any]]:
    """The sampling of TRL 1.16's RLOOTrainer with transformers: its own method and settings."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl import RLOOConfig, RLOOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = RLOOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=args.prompts * args.k,
        num_generations=args.k, max_completion_length=args.length, temperature=1.0, beta=0.0,
        report_to=[], use_cpu=not torch.cuda.is_available(), bf16=False,
        generation_kwargs={"min_new_tokens": args.length},
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": "x"}] * args.prompts)
    trainer = RLOOTrainer(
        trained, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=settings,
        train_dataset=data, processing_class=tokenizer,
    )  # fmt: skip
    trainer.model.train()
    ids = [prompt for prompt in prompts(args.prompts) for _ in range(args.k)]

    def sample(number: int) -> None:
        torch.manual_seed(number)
        drawn = trainer._generate_single_turn(ids, None, {})
        rows = drawn[0] if isinstance(drawn, tuple) else drawn
        assert len(rows) == len(ids) and all(len(row) == args.length for row in rows)

    yield sample, None


def measure(size: int, args: Any) -> list[dict[str, Any]]:
    """All four on one model; a row each."""
    with tempfile.TemporaryDirectory(prefix="rloo-bench-") as root, ExitStack() as held:
        folder = Path(root) / "model"
        trained = model(size, folder)
        if args.servers:
            words = held.enter_context(several(args.servers, folder, args))
            tools = {"vllm_server": held.enter_context(
                ours("vllm_server", folder, trained, args, words)
            )}  # fmt: skip
            return timed(tools, trained, args)
        backends = [b for b in BACKENDS if b != "vllm_server" or len(arguments.visible_gpus()) != 1]
        tools = {b: held.enter_context(ours(b, folder, trained, args)) for b in backends}
        tools["trl"] = held.enter_context(trl(folder, trained, args))
        return timed(tools, trained, args)


def timed(tools: dict[str, tuple[Sample, Any]], trained: Any, args: Any) -> list[dict[str, Any]]:
    """Each in turn, round after round; a row each."""
    seconds: dict[str, list[float]] = {name: [] for name in tools}
    syncs: dict[str, list[float]] = {name: [] for name in tools}
    for number in range(args.rounds + 1):
        for name, (sample, sync) in tools.items():
            if sync is not None:
                began = time.perf_counter()
                sync()
                syncs[name].append(time.perf_counter() - began)
            began = time.perf_counter()
            sample(number)
            seconds[name].append(time.perf_counter() - began)
    parameters = sum(p.numel() for p in trained.parameters())
    return [row(name, parameters, seconds[name][1:], syncs[name][1:], args) for name in tools]


def row(
    name: str, parameters: int, seconds: list[float], syncs: list[float], args: Any
) -> dict[str, Any]:
    """One tool's line of results.jsonl."""
    middle, count = statistics.median(seconds), args.prompts * args.k
    return {
        "tool": "trl" if name == "trl" else "rloo",
        "version": __version__,
        "workload": "rollout",
        "backend": name,
        "parameters": parameters,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "vllm": arguments.installed_vllm_version(),
        "K": args.k,
        "B": count,
        "length": args.length,
        "servers": args.servers or 1,
        "threads": torch.get_num_threads(),
        "rounds": len(seconds),
        "s_batch": middle,
        "s_batch_least": min(seconds),
        "s_batch_most": max(seconds),
        "completions_per_s": count / middle,
        "tokens_per_s": count * args.length / middle,
        "s_sync": statistics.median(syncs) if syncs and name != "transformers" else None,
        "loadavg": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    table = Table("parameters", "sampler", "s per batch", "least - most", "completions/s",
                  "tokens/s", "s per sync")  # fmt: skip
    for r in rows:
        spread = f"{r['s_batch_least']:.3f} - {r['s_batch_most']:.3f}"
        name = "TRL 1.16 transformers" if r["tool"] == "trl" else f"rloo {r['backend']}"
        sync = "-" if r["s_sync"] is None else f"{r['s_sync']:.3f}"
        table.add_row(
            f"{r['parameters'] / 1e6:.1f} M", name, f"{r['s_batch']:.3f}", spread,
            f"{r['completions_per_s']:.1f}", f"{r['tokens_per_s']:.0f}", sync,
        )  # fmt: skip
    Console(width=110).print(table)


def main() -> None:
    """Measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--servers", type=int, default=0, help="only vllm_server, over so many")
    parser.add_argument("--keep", action="store_true", help="append to bench/results.jsonl")
    args = parser.parse_args()
    every = []
    for size in args.sizes:
        rows = measure(size, args)
        if args.keep or not args.servers:
            with RESULTS.open("a") as file:
                file.writelines(json.dumps(r) + "\n" for r in rows)
        every += rows
    show(every)


if __name__ == "__main__":
    main()

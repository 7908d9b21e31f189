"""The train phase with images against TRL's: seconds and peak memory on the same completions.

    python bench/images.py [--rounds 3] [--k 8]     rows of bench/images.jsonl, and the table
    python bench/images.py --table                  only the table

A random Qwen2.5-VL whose vision tower has most of the work, four prompts with a picture each, K
completions of each. `rloo` shows the tower every picture once, TRL 1.16's RLOOTrainer once for each
completion. Each side is a process of its own on one thread, rounds go A B C A B C, and medians are
shown. Measured is everything from the completions to the optimizer's step: reference, old
log-probabilities, forward, backward. Memory is the peak above what the process held before.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import results

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE / "tests/support"))
ROWS = Path(__file__).with_name("images.jsonl")
SIDES = {"rloo": "rloo", "trl": "TRL, all rows at once", "trl-k": "TRL, a group at once"}
STEPS, PROMPTS, SIZE, LENGTH = 3, 4, 224, 32


def model_folder(place: Path) -> Path:
    """A random Qwen2.5-VL of 10 M parameters with its processor, and `rows.jsonl` with pictures."""
    import torch
    import transformers as T
    import vision_cases as v

    def larger(values: dict[str, Any], **more: Any) -> dict[str, Any]:
        return values | more

    v.TEXT = larger(v.TEXT, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
                    num_attention_heads=8, num_key_value_heads=4)  # fmt: skip
    kind, config, processor = v.MAKERS["qwen2_5_vl"]()
    tower = {"depth": 8, "hidden_size": 256, "intermediate_size": 768, "num_heads": 8,
             "out_hidden_size": 256, "patch_size": 14, "window_size": 112,
             "fullatt_block_indexes": [3, 7]}  # fmt: skip
    config.vision_config = T.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(
        **(config.vision_config.to_dict() | tower)
    )
    processor.image_processor = T.Qwen2VLImageProcessorPil(
        patch_size=14, merge_size=2, min_pixels=56 * 56, max_pixels=SIZE * SIZE
    )
    torch.manual_seed(0)
    kind(config).save_pretrained(place / "model")
    processor.chat_template = processor.tokenizer.chat_template
    processor.save_pretrained(place / "model")
    lines = []
    for number in range(PROMPTS * STEPS):
        v.picture(SIZE, SIZE, number).save(place / f"{number}.png")
        prompt = [{"role": "user", "content": f"what {number}?"}]
        lines.append(json.dumps({"prompt": prompt, "images": [f"{number}.png"], "answer": "1"}))
    (place / "rows.jsonl").write_text("\n".join(lines) + "\n")
    return place


def resident(what: str) -> float:
    """VmRSS (now) or VmHWM (peak) of this process in GiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) / 2**20
    raise RuntimeError(f"no {what} on this system")


def forget_peak() -> float:
    """The peak begins anew. -> what is held now, GiB"""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def side(name: str, place: Path, k: int) -> dict[str, float]:
    """Seconds of a step (median), and the peak above the start in GiB."""
    import loop_cases
    from trl_cases import Ours, digits, trained

    from rloo_cli.run import StepProgress
    from rloo_cli.train.step import update_policy

    run = loop_cases.make(
        place / name, "data=default", f"model.path={place / 'model'}", "algorithm.beta=0.05",
        f"data.path={place / 'rows.jsonl'}", "data.eval_split=null", "data.shuffle=false",
        "data.max_prompt_length=256", f"train.prompts_per_step={PROMPTS}", "model.dtype=float32",
        f"algorithm.num_generations={k}", f"generation.max_completion_length={LENGTH}",
        "generation.ignore_eos=true", f"max_steps={STEPS}",
        *(["train.micro_batch_size=" + str(k * PROMPTS if name == "trl" else k)] if name != "rloo"
          else []),
    )  # fmt: skip
    seen, state = run.state.seen_by_rewards(run), run.state
    batches = [run.rollouts.next_batch(n, n * PROMPTS, seen) for n in range(STEPS)]
    seconds: list[float] = []
    if name == "rloo":
        before = forget_peak()
        for batch in batches:
            start = time.perf_counter()
            update_policy(run, StepProgress(batch))
            seconds.append(time.perf_counter() - start)
            state.advance(batch)
    else:
        import copy

        import trl
        from trl_cases import of_rloo, settings

        from rloo_cli.policy.shared_attention import native_attention

        with native_attention(run.policy.model):
            model = copy.deepcopy(run.policy.model)
        if hasattr(model, "rloo_native"):
            del model.rloo_native
        held: list[float] = []
        prepare, train = (
            trl.RLOOTrainer._generate_and_score_completions,
            trl.RLOOTrainer.training_step,
        )

        def prepared(self: Any, inputs: Any) -> Any:
            if not held:
                held.append(forget_peak())
            start = time.perf_counter()
            found = prepare(self, inputs)
            seconds.append(time.perf_counter() - start)
            return found

        def stepped(self: Any, *given: Any, **options: Any) -> Any:
            start = time.perf_counter()
            scored = len(seconds)
            found = train(self, *given, **options)
            inside = seconds[-1] if len(seconds) > scored else 0.0
            seconds[-1] += time.perf_counter() - start - inside
            return found

        trl.RLOOTrainer._generate_and_score_completions = prepared
        trl.RLOOTrainer.training_step = stepped
        args = settings(run, STEPS) | of_rloo(run) | {"output_dir": str(place / "out")}
        trained(Ours(run, batches), model, {"digits": digits}, args, False, "RLOO")
        before = held[0]
    return {"seconds": statistics.median(seconds), "gib": resident("VmHWM") - before}


def table() -> str:
    """Medians over the rounds."""
    rows = results.read(ROWS)
    lines = ["| train phase, 4 prompts with a picture of 224 x 224 | K | seconds | memory | runs |"]
    lines.append("|---|---|---|---|---|")
    for k in sorted({row["k"] for row in rows}):
        for name, what in SIDES.items():
            own = [row for row in rows if row["side"] == name and row["k"] == k]
            if own:
                seconds = statistics.median(row["seconds"] for row in own)
                gib = statistics.median(row["gib"] for row in own)
                lines.append(f"| {what} | {k} | {seconds:.2f} | {gib:.2f} GiB | {len(own)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the rounds, or one side of one, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--side", nargs=2, metavar=("NAME", "FOLDER"))
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.side:
        print("TOLD " + json.dumps(side(args.side[0], Path(args.side[1]), args.k)))
        return
    for _ in range(0 if args.table else args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            place = model_folder(Path(folder))
            for name in SIDES:
                (place / name).mkdir()
                env = os.environ | {"OMP_NUM_THREADS": "1", "CI": "1", "HF_HUB_OFFLINE": "1"}
                words = ["--side", name, folder, "--k", str(args.k)]
                done = subprocess.run([sys.executable, __file__, *words], env=env, text=True,
                                      capture_output=True)  # fmt: skip
                if done.returncode:
                    raise RuntimeError(done.stdout + done.stderr)
                told = json.loads(done.stdout.partition("TOLD ")[2].splitlines()[0])
                row = {"side": name, "k": args.k} | told
                print(json.dumps(row), flush=True)
                results.append([row], ROWS)
    print(table())


if __name__ == "__main__":
    main()

"""One tool in the race: it trains until its clock says so, and is scored on the way.

    python bench/race_side.py rloo|trl_rloo|trl_grpo --seed 1 --seconds 720 --folder F [--micro 64]
    python bench/race_side.py rloo|trl_rloo --proof GRADIENT.pt --folder F

The clock runs from the beginning of a step to the beginning of the next, so a step holds everything
that its loop does; loading and the held-out scores are outside. All tools read the same file of
prompts in its order, and `held_out_score` is one function for all. Prints one JSON object.
"""

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ["CI"] = "1"  # or TRL reports its use over the network

import contextlib

import torch
from sides import Watch, keep_gradient, memory

from rloo_cli.policy.shared_attention import native_attention
from rloo_cli.rewards.common.text import extract_answer

EVERY_S = 60.0  # of the clock, between two held-out scores
EVAL_BATCH = 100
RECIPE = "+recipe=smollm2_arithmetic"
PROMPTS, HELD_OUT, ROWS = "prompts.jsonl", "held_out.jsonl", "rows.json"
Row = dict[str, Any]


class Enough(Exception):
    """The clock says so."""


def is_right(completion: str, answer: str) -> float:
    """1.0 where the last number is the answer."""
    return float(extract_answer(completion, "last_number") == answer)


@torch.no_grad()
def held_out_score(model: Any, tokenizer: Any, rows: list[Row], length: int) -> dict[str, float]:
    """The share of held-out prompts that are answered right, greedily."""
    was_training, side = model.training, tokenizer.padding_side
    model.eval()
    tokenizer.padding_side = "left"
    texts = []
    for first in range(0, len(rows), EVAL_BATCH):
        prompts = [row["prompt"] for row in rows[first : first + EVAL_BATCH]]
        inputs = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        with native_attention(model):  # rloo's training forward has an attention of its own
            ids = model.generate(
                **inputs, max_new_tokens=length, do_sample=False, use_cache=True,
                pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
            )  # fmt: skip
        new = ids[:, inputs["input_ids"].shape[1] :]
        texts += tokenizer.batch_decode(new, skip_special_tokens=True)
    model.train(was_training)
    tokenizer.padding_side = side
    pairs = [(text, row["answer"]) for text, row in zip(texts, rows, strict=True)]
    return {"score": sum(is_right(*pair) for pair in pairs) / len(pairs)}


class Race:
    """The clock, and the scores so far."""

    def __init__(self, seconds: float, score: Any):
        self.limit, self.score = seconds, score
        self.watch, self.spent, self.steps = Watch(), 0.0, 0
        self.curve: list[dict[str, float]] = []
        self.next_score = 0.0

    def lap(self, step_done: bool) -> None:
        """Between two steps: stop the clock, score where it is time. Raises Enough."""
        if step_done:
            self.spent += self.watch.read()["seconds"]
            self.steps += 1
        over = self.spent >= self.limit
        if over or self.spent >= self.next_score:
            self.curve.append({"seconds": self.spent, "steps": self.steps} | self.score())
            print(json.dumps(self.curve[-1]), file=sys.stderr, flush=True)
            self.next_score += EVERY_S
        if over:
            raise Enough
        self.watch.start()


def settings(folder: Path, seed: int) -> Any:
    """The recipe, as a checked config: the one place that says batch, length, rate and beta."""
    from rloo_cli.config import check
    from rloo_cli.config.compose import compose_config

    words = [
        RECIPE, f"data.path={folder / PROMPTS}", "data.shuffle=false", "data.eval_split=null",
        f"root={folder}", "name=rloo", f"seed={seed}", "resume=never", "max_steps=100000",
        "checkpoint.every=0", "logging.console=plain", "logging.samples=0", "eval.every=0",
    ]  # fmt: skip
    return check.resolve_config(check.check_config(compose_config(words)))


def rloo_run(folder: Path, seed: int) -> Any:
    """The run of the recipe on the race's prompts."""
    from rloo_cli.train.build import build_run

    home = folder / "rloo"
    home.mkdir(parents=True, exist_ok=True)
    run = build_run(settings(folder, seed), home, {})
    run.log.display = None
    run.generator.load(run.policy, run.state.updates)
    return run


def race_rloo(args: argparse.Namespace, rows: list[Row]) -> Row:
    """What `rloo train` does, step by step."""
    from rloo_cli.run import StepProgress
    from rloo_cli.train.between_steps import log_step
    from rloo_cli.train.step import update_policy

    run = rloo_run(args.folder, args.seed)
    length = run.config.generation.max_completion_length
    model, tokenizer = run.policy.model, run.tokenizer
    race = Race(args.seconds, lambda: held_out_score(model, tokenizer, rows, length))
    state, split = run.state, defaultdict(float)
    try:
        race.lap(step_done=False)
        while True:
            run.clock.lap()
            batch = run.rollouts.next_batch(state.step, state.place, state.seen_by_rewards(run))
            cycle = StepProgress(batch)
            update_policy(run, cycle)
            with run.clock.phase("sync"):
                run.generator.load(run.policy, state.updates)
            run.ledger.step(batch, state.place, cycle.updates.num_updates, batch.updated)
            state.advance(batch)
            log_step(run, batch, cycle.updates)
            for name, seconds in run.log.metrics_lines[-1].items():
                if name.startswith("time/"):
                    split[name[5:]] += seconds
            race.lap(step_done=True)
    except Enough:
        return {"curve": race.curve, "split": dict(split), "micro": None}


def trl_trainer(args: argparse.Namespace) -> Any:
    """TRL's trainer, with its defaults but for what the recipe says, and its best settings here."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    from rloo_cli.config.synthetic import resolve_model_path

    run = settings(args.folder, args.seed)
    batch = run.train.prompts_per_step * run.algorithm.num_generations
    micro = args.micro or batch
    config, trainer = {
        "trl_rloo": (RLOOConfig, RLOOTrainer), "trl_grpo": (GRPOConfig, GRPOTrainer),
    }[args.tool]  # fmt: skip
    # GRPO's own default is no KL; RLOO's beta is the recipe's.
    own = {"beta": run.algorithm.beta} if args.tool == "trl_rloo" else {}
    arguments = config(
        output_dir=str(args.folder / args.tool), seed=args.seed, use_cpu=True, bf16=False,
        num_generations=run.algorithm.num_generations,
        max_completion_length=run.generation.max_completion_length,
        per_device_train_batch_size=micro, gradient_accumulation_steps=batch // micro,
        steps_per_generation=batch // micro, gradient_checkpointing=False, max_steps=100_000,
        learning_rate=run.train.learning_rate, lr_scheduler_type="constant",
        max_grad_norm=run.train.max_grad_norm, shuffle_dataset=False,
        save_strategy="no", report_to="none", disable_tqdm=True, logging_steps=1, **own,
    )  # fmt: skip
    path = resolve_model_path(run.model.path)
    lines = (args.folder / PROMPTS).read_text().splitlines()

    def exact_match(completions: Any, answer: list[str], **_: Any) -> list[float]:
        texts = [messages[0]["content"] for messages in completions]
        return [is_right(text, right) for text, right in zip(texts, answer, strict=True)]

    made = trainer(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=[exact_match],
        args=arguments,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(path),
    )
    made.remove_callback(PrinterCallback)
    return made


def race_trl(args: argparse.Namespace, rows: list[Row]) -> Row:
    """TRL's own `train()`; a callback between its steps keeps the clock."""
    from side_trl import Phases, compact_head
    from transformers import TrainerCallback

    phases = Phases()
    with compact_head(True):
        trainer = trl_trainer(args)
        reference = getattr(trainer, "ref_model", None)
        phases.wrap(trainer, "_generate", lambda *_: "generation")
        phases.wrap(trainer, "_calculate_rewards", lambda *_: "reward")
        phases.wrap(trainer, "training_step", lambda *_: "update")
        phases.wrap(
            trainer, "_get_per_token_logps_and_entropies",
            lambda model, *_: "update" if torch.is_grad_enabled()
            else "reference" if model is reference else "old_logp",
        )  # fmt: skip
        length = trainer.args.max_completion_length
        tokenizer = trainer.processing_class
        race = Race(args.seconds, lambda: held_out_score(trainer.model, tokenizer, rows, length))
        begun = []

        class Laps(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                race.lap(step_done=bool(begun))
                begun.append(True)

        trainer.add_callback(Laps())
        with contextlib.suppress(Enough):
            trainer.train()
    micro = trainer.args.per_device_train_batch_size
    return {"curve": race.curve, "split": dict(phases.seconds), "micro": micro}


def prove_rloo(args: argparse.Namespace) -> Row:
    """Sample the first batch, keep its rows, and keep the gradient of its update."""
    from rloo_cli.run import StepProgress
    from rloo_cli.train.step import update_policy

    run = rloo_run(args.folder, args.seed)
    run.clock.lap()
    cycle = StepProgress(run.rollouts.next_batch(0, 0, run.state.seen_by_rewards(run)))
    rows = [[g.prompt_ids, r.completion_ids] for g in cycle.batch.groups for r in g.rollouts]
    (args.folder / ROWS).write_text(json.dumps(rows))
    take = run.optimizer.step

    def step(norm: Any) -> None:
        keep_gradient(run.policy.model, args.proof)
        take(norm)

    run.optimizer.step = step
    update_policy(run, cycle)
    return {"completions": len(rows)}


def prove_trl(args: argparse.Namespace) -> Row:
    """Train once on the rows that were kept, and keep the gradient."""
    from side_trl import compact_head

    rows = json.loads((args.folder / ROWS).read_text())
    with compact_head(True):
        trainer = trl_trainer(args)
        trainer._tokenize_prompts = lambda *_: ([row[0] for row in rows], None, {})
        trainer._generate_single_turn = lambda *_: [row[1] for row in rows]
        clip = trainer.accelerator.clip_grad_norm_

        def clipped(*values: Any, **options: Any) -> Any:
            keep_gradient(trainer.model, args.proof)
            clip(*values, **options)
            raise Enough

        trainer.accelerator.clip_grad_norm_ = clipped
        with contextlib.suppress(Enough):
            trainer.train()
    return {"completions": len(rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tool", choices=("rloo", "trl_rloo", "trl_grpo"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=720.0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--micro", type=int, help="TRL's completions a forward; a whole step's")
    parser.add_argument("--proof", help="only the gradient of the first update, into this file")
    args = parser.parse_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    began = time.perf_counter()
    if args.proof:
        found = prove_rloo(args) if args.tool == "rloo" else prove_trl(args)
    else:
        rows = [json.loads(x) for x in (args.folder / HELD_OUT).read_text().splitlines()]
        found = race_rloo(args, rows) if args.tool == "rloo" else race_trl(args, rows)
    found |= {"wall": time.perf_counter() - began, "peak_mb": memory("VmHWM")}
    print(json.dumps({"tool": args.tool, "seed": args.seed} | found), file=out, flush=True)


if __name__ == "__main__":
    main()

"""Peak memory of real steps against what `rloo plan` says of them, on a CPU; makes docs/scale.md.

    python bench/plan.py                  measures every configuration that can run here
    python bench/plan.py NAME [NAME ...]  these alone
    python bench/plan.py --page           writes the page from bench/plan.jsonl; --check compares

Each configuration is a run of `rloo train` in a process of its own, one after the other: a random
model of half a GB or more, prompts of known lengths, two steps. The run itself measures (its
run.json): peak of resident memory above what was held after the imports. Rows are appended to
bench/plan.jsonl; the page shows the latest of each configuration beside what the plan says of it
now. Without arguments that measure, no torch is imported: the page is checked in CI.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import results

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.planning import device, model_spec, peak_memory
from rloo_cli.planning.peak_memory import PeakMemory
from rloo_cli.planning.plan_inputs import PlanInputs

ROOT = Path(__file__).resolve().parents[1]
RAW, PAGE = Path(__file__).with_name("plan.jsonl"), ROOT / "docs" / "scale.md"
MARKS = ("<!-- table -->", "<!-- end of table -->")
GIB = 2**30
QWEN = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32768}  # fmt: skip
NEOX = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
        "vocab_size": 32768}  # fmt: skip
ONLY_QWEN = ("num_key_value_heads", "head_dim")  # keys that GPT-NeoX does not have
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "num_hidden_layers": 10, "tie_word_embeddings": True, **QWEN},
    "untied": {"model_type": "qwen3", "num_hidden_layers": 8, "tie_word_embeddings": False, **QWEN},
    "deep": {"model_type": "qwen3", "num_hidden_layers": 20, "tie_word_embeddings": True, **QWEN},
    "neox": {"model_type": "gpt_neox", "num_hidden_layers": 8, "tie_word_embeddings": False,
             **NEOX},
    "reward": {"model_type": "qwen3", "num_hidden_layers": 10, "tie_word_embeddings": True,
               "num_labels": 1, **QWEN},
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One configuration."""

    says: str
    model: str
    words: tuple[str, ...] = ()
    prompt: int = 96
    later: str = ""  # why it is not run by `python bench/plan.py` alone


ROWS = "train.micro_batch_tokens="
SETTINGS = {
    "plain": Setting("beta 0, K 4", "qwen3", ("algorithm.beta=0",)),
    "reference": Setting("a reference beside it", "qwen3"),
    "long": Setting(
        "K 2, long prompts",
        "qwen3",
        ("algorithm.num_generations=2", f"{ROWS}1536", "generation.max_completion_length=64"),
        448,
    ),
    "recomputed": Setting(
        "gradient checkpointing, 20 layers",
        "deep",
        (
            "algorithm.beta=0",
            "model.gradient_checkpointing=true",
            f"{ROWS}2048",
            "train.prompts_per_step=6",
        ),
    ),
    "deep": Setting("20 layers", "deep", ("algorithm.beta=0", f"{ROWS}768")),
    "no logits": Setting("logits made again", "untied", ("train.keep_logits_gb=0",)),
    "logits": Setting(
        "logits kept, short prompts",
        "untied",
        ("train.keep_logits_gb=2", "algorithm.num_generations=8"),
        32,
    ),
    "reward model": Setting(
        "a reward model",
        "qwen3",
        (
            "reward=model",
            "reward.model.path=REWARD",
            "reward.model.batch_size=8",
            "algorithm.beta=0",
        ),
    ),
    "bfloat16": Setting(
        "bfloat16, float32 masters, reference", "qwen3", ("model.dtype=bfloat16",)
    ),
    "padded": Setting("padded rows", "untied", ("train.layout=padded", "algorithm.beta=0")),
    "neox": Setting("GPT-NeoX, reference", "neox"),
    "sgd": Setting(
        "plain SGD", "neox", ("train.optimizer=torch.optim:SGD", "algorithm.beta=0")
    ),
    "lora": Setting("LoRA, r 16", "qwen3", ("+lora=default",), later="adapters"),
    "zero2": Setting(
        "ZeRO-2, two ranks",
        "qwen3",
        ("distributed=zero2", "distributed.num_processes=2"),
        later="two ranks",
    ),
    "fsdp2": Setting(
        "FSDP2, two ranks",
        "qwen3",
        ("distributed=fsdp2", "distributed.num_processes=2"),
        later="two ranks",
    ),
}  # fmt: skip


def words(setting: Setting, folder: Path) -> list[str]:
    """The command line of a configuration's run in `folder`."""
    chosen = [w.replace("REWARD", str(folder / "reward")) for w in setting.words]
    length = [] if any("max_completion" in w for w in chosen) else ["32"]
    return [
        "+recipe=smoke", f"model.path={folder / 'model'}", f"data.path={folder / 'prompts.jsonl'}",
        "data.eval_split=null", "data.max_prompt_length=512", "max_steps=2", f"root={folder}",
        "name=run", "generation.ignore_eos=true", "train.prompts_per_step=4", f"{ROWS}512",
        *(f"generation.max_completion_length={n}" for n in length),
        # every row is forwarded, whatever its score
        "train.forward_all=true", "distributed.threads=1", "logging.console=plain",
        "logging.samples=0", *chosen,
    ]  # fmt: skip


def predict(setting: Setting) -> PeakMemory:
    """What the plan says of a configuration, from the config.json that its model will have."""
    folder = Path("make:tiny")  # a path that is one; no file of it is read
    given = [w for w in words(setting, folder) if "/" not in w.partition("=")[2]]
    run = check.check_config(
        compose_config(
            [
                *given,
                "model.path=make:tiny",
                "data.path=make:tiny",
                *(["reward.model.path=make:tiny_reward"] if "reward=model" in given else []),
            ]
        )
    )
    model = model_spec.parse_model_spec(MODELS[setting.model], setting.model, "bench")
    rewards = {n: model_spec.parse_model_spec(MODELS["reward"], n, "bench")
               for n, entry in run.rewards.items() if entry.type == "model"}  # fmt: skip
    beta = getattr(run.algorithm, "beta", 0.0) > 0 and run.model.lora is None
    return peak_memory.estimate_peak_memory(
        PlanInputs(
            run=run,
            model=model,
            device=device.cpu_device(),
            ranks=run.distributed.num_processes or 1,
            max_prompt_tokens=setting.prompt,
            reference_model=model if beta else None,
            reward_models=rewards,
            token_budget=run.train.micro_batch_tokens,
            recompute=run.model.gradient_checkpointing is True,
        )
    )


def make(setting: Setting, folder: Path) -> None:
    """The random models and the prompts of a configuration. Imports torch."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from toys import EOS, FIRST, PAD
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        PreTrainedTokenizerFast,
        logging,
    )

    logging.disable_progress_bar()
    torch.manual_seed(0)
    size = MODELS[setting.model]["vocab_size"]
    ids = {"<pad>": PAD, "<eos>": EOS} | {f"t{i}": i for i in range(FIRST, size - 1)}
    plain = Tokenizer(models.WordLevel(ids | {"<unk>": size - 1}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    ends = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD}
    kinds = {"model": (setting.model, AutoModelForCausalLM)}
    if any("REWARD" in word for word in setting.words):
        kinds["reward"] = ("reward", AutoModelForSequenceClassification)
    for name, (model, kind) in kinds.items():
        values = {k: v for k, v in MODELS[model].items() if k != "model_type"}
        values |= {"max_position_embeddings": 1024, **ends}
        config = AutoConfig.for_model(MODELS[model]["model_type"], **values)
        kind.from_config(config, dtype=torch.float32).save_pretrained(folder / name)
        tokens.save_pretrained(folder / name)
    draw = torch.Generator().manual_seed(1)
    lines = []
    for _ in range(64):
        drawn = torch.randint(FIRST, size - 1, (setting.prompt,), generator=draw).tolist()
        lines.append(json.dumps({"prompt": " ".join(f"t{i}" for i in drawn)}) + "\n")
    (folder / "prompts.jsonl").write_text("".join(lines))


def measure(name: str) -> results.Row:
    """One configuration, in processes of its own. -> the row for bench/plan.jsonl"""
    setting, began = SETTINGS[name], time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="rloo-plan-"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {
        "RLOO_CACHE": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "bench")]),
    }
    try:
        subprocess.run([sys.executable, __file__, "--make", name, str(folder)], check=True,
                       env=environment)  # fmt: skip
        command = [sys.executable, "-P", "-m", "rloo_cli", "train", *words(setting, folder)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        if ended.returncode:
            raise SystemExit(
                f"{name}: exit {ended.returncode}\n{(ended.stdout + ended.stderr)[-3000:]}"
            )
        got = json.loads((folder / "run" / "run.json").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    import torch
    import transformers

    return {
        "name": name, "says": setting.says, "model": setting.model, **got["memory"],
        "seconds": round(time.monotonic() - began, 1), "loadavg": os.getloadavg()[0],
        "device": "cpu", "torch": torch.__version__, "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def table(rows: list[results.Row]) -> list[str]:
    """The latest row of each configuration, in the order of SETTINGS, and the median error."""
    latest = {row["name"]: row for row in rows}
    lines = [
        "| configuration | model | measured GiB | predicted GiB | off | largest parts |",
        "|---|---|---|---|---|---|",
    ]
    errors = []
    for name, setting in SETTINGS.items():
        if name not in latest:
            why = "not yet run" + (f": {setting.later}" if setting.later else "")
            lines.append(f"| {setting.says} | {setting.model} | {why} | | | |")
            continue
        row, found = latest[name], predict(setting)
        off = found.peak_bytes / row["measured_bytes"] - 1
        errors.append(abs(off))
        parts = sorted(found.phases[found.worst_phase].items(), key=lambda p: -p[1])[:3]
        said = ", ".join(f"{n} {v / GIB:.2f}" for n, v in parts)
        lines.append(
            f"| {setting.says} | {row['model']} | {row['measured_bytes'] / GIB:.2f} | "
            f"{found.peak_bytes / GIB:.2f} | {off:+.0%} | {said} ({found.worst_phase}) |"
        )
    if errors:
        lines += ["", f"Median error of {len(errors)} configurations: **{median(errors):.1%}**; "
                  f"largest {max(errors):.1%}."]  # fmt: skip
    return lines


def page(text: str, rows: list[results.Row]) -> str:
    """The page with the table between its marks made anew."""
    head, _, rest = text.partition(MARKS[0])
    tail = rest.partition(MARKS[1])[2]
    return head + MARKS[0] + "\n\n" + "\n".join(table(rows)) + "\n\n" + MARKS[1] + tail


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.make:
        make(SETTINGS[given.make[0]], Path(given.make[1]))
        return
    if not (given.page or given.check):
        chosen = given.names or [n for n, s in SETTINGS.items() if not s.later]
        for name in chosen:
            row = measure(name)
            results.append([row], RAW)
            off = row["predicted_bytes"] / row["measured_bytes"] - 1
            print(f"{name:<14} {row['measured_bytes'] / GIB:6.2f} GiB, predicted "
                  f"{row['predicted_bytes'] / GIB:6.2f} ({off:+.0%})", flush=True)  # fmt: skip
    text = PAGE.read_text(encoding="utf-8")
    made = page(text, results.read(RAW))
    if given.check:
        raise SystemExit(
            "docs/scale.md is not what bench/plan.py would write" if made != text else 0
        )
    PAGE.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()

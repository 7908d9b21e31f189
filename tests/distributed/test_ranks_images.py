"""Two ranks train on prompts with images as one process does, tower and all."""

from pathlib import Path

import pytest
import vision_cases as v
from cli_cases import strict
from fork_cases import Forked
from resume_cases import update_apart
from test_ranks import PLAIN, spread

pytestmark = pytest.mark.ranks

FROZEN, ADAPTED = ("model.freeze=[vision]",), ("lora=default", "algorithm.beta=0.05")
CASES = [
    *((engine, "qwen2_5_vl", more) for engine in ("ddp", "fsdp2", "zero3")
      for more in ((), FROZEN, ADAPTED)),
    ("zero2", "qwen2_5_vl", ()),
    # Images that are seen both ways, a weight beside tower and projector, and images in tiles.
    ("zero3", "gemma3", ()), ("zero3", "llava_next", ()), ("zero3", "smolvlm", ()),
]  # fmt: skip
KINDS = {(): "whole", FROZEN: "frozen", ADAPTED: "adapted"}
IDS = [f"{engine}-{family}-{KINDS[more]}" for engine, family, more in CASES]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "family", "more"), CASES, ids=IDS)
def test_two_ranks_train_on_images_as_one_process_does(
    fast: dict[str, str], tmp_path: Path, engine: str, family: str, more: tuple[str, ...]
) -> None:
    """Half of the micro-batches are of prompts without an image, and ranks have unequal numbers."""
    home = Forked(fast, tmp_path)
    shown = v.run_words(family, v.rows_file(tmp_path / "rows"))
    words = [*PLAIN, *shown, *more, "train.micro_batch_size=4", "train.learning_rate=0.1"]
    words += ["train.prompts_per_step=5", "distributed.timeout_s=60", "eval.at_start=false"]
    assert home(*words, "name=one") == 0, home.said()
    assert home(*words, "name=two", *spread(engine), ranks=2) == 0, home.said()
    one, two = (home.folder / "runs" / name for name in ("one", "two"))
    assert (one / "ledger.jsonl").read_text() == (two / "ledger.jsonl").read_text()
    assert update_apart(one, two, str(v.folder(family))) < 1e-4
    a, b = ([r for r in strict(run / "metrics.jsonl") if "step_time" in r] for run in (one, two))
    assert [r["loss"] for r in a] == pytest.approx([r["loss"] for r in b], rel=1e-4, abs=1e-7)


RECIPE = (
    "train", "+recipe=vision_mini", "distributed.threads=1", "logging.console=plain",
    "max_steps=3", "eval.every=0", "eval.at_start=false", "root=runs", "checkpoint.every=3",
    "train.prompts_per_step=5", "train.micro_batch_size=8", "train.optimizer=torch.optim:SGD",
    "train.max_grad_norm=null", "train.learning_rate=0.1",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero2", "zero3", "fsdp2"])
def test_the_recipe_with_images_trains_on_two_ranks_as_on_one(
    fast: dict[str, str], tmp_path: Path, engine: str
) -> None:
    """Three of five groups for one rank, two for the other."""
    home = Forked(fast, tmp_path)
    assert home(*RECIPE, "name=one") == 0, home.said()
    assert home(*RECIPE, "name=two", *spread(engine), ranks=2) == 0, home.said()
    one, two = (home.folder / "runs" / name for name in ("one", "two"))
    assert (one / "ledger.jsonl").read_text() == (two / "ledger.jsonl").read_text()
    assert update_apart(one, two, "make:vision") < 1e-4

"""Two ranks of ddp train on prompts with images as one process does, tower and all."""

from pathlib import Path

import pytest
import vision_cases as v
from cli_cases import strict
from fork_cases import Forked
from resume_cases import update_apart
from test_ranks import PLAIN, spread


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [[], ["model.freeze=[vision]"], ["lora=default"]],
    ids=["whole", "a frozen tower", "an adapter"],
)  # fmt: skip
def test_two_ranks_train_on_images_as_one_process_does(
    fast: dict[str, str], tmp_path: Path, more: list[str]
) -> None:
    home = Forked(fast, tmp_path)
    shown = v.run_words("qwen2_5_vl", v.rows_file(tmp_path / "rows"))
    words = [*PLAIN, *shown, *more, "train.micro_batch_tokens=600", "train.learning_rate=0.1"]
    assert home(*words, "name=one") == 0, home.said()
    assert home(*words, "name=two", *spread("ddp"), ranks=2) == 0, home.said()
    one, two = (home.folder / "runs" / name for name in ("one", "two"))
    assert (one / "ledger.jsonl").read_text() == (two / "ledger.jsonl").read_text()
    assert update_apart(one, two, str(v.folder("qwen2_5_vl"))) < 1e-4
    a, b = ([r for r in strict(run / "metrics.jsonl") if "step_time" in r] for run in (one, two))
    assert [r["loss"] for r in a] == pytest.approx([r["loss"] for r in b], rel=1e-4, abs=1e-7)

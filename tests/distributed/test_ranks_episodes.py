"""Two ranks make the update of one process on episodes of several turns, and count them alike."""

import json
import os
from pathlib import Path
from unittest import mock

import pytest
from fork_cases import Forked
from resume_cases import weights
from safetensors.torch import load_file
from test_ranks import spread

from rloo_cli.config import synthetic

pytestmark = [pytest.mark.ranks, pytest.mark.slow]  # the model of products is made first

# 5 prompts: ranks of 3 and 2 groups, and micro-batches of unequal number.
WORDS = (
    "train", "+recipe=tools_mini", "distributed.threads=1", "logging.console=plain",
    "train.prompts_per_step=5", "max_steps=2", "train.micro_batch_tokens=300", "eval.every=0",
    "data.eval_split=null", "algorithm.num_generations=4", "root=runs",
)  # fmt: skip


def rows(run: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def home(fast, tmp_path_factory):
    return Forked(fast, tmp_path_factory.mktemp("episodes"))


@pytest.fixture(scope="module")
def single(home):
    assert home(*WORDS, "name=single") == 0, home.said()
    return home.folder / "runs" / "single"


@pytest.mark.parametrize("engine", ["ddp", "zero2", "fsdp2"])
def test_two_ranks_make_the_update_of_one_process_on_episodes(home, single, engine):
    assert home(*WORDS, f"name={engine}", *spread(engine), ranks=2) == 0, home.said()
    pair = home.folder / "runs" / engine
    with mock.patch.dict(os.environ, RLOO_CACHE=home.env["RLOO_CACHE"]):  # where the run made it
        made = Path(synthetic.resolve_model_path("make:products"))
    begin = load_file(made / "model.safetensors")
    a, b = weights(single), weights(pair)
    assert a.keys() == b.keys()
    apart = [float((a[n] - b[n]).norm() / (a[n] - begin[n]).norm()) for n in a]
    assert max(apart) < 2e-4  # AdamW makes much of the last bits of gradients near 0
    for one, two in zip(rows(single), rows(pair), strict=True):
        names = [n for n in one if n.startswith("agent/") and n != "agent/tool_s"]
        assert names and {n: one[n] for n in names} == {n: two[n] for n in names}
        assert one["agent/calls"] > 0 and one["agent/retokenised"] == 0
        assert one["completions/mean_length"] == two["completions/mean_length"]

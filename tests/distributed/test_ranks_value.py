"""Two ranks train policy and value model as one process does, whatever engine keeps their weights,
with an adapter too, and either goes on where the other stopped."""

from pathlib import Path

import pytest
import torch
from cli_cases import strict
from fork_cases import Forked
from loop_cases import ENDS
from resume_cases import untimed, update_apart
from safetensors.torch import load_file
from test_ranks import spread
from test_ranks_adapters import adapters_apart

from rloo_cli.checkpoint import manifest
from rloo_cli.config import synthetic

pytestmark = pytest.mark.ranks

# Five groups, some 500 rows in parts of 120: unequal micro-batches, and one of nothing.
WORDS = (
    "train", "+recipe=smoke", "algorithm=ppo", "distributed.threads=1", "logging.console=plain",
    "train.prompts_per_step=5", "train.micro_batch_tokens=120", "max_steps=3", "eval.every=0",
    "eval.at_start=false", "train.learning_rate=1e-3", "train.lr_scheduler=constant",
    "checkpoint.every=1", "checkpoint.keep_last=5", "root=runs", "reward=model",
    "reward.model.path=make:tiny_reward", ENDS,
    "algorithm.mask_truncated_completions=true", "train.max_grad_norm=0.05",
)  # fmt: skip
PLAIN = ("train.optimizer=torch.optim:SGD", "train.learning_rate=1", "max_steps=2")
LORA = ("lora=default",)
SHARDED = ("fsdp2", "zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def home(fast, tmp_path_factory):
    return Forked(fast, tmp_path_factory.mktemp("value"))


@pytest.fixture(scope="module")
def single(home):
    """One process, undisturbed."""
    assert home(*WORDS, "name=single") == 0, home.said()
    return home.folder / "runs" / "single"


@pytest.fixture(scope="module")
def plain(home):
    """One process, by plain gradient descent."""
    assert home(*WORDS, *PLAIN, "name=plain") == 0, home.said()
    return home.folder / "runs" / "plain"


def values_apart(one: Path, other: Path) -> float:
    """The largest relative difference of two value models' whole updates, over tensors."""
    begin = load_file(Path(synthetic.resolve_model_path("make:tiny_reward")) / "model.safetensors")
    names = [
        manifest.list_checkpoints(r)[0] / "trainer" / "value.safetensors" for r in (one, other)
    ]
    a, b = map(load_file, names)
    assert a.keys() == b.keys()
    moved = {n: float((a[n] - begin[n]).norm()) for n in a}
    assert [n for n, norm in moved.items() if not norm and "embed" not in n] == []
    return max(float((a[n] - b[n]).norm()) / norm for n, norm in moved.items() if norm)


ENGINES = [
    "fsdp2",
    pytest.param("zero1", marks=pytest.mark.slow),
    pytest.param("zero2", marks=pytest.mark.slow),
    pytest.param("zero3", marks=pytest.mark.slow),
]


@pytest.mark.slow_cases("fsdp2")
@pytest.mark.parametrize("engine", ENGINES)
def test_both_gradients_of_two_ranks_are_as_large_as_those_of_one_process(home, plain, engine):
    two = home.folder / "runs" / f"plain_{engine}"
    assert home(*WORDS, *PLAIN, f"name={two.name}", *spread(engine), ranks=2) == 0, home.said()
    assert update_apart(plain, two) < 1e-4
    assert values_apart(plain, two) < 1e-4
    for a, b in zip(strict(plain / "metrics.jsonl"), strict(two / "metrics.jsonl"), strict=True):
        for name in ("loss/value_avg", "value/explained_variance", "grad_norm"):
            if name in (found := untimed(a)):
                assert b[name] == pytest.approx(found[name], rel=2e-4, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("engine", SHARDED)
def test_with_adam_too_and_either_goes_on_where_the_other_stopped(home, single, engine):
    runs = home.folder / "runs"
    assert home(*WORDS, f"name={engine}", *spread(engine), ranks=2) == 0, home.said()
    assert update_apart(single, runs / engine) < 1e-4
    assert values_apart(single, runs / engine) < 1e-4
    on_one = ["distributed=single", f"name={engine}_on_1", f"resume=runs/{engine}/checkpoint-1"]
    assert home(*WORDS, *on_one) == 0, home.said()
    assert update_apart(single, runs / f"{engine}_on_1") < 1e-4
    assert values_apart(single, runs / f"{engine}_on_1") < 1e-4
    on_two = [*spread(engine), f"name={engine}_on_2", "resume=runs/single/checkpoint-1"]
    assert home(*WORDS, *on_two, ranks=2) == 0, home.said()
    assert update_apart(single, runs / f"{engine}_on_2") < 1e-4
    assert values_apart(single, runs / f"{engine}_on_2") < 1e-4


@pytest.fixture(scope="module")
def adapted(home):
    """One process whose policy is an adapter."""
    assert home(*WORDS, *PLAIN, *LORA, "name=adapted") == 0, home.said()
    return home.folder / "runs" / "adapted"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", *SHARDED])
def test_an_adapter_and_a_whole_value_model_learn_together_on_two_ranks(home, adapted, engine):
    two = home.folder / "runs" / f"adapted_{engine}"
    words = [*WORDS, *PLAIN, *LORA, f"name={two.name}", *spread(engine)]
    assert home(*words, ranks=2) == 0, home.said()
    assert adapters_apart(adapted, two) < 1e-4
    assert values_apart(adapted, two) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("engine", SHARDED)
def test_in_half_precision_both_are_trained_and_saved_whole(home, engine):
    words = [*WORDS, "model.dtype=bfloat16", "max_steps=2"]
    one, two = (home.folder / "runs" / f"half_{engine}_{n}" for n in (1, 2))
    assert home(*words, f"name={one.name}") == 0, home.said()
    assert home(*words, f"name={two.name}", *spread(engine), ranks=2) == 0, home.said()
    saved = [load_file(r / "checkpoint-2" / "trainer" / "value.safetensors") for r in (one, two)]
    assert saved[0].keys() == saved[1].keys()
    for name, tensor in saved[0].items():
        assert tensor.isfinite().all() and saved[1][name].shape == tensor.shape
        torch.testing.assert_close(saved[1][name].float(), tensor.float(), atol=2e-2, rtol=2e-2)
    again = f"name=half_{engine}_again"
    came = f"resume=runs/{two.name}/checkpoint-1"
    assert home(*words, again, came, *spread(engine), ranks=2) == 0, home.said()
    ours, theirs = (load_file(home.folder / "runs" / name / "checkpoint-2/model.safetensors")
                    for name in (two.name, f"half_{engine}_again"))  # fmt: skip
    torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)

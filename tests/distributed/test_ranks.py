"""Two ranks do what one process does: the same update, the same prompts, and either goes on where
the other stopped."""

import json
from pathlib import Path

import pytest
from assert_refused import assert_refused
from cli_cases import strict
from fork_cases import Forked
from resume_cases import differing, left, untimed, update_apart

from rloo_cli.config.check import check_config
from rloo_cli.config.compose import compose_config
from rloo_cli.utils.errors import ConfigError

pytestmark = pytest.mark.ranks

ENGINES = ("ddp", "fsdp2", "zero2", "zero3")
# 5 prompts: ranks of 3 and 2 groups. Some 500 rows in parts of 120: unequal micro-batches, and one
# of nothing where their number is odd.
WORDS = (
    "train", "+recipe=smoke", "distributed.threads=1", "logging.console=plain",
    "train.prompts_per_step=5",
    "max_steps=5", "train.learning_rate=1e-3", "train.lr_scheduler=linear",
    "train.max_grad_norm=1.0", "train.micro_batch_tokens=120", "algorithm.beta=0.05",
    "algorithm.normalize_advantages=true",
    "checkpoint.every=3", "eval.every=0", "root=runs",
)  # fmt: skip


def spread(engine: str, ranks: int = 2) -> list[str]:
    return [f"distributed={engine}", f"distributed.num_processes={ranks}"]


@pytest.fixture(scope="module")
def home(fast, tmp_path_factory):
    return Forked(fast, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def single(home):
    """One process, undisturbed."""
    assert home(*WORDS, "name=single") == 0, home.said()
    return home.folder / "runs" / "single"


@pytest.fixture(scope="module")
def padded(home):
    """One process with padded rows."""
    assert home(*WORDS, "train.layout=padded", "name=padded") == 0, home.said()
    return home.folder / "runs" / "padded"


@pytest.fixture(scope="module", params=ENGINES)
def pair(request, home):
    """Two ranks, undisturbed."""
    name = f"name={request.param}"
    assert home(*WORDS, name, *spread(request.param), ranks=2) == 0, home.said()
    return home.folder / "runs" / request.param


def rates(run: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["learning_rate"]) for r in strict(run / "metrics.jsonl") if "loss" in r]


def drawn(run: Path) -> list[list[int]]:
    """The rows that each step drew."""
    lines = map(json.loads, (run / "ledger.jsonl").read_text().splitlines())
    return [line["rows"] for line in lines if "rows" in line]


@pytest.mark.slow_but("ddp", "fsdp2")
def test_two_ranks_make_the_update_of_one_process(single, pair):
    assert update_apart(single, pair) < 1e-4
    assert (pair / "ledger.jsonl").read_text() == (single / "ledger.jsonl").read_text()
    assert rates(pair) == rates(single)


# Adam forgets how large a gradient was, and clipping too: plain descent does not.
PLAIN = (*WORDS, "train.optimizer=torch.optim:SGD", "train.max_grad_norm=null", "max_steps=2")


@pytest.fixture(scope="module")
def plain(home):
    """One process, by plain gradient descent."""
    assert home(*PLAIN, "name=plain") == 0, home.said()
    return home.folder / "runs" / "plain"


@pytest.mark.slow_but("ddp", "fsdp2")
@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_two_ranks_are_as_large_as_those_of_one_process(home, plain, engine):
    assert home(*PLAIN, f"name=plain_{engine}", *spread(engine), ranks=2) == 0, home.said()
    assert update_apart(plain, home.folder / "runs" / f"plain_{engine}") < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
def test_seven_ranks_which_divide_nothing_make_the_update_of_one_process(home, engine):
    words = [*PLAIN, "train.prompts_per_step=8", "eval.at_start=false"]
    one, seven = (home.folder / "runs" / f"{name}_{engine}" for name in ("eight", "seven"))
    assert home(*words, f"name={one.name}") == 0, home.said()
    assert home(*words, f"name={seven.name}", *spread(engine, 7), ranks=7) == 0, home.said()
    assert update_apart(one, seven) < 1e-4
    assert (seven / "ledger.jsonl").read_text() == (one / "ledger.jsonl").read_text()
    with pytest.raises(ConfigError) as refused:  # with the five of the other tests, two do nothing
        check_config(compose_config([*WORDS[1:], *spread(engine, 7)]))
    assert_refused(refused, 2, "5", where="train.prompts_per_step")


@pytest.mark.slow_but("fsdp2")
@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_a_rank_with_nothing_left_asks_policy_and_reference_as_the_others_do(home, padded, engine):
    # Padded rows part a group: the sampler's log-probabilities have a pass of their own, in which
    # one rank has a micro-batch less.
    words = [*WORDS, "train.layout=padded", f"name=padded_{engine}", *spread(engine)]
    assert home(*words, ranks=2) == 0, home.said()
    assert update_apart(padded, home.folder / "runs" / f"padded_{engine}") < 1e-4


@pytest.mark.slow_but("ddp", "fsdp2")
def test_the_metrics_of_two_ranks_are_those_of_one(single, pair):
    for one, two in zip(
        strict(single / "metrics.jsonl"), strict(pair / "metrics.jsonl"), strict=True
    ):
        # It looks at a few numbers of each rank's own shard, and ZeRO's shards are DeepSpeed's.
        sampled = {"update/changed_frac"}
        assert {*untimed(one)} - sampled == {*untimed(two)} - sampled
        for name, value in untimed(one).items():
            if name in sampled:
                continue
            if name != "loss" and not name.startswith(("policy_loss", "loss/", "val/ratio_var")):
                assert two[name] == pytest.approx(value, rel=2e-4, abs=1e-6), name


@pytest.mark.slow_but("ddp-1", "zero3-2")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_of_two_ranks_goes_on_with_one_and_with_two(home, pair, ranks):
    again = f"{pair.name}_on_{ranks}"
    where = ["distributed=single"] if ranks == 1 else spread(pair.name)
    came = f"resume=runs/{pair.name}/checkpoint-3"
    assert home(*WORDS, f"name={again}", came, *where, ranks=ranks - 1 and 2) == 0, home.said()
    found = home.folder / "runs" / again
    assert update_apart(pair, found) < 1e-4
    assert rates(found) == rates(pair)[3:]
    assert drawn(found) == drawn(pair)[3:]
    if ranks == 2 and pair.name == "ddp":
        assert [k for k in differing(left(pair), left(found)) if k.startswith(("opt", "rng"))] == []


@pytest.mark.slow_but("zero3")
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero1", "zero3"])
def test_an_engine_with_one_process_does_the_same(home, single, engine):
    words = [*WORDS, f"distributed={engine}", f"name=one_{engine}"]
    assert home(*words) == 0, home.said()
    assert update_apart(single, home.folder / "runs" / f"one_{engine}") < 1e-4


# What else of a forward pass has a gradient. Five groups, each a micro-batch of its own: three for
# one rank, and for the other two and one of nothing.
OUTPUTS = {
    "entropy": ("algorithm.beta=0", "algorithm.entropy_coef=0.05"),
    "KL": (
        "algorithm.kl_in=loss", "algorithm.kl_estimator=k3", "algorithm.kl_temperature=one",
        "generation.temperature=0.7",
    ),
    "neither": ("algorithm.kl_temperature=one", "generation.temperature=0.7"),
}  # fmt: skip


@pytest.mark.slow_cases("entropy-zero3", "KL-zero3")
@pytest.mark.parametrize(
    ("output", "engine"),
    [
        ("entropy", "zero3"),
        ("KL", "zero3"),
        pytest.param("neither", "zero3", marks=pytest.mark.slow),
        pytest.param("entropy", "fsdp2", marks=pytest.mark.slow),
        pytest.param("KL", "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_a_rank_with_nothing_left_has_a_gradient_wherever_the_others_have_one(home, output, engine):
    own = ("eval.at_start=false", "data.eval_split=null", "distributed.timeout_s=60")
    words = [*WORDS, *own, *OUTPUTS[output], "train.micro_batch_size=4", "max_steps=3"]
    assert home(*words, f"name={output}") == 0, home.said()
    two = f"{output}_{engine}"
    assert home(*words, f"name={two}", *spread(engine), ranks=2) == 0, home.said()
    assert update_apart(home.folder / "runs" / output, home.folder / "runs" / two) < 1e-4

"""Two ranks make the update of one process under every algorithm whose advantages are its own."""

import pytest
from fork_cases import Forked
from resume_cases import update_apart
from test_ranks import PLAIN, spread

pytestmark = pytest.mark.ranks

KINDS = {
    "reinforce_pp": ("algorithm.num_iterations=2", "algorithm.normalize_advantages=false"),
    "remax": ("algorithm.normalize_advantages=false",),
    "grpo": ("algorithm.num_iterations=2", "algorithm.normalize_advantages=false"),
    "rloo": ("algorithm.entropy_coef=0.1",),
    # The second update has a bonus, if both ranks measured the entropy of the first alike.
    "dapo": (
        "algorithm.adaptive_entropy={target:9.0,delta:0.5,min:0.0,max:0.5}",
        "algorithm.top_entropy_quantile=0.4",
        "algorithm.num_iterations=2",
        "algorithm.advantage_scale=none",
    ),
    "reinforce": ("algorithm.baseline=ema", "algorithm.normalize_advantages=false"),
}


@pytest.fixture(scope="module")
def home(fast, tmp_path_factory):
    return Forked(fast, tmp_path_factory.mktemp("family"))


@pytest.mark.slow_cases("reinforce_pp-ddp")
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("reinforce_pp", "ddp"),
        pytest.param("reinforce_pp", "fsdp2", marks=pytest.mark.slow),
        pytest.param("remax", "ddp", marks=pytest.mark.slow),
        pytest.param("grpo", "zero2", marks=pytest.mark.slow),
        pytest.param("rloo", "fsdp2", marks=pytest.mark.slow),
        pytest.param("reinforce", "ddp", marks=pytest.mark.slow),
        pytest.param("dapo", "ddp", marks=pytest.mark.slow),
        pytest.param("dapo", "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_make_the_update_of_one_process(home, kind, engine):
    words = [*PLAIN, f"algorithm={kind}", *KINDS[kind], "algorithm.num_generations=4"]
    assert home(*words, f"name={kind}-1-{engine}") == 0, home.said()
    two = [f"name={kind}-2-{engine}", *spread(engine)]
    assert home(*words, *two, ranks=2) == 0, home.said()
    runs = home.folder / "runs"
    assert update_apart(runs / f"{kind}-1-{engine}", runs / f"{kind}-2-{engine}") < 1e-4

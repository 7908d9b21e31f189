"""The correction for a sampler that differs is TRL's: its four modes, on the same numbers.

The sampler's log-probabilities are off by up to half a nat a token, the same for both sides, so
that caps and floors are passed; TRL's own code makes weights of them and multiplies its loss.
"""

import functools

import pytest
from loop_cases import ENDS, PLAIN, apart
from trl_cases import both, gaps, vector

pytestmark = pytest.mark.trl

A, C = "algorithm.", "algorithm.correction."
STALE = (f"{A}num_iterations=2", "train.learning_rate=0.1")
BASE = (*PLAIN, ENDS, "algorithm=grpo", f"{A}num_generations=4", "train.micro_batch_size=8", *STALE)
MODES = {  # TRL's name -> level, mode, cap, floor
    "token_truncate": ("token", "truncate", 1.2, 0.9),
    "token_mask": ("token", "mask", 1.2, 0.8),
    "sequence_truncate": ("sequence", "truncate", 1.3, 0.7),
    "sequence_mask": ("sequence", "mask", 1.3, 0.7),
}
SLOW = ("token_truncate", "token_mask", "sequence_truncate")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Both sides of one of the modes, computed once."""

    @functools.cache
    def found(name):
        level, mode, cap, floor = MODES[name]
        words = (f"{C}level={level}", f"{C}mode={mode}", f"{C}cap={cap}", f"{C}floor={floor}")
        words += ("generation.logp_tolerance=100",)  # else the run stops at such a sampler
        return both(tmp_path_factory.mktemp("case"), *BASE, *words, trainer="GRPO", noise=0.5)

    return found


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in MODES]
)
def test_gradients_under_a_correction_are_those_of_trl(case, name):
    ours, theirs = case(name)
    first, later = gaps(ours, theirs)
    print(f"{name}: {first:.1e} {later:.1e}")
    assert first < 1e-5 and later < 1e-4
    assert theirs.trainer.vllm_importance_sampling_mode == name
    weights = [micro["importance_sampling_ratio"] for micro in theirs.micros]
    assert any(float(w.min()) < 1.0 < float(w.max()) for w in weights)  # it corrects
    assert apart(ours.weights, theirs.weights) < 1e-5


@pytest.mark.slow  # both sides of two modes
def test_the_modes_are_told_apart_by_the_gradient(case):
    one, other = (case(name)[1].gradients[-1] for name in ("token_truncate", "sequence_mask"))
    assert apart(vector(one), vector(other)) > 0.02

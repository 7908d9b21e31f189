"""Adaptive entropy and the tokens of the highest entropy are those of TRL 1.16's GRPOTrainer.

As `test_trl_grpo.py`; each update is one micro-batch, over which TRL takes its quantile and its
mean. Ours are over the whole update, however it is cut (`tests/train/test_entropy_runs.py`).
"""

from types import SimpleNamespace

import pytest
import torch
from loop_cases import ENDS, PLAIN, apart
from trl_cases import both, gaps, vector

from rloo_cli.data.pass_results import highest_entropies

pytestmark = pytest.mark.trl

A = "algorithm."
GRPO = (*PLAIN, ENDS, "algorithm=grpo", f"{A}num_generations=4", "train.micro_batch_size=16")
TOP = f"{A}top_entropy_quantile=0.3"
CLOSE = 1e-5


def adaptive(target: float, coef: float = 0.02) -> tuple[str, ...]:
    rule = f"{{target:{target},delta:0.05,min:0.0,max:0.1}}"
    return (f"{A}adaptive_entropy={rule}", f"{A}entropy_coef={coef}", "train.learning_rate=0.1")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.5, 0.9])
def test_the_chosen_tokens_are_those_of_trls_function(share):
    from trl import GRPOTrainer

    alone = SimpleNamespace(pad_across_processes=lambda x, **_: x, gather=lambda x: x)
    for seed in range(50):
        g = torch.Generator().manual_seed(seed)
        entropies = 4 * torch.rand(4, 11, generator=g)
        lengths = torch.randint(1, 12, (4,), generator=g)
        if seed % 2:  # ties at the threshold
            entropies = entropies.round()
        mask = torch.arange(11) < lengths[:, None]
        columns = [row[:n] for row, n in zip(entropies, lengths, strict=True)]
        groups = [SimpleNamespace(entropy=columns[i : i + 2]) for i in (0, 2)]
        batch = SimpleNamespace(groups=groups, masked=torch.zeros(2, 2, dtype=torch.bool))
        least, count = highest_entropies(batch, [0, 1], share)
        theirs = GRPOTrainer.get_high_entropy_mask(
            SimpleNamespace(accelerator=alone), entropies, mask.int(), 1 - share
        )
        assert torch.equal((entropies >= least) & mask, theirs) and count == int(theirs.sum())


@pytest.mark.parametrize(
    "words",
    [
        pytest.param((TOP,), marks=pytest.mark.slow, id="dapo"),
        pytest.param(
            (TOP, f"{A}loss_type=grpo", f"{A}entropy_coef=0.3", f"{A}beta=0.3"),
            id="grpo, bonus, KL",
        ),
    ],
)
def test_the_gradient_of_the_tokens_of_the_highest_entropy_is_trls(tmp_path, words):
    folders = [tmp_path / name for name in ("top", "all")]
    for folder in folders:
        folder.mkdir()
    ours, theirs = both(folders[0], *GRPO, *words, trainer="GRPO")
    assert gaps(ours, theirs)[0] < CLOSE
    whole, _ = both(folders[1], *GRPO, *words, f"{A}top_entropy_quantile=1.0", trainer="GRPO")
    assert apart(vector(ours.gradients[0]), vector(whole.gradients[0])) > 0.1


@pytest.mark.parametrize(
    ("words", "coefs"),
    [
        # Below its target the bonus acts from the second update on.
        pytest.param(adaptive(9.0), [0.07, 0.1, 0.1], marks=pytest.mark.slow, id="low"),
        pytest.param(adaptive(0.1, 0.08), [0.03, 0.0, 0.0], marks=pytest.mark.slow, id="high"),
        pytest.param((*adaptive(9.0), TOP), [0.07, 0.1, 0.1], id="low, top tokens"),
    ],
)
def test_an_adaptive_weight_and_its_gradients_are_trls(tmp_path, words, coefs):
    words = (*GRPO, *words)
    ours, theirs = both(tmp_path, *words, steps=3, trainer="GRPO")
    found = gaps(ours, theirs)
    assert found[0] < CLOSE and max(found) < 1e-3 and len(found) == 3
    control = ours.run.state.entropy_control
    assert control["coef"] == pytest.approx(theirs.trainer.entropy_coef) == coefs[-1]
    assert control["entropy"] == pytest.approx(theirs.trainer._last_world_entropy, rel=1e-4)
    assert ours.row["entropy_coef"] == pytest.approx(coefs[-1])  # TRL logs the last step's too

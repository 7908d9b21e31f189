"""The gradient of a step with images is that of TRL 1.16.0's RLOOTrainer on the same completions.

The tower sees each prompt's images once here, and once for every completion there.
"""

import pytest
import torch
import vision_cases as v
from loop_cases import ENDS, PLAIN, apart
from trl_cases import both, sums, vector

from rloo_cli.config.vision_models import VISION_FAMILIES

pytestmark = pytest.mark.trl

CLOSE = 1e-4
WORDS = (
    *PLAIN,
    ENDS,
    "algorithm.beta=0.3",
    "train.micro_batch_size=8",
    "train.learning_rate=0.003",
)
FAMILIES = ("qwen2_5_vl", "gemma3", "llava_next", "idefics3", "internvl")


@pytest.mark.slow_but("qwen2_5_vl")
@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_with_images_is_that_of_trl(tmp_path, name):
    file = v.rows_file(tmp_path / "rows", (1, 1, 1, 1))
    words = (*WORDS, *v.run_words(name, file), "generation.max_completion_length=8")
    ours, theirs = both(tmp_path, *words)
    batch = ours.batch
    assert theirs.prompts == [g.prompt_ids for g in batch.groups for _ in range(4)]
    (scored,) = theirs.scored
    assert sums(batch).allclose(scored["old_logps"].view_as(batch.score), rtol=1e-4)
    (mine,), (other,) = ours.gradients, theirs.gradients
    assert mine.keys() >= other.keys()
    whole = float(vector(mine).norm())
    # A weight that the result does not depend on has a gradient of rounding errors alone.
    live = [n for n in other if float(other[n].norm()) > 1e-5 * whole]
    gap = max(
        apart(vector(mine), vector({n: other.get(n, torch.zeros_like(mine[n])) for n in mine})),
        *(apart(mine[n], other[n]) for n in live),
    )
    print(f"{name}: {gap:.1e}, {len(mine) - len(live)} of {len(mine)} weights without an effect")
    assert gap < CLOSE and whole > 0.1
    assert [n for n in live if {*n.split(".")} & {*VISION_FAMILIES[name].towers}]

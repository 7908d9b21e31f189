"""Two ranks read many rows, which one of them has prepared for both."""

import json

import pytest
from resume_cases import update_apart
from test_ranks import PLAIN, drawn, spread

pytestmark = pytest.mark.ranks

MANY = 12_000  # more than are looked at again at each start, in a file that is kept as Arrow's
RANDOM_MAP = """
import random

def change(row):
    return row | {"prompt": f"{row['prompt']} {random.random()}"}
"""


@pytest.fixture
def words(tmp_path):
    rows = [{"prompt": f"{i} and {i * i}", "answer": str(i) * 150} for i in range(MANY)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ("data=default", f"data.path={tmp_path}/rows.jsonl", "data.eval_split=null")
    return [*PLAIN, *data, "max_steps=3", "checkpoint.every=2"]


def test_two_ranks_draw_the_rows_of_one_process_and_go_on_with_them(forked, words):
    runs = forked.folder / "runs"
    assert forked(*words, "name=many_one") == 0, forked.said()
    assert forked(*words, "name=many_two", *spread("ddp"), ranks=2) == 0, forked.said()
    came = "resume=runs/many_two/checkpoint-2"
    assert forked(*words, "name=many_on", came, *spread("ddp"), ranks=2) == 0, forked.said()
    one, two, on = (runs / f"many_{name}" for name in ("one", "two", "on"))
    assert (one / "ledger.jsonl").read_text() == (two / "ledger.jsonl").read_text()
    assert drawn(on) == drawn(two)[2:]
    assert update_apart(one, two) < 1e-4 and update_apart(two, on) < 1e-4


def test_two_ranks_have_the_rows_that_a_random_map_made_once(forked, words, tmp_path):
    """Ranks compare their data's fingerprints at the start, and each prompt that they share."""
    (tmp_path / "my.py").write_text(RANDOM_MAP)
    words = [*words, f"data.map={tmp_path}/my.py:change", "data.max_samples=500"]
    assert forked(*words, "name=mapped", *spread("ddp"), ranks=2) == 0, forked.said()

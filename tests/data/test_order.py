"""The order of draws, of numpy alone."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as some

from rloo_cli.data import order


@given(seed=some.integers(0, 2**40), epoch=some.integers(0, 99), n=some.integers(1, 300))
def test_every_epoch_of_every_seed_has_every_prompt_once(seed, epoch, n):
    for shuffle in (True, False):
        places = range(epoch * n, epoch * n + n)
        drawn = [order.prompt_index_at(index, n, seed, "data", shuffle) for index in places]
        assert sorted(drawn) == list(range(n))
        assert shuffle or drawn == list(range(n))


def test_the_order_in_this_version_is_the_order_in_every_version():
    """A resumed run must draw what the first would have: change this only with the format."""
    assert [order.prompt_index_at(index, 5, 1, "data", True) for index in range(10)] == [
        3,
        1,
        0,
        2,
        4,
        2,
        3,
        4,
        1,
        0,
    ]


def test_an_order_that_is_read_in_blocks_is_the_whole_permutation(monkeypatch):
    monkeypatch.setattr(order, "ORDER_BLOCK", 3)
    drawn = [order.prompt_index_at(index, 8, 5, "blocks", True) for index in range(16)]
    whole = [order.epoch_permutation(5, epoch, "blocks", 8).tolist() for epoch in (0, 1)]
    assert drawn == [*whole[0], *whole[1]]


@pytest.mark.process
def test_the_order_needs_no_torch():
    code = (
        "import sys; import rloo_cli.data.order; print(*({'torch', 'datasets'} & {*sys.modules}))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "\n"

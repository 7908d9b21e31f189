"""Before torch is imported: its threads must not spin long while they wait for each other.

`server` is the one real rollout server that all tests of a session share: whoever uses it connects
and sends weights first, and leaves it running.
"""

import importlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Files whose tests use `server`.
ONE_SERVER = (
    "test_vllm_contract.py", "test_vllm_truth.py", "test_judge_vllm.py", "test_ranks_vllm.py",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several processes (`make test`), the tests of a file share one, and so do all that use
    the one server."""
    for item in items:
        shares = item.get_closest_marker("vllm") and item.path.name in ONE_SERVER
        item.add_marker(pytest.mark.xdist_group("server" if shares else item.path.name))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`vllm_cases.Real`: its url, token, folder and model."""
    cases = importlib.import_module("vllm_cases")  # it imports torch, most tests do not
    base = tmp_path_factory.getbasetemp()
    with cases.serving(tmp_path_factory.mktemp("real"), base) as real:
        yield real

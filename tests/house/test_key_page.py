"""docs/keys.md is what the schema and conf/ say."""

from pathlib import Path

import pytest

from rloo_cli.cli import key_page
from rloo_cli.cli.config import value_keys

pytestmark = pytest.mark.wide

PAGE = Path(__file__).parents[2] / "docs" / "keys.md"


def test_the_page_of_keys_is_the_one_that_the_code_makes() -> None:
    assert PAGE.read_text() == key_page.key_page(), "python -m rloo_cli.cli.key_page > docs/keys.md"


def test_every_key_has_its_line_and_every_plugin_its_own() -> None:
    text = PAGE.read_text()
    lost = [key for key in value_keys() if f"| `{key}` |" not in text]
    rest = {key.split(".", 2)[2] for key in lost if key.startswith("reward.")}
    assert len(rest) < 16 and all(f"| `reward.<reward>.{name}` |" in text for name in rest)
    assert all(key.startswith("reward.") for key in lost)
    for key in ("generation.server.port", "algorithm.vf_coef"):
        assert f"| `{key}` |" in text

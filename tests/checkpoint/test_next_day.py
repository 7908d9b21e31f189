"""A run that goes on the next day has the prompts that it began with, or says what made others."""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from resume_cases import attempt
from transformers.utils import chat_template_utils

from rloo_cli.checkpoint import manifest
from rloo_cli.data import chat_templates
from rloo_cli.data.synthetic import tiny
from rloo_cli.utils.errors import DataError
from rloo_cli.utils.files import read_json

SHORT = (
    "model.dtype=float32", "generation.max_completion_length=4", "train.prompts_per_step=2",
    "data.eval_split=null", "train.lr_scheduler=constant", "checkpoint.every=1",
)  # fmt: skip
DATED = "{{ strftime_now('%d %b %Y') }}" + tiny.TEMPLATE
MAP = """
from datetime import datetime
def dated(row):
    return row | {"prompt": f"{datetime.now()} {row['prompt']}"}
"""


class Calendar:
    """What stands in for `datetime`: its `now` is `days` after a day of summer."""

    days = 0
    fromisoformat, fromtimestamp = datetime.fromisoformat, datetime.fromtimestamp

    def now(self) -> datetime:
        return datetime(2024, 7, 26, 12) + timedelta(days=self.days)


@pytest.fixture
def calendar(monkeypatch: pytest.MonkeyPatch) -> Calendar:
    """The clock of chat templates, which a test sets a day on."""
    calendar = Calendar()
    for module in (chat_templates, chat_template_utils):
        monkeypatch.setattr(module, "datetime", calendar)
    return calendar


def test_a_template_with_a_clock_sees_the_day_on_which_the_run_began(
    tmp_path: Path, calendar: Calendar
) -> None:
    template = tmp_path / "dated.jinja"
    template.write_text(DATED)
    words = (*SHORT, "data.path=make:tiny_chat", f"model.chat_template={template}")
    assert attempt(tmp_path, *words, "max_steps=1")
    calendar.days = 1
    assert attempt(tmp_path, *words, "max_steps=2")
    states = [manifest.read_trainer_state(p) for p in manifest.list_checkpoints(tmp_path / "smoke")]
    assert len({state["fingerprint"] for state in states}) == 1
    assert {state["template_clock"] for state in states} == {"2024-07-26T12:00:00"}
    assert read_json(tmp_path / "smoke" / "run.json")["template_clock"] == "2024-07-26T12:00:00"


class Tokenizer:
    """Tells what it was asked for."""

    def __init__(self, chat_template: str):
        self.chat_template, self.options = chat_template, dict[str, Any]()
        self.time = datetime(2000, 1, 1)

    def apply_chat_template(self, messages: object, **options: Any) -> str:
        self.options, self.time = options, vars(chat_template_utils)["datetime"].now()
        return ""


def test_a_template_is_given_the_clock_where_it_asks_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chat_templates, "_clock", None)
    monkeypatch.setattr(chat_template_utils, "datetime", datetime)
    chat_templates.set_template_clock("2024-07-26T12:00:00")
    dated, plain = Tokenizer(DATED), Tokenizer(tiny.TEMPLATE)
    for tokenizer in (plain, dated):
        chat_templates.apply_chat_template(tokenizer, [], add_generation_prompt=True)  # type: ignore[arg-type]
        assert tokenizer.options == {"add_generation_prompt": True, "tokenize": False}
    assert dated.time == datetime(2024, 7, 26, 12) and plain.time.year > 2024
    chat_templates.set_template_clock(None)
    chat_templates.apply_chat_template(dated, [])  # type: ignore[arg-type]
    assert dated.time.year > 2024


def test_a_map_with_a_clock_is_named_and_the_way_on_works(tmp_path: Path) -> None:
    mapped = tmp_path / "mine.py"
    mapped.write_text(MAP)
    words = (*SHORT, f"data.map={mapped}:dated")
    assert attempt(tmp_path, *words, "max_steps=1")
    with pytest.raises(DataError) as refused:
        attempt(tmp_path, *words, "max_steps=2")
    (problem,) = refused.value.problems
    assert f"data.map={mapped}:dated" in problem.why
    assert "resume_allow_changes=true" in problem.fix
    assert attempt(tmp_path, *words, "max_steps=2", "resume_allow_changes=true")

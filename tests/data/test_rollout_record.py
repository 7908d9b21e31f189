"""Records of rollouts: bit for bit, whole or not there, and readable without torch."""

import subprocess
import sys
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import pytest
import torch

from rloo_cli.data import rollout_files
from rloo_cli.data.batch import Batch, Group, Rollout
from rloo_cli.data.rollout_record import (
    read_rollout_record,
    without_updates,
    write_rollout_record,
)
from rloo_cli.utils.errors import DataError

ODD = {
    "when": datetime(2026, 1, 2, 3, 4, 5), "day": date(2026, 1, 2), "price": Decimal("1.10"),
    "raw": b"\x00\xff", "nested": [{"a": None, "b": float("inf")}], "text": "half \ud800, ünï",
}  # fmt: skip


def made_batch(step: int = 0) -> Batch:
    """Two groups of two completions, the second of which was not trained on."""
    logp = [-1 / 3, -0.1]
    rollouts = [
        Rollout([5, 6][: 1 + i % 2], f"t{i}", "stop", i > 0, 2**62 + i, step, logp[: 1 + i % 2])
        for i in range(4)
    ]
    groups = [Group(7, ODD, "p", [1, 2, 3], rollouts[:2]), Group(9, {}, "q", [4], rollouts[2:])]
    groups[0].old_logp = [torch.tensor([-1 / 3]), torch.tensor([-0.5, float("nan")])]
    table = torch.tensor([[0.1, 2.0], [3.0, 3.0]], dtype=torch.float64)
    yes = torch.ones(2, 2, dtype=torch.bool)
    raw = torch.stack([table, torch.full((2, 2), float("nan"), dtype=torch.float64)])
    extras: dict[str, list[object]] = {"x": [1, 2, 3, "4"]}
    tables = (raw, table, table + 1, yes, ~yes)
    batch = Batch(step, groups, ["a", "b"], *tables, [0], 3, extras=extras)
    batch.advantage = table - 1
    return batch


def test_a_step_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_rollout_record(tmp_path, batch := made_batch(), {"seed": 3})
    record = read_rollout_record(tmp_path, 1)
    found = record.batch
    assert record.step == 1 and record.head["seed"] == 3 and not record.lost_columns
    assert found.groups[0].example == ODD and found.extras == batch.extras
    for name in ("raw", "score", "shaped", "scorable", "masked", "advantage"):
        assert torch.equal(getattr(found, name).nan_to_num(9), getattr(batch, name).nan_to_num(9))
    assert [g.rollouts for g in found.groups] == [g.rollouts for g in batch.groups]
    assert [(g.prompt_offset, g.prompt_ids) for g in found.groups] == [(7, [1, 2, 3]), (9, [4])]
    ours, theirs = found.groups[0].old_logp, batch.groups[0].old_logp
    assert (
        ours
        and theirs
        and all(map(torch.equal, map(torch.nan_to_num, ours), map(torch.nan_to_num, theirs)))
    )
    assert found.groups[1].old_logp is None and found.greedy is None and found.kl is None
    plain = without_updates(found)
    assert (
        plain.advantage is None
        and plain.groups[0].old_logp is None
        and plain.shaped is found.shaped
    )
    assert found.advantage is not None


def test_a_value_that_json_does_not_hold_is_kept_as_text_and_named(tmp_path: Path) -> None:
    batch = made_batch()
    batch.groups[0].example = {"odd": object(), "even": 2}
    write_rollout_record(tmp_path, batch, {})
    assert read_rollout_record(tmp_path, 1).lost_columns == ["odd"]


def cut(data: bytes) -> bytes:
    return data[:-5]


def flip(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


def newer(data: bytes) -> bytes:
    return data.replace(b'\\"format\\": 1', b'\\"format\\": 9')


def other(data: bytes) -> bytes:
    return data.replace(b'\\"draws\\": 3', b'\\"draws\\": 4')


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut, "bytes"), (flip, "digest differs"), (newer, "newer than 3"),
        (other, "head was changed"), (lambda d: b"", "damaged"),
        (lambda d: b"\xff" * 40, "invalid header"), (lambda d: d[:30], "damaged"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_one_error_that_names_it(tmp_path: Path, change, said: str) -> None:
    path = write_rollout_record(tmp_path, made_batch(), {})
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=said) as caught:
        read_rollout_record(tmp_path, 1)
    assert len(caught.value.problems) == 1 and str(path) in str(caught.value)


def test_a_missing_step_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="step_000002"):
        read_rollout_record(tmp_path, 2)


def test_the_newest_records_are_kept_and_later_ones_moved(tmp_path: Path) -> None:
    for step in range(5):
        write_rollout_record(tmp_path, made_batch(step), {})
    rollout_files.prune_rollout_files(tmp_path, None)
    assert [*rollout_files.list_rollout_files(tmp_path)] == [1, 2, 3, 4, 5]
    rollout_files.prune_rollout_files(tmp_path, 3)
    assert [*rollout_files.list_rollout_files(tmp_path)] == [3, 4, 5]
    moved = rollout_files.move_rollout_files(tmp_path, tmp_path / "tail", lambda step: step > 4)
    assert [p.name for p in moved] == ["step_000005.safetensors"] and moved[0].is_file()
    assert rollout_files.step_ranges([4, 3, 8, 1]) == "1, 3-4, 8"


@pytest.mark.process
def test_heads_are_read_without_torch(tmp_path: Path) -> None:
    write_rollout_record(tmp_path, made_batch(), {"seed": 4})
    code = (
        "import sys; from pathlib import Path; from rloo_cli.data import rollout_files as f;"
        "h = f.read_rollout_head(f.rollout_path(Path(sys.argv[1]), 1));"
        "assert h['seed'] == 4 and h['num_generations'] == 2 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)

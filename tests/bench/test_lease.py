"""bench/lease.py: what travels to a GPU machine, in pieces, and the queues that run there."""

import hashlib
import os
import shlex
import signal
import struct
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# Stands for bench/gpu.py: each row takes a moment and is on the disk before the next begins.
ROWS = """
import argparse, json, time
parser = argparse.ArgumentParser()
for name in ("--minutes", "--raw", "--page", "--keep"):
    parser.add_argument(name)
parser.add_argument("--rehearse", action="store_true")
parser.add_argument("--rows", nargs="+")
args = parser.parse_args()
for row in args.rows:
    with open(args.raw, "a") as raw:
        raw.write(json.dumps({"row": row}) + chr(10))
    print(row, flush=True)
    time.sleep(.5)
"""


@pytest.fixture(scope="module")
def lease() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "bench")
        import lease

        yield lease


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of bench/gpu.py."""
    program = tmp_path / "rows.py"
    program.write_text(ROWS)
    monkeypatch.setenv("LEASE_GPU", str(program))
    monkeypatch.setenv("LEASE_EVERY", "1")
    return program


def brought_rows(out: Path) -> str:
    """The raw rows in the archive that call 4 brings back."""
    with tarfile.open(out / "results.tgz") as archive:
        if "out/gpu.jsonl" not in archive.getnames():
            return ""
        member = archive.extractfile("out/gpu.jsonl")
        assert member is not None
        return member.read().decode()


def fat_binary(codes: dict[int, bytes]) -> bytes:
    """A fat binary with machine code for some compute capabilities."""
    body = b""
    for capability, code in codes.items():
        header = struct.pack("<HHIQ", 2, 0, 64, len(code)).ljust(28, b"\0")
        body += (header + struct.pack("<I", capability)).ljust(64, b"\0") + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_a_library_keeps_the_code_of_one_gpu_and_everything_that_is_not_gpu_code(lease: Any):
    library = b"ELF" + fat_binary({80: b"a" * 100, 90: b"b" * 100}) + b"the end"
    small = lease.slim_library(library, 90)
    assert len(small) == len(library)
    assert b"a" * 100 not in small and b"b" * 100 in small
    assert small.startswith(b"ELF") and small.endswith(b"the end")
    assert lease.slim_library(b"no GPU code here", 90) == b"no GPU code here"


def test_the_pieces_fill_each_call_and_are_one_archive_again(lease: Any, tmp_path: Path):
    for name, size in (("model.whl", 40_000), ("engine.tar.xz", 30_000)):
        (tmp_path / name).write_bytes(os.urandom(size))
    files = [tmp_path / "model.whl", tmp_path / "engine.tar.xz"]
    pieces = lease.cut_stream(files, [20_000, 30_000, 60_000])
    assert [len(piece) for piece in pieces[:2]] == [20_000, 30_000]
    joined = tmp_path / "joined.tar"
    joined.write_bytes(b"".join(pieces))
    with tarfile.open(joined) as archive:
        for file in files:
            member = archive.extractfile(file.name)
            assert member is not None and member.read() == file.read_bytes()


def test_what_does_not_fit_into_the_calls_is_refused(lease: Any, tmp_path: Path):
    (tmp_path / "model.whl").write_bytes(bytes(50_000))
    with pytest.raises(SystemExit, match="too many"):
        lease.cut_stream([tmp_path / "model.whl"], [10_000, 10_000, 10_000])


def packed_calls(lease: Any, folder: Path) -> Path:
    """.lease as `prepare` leaves it, with three small pieces and empty wheels."""
    sums = []
    for number in (1, 2, 3):
        call = folder / f"call{number}"
        call.mkdir(parents=True)
        names = [f"call{number}.sh"]
        names += ["env.sh", "queue_a.sh", "queue_b.sh", "pack.sh"] * (number == 1)
        for name in names:
            (call / name).write_bytes((lease.SCRIPTS / name).read_bytes())
        (call / f"piece.{number - 1}").write_bytes(b"%d" % number)
        digest = hashlib.sha256(b"%d" % number).hexdigest()
        sums.append(f"{digest}  piece.{number - 1}\n")
    (folder / "call3" / "pieces.sha256").write_text("".join(sums))
    wheels = folder / "call1" / "wheels"
    wheels.mkdir()
    for requirement in lease.read_requirements("training"):
        name, _, version = requirement.partition("==")
        (wheels / f"{name.replace('-', '_')}-{version}-py3-none-any.whl").touch()
    return folder


def test_the_check_passes_what_is_complete_and_prints_the_size_of_each_call(
    lease: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder = packed_calls(lease, tmp_path / "lease")
    assert lease.find_faults(folder) == []
    lease.print_calls(folder)
    assert capsys.readouterr().out.count(f"of {lease.CALL_LIMIT:,}") == 4


@pytest.mark.parametrize(
    "harm",
    ["call2/piece.1 is missing", "call1/piece.0 is damaged", "call1/queue_a.sh differs",
     "call 3 is", "call 1 lacks the wheel of trl", "call3/pieces.sha256 is missing"],
)  # fmt: skip
def test_the_check_names_what_is_missing_damaged_or_too_large(
    lease: Any, tmp_path: Path, harm: str
):
    folder = packed_calls(lease, tmp_path / "lease")
    if harm.startswith("call2"):
        (folder / "call2" / "piece.1").unlink()
    elif "damaged" in harm:
        (folder / "call1" / "piece.0").write_bytes(b"other")
    elif "differs" in harm:
        (folder / "call1" / "queue_a.sh").write_text("true\n")
    elif harm == "call 3 is":
        with (folder / "call3" / "large").open("wb") as large:
            large.truncate(lease.CALL_LIMIT)
    elif "lacks" in harm:
        next((folder / "call1" / "wheels").glob("trl-*")).unlink()
    else:
        (folder / "call3" / "pieces.sha256").unlink()
    faults = lease.find_faults(folder)
    assert len(faults) == 1 and harm in faults[0]


def test_the_queues_name_rows_and_sizes_that_bench_gpu_has(lease: Any):
    import gpu_table

    sizes = {row.name: row.sizes for row in gpu_table.ROWS}
    queued = []
    for queue in ("queue_a.sh", "queue_b.sh"):
        for line in (lease.SCRIPTS / queue).read_text().splitlines():
            if line.startswith("gpu "):
                settings, *rows = shlex.split(line)[1:]
                keys = [setting.partition("=")[0] for setting in settings.split()]
                assert all(key in sizes[row] for row in rows for key in keys), line
                queued += rows
    assert queued[0] == "train phase W5" and "real run" in queued


def test_a_dry_run_brings_back_the_rows_of_both_queues(lease: Any, tmp_path: Path, stand_in: Path):
    assert lease.dry_run(tmp_path / "out") == 0
    rows = brought_rows(tmp_path / "out")
    assert rows.index("train phase W5") < rows.index("whole step W5") < rows.index("real run")
    assert rows.count("\n") == 9


@pytest.mark.process
def test_a_dry_run_that_is_killed_has_brought_back_the_rows_that_had_ended(
    lease: Any, tmp_path: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    out = tmp_path / "out"
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'bench')!r}); import lease;"
    code += f"from pathlib import Path; lease.dry_run(Path({str(out)!r}))"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if (out / "results.tgz").exists() and "optimizer" in brought_rows(out):
                break
            time.sleep(0.1)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    assert "train phase W5" in brought_rows(out)

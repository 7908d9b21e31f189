"""bench/slim_libraries.py: one GPU's code is left, byte for byte."""

import struct
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))
import slim_libraries


def entry(kind: int, capability: int, code: bytes) -> bytes:
    """One code of a fat binary."""
    head = struct.pack("<HHIQ", kind, 0, 64, len(code)) + bytes(12) + struct.pack("<I", capability)
    return head.ljust(64, b"h") + code


def fat(*codes: bytes) -> bytes:
    """A fat binary."""
    body = b"".join(codes)
    return slim_libraries.MAGIC + struct.pack("<HHQ", 1, 16, len(body)) + body


def test_one_gpus_code_is_kept_and_everything_else_is_zeros() -> None:
    ours, other, ptx = b"ours" * 8, b"others" * 4, b"text" * 8
    several = fat(entry(2, 80, other), entry(2, 90, ours), entry(1, 90, ptx))
    chance = slim_libraries.MAGIC + b"by chance, and no fat binary"
    whole = [b"\x7fELF", several, chance, fat(entry(2, 90, ours))]
    small, gone = slim_libraries.slim(b"".join(whole), 90)
    whole[1] = fat(entry(2, 80, bytes(24)), entry(2, 90, ours), entry(1, 90, bytes(32)))
    assert small == b"".join(whole) and gone == 24 + 32


def test_libraries_below_a_folder_are_made_small_in_place(tmp_path: Path, capsys) -> None:
    place = tmp_path / "deep" / "lib.abi3.so"
    place.parent.mkdir()
    place.write_bytes(fat(entry(2, 80, b"x" * 64)))
    plain = tmp_path / "plain.so"
    plain.write_bytes(b"nothing of CUDA")
    assert slim_libraries.main([str(tmp_path), "--keep", "90"]) == 0
    assert b"x" not in place.read_bytes() and plain.read_bytes() == b"nothing of CUDA"
    assert capsys.readouterr().out.count("are zeros now") == 1

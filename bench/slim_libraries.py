"""Makes shared libraries with CUDA code small enough to carry: keeps one GPU's code of each.

    python bench/slim_libraries.py FOLDER --keep 90

A wheel's library holds machine code for every kind of GPU. In each library below FOLDER all but the
code for compute capability `--keep` is overwritten with zeros, in place: the files stay as long as
they were, and compress to a fraction. What has no code for that GPU cannot run any more, PTX
included. Libraries without CUDA code stay as they are.
"""

import argparse
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)  # of a fat binary
MACHINE_CODE = 2  # kind of an entry; 1 = PTX


def entries(data: bytes | bytearray) -> Iterator[tuple[int, int, int, int]]:
    """Of each code in each fat binary: kind, compute capability, where it begins, bytes.

    A fat binary is u32 magic, u16 version, u16 size of this header, u64 size of the rest; an entry
    u16 kind, u16, u32 size of its header, u64 size of the code, .., at 28 u32 compute capability.
    """
    at = data.find(MAGIC)
    while at >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, at + 4)
        end = at + header + size
        if version != 1 or header != 16 or end > len(data):
            at = data.find(MAGIC, at + 4)  # these four bytes by chance
            continue
        place = at + header
        while place < end:
            kind, _, own, length = struct.unpack_from("<HHIQ", data, place)
            (capability,) = struct.unpack_from("<I", data, place + 28)
            yield kind, capability, place + own, length
            place += own + length
        at = data.find(MAGIC, end)


def slim(data: bytes, keep: int) -> tuple[bytes, int]:
    """A library with the code of one GPU alone, and how many bytes were overwritten."""
    out, gone = bytearray(data), 0
    for kind, capability, begin, length in entries(data):
        if (kind, capability) != (MACHINE_CODE, keep):
            out[begin : begin + length] = bytes(length)
            gone += length
    return bytes(out), gone


def main(words: list[str]) -> int:
    """The command. -> exit code"""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keep", type=int, default=90, help="e.g. 90 for an H100")
    args = parser.parse_args(words)
    for path in sorted(args.folder.rglob("*.so*")):
        small, gone = slim(path.read_bytes(), args.keep)
        if gone:
            path.write_bytes(small)
            print(f"{path}: {gone / 1e6:.1f} MB of {len(small) / 1e6:.1f} are zeros now")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Prepares a quarter of an hour of `bench/gpu.py` on a GPU machine without a network.

    python bench/lease.py             fetch, slim and pack everything into .lease/
    python bench/lease.py --check     what is missing or too large, and the calls to make
    python bench/lease.py --dry-run   both queues here, on the CPU, with tiny sizes

The machine is reached in four calls. Each of the first three carries the repository and one folder,
.lease/call1 to call3, with at most 64 MiB in all; each brings back what it writes to $OUT. Call 1
installs what training needs and starts two queues of rows (bench/lease/queue_*.sh), which go on
while calls 2 and 3 travel. Call 4 waits for them and packs their results every 20 s.

SmolLM2 and vLLM travel as one stream, cut where a call is full. vLLM's libraries hold machine code
for every kind of GPU; all but the code for compute capability 9.0 is overwritten with zeros here,
so that they compress to a fraction. What was downloaded stays in .lease/downloads.

Exit codes: 0; 1 something is missing, damaged or too large, or a row of the dry run failed.
"""

import argparse
import hashlib
import io
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "bench" / "lease"
FOLDER = ROOT / ".lease"
CALL_LIMIT = 64 * 2**20  # bytes of one call: the repository and the folder that it carries
SPARE = 2 * 2**20  # left free in calls 1 and 2, for a repository that grows after packing
CAPABILITY = 90  # of an H100 and an H200
PYTHON_VERSION = "3.12"
GLIBC_MINORS = range(35, 4, -1)  # of the manylinux tags that the machine takes
# Parts of vLLM's wheel that no row uses: mixture-of-experts kernels, FlashAttention 2 (the H100 has
# 3), the Rust frontend, kernels for DeepSeek.
UNUSED_VLLM = re.compile(r"_moe_C|_vllm_fa2_C|vllm-rs|third_party/deep_gemm|flashmla")
UNUSED_DATA = re.compile(r"mistral_common/data/|pycountry/locales/|libxgrammar\.a")
# Call: what it does, expected seconds. The queues go on between them.
CALLS = {
    1: ("start the machine, install, start the queues", 105),
    2: ("the second piece", 25),
    3: ("the third piece; unpack SmolLM2 and vLLM", 50),
    4: ("wait for the queues; pack every 20 s", 575),
}
FAT_BINARY = struct.pack("<I", 0xBA55ED50)
MACHINE_CODE = 2  # kind of an entry of a fat binary; 1 = PTX


# Fetching.


def read_requirements(section: str) -> list[str]:
    """The pinned requirements of a section of bench/lease/wheels.txt."""
    text = (SCRIPTS / "wheels.txt").read_text()
    body = re.search(rf"(?ms)^\[{section}\]$(.*?)(?=^\[|\Z)", text)
    if body is None:
        raise SystemExit(f"lease: bench/lease/wheels.txt has no section [{section}]")
    return [line for line in body[1].split("\n") if line and not line.startswith("#")]


def find_wheel(requirement: str, folder: Path) -> Path | None:
    """The wheel of NAME==VERSION in a folder, however its name is spelt."""
    name, _, version = requirement.partition("==")
    spelt = re.sub(r"[-_.]+", "_", name).lower()
    for path in folder.glob("*.whl"):
        found, number = path.name.split("-")[:2]
        if re.sub(r"[-_.]+", "_", found).lower() == spelt and number == version:
            return path
    return None


def fetch_wheels(section: str, downloads: Path) -> list[Path]:
    """Download the wheels of a section that are not there yet; antlr4 has a source archive only.

    Raises SystemExit with pip's last line where one cannot be had.
    """
    found = []
    for requirement in read_requirements(section):
        if find_wheel(requirement, downloads) is None:
            run_pip(requirement, downloads)
        wheel = find_wheel(requirement, downloads)
        if wheel is None:
            raise SystemExit(f"lease: pip fetched another version than {requirement}")
        found.append(wheel)
    return found


def run_pip(requirement: str, downloads: Path) -> None:
    """Fetch one wheel for the GPU machine's Python and system."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    if requirement.startswith("antlr4"):
        command += ["wheel", "--no-deps", "--wheel-dir", str(downloads), requirement]
    else:
        older = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
        tags = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS]
        tags += [f"{name}_x86_64" for name in older.values()]
        command += ["download", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
        command += ["--python-version", PYTHON_VERSION, "--dest", str(downloads)]
        command += [word for tag in tags for word in ("--platform", tag)] + [requirement]
    child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode:
        lines = child.stderr.strip().splitlines() or ["pip said nothing"]
        raise SystemExit(f"lease: {requirement} cannot be fetched: {lines[-1]}")


def build_own_wheel(dest: Path) -> None:
    """rloo's own wheel into `dest`: the metadata of an installed rloo is asked for at run time."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    subprocess.run([*command, "--no-deps", "--wheel-dir", str(dest), str(ROOT)], check=True)


# Slimming.


def code_entries(data: bytes | bytearray) -> Iterator[tuple[int, int, int, int]]:
    """Each code in each fat binary of a library: kind, compute capability, offset, bytes.

    A fat binary is u32 magic, u16 version, u16 size of this header, u64 size of the rest. An entry
    is u16 kind, u16, u32 size of its header, u64 size of the code, and at 28 u32 capability.
    """
    at = data.find(FAT_BINARY)
    while at >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, at + 4)
        end = at + header + size
        if version != 1 or header != 16 or end > len(data):
            at = data.find(FAT_BINARY, at + 4)  # these four bytes by chance
            continue
        entry = at + header
        while entry < end:
            kind, _, own, length = struct.unpack_from("<HHIQ", data, entry)
            (capability,) = struct.unpack_from("<I", data, entry + 28)
            yield kind, capability, entry + own, length
            entry += own + length
        at = data.find(FAT_BINARY, end)


def slim_library(data: bytes, capability: int) -> bytes:
    """A library in which all GPU code but that of one capability is zeros. PTX goes, too."""
    out = bytearray(data)
    for kind, found, begin, length in code_entries(data):
        if (kind, found) != (MACHINE_CODE, capability):
            out[begin : begin + length] = bytes(length)
    return bytes(out)


def pack_engine(wheels: list[Path], dest: Path) -> None:
    """Unpack vLLM and what it imports, slim it, and compress it into `dest` (.tar.xz)."""
    with tempfile.TemporaryDirectory(prefix="rloo-lease-") as temporary:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if not (UNUSED_VLLM.search(name) or UNUSED_DATA.search(name)):
                        archive.extract(name, temporary)
        for library in sorted(Path(temporary).rglob("*.so*")):
            data = library.read_bytes()
            small = slim_library(data, CAPABILITY)
            if small != data:
                library.write_bytes(small)
            subprocess.run(["strip", "--strip-debug", str(library)], stderr=subprocess.DEVNULL)
        members = sorted(os.listdir(temporary))
        command = ["tar", "--use-compress-program", "xz -3 -T0", "-cf", f"{dest}.new"]
        subprocess.run([*command, "-C", temporary, *members], check=True)
    Path(f"{dest}.new").rename(dest)


# Packing.


def carried_tree_bytes() -> int:
    """Bytes of the repository as every call carries it: tracked files, and new ones not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    files = [ROOT / name.decode() for name in listed.split(b"\0") if name]
    return sum(file.lstat().st_size for file in files if file.is_file())


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def cut_stream(files: list[Path], rooms: list[int]) -> list[bytes]:
    """One tar of `files`, cut into a piece for each room; the last takes the rest.

    Raises SystemExit where the rest is larger than the last room.
    """
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for file in files:
            archive.add(file, file.name)
    data, pieces = stream.getvalue(), []
    for room in rooms[:-1]:
        pieces.append(data[:room])
        data = data[room:]
    if len(data) > rooms[-1]:
        raise SystemExit(f"lease: {len(data) - rooms[-1]} bytes too many for {len(rooms)} calls")
    return [*pieces, data]


def prepare(folder: Path = FOLDER) -> None:
    """Fetch, slim and pack: .lease/call1 to call3, ready to be carried."""
    downloads = folder / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    training, model = fetch_wheels("training", downloads), fetch_wheels("model", downloads)
    engine = downloads / "engine.tar.xz"
    parts = [*fetch_wheels("engine", downloads), *fetch_wheels("vllm", downloads)]
    if not engine.exists() or engine.stat().st_mtime < (SCRIPTS / "wheels.txt").stat().st_mtime:
        pack_engine(parts, engine)
    calls = [folder / f"call{number}" for number in (1, 2, 3)]
    for number, call in enumerate(calls, 1):
        shutil.rmtree(call, ignore_errors=True)
        call.mkdir()
        shutil.copy(SCRIPTS / f"call{number}.sh", call)
    for name in ("env.sh", "queue_a.sh", "queue_b.sh", "pack.sh"):
        shutil.copy(SCRIPTS / name, calls[0])
    (calls[0] / "wheels").mkdir()
    for wheel in training:
        shutil.copy(wheel, calls[0] / "wheels")
    build_own_wheel(calls[0] / "wheels")
    tree = carried_tree_bytes()
    rooms = [CALL_LIMIT - SPARE - tree - folder_bytes(call) for call in calls]
    sums = []
    for index, piece in enumerate(cut_stream([*model, engine], rooms)):
        (calls[index] / f"piece.{index}").write_bytes(piece)
        sums.append(f"{hashlib.sha256(piece).hexdigest()}  piece.{index}\n")
    (calls[2] / "pieces.sha256").write_text("".join(sums))


def find_faults(folder: Path = FOLDER) -> list[str]:
    """What is missing, damaged, or too large to be carried; one line each."""
    faults = []
    sums = folder / "call3" / "pieces.sha256"
    listed = sums.read_text().split() if sums.exists() else []
    expected = dict(zip(listed[1::2], listed[::2], strict=True))
    if len(expected) != 3:
        return [f"{sums} is missing or incomplete: run python bench/lease.py"]
    for number in (1, 2, 3):
        call, piece = folder / f"call{number}", f"piece.{number - 1}"
        path = call / piece
        if not path.exists():
            faults.append(f"{path} is missing")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != expected[piece]:
            faults.append(f"{path} is damaged")
        scripts = [f"call{number}.sh"]
        scripts += ["env.sh", "queue_a.sh", "queue_b.sh", "pack.sh"] * (number == 1)
        for name in scripts:
            packed = call / name
            if not packed.exists() or packed.read_bytes() != (SCRIPTS / name).read_bytes():
                faults.append(f"{packed} differs from bench/lease/{name}: pack again")
        size = carried_tree_bytes() + folder_bytes(call)
        if size > CALL_LIMIT:
            faults.append(f"call {number} is {size - CALL_LIMIT} bytes over {CALL_LIMIT}")
    for requirement in read_requirements("training"):
        if find_wheel(requirement, folder / "call1" / "wheels") is None:
            faults.append(f"call 1 lacks the wheel of {requirement}")
    return faults


def print_calls(folder: Path = FOLDER) -> None:
    """The calls to make, in order, with their size and the seconds that they should take."""
    tree = carried_tree_bytes()
    for number, (what, seconds) in CALLS.items():
        if number == 4:
            command, carried = "bash /tmp/lease/scripts/pack.sh", 0
        else:
            command = f"bash .lease/call{number}/call{number}.sh"
            carried = folder_bytes(folder / f"call{number}")
        print(f"call {number}: {what}\n  run      {command}")
        if carried:
            print(f"  carry    .lease/call{number}")
        print(f"  bytes    {tree + carried:,} of {CALL_LIMIT:,}; about {seconds} s")


# The dry run.


def dry_run(out: Path | None = None) -> int:
    """Both queues and the packing on this machine, as calls 1 and 4 begin them. -> exit code

    The rows are rehearsed: tiny, on the CPU. `LEASE_GPU` names another program than bench/gpu.py.
    """
    with tempfile.TemporaryDirectory(prefix="rloo-lease-") as temporary:
        lease, brought = Path(temporary), out or FOLDER / "dry-run"
        shutil.rmtree(brought, ignore_errors=True)
        for made in (lease / "out", lease / "scripts", brought):
            made.mkdir(parents=True)
        (lease / "code").symlink_to(ROOT)
        for script in SCRIPTS.glob("*.sh"):
            shutil.copy(script, lease / "scripts")
        settings = {
            "LEASE": str(lease), "LEASE_REHEARSE": "1", "LEASE_PYTHON": sys.executable,
            "LEASE_LIMIT": "7200", "OUT": str(brought),
        }  # fmt: skip
        environment = os.environ | settings
        queues = [
            subprocess.Popen(
                ["bash", str(lease / "scripts" / f"queue_{name}.sh")], env=environment,
                stdin=subprocess.DEVNULL,
            ) for name in ("a", "b")
        ]  # fmt: skip
        try:
            pack = ["bash", str(lease / "scripts" / "pack.sh")]
            code = subprocess.run(pack, env=environment).returncode
        finally:
            for queue in queues:
                queue.kill()
                queue.wait()
        failed = (lease / "out" / "queue.txt").read_text().count("lease: FAILED")
        print(f"lease: {brought / 'results.tgz'}; {failed} calls of bench/gpu.py failed")
        return int(bool(code or failed))


def main(words: list[str] | None = None) -> int:
    """The command line. -> exit code"""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="say what is missing or too large")
    parser.add_argument("--dry-run", action="store_true", help="rehearse both queues here")
    args = parser.parse_args(words)
    if args.dry_run:
        return dry_run()
    if not args.check:
        prepare()
    faults = find_faults()
    for fault in faults:
        print(f"lease: {fault}", file=sys.stderr)
    if not faults:
        print_calls()
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())

"""Wheels for a machine without a network: cut into parts that can be sent, joined there, tried.

    python bench/carry.py pack DEST --have torch==2.11.0 [--have FREEZE] vllm==0.22.1
    python bench/carry.py split WHEELS DEST [--have ...] vllm==0.22.1   of wheels that lie here
    python bench/carry.py join PARTS DEST [--verify [--environment VENV]]
    python bench/carry.py verify WHEELS [--have ...] [--environment VENV] vllm==0.22.1

`pack` asks pip what a fresh environment would take, fetches of that what the machine lacks, and
cuts it. `--have` is what the machine has: a requirement, or a file of `pip freeze` of its own. The
versions there stay where they can (torch always), and what only they need is not fetched. For a
machine unlike this one give `--python-version 3.12 --platform manylinux_2_35_x86_64` (2.35 is its
glibc), and verify it over there.

All files are one stream, cut at `--part-mb` (millions of bytes): part-000, part-001, ... and a
manifest.json with the sha256 of every part and every file. `join` needs nothing but Python and the
parts, and names those that are missing or damaged; only they need to be sent again. `--verify` then
installs into a fresh environment with no index at hand; it sees the machine's own packages where
some of `--have` are named. TRL with a vLLM of its own is packed and joined in folders of its own:

    python bench/carry.py pack /tmp/for-trl --have machine.txt trl==1.16.0 vllm==0.22.1

Exit code 1 and one line where something is wrong.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MANIFEST, PART_MB, BLOCK = "manifest.json", 60, 2**20
CUDA = ("nvidia-", "cuda-")
# As CUDA's: what a GPU machine's driver and builds decide. Never another version.
KEPT = {"torch", "triton"}


class Wrong(Exception):
    """What is wrong, in a line for the user."""


# Cutting and joining.


def split(files: list[Path], dest: Path, part_bytes: int, about: dict[str, Any]) -> dict[str, Any]:
    """Cut `files` into parts of at most `part_bytes` in `dest`; the manifest, which is there too.

    `about`: what else the manifest is to say. Raises Wrong where `dest` has something in it.
    """
    if dest.exists() and any(dest.iterdir()):
        raise Wrong(f"{dest} is not empty: parts of two packings would be mixed")
    dest.mkdir(parents=True, exist_ok=True)
    parts = Parts(dest, part_bytes)
    listed = []
    for file in sorted(files):
        whole = hashlib.sha256()
        for block in blocks(file):
            whole.update(block)
            parts.write(block)
        listed.append(
            {"name": file.name, "bytes": file.stat().st_size, "sha256": whole.hexdigest()}
        )
    parts.close()
    manifest = {**about, "parts": parts.done, "files": listed}
    (dest / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


class Parts:
    """Bytes in, numbered files of at most `limit` bytes out."""

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit
        self.done: list[dict[str, Any]] = []
        self.room, self.file, self.sum = 0, None, hashlib.sha256()  # type: ignore[var-annotated]

    def write(self, block: bytes) -> None:
        """Append; begins another part as often as one is full."""
        while block:
            if not self.room:
                self.close()
                self.file = (self.folder / f"part-{len(self.done):03d}").open("wb")
                self.room, self.sum = self.limit, hashlib.sha256()
            now, block = block[: self.room], block[self.room :]
            assert self.file is not None
            self.file.write(now)
            self.sum.update(now)
            self.room -= len(now)

    def close(self) -> None:
        """End the part that is open, if one is."""
        if self.file is None:
            return
        self.file.close()
        name, size = Path(self.file.name).name, self.limit - self.room
        self.done.append({"name": name, "bytes": size, "sha256": self.sum.hexdigest()})
        self.file, self.room = None, 0


def blocks(file: Path) -> Iterator[bytes]:
    """A file's bytes, a block at a time."""
    with file.open("rb") as opened:
        while block := opened.read(BLOCK):
            yield block


def sha256(file: Path) -> str:
    """The sum of a file's bytes."""
    found = hashlib.sha256()
    for block in blocks(file):
        found.update(block)
    return found.hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises Wrong where there is none, or one that is not as `split` writes it."""
    place = folder / MANIFEST
    try:
        manifest = json.loads(place.read_text())
        for row in [*manifest["parts"], *manifest["files"]]:
            name = row["name"]
            int(row["bytes"]), str(row["sha256"])
            if not isinstance(name, str) or Path(name).name != name or name.startswith("."):
                raise Wrong(f"{place} is damaged: {name!r} is not a file's plain name")
    except FileNotFoundError:
        raise Wrong(f"{place} is missing: send it with the parts") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Wrong(
            f"{place} is damaged ({type(error).__name__}: {error}): send it again"
        ) from None
    found: dict[str, Any] = manifest
    return found


def join(folder: Path, dest: Path) -> dict[str, Any]:
    """Put the files of `folder`'s parts together in `dest`; the manifest.

    Raises Wrong with the names of all parts that are missing or damaged, before it writes anything.
    """
    manifest = read_manifest(folder)
    wrong = [why for part in manifest["parts"] if (why := fault_of(folder, part))]
    if wrong:
        count = len(manifest["parts"])
        raise Wrong(f"{len(wrong)} of {count} parts must be sent again: {', '.join(wrong)}")
    dest.mkdir(parents=True, exist_ok=True)
    stream = Stream(b for part in manifest["parts"] for b in blocks(folder / part["name"]))
    for file in manifest["files"]:
        place = dest / f".{file['name']}.joining"
        whole = hashlib.sha256()
        with place.open("wb") as out:
            for block in stream.take(file["bytes"]):
                whole.update(block)
                out.write(block)
        if whole.hexdigest() != file["sha256"]:
            place.unlink()
            raise Wrong(f"{file['name']} is not what was packed: {folder / MANIFEST} is another's")
        place.rename(dest / file["name"])
    return manifest


def fault_of(folder: Path, part: dict[str, Any]) -> str:
    """What is wrong with a part, with its name; "" for a good one."""
    file = folder / part["name"]
    if not file.is_file():
        return f"{part['name']} (missing)"
    if (size := file.stat().st_size) != part["bytes"]:
        return f"{part['name']} ({size} bytes instead of {part['bytes']})"
    return "" if sha256(file) == part["sha256"] else f"{part['name']} (damaged)"


class Stream:
    """Blocks of any size, taken by the byte."""

    def __init__(self, source: Iterator[bytes]):
        self.source, self.left = source, b""

    def take(self, count: int) -> Iterator[bytes]:
        """The next `count` bytes, or fewer at the end."""
        while count and (block := self.left or next(self.source, b"")):
            now, self.left = block[:count], block[count:]
            count -= len(now)
            yield now


# What to carry.


def plain(name: str) -> str:
    """A package's name as two spellings of it agree."""
    return re.sub(r"[-_.]+", "-", name).lower()


def had(given: list[str]) -> dict[str, str]:
    """What the machine has: name -> the requirement that pins it. Raises Wrong."""
    found = {}
    for one in given:
        lines = Path(one).read_text().splitlines() if Path(one).is_file() else [one]
        for line in lines:
            text = line.partition("#")[0].strip()
            if not text or text.startswith("-"):
                continue  # an editable install, or an option
            match = re.fullmatch(r"([\w.-]+)\s*==\s*([\w.+!-]+)", text)
            if match:
                found[plain(match[1])] = f"{match[1]}=={match[2]}"
            elif " @ " not in text:
                raise Wrong(
                    f"--have {one}: {text!r} is not NAME==VERSION, nor a file of such lines"
                )
    return found


def tags(platform: str) -> list[str]:
    """Every older manylinux that a machine of this one takes too: pip looks for each by name."""
    match = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", platform)
    if match is None:
        return [platform]
    number, machine = int(match[1]), match[2]
    older = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    found = []
    for n in range(number, 4, -1):
        names = [f"manylinux_2_{n}", older[n]] if n in older else [f"manylinux_2_{n}"]
        found += [f"{name}_{machine}" for name in names]
    return found


def missing(report: dict[str, Any], there: dict[str, str]) -> list[str]:
    """Of pip's report on a fresh environment: NAME==VERSION of what the machine lacks.

    What only packages need that are there already is there already too.
    """
    items = {plain(i["metadata"]["name"]): i["metadata"] for i in report["install"]}
    asked = [plain(i["metadata"]["name"]) for i in report["install"] if i.get("requested")]
    found: dict[str, str] = {}
    while asked:
        name = asked.pop()
        if name in there or name in found or name not in items:
            continue
        found[name] = f"{items[name]['name']}=={items[name]['version']}"
        for need in items[name].get("requires_dist", ()):
            match = re.match(r"[\w.-]+", need)
            asked += [plain(match[0])] if match else []
    return sorted(found.values())


def pip(words: list[str], own_settings: bool = True, **more: Any) -> str:
    """Run pip; its output. Raises Wrong with its last error. `own_settings`: the user's index."""
    environment = dict(os.environ)
    if not own_settings:
        environment = {k: v for k, v in environment.items() if not k.startswith("PIP_")}
        environment["PIP_CONFIG_FILE"] = os.devnull
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, **more)
    if ended.returncode:
        errors = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
        if conflict := re.search(r"(?s)The conflict is caused by:\n(.*?)\n\s*\n", ended.stdout):
            errors = [line.strip() for line in conflict[1].splitlines()]
        said = "; ".join(errors[:8]) or ended.stderr.strip()[-300:]
        verb = next(word for word in words if word in ("install", "download"))
        raise Wrong(f"pip {verb} failed: {said}")
    return ended.stdout


def fetch(requirements: list[str], there: dict[str, str], target: list[str], dest: Path) -> None:
    """Download the wheels of `requirements` that the machine lacks. `target`: pip's options for
    another machine."""
    for one in missing(resolve(requirements, there, target), there):
        pip(["download", "--no-deps", "--only-binary=:all:", *target, "--dest", str(dest), one])


def resolve(requirements: list[str], there: dict[str, str], target: list[str]) -> dict[str, Any]:
    """pip's report on a fresh environment with the versions of `there`. One that `requirements`
    cannot have, or that asks for what they cannot have, is left out of `there`: another version is
    then carried. Where pip does not say which, only torch and CUDA's packages are held to what is
    there. Raises Wrong.
    """
    options = ["--ignore-installed", "--only-binary=:all:", *target]
    dropped: dict[str, str] = {}
    while True:
        with tempfile.TemporaryDirectory() as scratch:
            pins, report = Path(scratch, "have.txt"), Path(scratch, "report.json")
            pins.write_text("".join(f"{line}\n" for line in there.values()))
            asked = ["install", "--dry-run", "--report", str(report), "--target", scratch]
            try:
                pip([*asked, *options, "--constraint", str(pins), *requirements])
                found: dict[str, Any] = json.loads(report.read_text())
            except Wrong as wrong:
                barred = in_the_way(str(wrong), there)
                if not barred:
                    raise
                print(f"carry: not held to {', '.join(there[n] for n in barred)}: {wrong}")
                dropped |= {name: there.pop(name) for name in barred}
                continue
        there |= {n: pin for n, pin in dropped.items() if not replaced(found, n, pin)}
        for name, pin in sorted(dropped.items()):
            if name not in there:
                print(f"carry: another {name} than {pin} is carried")
        return found


def in_the_way(said: str, there: dict[str, str]) -> list[str]:
    """Names in `there` that pip's conflict is about: those that it says are pinned, or that ask
    for what others cannot have; where it names none, all whose version may be another."""
    free = [name for name in there if name not in KEPT and not name.startswith(CUDA)]
    names = re.findall(r"The user requested \(constraint\) ([\w.-]+)", said)
    names += re.findall(r"([\w.-]+) [\w.+!-]+ depends on", said)
    barred = [name for name in free if name in map(plain, names)]
    pins = re.findall(r"\(constraint\) ([\w.-]+)", said)
    return barred or ([] if any(plain(name) in there for name in pins) else free)


def replaced(report: dict[str, Any], name: str, pin: str) -> bool:
    """Whether the resolved environment has another version of a package than this pin."""
    items = (i["metadata"] for i in report["install"])
    versions = [m["version"] for m in items if plain(m["name"]) == name]
    return bool(versions) and versions[0] != pin.partition("==")[2]


# Trying it.


def verify(
    wheels: Path, requirements: list[str], there: dict[str, str], environment: Path | None = None
) -> str:
    """Install `requirements` from `wheels` alone into a fresh environment; what was installed.

    It is thrown away unless `environment` says where it stays. Raises Wrong.
    """
    with tempfile.TemporaryDirectory() as scratch:
        place = environment or Path(scratch, "venv")
        if environment is not None and environment.exists():
            raise Wrong(f"{environment} is there already: a fresh environment has another name")
        inherits = ["--system-site-packages"] if there else []
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", *inherits, place], check=True
        )
        if there:  # of the environment that we run in, which need not be the system's
            site = next(place.glob("lib/python*/site-packages"))
            paths = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
            (site / "carried_from.pth").write_text("".join(f"{p}\n" for p in paths))
        words = ["--isolated", "--python", str(place / "bin" / "python"), "install", "--quiet"]
        words += ["--no-index", "--find-links", str(wheels), "--report", "-"]
        report = json.loads(pip([*words, *requirements], own_settings=False))
    rows = [i["metadata"] for i in report["install"]]
    return ", ".join(f"{m['name']} {m['version']}" for m in rows) or "nothing was lacking"


# The command line.


def main(words: list[str]) -> int:
    """The exit code."""
    args = parser().parse_args(words)
    try:
        print(args.work(args))
    except Wrong as wrong:
        print(f"carry: {wrong}", file=sys.stderr)
        return 1
    return 0


def _pack(args: argparse.Namespace) -> str:
    there = had(args.have)
    target = [w for one in args.platform for name in tags(one) for w in ("--platform", name)]
    target += ["--python-version", args.python_version] if args.python_version else []
    with tempfile.TemporaryDirectory() as scratch:
        fetch(args.requirements, there, target, Path(scratch))
        return _cut(Path(scratch), there, args)


def _split(args: argparse.Namespace) -> str:
    return _cut(args.wheels, had(args.have), args)


def _cut(wheels: Path, there: dict[str, str], args: argparse.Namespace) -> str:
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise Wrong(f"no wheels are in {wheels}: nothing is lacking, or the folder is another")
    if args.part_mb <= 0:
        raise Wrong(f"--part-mb {args.part_mb} is not a size")
    about = {"requirements": args.requirements, "have": list(there.values())}
    said = f"; installs {verify(wheels, args.requirements, there)}" if args.verify else ""
    manifest = split(files, args.dest, int(args.part_mb * 10**6), about)
    total = sum(file.stat().st_size for file in files) / 10**6
    return f"{len(files)} wheels, {total:.1f} MB, in {len(manifest['parts'])} parts{said}"


def _join(args: argparse.Namespace) -> str:
    manifest = join(args.parts, args.dest)
    said = f"{len(manifest['files'])} wheels are in {args.dest}"
    if args.verify:
        there = had(manifest["have"])
        installed = verify(args.dest, manifest["requirements"], there, args.environment)
        return f"{said}; installs {installed}"
    wanted = " ".join(manifest["requirements"])
    return f"{said}: pip install --no-index --find-links {args.dest} {wanted}"


def _verify(args: argparse.Namespace) -> str:
    return f"installs {verify(args.wheels, args.requirements, had(args.have), args.environment)}"


def parser() -> argparse.ArgumentParser:
    """pack, split, join, verify."""
    whole = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = whole.add_subparsers(required=True)
    how: dict[str, tuple[Callable[[argparse.Namespace], str], list[str]]] = {
        "pack": (_pack, ["dest"]), "split": (_split, ["wheels", "dest"]),
        "join": (_join, ["parts", "dest"]), "verify": (_verify, ["wheels"]),
    }  # fmt: skip
    for name, (work, places) in how.items():
        verb = verbs.add_parser(name)
        verb.set_defaults(work=work, verify=name == "verify", environment=None)
        for place in places:
            verb.add_argument(place, type=Path)
        if name != "join":
            verb.add_argument("requirements", nargs="+", help="as to pip: vllm==0.22.1")
            verb.add_argument("--have", action="append", default=[], help="NAME==VERSION or a file")
        if name in ("pack", "split"):
            verb.add_argument("--part-mb", type=float, default=PART_MB)
        if name == "pack":
            verb.add_argument("--platform", action="append", default=[], help="as to pip")
            verb.add_argument("--python-version", default="", help="as to pip")
        if name != "verify":
            verb.add_argument("--verify", action="store_true", help="install it without an index")
        if name in ("join", "verify"):
            verb.add_argument("--environment", type=Path, help="where the fresh environment stays")
    return whole


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

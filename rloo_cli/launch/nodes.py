"""How launchers of one run that were started side by side come to an agreement: through files.

Rank 0's launcher makes the run's folder; the others wait for its word, `.go-KEY.json` beside the
run's folder. Each of them first writes a word of its own with a number drawn for the occasion, and
believes only what answers that number: files of a start that was killed say nothing. Whoever ends
wrongly writes its code, so that nobody waits for one who has gone.
"""

import contextlib
import hashlib
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rloo_cli.config.rules import address
from rloo_cli.config.schema import RunConfig
from rloo_cli.launch import preflight, processes, topology
from rloo_cli.launch.topology import Place
from rloo_cli.utils.errors import GenerationError, MachineError, Problem, RunError
from rloo_cli.utils.files import read_json, write_json

POLL_S = 0.2
PART_S = 15.0  # the first one waits so long for the others to have heard how it ended
HARMLESS = (0, 75)  # all of them end so together
Word = dict[str, Any]
P = TypeVar("P", "Leader", "Follower")


def go_file(root: Path, name: str, key: str) -> Path:
    """Where rank 0's launcher says what it does, for one start of one run."""
    digest = hashlib.sha256(f"{name}\n{key}".encode()).hexdigest()[:12]
    return root / f".go-{digest}.json"


def _read(path: Path) -> Word:
    try:
        return read_json(path)
    except (OSError, ValueError):  # taken away, or a network's file system that is behind
        return {}


class Leader:
    """Rank 0's launcher: says what to do, hears how the others fare. Alone, it does nothing."""

    def __init__(self, root: Path, name: str, place: Place):
        self.path, self.others = go_file(root, name, place.key), place.launchers - 1
        self.word: Word = {"key": place.key, "host": platform.node(), "total": place.total}
        self.answered: dict[str, str] = {}  # file -> the number in it
        self.present: set[str] = set()
        self.new_root = False
        self.code = 0  # how it ended
        if self.others:
            with contextlib.suppress(OSError):  # it cannot be written: that is said elsewhere
                self.new_root = not root.exists()
                root.mkdir(parents=True, exist_ok=True)
                self._clear()

    def say(self, **words: Any) -> None:
        """Tell the others."""
        self.word |= words
        self._write()

    def heard(self) -> int | None:
        """Answer those who came; the code of one that ended wrongly."""
        if not self.others:
            return None
        words = {p.name: _read(p) for p in self.path.parent.glob(f"{self.path.stem}-*.json")}
        self.present = {name for name, word in words.items() if "code" not in word}
        new = {name: word["nonce"] for name, word in words.items() if "nonce" in word}
        if new.items() - self.answered.items():
            self.answered |= new
            self._write()
        codes = (word["code"] for word in words.values() if "code" in word)
        return next((code for code in codes if code not in HARMLESS), None)

    def part(self, code: int) -> None:
        """Say how it ended, let the others hear it, and take the files away."""
        if not self.others:
            return
        with contextlib.suppress(OSError):
            self.say(code=code)
            limit = time.monotonic() + PART_S
            self.heard()
            while time.monotonic() < limit and (self.present or len(self.answered) < self.others):
                time.sleep(POLL_S)
                self.heard()
            self._clear()
            if self.new_root:
                self.path.parent.rmdir()

    def _write(self) -> None:
        if self.others:
            write_json(self.path, self.word | {"answered": sorted(self.answered.values())})

    def _clear(self) -> None:
        for path in self.path.parent.glob(f"{self.path.stem}*.json"):
            path.unlink(missing_ok=True)


@contextmanager
def _told(party: P) -> Iterator[P]:
    """The others hear with which code this one parts, or that an error of ours ended it."""
    code = 1
    try:
        yield party
        code = party.code
    except RunError as error:
        code = error.code
        raise
    finally:
        party.part(code)


@contextmanager
def leading(root: Path, name: str, place: Place) -> Iterator[Leader]:
    """While inside, the others can hear us; they are told if it ends in a refusal."""
    with _told(Leader(root, name, place)) as leader:
        yield leader


class Follower:
    """Another launcher: waits for the word of rank 0's. It never touches the run's folder."""

    def __init__(self, root: Path, name: str, place: Place):
        self.go = go_file(root, name, place.key)
        self.mine = self.go.with_name(f"{self.go.stem}-{place.first}.json")
        self.first, self.nonce = place.first, secrets.token_hex(8)
        self.code = 0  # how it ended

    def wait(self, limit: float) -> Word:
        """The word that says what to do, or a code. Raises GenerationError after `limit` s."""
        end = time.monotonic() + limit
        while time.monotonic() < end:
            if self.go.parent.is_dir() and not self.mine.exists():
                with contextlib.suppress(OSError):  # rank 0's launcher makes the folder, not we
                    write_json(self.mine, {"nonce": self.nonce})
            word = self._word()
            if "start" in word or "code" in word:
                return word
            time.sleep(min(POLL_S, limit))
        raise GenerationError(
            Problem(
                f"rank 0 did not begin in {limit:g} s (this is the launcher of rank {self.first})",
                "distributed.timeout_s",
                f"waited for {self.go.absolute()}, which rank 0's launcher writes; it died, or"
                " root is not on a disk that all nodes share",
                "root=FOLDER that every node sees, or a longer distributed.timeout_s",
            )
        )

    def heard(self) -> int | None:
        """The code of rank 0's launcher, if it has ended wrongly."""
        code = self._word().get("code", 0)
        return None if code in HARMLESS else code

    def part(self, code: int) -> None:
        """Say how it ended."""
        with contextlib.suppress(OSError):
            if code in HARMLESS or "code" in self._word() or not self.go.parent.is_dir():
                self.mine.unlink(missing_ok=True)
            else:
                write_json(self.mine, {"nonce": self.nonce, "code": code})

    def _word(self) -> Word:
        word = _read(self.go)
        return word if self.nonce in word.get("answered", ()) else {}


@contextmanager
def following(root: Path, name: str, place: Place) -> Iterator[Follower]:
    """While inside, rank 0's launcher knows of us; it is told if we are refused."""
    with _told(Follower(root, name, place)) as follower:
        yield follower


def follow(run: RunConfig, place: Place) -> int:
    """Do our part of a run; its exit code. Raises RunError where we cannot take part."""
    root, name = Path(run.root), str(run.name)
    with following(root, name, place) as follower:
        preflight.check(run, here=place.on_node)
        word = follower.wait(run.distributed.timeout_s)
        if "code" in word:  # refused, or there was nothing to do: rank 0's launcher has said why
            follower.code = word["code"]
        else:
            follower.code = _join(root / name, place, word, follower.heard)
    return follower.code


def _join(
    folder: Path, place: Place, word: dict[str, Any], elsewhere: Callable[[], int | None]
) -> int:
    if word["total"] != place.total:
        why = f"on {word['host']} there are to be {word['total']} in all, on {platform.node()}"
        raise MachineError(
            Problem(
                "nodes do not agree how many processes train",
                "distributed.num_processes",
                f"{why} {place.total}: one per GPU, and the nodes have not as many",
                "distributed.num_processes=N",
            )
        )
    host, port = address(place.store) or word["store"] or ("", 0)
    env = word["env"] if word["host"] == platform.node() else {}
    starts = with_env(topology.starts(place, host, port, None), env)
    watch = processes.Watch(busy=saving(folder), elsewhere=elsewhere)
    return processes.run("train.worker", [word["start"]], watch, starts)


def with_env(starts: list[processes.Start], env: Mapping[str, str]) -> list[processes.Start]:
    """The same processes, with more in their environment."""
    return [replace(start, env={**env, **start.env}) for start in starts]


def saving(folder: Path) -> Callable[[], bool]:
    """Whether a checkpoint is being written there."""
    return lambda: any(folder.glob(".tmp-*"))

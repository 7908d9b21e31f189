"""Temporary folders that are removed soon after their owner ends, however it ends.

The owner keeps a file in its folder locked. The kernel releases the lock when the owner ends, also
when it is killed, and the next folder of the same kind removes the unlocked ones.
"""

import fcntl
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

LOCK_FILE = "owner.lock"
LOCKED = b"locked\n"  # content of the file after its owner got the lock


class ScratchFolder:
    """A new folder below `parent`, readable by its owner alone; its name begins with `prefix`.

    It is locked as long as this object exists. Raises OSError if it cannot be created.
    """

    def __init__(self, prefix: str, parent: str):
        remove_abandoned_folders(prefix, parent)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))  # with mode 0700
        self._lock = (self.path / LOCK_FILE).open("wb")  # no child inherits it
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._lock.write(LOCKED)
        self._lock.flush()

    def remove(self) -> None:
        """Remove it with everything in it; ignore what cannot be removed."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_abandoned_folders(prefix: str, parent: str) -> None:
    """Remove folders of this kind whose owner has ended. Another user's folders cannot be opened; a
    folder without LOCKED is new and about to be locked."""
    for path in Path(parent).glob(f"{prefix}*/{LOCK_FILE}"):
        with suppress(OSError), path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.read() == LOCKED:
                shutil.rmtree(path.parent, ignore_errors=True)

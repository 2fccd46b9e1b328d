"""A simulated disk that retains only synced data, and the most harmful part of everything else."""

from __future__ import annotations

import enum
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from streamfold._native import FaultyDisk

#: Bytes that a device writes atomically.
_SECTOR = 512


class Mood(enum.Enum):
    """What a power cut does to unsynced changes."""

    LOSES = "all of it is lost, and what was deleted is back"
    TEARS = "all names are there, and no content is whole"
    MIXES = "anything, file by file"


class HostileDisk:
    """Tracks what was synced below `root` and writes images of what a power cut may leave.

    Follows POSIX, and what ext4 may do. Syncing a file stores its content but not its name. Syncing
    a folder stores the names now in it but no content. Until then, a new name may be missing, a
    deleted one may reappear, and a file may be whole, empty, truncated or zeroed. Everything below
    `root` at construction counts as synced.
    """

    def __init__(self, root: Path, spare: Path) -> None:
        self._root = root
        #: Holds a hard link to every file ever synced, so that no inode number is reused.
        self._spare = spare
        self._spare.mkdir(parents=True, exist_ok=True)
        self._contents: dict[int, bytes] = {}
        self._names: dict[Path, dict[str, int]] = {}
        #: Names of folders whose files are synced before they get their final names.
        self._whole: set[str] = set()
        self._lock = threading.RLock()
        #: Called before a sync takes effect.
        self.on_sync: Callable[[Path], None] = lambda path: None
        for folder, _, files in os.walk(root):
            self._store(Path(folder))
            for file in files:
                self._store(Path(folder) / file)

    def sync(self, path: Path) -> None:
        """Record a sync. The store calls this instead of fsync."""
        with self._lock:
            self.on_sync(path)
            if path.is_relative_to(self._root):
                self._store(path)

    def follow(self, engine: FaultyDisk) -> None:
        """Record the engine's own syncs until `engine` closes.

        The engine syncs log files before it gives them their final names.
        """
        self._whole.add("wal")
        engine.watch()

        def learn() -> None:
            try:
                while (file := engine.next_sync()) is not None:
                    self.sync(file)
                    self.sync(file.parent)
            finally:
                engine.close()  # after an error, so that the engine does not wait for this thread

        threading.Thread(target=learn, daemon=True, name="syncs").start()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Block all syncs while the context is open."""
        with self._lock:
            yield

    def _store(self, path: Path) -> None:
        if path.is_dir():
            self._names[path] = {entry.name: entry.inode() for entry in os.scandir(path)}
            return
        inode = path.stat().st_ino
        if inode not in self._contents:
            os.link(path, self._spare / str(inode))
        self._contents[inode] = path.read_bytes()  # a file may be rewritten and synced again

    def cut_power(self, image: Path, dice: random.Random, mood: Mood) -> None:
        """Write to `image` a state that a power cut now may leave below the root."""
        with self._lock:
            self._copy(self._root, image, dice, mood)

    def _copy(self, folder: Path, image: Path, dice: random.Random, mood: Mood) -> None:
        image.mkdir(parents=True)
        stored = self._names.get(folder, {})
        live = _names(folder)
        for name in sorted(stored.keys() | live.keys()):
            inodes = [names[name] for names in (stored, live) if name in names]
            certain = len(inodes) == 2 and inodes[0] == inodes[1]
            if not certain and not _survives(name in live, dice, mood):
                if len(inodes) < 2:
                    continue
                inodes.reverse()  # the name still refers to its previous file
            path = folder / name
            if path.is_dir() or path in self._names:
                self._copy(path, image / name, dice, mood)
            else:
                content = self._content(path, inodes[-1], dice, mood)
                if content is not None:
                    (image / name).write_bytes(content)

    def _content(self, path: Path, inode: int, dice: random.Random, mood: Mood) -> bytes | None:
        if inode in self._contents:
            return self._contents[inode]
        try:
            written = path.read_bytes()
        except FileNotFoundError:
            return None  # the database has just deleted it
        if path.parent.name in self._whole and "#" not in path.name:
            return written
        return torn(written, dice, whole=mood is Mood.MIXES)


def _names(folder: Path) -> dict[str, int]:
    if not folder.exists():
        return {}
    return {entry.name: entry.inode() for entry in os.scandir(folder)}


def _survives(live: bool, dice: random.Random, mood: Mood) -> bool:
    """Return whether a new name took effect (`live`) or a deleted one came back (not `live`)."""
    if mood is Mood.MIXES:
        return dice.random() < 0.5
    return live if mood is Mood.TEARS else not live


def torn(content: bytes, dice: random.Random, *, whole: bool = False) -> bytes:
    """Return content that may be left of a file that was never synced."""
    damage = dice.choice(["empty", "zeros", "prefix", "hole", *(["none"] if whole else [])])
    if damage == "empty":
        return b""
    if damage == "zeros":
        return bytes(len(content))
    if damage == "prefix":
        return content[: dice.randrange(len(content) or 1)]
    if damage == "hole":
        start = dice.randrange(len(content) or 1) // _SECTOR * _SECTOR
        size = min(_SECTOR, len(content) - start)
        return content[:start] + bytes(size) + content[start + size :]
    return content

"""A folder of files that were read before, named by their SHA-256 and bounded in bytes.

Several processes may share it. A file appears whole, under the name of its content, by one rename;
a process that has it open can still read it after another evicts it. A cache can be deleted at any
time; files with a wrong hash are fetched again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from streamfold.errors import InvalidError

#: Bytes that a cache holds by default: a few bases of a table of millions of rows.
DEFAULT_MAX_BYTES = 10 << 30
#: Seconds after which an unfinished file is attributed to a process that died.
ABANDONED = 86_400
#: Prefix of the names of unfinished files.
DRAFT = "draft-"
#: File that evicting processes lock.
LOCK = "lock"


@dataclass(frozen=True, slots=True)
class Cache:
    """Files by content in `folder`, at most `max_bytes`, evicting the least recently used first.

    The bound holds after each addition; a file that is larger than it stays until the next one.
    """

    folder: Path
    max_bytes: int = DEFAULT_MAX_BYTES

    def __post_init__(self) -> None:
        if self.max_bytes < 0:
            raise InvalidError(f"a cache of {self.max_bytes} bytes: it cannot be negative")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidError(
                f"{self.folder} cannot be the folder of a cache: {error.strerror}; name another"
            ) from None

    def path(self, sha256: str) -> Path:
        """Return the path of a file of this content, which need not exist."""
        return self.folder / sha256[:2] / sha256

    def find(self, sha256: str) -> Path | None:
        """Return a file that certainly has this content, and count it as used; None if not cached."""
        path = self.path(sha256)
        try:
            if digest_of(path) == sha256:
                os.utime(path)
                return path
            path.unlink()
        except FileNotFoundError:
            pass  # not cached, or evicted while we looked
        return None

    @contextmanager
    def draft(self) -> Iterator[IO[bytes]]:
        """Give a file to write to; it is deleted unless `keep` adds it to the cache."""
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=DRAFT, delete=False) as file:
            try:
                yield file
            finally:
                with suppress(FileNotFoundError):  # kept, and so renamed
                    Path(file.name).unlink()

    def keep(self, draft: IO[bytes], sha256: str) -> Path:
        """Add a draft whose content was checked, and evict what exceeds the bound."""
        draft.flush()
        path = self.path(sha256)
        path.parent.mkdir(exist_ok=True)
        Path(draft.name).replace(path)
        self.evict(spare=path)
        return path

    def evict(self, spare: Path | None = None) -> None:
        """Delete the least recently used files until the bound holds; never `spare`."""
        with self._lock() as alone:
            if not alone:
                return  # another process is evicting, and sees what this one added
            found = sorted(self._files(), key=lambda file: file[0])
            excess = sum(size for _, size, _ in found) - self.max_bytes
            for used, size, path in found:
                abandoned = path.name.startswith(DRAFT) and used < time.time() - ABANDONED
                if abandoned or (excess > 0 and path != spare and not path.name.startswith(DRAFT)):
                    path.unlink(missing_ok=True)
                    excess -= size

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        for path in (*self.folder.glob("??/*"), *self.folder.glob(f"{DRAFT}*")):
            with suppress(FileNotFoundError):
                status = path.stat()
                yield status.st_mtime, status.st_size, path

    @contextmanager
    def _lock(self) -> Iterator[bool]:
        with (self.folder / LOCK).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

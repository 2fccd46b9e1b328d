"""Where an archive is, as people write it: a URL or a path, of its folder or of its manifest."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from streamfold.archive.errors import ManifestNotFoundError
from streamfold.archive.manifest.model import MANIFEST_KEY


def folder_url(text: str) -> str:
    """Return the URL of the folder, without a slash at the end."""
    url = text if "://" in text or text.startswith("memory:") else Path(text).absolute().as_uri()
    return url.rstrip("/").removesuffix("/" + MANIFEST_KEY)


def existing_folder(text: str) -> str:
    """Return the same; a local folder must be there, for reading does not create it."""
    url = folder_url(text)
    folder = local_folder(url)
    if folder is not None and not folder.is_dir():
        raise ManifestNotFoundError(f"there is no folder {folder}: name the folder of a table")
    return url


def local_folder(uri: str) -> Path | None:
    """Return the path that a file URI names, None for any other URI."""
    parts = urlsplit(uri)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None

"""What can go wrong between Spark and archives, beyond what `streamfold.archive` says itself.

RetryLaterError
└── FilesGoneError                load the table again, and pin what takes long to read
ConflictError
└── ArchiveReplacedError          load the table again
"""

from __future__ import annotations

from streamfold.errors import ConflictError, RetryLaterError


class FilesGoneError(RetryLaterError):
    """Files of the plan were collected before tasks had read them; no rows are left out silently."""

    code = "archive_files_gone"

    def __init__(self, cause: str, position: str) -> None:
        super().__init__(
            f"{cause}; this query reads position {position}: load the table again to read its head, "
            "and to read for longer than collection leaves files, pin the epoch first"
        )


class ArchiveReplacedError(ConflictError):
    """Another archive is in the folder since the table was loaded."""

    code = "archive_replaced"

    def __init__(self, uri: str) -> None:
        super().__init__(
            f"{uri} holds another archive than when it was loaded: load the table again"
        )

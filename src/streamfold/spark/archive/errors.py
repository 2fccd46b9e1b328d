"""Errors of reading archives with Spark, besides those of `streamfold.archive`.

RetryLaterError
└── FilesGoneError                load the table again, and pin the epoch for long reads
ConflictError
└── ArchiveReplacedError          load the table again
"""

from __future__ import annotations

from streamfold.errors import ConflictError, RetryLaterError


class FilesGoneError(RetryLaterError):
    """Files of the plan were collected before tasks read them; no rows are dropped silently."""

    code = "archive_files_gone"

    def __init__(self, cause: str, position: str) -> None:
        super().__init__(
            f"{cause}; this query reads position {position}: load the table again to read its head, "
            "and pin the epoch first for reads that take longer than collection keeps files"
        )


class ArchiveReplacedError(ConflictError):
    """The folder holds another archive than when the table was loaded."""

    code = "archive_replaced"

    def __init__(self, uri: str) -> None:
        super().__init__(
            f"{uri} holds another archive than when it was loaded: load the table again"
        )

"""Errors that a saver raises besides those in `streamfold.errors`.

ConflictError
└── ThreadConflictError   another writer has added a checkpoint to the thread
RetryLaterError
└── ThreadDeletingError   the thread's stream is still being deleted
"""

from __future__ import annotations

from streamfold.errors import ConflictError, RetryLaterError


class ThreadConflictError(ConflictError):
    """Another writer has continued the thread. The rejected checkpoint is not stored."""

    code = "thread_conflict"

    def __init__(self, thread_id: str, parent: str | None, newest: str) -> None:
        began = f"checkpoint {parent}" if parent else "an empty thread"
        super().__init__(
            f"thread {thread_id!r} has a newer checkpoint, {newest}, from another writer: this run "
            f"began at {began}, and nothing of this step is stored; run the graph again to continue "
            "from the newest checkpoint, or name an older one by checkpoint_id to fork the thread"
        )


class ThreadDeletingError(RetryLaterError):
    """The thread was just deleted, and its stream cannot be recreated yet."""

    code = "thread_deleting"

    def __init__(self, thread_id: str) -> None:
        super().__init__(
            f"the stream of thread {thread_id!r} is still being deleted: try again later, or use "
            "another thread_id"
        )

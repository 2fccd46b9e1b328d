"""Backs up a running store, and restores stores from backups."""

from streamfold.store.backup.backup import BackupReport, back_up
from streamfold.store.backup.backup_manifest import BackupManifest, list_backups
from streamfold.store.backup.restore import RestoreReport, open_backups, restore_backup

__all__ = [
    "BackupManifest",
    "BackupReport",
    "RestoreReport",
    "back_up",
    "list_backups",
    "open_backups",
    "restore_backup",
]

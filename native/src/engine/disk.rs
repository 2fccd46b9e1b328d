//! Files in a folder, with log files synced on request, and a fault-injecting disk for tests.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt, TryStreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;
use tokio::sync::{oneshot, watch};

/// The log's folder, below the database's.
const LOG: &str = "wal";

#[derive(Debug)]
pub struct Disk {
    folder: PathBuf,
    plain: Arc<LocalFileSystem>,
    syncing: Arc<LocalFileSystem>,
    /// Whether log files are synced, with their folder, before they count as written.
    syncs_log: bool,
    /// The sync that failed. No log file is written after it: the system may have dropped the data
    /// that it could not write, and would report success for it the next time.
    failed: Mutex<Option<SyncFailure>>,
}

impl Disk {
    pub fn new(folder: &str, syncs_log: bool) -> Result<Self> {
        let plain = LocalFileSystem::new_with_prefix(folder)?;
        let syncing = LocalFileSystem::new_with_prefix(folder)?.with_fsync(true);
        let (plain, syncing) = (Arc::new(plain), Arc::new(syncing));
        Ok(Self { folder: folder.into(), plain, syncing, syncs_log, failed: Mutex::default() })
    }

    /// Returns the writer of a file, and whether it syncs.
    fn writer(&self, location: &Path) -> (&LocalFileSystem, bool) {
        let folder = location.parts().rev().nth(1);
        let syncs = self.syncs_log && folder.is_some_and(|folder| folder.as_ref() == LOG);
        (if syncs { &self.syncing } else { &self.plain }, syncs)
    }

    async fn pass(&self, step: u8) -> Result<()> {
        match faulty(&self.folder) {
            Some(faults) => faults.pass(step).await,
            None => Ok(()),
        }
    }

    /// Returns the error for a failed synced write: a `SyncFailure` if the sync itself failed.
    fn judge(&self, location: &Path, source: Box<dyn std::error::Error + Send + Sync>) -> Error {
        let file = self.folder.join(location.as_ref());
        let reason = source.to_string();
        // If the write failed but the file exists, it has its name, and syncing the folder failed.
        if !reason.contains(SYNC_MESSAGE) && !file.exists() {
            return Error::Generic { store: "Disk", source };
        }
        let failure = SyncFailure { file, reason };
        *self.failed.lock() = Some(failure.clone());
        failure.into()
    }

    /// Reports a synced file to a test that decides when the sync counts.
    async fn report(&self, location: &Path) -> Result<()> {
        let Some(faults) = faulty(&self.folder) else { return Ok(()) };
        faults.pass(SYNC).await?;
        faults.report(self.folder.join(location.as_ref())).await;
        Ok(())
    }
}

impl std::fmt::Display for Disk {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Disk({})", self.folder.display())
    }
}

#[async_trait]
impl ObjectStore for Disk {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        self.pass(CREATE).await?;
        let (writer, syncs) = self.writer(location);
        if !syncs {
            return writer.put_opts(location, payload, options).await;
        }
        if let Some(failure) = self.failed.lock().clone() {
            return Err(failure.into());
        }
        let mut result = writer.put_opts(location, payload, options).await;
        if result.is_ok() {
            result = self.report(location).await.and(result);
        }
        match result {
            Err(Error::Generic { source, .. }) => Err(self.judge(location, source)),
            result => result,
        }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.pass(CREATE).await?;
        self.writer(location).0.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.pass(READ).await?;
        self.plain.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.pass(READ).await?;
        self.plain.get_ranges(location, ranges).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let folder = self.folder.clone();
        let passed = locations.and_then(move |location| {
            let faults = faulty(&folder);
            async move {
                match faults {
                    Some(faults) => faults.pass(REMOVE).await.map(|()| location),
                    None => Ok(location),
                }
            }
        });
        self.plain.delete_stream(passed.boxed())
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.plain.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.pass(READ).await?;
        self.plain.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.plain.copy_opts(from, to, options).await // SlateDB copies only for clones
    }
}

/// How object_store's message for a failed file sync begins.
const SYNC_MESSAGE: &str = "Unable to sync";

/// A file, or its folder, could not be synced.
#[derive(Clone, Debug)]
pub struct SyncFailure {
    file: PathBuf,
    reason: String,
}

impl std::fmt::Display for SyncFailure {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "cannot sync {}: {}", self.file.display(), self.reason)
    }
}

impl std::error::Error for SyncFailure {}

impl From<SyncFailure> for Error {
    fn from(failure: SyncFailure) -> Self {
        Self::Generic { store: "Disk", source: Box::new(failure) }
    }
}

fn failure(number: i32) -> Error {
    let source = Box::new(io::Error::from_raw_os_error(number));
    Error::Generic { store: "Disk", source }
}

/// The steps that can fail, numbered as in `FaultyDisk.turn`.
const READ: u8 = 1;
const CREATE: u8 = 2;
const REMOVE: u8 = 4;
const SYNC: u8 = 8;

/// Whether any disk is faulty. If none is, `DISKS` is not consulted.
static FAULTY: AtomicBool = AtomicBool::new(false);
static DISKS: Mutex<Vec<(PathBuf, Arc<Faults>)>> = Mutex::new(Vec::new());

fn faulty(folder: &std::path::Path) -> Option<Arc<Faults>> {
    if !FAULTY.load(Ordering::Relaxed) {
        return None;
    }
    let disks = DISKS.lock();
    disks.iter().find(|(root, _)| folder.starts_with(root)).map(|(_, faults)| faults.clone())
}

/// How the steps of a disk behave.
#[derive(Clone, Copy, Default)]
struct Mode {
    /// The steps that fail, the system error they fail with, and the fraction that fails.
    steps: u8,
    number: i32,
    rate: f64,
    /// Maximum delay of a step, in seconds.
    delay: f64,
    hangs: bool,
}

struct Faults {
    mode: watch::Sender<Mode>,
    dice: Mutex<u64>,
    syncs: Mutex<Syncs>,
    synced: Condvar,
}

#[derive(Default)]
struct Syncs {
    watched: bool,
    waiting: VecDeque<(PathBuf, oneshot::Sender<()>)>,
}

impl Faults {
    async fn pass(&self, step: u8) -> Result<()> {
        let mode = *self.mode.borrow();
        if mode.hangs {
            let mut changes = self.mode.subscribe();
            let _ = changes.wait_for(|mode| !mode.hangs).await;
        }
        if mode.delay > 0.0 {
            tokio::time::sleep(Duration::from_secs_f64(mode.delay * self.roll())).await;
        }
        if mode.steps & step != 0 && self.roll() < mode.rate {
            return Err(failure(mode.number));
        }
        Ok(())
    }

    /// A number from 0 to below 1 (xorshift).
    fn roll(&self) -> f64 {
        let mut state = self.dice.lock();
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        (*state >> 11) as f64 / (1_u64 << 53) as f64
    }

    async fn report(&self, file: PathBuf) {
        let (sender, done) = oneshot::channel();
        {
            let mut syncs = self.syncs.lock();
            if !syncs.watched {
                return;
            }
            syncs.waiting.push_back((file, sender));
            self.synced.notify_all();
        }
        let _ = done.await; // an error means that nobody watches any more
    }
}

/// A fault-injecting disk for tests: it affects the stores of this process below `root`.
#[pyclass(frozen, module = "streamfold._native")]
pub struct FaultyDisk {
    root: PathBuf,
    faults: Arc<Faults>,
    current: Mutex<Option<oneshot::Sender<()>>>,
}

#[pymethods]
impl FaultyDisk {
    #[new]
    fn new(root: PathBuf, seed: u64) -> Self {
        let faults = Arc::new(Faults {
            mode: watch::Sender::new(Mode::default()),
            dice: Mutex::new(seed.max(1)),
            syncs: Mutex::default(),
            synced: Condvar::new(),
        });
        DISKS.lock().push((root.clone(), faults.clone()));
        FAULTY.store(true, Ordering::Relaxed);
        Self { root, faults, current: Mutex::new(None) }
    }

    /// Makes a fraction `rate` of the `steps` (1 reads, 2 writes, 4 deletes, 8 syncs) fail with
    /// system error `number`, delays all steps by up to `delay` seconds, or hangs them until the
    /// next call.
    #[pyo3(signature = (steps=0, number=0, rate=1.0, delay=0.0, hangs=false))]
    fn turn(&self, steps: u8, number: i32, rate: f64, delay: f64, hangs: bool) {
        self.faults.mode.send_replace(Mode { steps, number, rate, delay, hangs });
    }

    /// Waits for the next synced file, whose sync counts only after the following call. None once
    /// the disk is closed.
    fn next_sync(&self, py: Python<'_>) -> Option<PathBuf> {
        py.detach(|| {
            drop(self.current.lock().take());
            let mut syncs = self.faults.syncs.lock();
            loop {
                if let Some((file, sender)) = syncs.waiting.pop_front() {
                    *self.current.lock() = Some(sender);
                    return Some(file);
                }
                if !syncs.watched {
                    return None;
                }
                self.faults.synced.wait(&mut syncs);
            }
        })
    }

    /// From now on, makes syncs wait for `next_sync`.
    fn watch(&self) {
        self.faults.syncs.lock().watched = true;
    }

    /// Stops all faults for good.
    fn close(&self) {
        self.turn(0, 0, 1.0, 0.0, false);
        let mut disks = DISKS.lock();
        disks.retain(|(root, _)| *root != self.root);
        FAULTY.store(!disks.is_empty(), Ordering::Relaxed);
        let mut syncs = self.faults.syncs.lock();
        syncs.watched = false;
        syncs.waiting.clear();
        self.faults.synced.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_failed_sync_nothing_is_written() {
        let folder = std::env::temp_dir();
        let disk = Disk::new(folder.to_str().unwrap(), true).unwrap();
        let absent = Path::from("no-such-file");
        let kept = disk.judge(&absent, "Unable to write".into());
        assert!(!kept.to_string().contains("cannot sync"), "{kept}");
        assert!(disk.failed.lock().is_none());
        let judged = disk.judge(&absent, "Unable to sync data".into());
        assert!(judged.to_string().contains("cannot sync"), "{judged}");
        assert!(disk.failed.lock().is_some());
    }

    #[test]
    fn only_the_log_is_synced_where_that_is_asked_for() {
        let folder = std::env::temp_dir();
        let disk = Disk::new(folder.to_str().unwrap(), true).unwrap();
        let syncs = |name: &str| disk.writer(&Path::from(name)).1;
        assert!(syncs("db/wal/00000000000000000001.sst"));
        assert!(!syncs("db/compacted/wal.sst"));
        assert!(!syncs("wal/manifest/1.manifest"));
    }
}

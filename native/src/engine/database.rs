//! An open database, for writing or read-only.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use object_store::path::Path;
use parking_lot::Mutex;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use slatedb::config::{
    CloseOptions, DbReaderOptions, DurabilityLevel, FlushOptions, FlushType, ReadOptions,
    ScanOptions,
};
use slatedb::{
    CompactorBuilder, Db, DbIterator, DbReader, DbReaderMode, IterationOrder, KeyValue, Settings,
    SstBlockSize, WriteBatch, WriteHandle,
};
use tokio::sync::{mpsc, oneshot};

use super::cache::BlockCache;
use super::calls::{Calls, Started};
use super::clock::Clock;
use super::fault::Fault;
use super::manifest::Raw;
use super::merges::DisjointMerges;
use super::runtime;
use super::storage::Storage;
use crate::codec::unlocked;

/// Commits that may queue for SlateDB. The committer sends only a few at a time.
const COMMITS_MAX: usize = 1024;

#[derive(Clone)]
enum Handle {
    Writer(Db, mpsc::Sender<Commit>),
    Reader(Arc<DbReader>),
}

/// Rows on their way to SlateDB.
struct Commit {
    rows: WriteBatch,
    flush: FlushType,
    answer: oneshot::Sender<Result<u64, Fault>>,
}

/// An open database. Dropping it unclosed closes it without a flush.
#[pyclass(frozen, module = "streamfold._native")]
pub struct Database {
    handle: Handle,
    closed: AtomicBool,
}

#[pymethods]
impl Database {
    /// SlateDB's own settings, as a JSON object.
    #[staticmethod]
    fn default_settings() -> String {
        serde_json::to_string(&Settings::default()).expect("settings are plain values")
    }

    /// Opens the database at `path` as its writer. `settings` is a JSON object, `cache` the block
    /// cache size in bytes.
    #[staticmethod]
    fn open<'py>(
        py: Python<'py>,
        calls: &Calls,
        storage: &Storage,
        path: &str,
        settings: &str,
        clock: &Clock,
        cache: usize,
    ) -> Started<'py> {
        let settings: Settings = serde_json::from_str(settings)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        let (path, store) = (Path::from(path), storage.store.clone());
        let merging = settings.compactor_options.clone().unwrap_or_default();
        let builder = Db::builder(path.clone(), store.clone())
            .with_settings(settings)
            .with_sst_block_size(SstBlockSize::Block64Kib)
            .with_system_clock(clock.shared.clone())
            .with_db_cache(Arc::new(BlockCache::new(cache)), 0);
        calls.start(py, async move {
            let compactor = CompactorBuilder::new(path, store)
                .with_options(merging)
                .with_scheduler_supplier(Arc::new(DisjointMerges));
            let db = builder.with_compactor_builder(compactor).build().await?;
            let (sender, commits) = mpsc::channel(COMMITS_MAX);
            tokio::spawn(write_all(db.clone(), commits));
            Ok(Self::new(Handle::Writer(db, sender)))
        })
    }

    /// Opens the newest durable state for reading and refreshes it every `poll` milliseconds. A
    /// checkpoint of `lifetime` milliseconds pins it unless `follow`.
    #[staticmethod]
    #[pyo3(signature = (calls, storage, path, *, poll, lifetime, memory, retries, replay_log, follow))]
    #[expect(clippy::too_many_arguments, reason = "named options")]
    fn open_reader<'py>(
        py: Python<'py>,
        calls: &Calls,
        storage: &Storage,
        path: &str,
        poll: u64,
        lifetime: u64,
        memory: u64,
        retries: u32,
        replay_log: bool,
        follow: bool,
    ) -> Started<'py> {
        let options = DbReaderOptions {
            manifest_poll_interval: Duration::from_millis(poll),
            checkpoint_lifetime: Duration::from_millis(lifetime),
            max_memtable_bytes: memory,
            skip_wal_replay: !replay_log,
            object_store_max_retries: Some(retries),
            ..DbReaderOptions::default()
        };
        let mode =
            if follow { DbReaderMode::FollowLatest } else { DbReaderMode::ManagedCheckpoint };
        let builder = DbReader::builder(Path::from(path), storage.store.clone())
            .with_options(options)
            .with_reader_mode(mode)
            .with_db_cache_disabled();
        calls.start(
            py,
            async move { Ok(Self::new(Handle::Reader(Arc::new(builder.build().await?)))) },
        )
    }

    /// Writes rows after those of all earlier calls, and flushes the log, or with `tables` the
    /// memtable. Returns the sequence number of the last row once it is durable.
    #[pyo3(signature = (calls, rows, tables=false))]
    fn commit<'py>(
        &self,
        py: Python<'py>,
        calls: &Calls,
        rows: &Rows,
        tables: bool,
    ) -> Started<'py> {
        let Handle::Writer(_, commits) = &self.handle else {
            return Err(PyValueError::new_err("a reader takes no rows"));
        };
        let rows = rows.batch.lock().take();
        let rows = rows.ok_or_else(|| PyValueError::new_err("these rows were committed before"))?;
        let flush = if tables { FlushType::MemTable } else { FlushType::Wal };
        let (answer, written) = oneshot::channel();
        let sent = commits
            .try_send(Commit { rows, flush, answer })
            .map_err(|_| Fault::new("closed", "the database is closed, or too many commits wait"));
        calls.start(py, async move {
            sent?;
            written.await.unwrap_or_else(|_| Err(Fault::new("closed", "the database was closed")))
        })
    }

    /// Returns the durable values of keys, or None, in order. Reads them concurrently.
    fn get_many<'py>(&self, py: Python<'py>, calls: &Calls, keys: Vec<Vec<u8>>) -> Started<'py> {
        let handle = self.handle.clone();
        calls.start(py, async move {
            futures_util::future::try_join_all(keys.iter().map(|key| handle.get(key))).await
        })
    }

    /// Starts a scan of the durable rows from `start` to before `end`.
    #[pyo3(signature = (calls, start, end, *, descending, read_ahead, fetches))]
    #[expect(clippy::too_many_arguments, reason = "named options")]
    fn scan<'py>(
        &self,
        py: Python<'py>,
        calls: &Calls,
        start: Vec<u8>,
        end: Vec<u8>,
        descending: bool,
        read_ahead: usize,
        fetches: usize,
    ) -> Started<'py> {
        let handle = self.handle.clone();
        let order = if descending { IterationOrder::Descending } else { IterationOrder::Ascending };
        let options = ScanOptions::new()
            .with_durability_filter(DurabilityLevel::Remote)
            .with_read_ahead_bytes(read_ahead)
            .with_cache_blocks(false)
            .with_max_fetch_tasks(fetches)
            .with_order(order);
        calls.start(py, async move {
            let iterator = match &handle {
                Handle::Writer(db, _) => db.scan_with_options(start..end, &options).await,
                Handle::Reader(reader) => reader.scan_with_options(start..end, &options).await,
            };
            Ok(Scan { iterator: Arc::new(tokio::sync::Mutex::new(iterator?)) })
        })
    }

    /// Closes the database. With `flush`, first writes the memtable.
    fn close<'py>(&self, py: Python<'py>, calls: &Calls, flush: bool) -> Started<'py> {
        self.closed.store(true, Ordering::Relaxed);
        let handle = self.handle.clone();
        calls.start(py, async move { handle.close(flush).await })
    }
}

impl Database {
    fn new(handle: Handle) -> Self {
        Self { handle, closed: AtomicBool::new(false) }
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // Otherwise its background tasks, which compact and write, would live on.
        if !self.closed.load(Ordering::Relaxed)
            && let Ok(runtime) = runtime::handle()
        {
            let handle = self.handle.clone();
            runtime.spawn(async move {
                let _ = handle.close(false).await; // nobody is left to receive the error
            });
        }
    }
}

impl Handle {
    async fn get(&self, key: &[u8]) -> Result<Option<Raw>, Fault> {
        let options = ReadOptions::new().with_durability_filter(DurabilityLevel::Remote);
        let value = match self {
            Self::Writer(db, _) => db.get_with_options(key, &options).await?,
            Self::Reader(reader) => reader.get_with_options(key, &options).await?,
        };
        Ok(value.map(Raw))
    }

    async fn close(&self, flush: bool) -> Result<(), Fault> {
        match self {
            Self::Writer(db, _) => {
                let flush = flush.then_some(FlushType::MemTable);
                db.close_with_options(CloseOptions::default().with_flush_type(flush)).await?;
            }
            Self::Reader(reader) => reader.close().await?,
        }
        Ok(())
    }
}

/// Writes commits in the order in which they were sent. After one fails, fails all later ones.
async fn write_all(db: Db, mut commits: mpsc::Receiver<Commit>) {
    while let Some(Commit { rows, flush, answer }) = commits.recv().await {
        let db = db.clone();
        let written = tokio::spawn({
            let db = db.clone();
            async move { db.write(rows).await }
        });
        match written.await {
            Ok(Ok(handle)) => {
                tokio::spawn(async move {
                    let _ = answer.send(flush_rows(&db, handle, flush).await); // cancelled
                });
            }
            failed => {
                let fault = match failed {
                    Ok(Err(error)) => Fault::from(error),
                    _ => Fault::new("panic", "SlateDB panicked while it took rows"),
                };
                let _ = answer.send(Err(fault));
                break;
            }
        }
    }
    commits.close();
    while let Some(commit) = commits.recv().await {
        let fault = Fault::new("closed", "an earlier commit failed: open the store again");
        let _ = commit.answer.send(Err(fault));
    }
}

async fn flush_rows(db: &Db, written: WriteHandle, flush: FlushType) -> Result<u64, Fault> {
    db.flush_with_options(FlushOptions { flush_type: flush }).await?;
    if db.status().durable_seq < written.seqnum() {
        written.await_durable().await?;
    }
    Ok(written.seqnum())
}

/// Rows that can be committed once.
#[pyclass(frozen, module = "streamfold._native")]
pub struct Rows {
    batch: Mutex<Option<WriteBatch>>,
}

type Op<'py> = (Bound<'py, PyBytes>, Option<Bound<'py, PyBytes>>);

#[pymethods]
impl Rows {
    /// Copies keys and values. A None value deletes its key.
    #[new]
    fn new(py: Python<'_>, ops: Vec<Op<'_>>) -> PyResult<Self> {
        let ops: Vec<(&[u8], Option<&[u8]>)> = ops
            .iter()
            .map(|(key, value)| (key.as_bytes(), value.as_ref().map(|value| value.as_bytes())))
            .collect();
        if ops.iter().any(|(key, _)| key.is_empty() || key.len() > usize::from(u16::MAX)) {
            let fault = Fault::new("invalid", "a key has 1 to 65,535 bytes");
            return Err(fault.into_error());
        }
        let size = ops.iter().map(|(key, value)| key.len() + value.map_or(0, <[u8]>::len)).sum();
        let batch = unlocked(py, size, || {
            let mut batch = WriteBatch::new();
            for (key, value) in ops {
                match value {
                    Some(value) => batch.put(key, value),
                    None => batch.delete(key),
                }
            }
            batch
        });
        Ok(Self { batch: Mutex::new(Some(batch)) })
    }
}

/// A running scan.
#[pyclass(frozen, module = "streamfold._native")]
pub struct Scan {
    iterator: Arc<tokio::sync::Mutex<DbIterator>>,
}

#[pymethods]
impl Scan {
    /// Returns the next rows, and whether more may follow. Stops at `rows` rows, or once they have
    /// `size` bytes.
    fn next<'py>(&self, py: Python<'py>, calls: &Calls, rows: usize, size: usize) -> Started<'py> {
        let iterator = self.iterator.clone();
        calls.start(py, async move {
            let mut iterator = iterator.lock().await;
            let mut page: Vec<(Raw, Raw)> = Vec::new();
            let mut left = size;
            while page.len() < rows && left > 0 {
                let Some(KeyValue { key, value, .. }) = iterator.next().await? else {
                    return Ok((page, false));
                };
                left = left.saturating_sub(key.len() + value.len());
                page.push((Raw(key), Raw(value)));
            }
            Ok((page, true))
        })
    }
}

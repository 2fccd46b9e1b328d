//! Log files, read one by one.

use std::sync::Arc;

use object_store::path::Path;
use pyo3::prelude::*;
use slatedb::WalReader;

use super::calls::{Calls, Started};
use super::manifest::Raw;
use super::storage::Storage;

/// Reads the log files of a database, open or not.
#[pyclass(frozen, module = "streamfold._native")]
pub struct LogReader {
    reader: Arc<WalReader>,
}

#[pymethods]
impl LogReader {
    #[new]
    fn new(storage: &Storage, path: &str) -> Self {
        Self { reader: Arc::new(WalReader::new(Path::from(path), storage.store.clone())) }
    }

    /// Returns the numbers of the files after `after`, in order.
    fn files<'py>(&self, py: Python<'py>, calls: &Calls, after: u64) -> Started<'py> {
        let reader = self.reader.clone();
        calls.start(py, async move {
            let files = reader.list(after.saturating_add(1)..).await?;
            Ok(files.iter().map(|file| file.id).collect::<Vec<_>>())
        })
    }

    /// Returns a file's rows: key, value or None, and write time (ms since the Unix epoch).
    fn rows<'py>(&self, py: Python<'py>, calls: &Calls, number: u64) -> Started<'py> {
        let file = self.reader.get(number);
        calls.start(py, async move {
            let mut entries = file.iterator().await?;
            let mut rows: Vec<(Raw, Option<Raw>, Option<i64>)> = Vec::new();
            while let Some(entry) = entries.next().await? {
                rows.push((Raw(entry.key), entry.value.as_bytes().map(Raw), entry.create_ts));
            }
            Ok(rows)
        })
    }

    /// Reads a whole file to check that it is intact.
    fn check<'py>(&self, py: Python<'py>, calls: &Calls, number: u64) -> Started<'py> {
        let file = self.reader.get(number);
        calls.start(py, async move {
            let mut entries = file.iterator().await?;
            while entries.next().await?.is_some() {}
            Ok(())
        })
    }
}

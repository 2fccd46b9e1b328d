//! Manifests, checkpoints, compactions and garbage collection of a database, open or not.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use slatedb::admin::{self, AdminBuilder};
use slatedb::compactor::{CompactionSpec, SourceId};
use slatedb::config::{CheckpointOptions, GarbageCollectorOptions};

use super::calls::{Calls, Started};
use super::clock::Clock;
use super::manifest::{Manifest, compaction};
use super::storage::Storage;

/// Inspects a database and changes its manifest.
#[pyclass(frozen, module = "streamfold._native")]
pub struct Admin {
    admin: Arc<admin::Admin>,
}

#[pymethods]
impl Admin {
    #[new]
    #[pyo3(signature = (storage, path, clock=None))]
    fn new(storage: &Storage, path: &str, clock: Option<&Clock>) -> Self {
        let mut builder = AdminBuilder::new(Path::from(path), storage.store.clone());
        if let Some(clock) = clock {
            builder = builder.with_system_clock(clock.shared.clone());
        }
        Self { admin: Arc::new(builder.build()) }
    }

    /// Returns manifest `number`, or the newest. None if there is none.
    #[pyo3(signature = (calls, number=None))]
    fn manifest<'py>(&self, py: Python<'py>, calls: &Calls, number: Option<u64>) -> Started<'py> {
        let admin = self.admin.clone();
        calls.start(py, async move { Ok(admin.read_manifest(number).await?.map(Manifest)) })
    }

    /// Pins the newest manifest and its tables, for `lifetime` milliseconds if given. Returns the
    /// checkpoint id and the manifest number.
    #[pyo3(signature = (calls, name, lifetime=None))]
    fn create_checkpoint<'py>(
        &self,
        py: Python<'py>,
        calls: &Calls,
        name: String,
        lifetime: Option<u64>,
    ) -> Started<'py> {
        let admin = self.admin.clone();
        calls.start(py, async move {
            let lifetime = lifetime.map(Duration::from_millis);
            let options = CheckpointOptions { lifetime, name: Some(name), source: None };
            let checkpoint = admin.create_detached_checkpoint(&options).await?;
            Ok((checkpoint.id.to_string(), checkpoint.manifest_id))
        })
    }

    /// Extends a checkpoint to `lifetime` milliseconds from now.
    fn refresh_checkpoint<'py>(
        &self,
        py: Python<'py>,
        calls: &Calls,
        id: &str,
        lifetime: u64,
    ) -> Started<'py> {
        let (admin, id) = (self.admin.clone(), parse(id)?);
        calls.start(py, async move {
            Ok(admin.refresh_checkpoint(id, Some(Duration::from_millis(lifetime))).await?)
        })
    }

    fn delete_checkpoint<'py>(&self, py: Python<'py>, calls: &Calls, id: &str) -> Started<'py> {
        let (admin, id) = (self.admin.clone(), parse(id)?);
        calls.start(py, async move { Ok(admin.delete_checkpoint(id).await?) })
    }

    /// Returns the compactions that are running or ended last.
    fn compactions<'py>(&self, py: Python<'py>, calls: &Calls) -> Started<'py> {
        let admin = self.admin.clone();
        calls.start(py, async move {
            let compactions = admin.read_compactions(None).await?;
            let recent = compactions.iter().flat_map(|found| found.recent_compactions());
            Ok(recent.map(compaction).collect::<Vec<_>>())
        })
    }

    /// Asks the writer to merge young tables (by view id) and sorted runs into run `destination`.
    fn submit_compaction<'py>(
        &self,
        py: Python<'py>,
        calls: &Calls,
        young: Vec<String>,
        runs: Vec<u32>,
        destination: u32,
    ) -> Started<'py> {
        let young = young.iter().map(|id| Ok(SourceId::SstView(parse(id)?)));
        let runs = runs.into_iter().map(|run| Ok(SourceId::SortedRun(run)));
        let sources = young.chain(runs).collect::<PyResult<Vec<_>>>()?;
        let admin = self.admin.clone();
        calls.start(py, async move {
            let spec = CompactionSpec::new(sources, destination);
            Ok(compaction(&admin.submit_compaction(spec).await?))
        })
    }

    /// Deletes unneeded files. `options` is SlateDB's garbage collector configuration as a JSON
    /// object.
    fn collect<'py>(&self, py: Python<'py>, calls: &Calls, options: &str) -> Started<'py> {
        let options: GarbageCollectorOptions = serde_json::from_str(options)
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        let admin = self.admin.clone();
        calls.start(py, async move { Ok(admin.run_gc_once(options).await?) })
    }
}

fn parse<T: FromStr<Err: std::fmt::Display>>(id: &str) -> PyResult<T> {
    id.parse().map_err(|error: T::Err| PyValueError::new_err(error.to_string()))
}

//! SlateDB's manifests, compactions and rows as tuples, which `store/engine/native.py` turns into
//! named types.

use std::convert::Infallible;

use bytes::Bytes;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use slatedb::compactor::{Compaction, CompactionStatus};
use slatedb::manifest::{SsTableView, VersionedManifest};

/// Bytes that become a Python object when the event loop drains them.
pub struct Raw(pub Bytes);

impl<'py> IntoPyObject<'py> for Raw {
    type Target = PyBytes;
    type Output = Bound<'py, PyBytes>;
    type Error = Infallible;

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Infallible> {
        Ok(PyBytes::new(py, &self.0))
    }
}

pub struct Manifest(pub VersionedManifest);

impl<'py> IntoPyObject<'py> for Manifest {
    type Target = PyTuple;
    type Output = Bound<'py, PyTuple>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Self::Output> {
        let manifest = self.0;
        let young: Vec<_> = manifest.l0().iter().map(view).collect();
        let runs: Vec<_> = manifest
            .compacted()
            .iter()
            .map(|run| (run.id, run.estimate_size(), run.sst_views().iter().map(view).collect()))
            .collect::<Vec<(u32, u64, Vec<View>)>>();
        let checkpoints: Vec<_> = manifest
            .checkpoints()
            .iter()
            .map(|checkpoint| {
                let expires = checkpoint.expire_time.map(|time| time.timestamp());
                let name = checkpoint.name.clone();
                (checkpoint.id.to_string(), checkpoint.manifest_id, expires, name)
            })
            .collect();
        (
            manifest.id(),
            manifest.writer_epoch(),
            manifest.last_l0_seq(),
            manifest.last_l0_clock_tick(),
            manifest.replay_after_wal_id(),
            manifest.last_compacted_l0_sst_view_id().map(|id| id.to_string()),
            young,
            runs,
            checkpoints,
        )
            .into_pyobject(py)
    }
}

type View = (String, String, u64, Option<Raw>, Option<Raw>, u64, u64, u64, u64);

fn view(view: &SsTableView) -> View {
    let info = &view.sst.info;
    (
        view.id.to_string(),
        view.sst.id.value().to_string(),
        view.estimate_size(),
        info.first_entry.clone().map(Raw),
        info.last_entry.clone().map(Raw),
        info.index_offset,
        info.index_len,
        info.filter_offset,
        info.filter_len,
    )
}

/// A compaction's id, whether it has ended, whether it completed, and the tables it has written.
pub type CompactionParts = (String, bool, bool, Vec<String>);

pub fn compaction(compaction: &Compaction) -> CompactionParts {
    let status = compaction.status();
    let completed = status == CompactionStatus::Completed;
    let ended = completed || status == CompactionStatus::Failed;
    let tables =
        compaction.output_ssts().iter().map(|table| table.id.value().to_string()).collect();
    (compaction.id().to_string(), ended, completed, tables)
}

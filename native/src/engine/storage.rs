//! Database storage: in memory, in a folder, or in a bucket.

use std::collections::HashMap;
use std::str::FromStr;
use std::sync::Arc;

use object_store::ObjectStore;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::memory::InMemory;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tokio_rustls::rustls::crypto::ring;

use super::credentials::Credentials;
use super::disk::Disk;

/// Storage for database files.
#[pyclass(frozen, module = "streamfold._native")]
pub struct Storage {
    pub store: Arc<dyn ObjectStore>,
}

#[pymethods]
impl Storage {
    #[staticmethod]
    fn memory() -> Self {
        Self { store: Arc::new(InMemory::new()) }
    }

    /// Stores files below the existing `folder`. With `syncs_log`, log files survive a power cut
    /// once written.
    #[staticmethod]
    fn local(folder: &str, syncs_log: bool) -> PyResult<Self> {
        let disk = Disk::new(folder, syncs_log).map_err(|error| refuse(&error))?;
        Ok(Self { store: Arc::new(disk) })
    }

    /// Stores files in a bucket. `options` have object_store's names.
    #[staticmethod]
    #[pyo3(signature = (options, credentials=None))]
    fn s3(options: HashMap<String, String>, credentials: Option<&Credentials>) -> PyResult<Self> {
        let _ = ring::default_provider().install_default(); // an error: already installed
        let mut builder = AmazonS3Builder::new();
        for (name, value) in options {
            let key = AmazonS3ConfigKey::from_str(&name).map_err(|error| refuse(&error))?;
            builder = builder.with_config(key, value);
        }
        if let Some(credentials) = credentials {
            builder = builder.with_credentials(credentials.provider());
        }
        let bucket = builder.build().map_err(|error| refuse(&error))?;
        Ok(Self { store: Arc::new(bucket) })
    }
}

fn refuse(error: &object_store::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

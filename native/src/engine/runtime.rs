//! The engine's threads: one set per process, started by the first call.

use std::sync::OnceLock;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tokio::runtime::{Builder, Handle, Runtime};

/// Threads that run SlateDB. A compaction or a table write may occupy one each.
const THREADS: usize = 3;
/// Threads for blocking file operations.
const FILE_THREADS: usize = 32;

static RUNTIME: OnceLock<(u32, Runtime)> = OnceLock::new();

/// Returns this process's runtime. Fails in a fork of the process that started it, because a fork
/// has none of its threads.
pub fn handle() -> PyResult<&'static Handle> {
    if RUNTIME.get().is_none() {
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .max_blocking_threads(FILE_THREADS)
            .thread_name("streamfold-engine")
            .enable_all()
            .build()?;
        if let Err((_, runtime)) = RUNTIME.set((std::process::id(), runtime)) {
            runtime.shutdown_background(); // another thread was faster
        }
    }
    let (process, runtime) = RUNTIME.get().expect("it was set above");
    if *process != std::process::id() {
        return Err(PyRuntimeError::new_err(
            "this process is a fork of one that has used a store: start it by `spawn`, or fork before",
        ));
    }
    Ok(runtime.handle())
}

//! The calls of one event loop. They run on the engine's threads, and their results queue here.
//!
//! One byte in a pipe wakes Python for everything that queues until it drains. The pipe holds a
//! byte exactly while `signalled` is set, so neither end ever blocks. No engine thread takes the
//! GIL: results become Python objects when the event loop drains them. The queue never holds more
//! results than there are awaited calls.

use std::collections::HashMap;
use std::future::Future;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::FutureExt;
use parking_lot::{Mutex, MutexGuard};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use pyo3::{BoundObject, IntoPyObject, IntoPyObjectExt};
use tokio::task::AbortHandle;

use super::fault::Fault;
use super::runtime;

/// Converts a call's result to a Python object.
type Value = Box<dyn for<'py> FnOnce(Python<'py>) -> PyResult<Bound<'py, PyAny>> + Send>;
type Outcome = Result<Value, Fault>;
/// The number of a running call and None, or 0 and the result of a finished one.
pub type Started<'py> = PyResult<Bound<'py, PyTuple>>;

#[derive(Default)]
struct Waiting {
    last: u64,
    running: HashMap<u64, Option<AbortHandle>>,
    ended: Vec<(u64, Outcome)>,
    signalled: bool,
}

struct Shared {
    waiting: Mutex<Waiting>,
    reader: PipeReader,
    writer: PipeWriter,
}

/// The calls of one event loop, and their results.
#[pyclass(frozen, module = "streamfold._native")]
pub struct Calls {
    shared: Arc<Shared>,
}

#[pymethods]
impl Calls {
    #[new]
    fn new() -> PyResult<Self> {
        let (reader, writer) = std::io::pipe()?;
        Ok(Self { shared: Arc::new(Shared { waiting: Mutex::default(), reader, writer }) })
    }

    /// A descriptor that is readable while `drain` has something to return.
    fn fileno(&self) -> i32 {
        self.shared.reader.as_raw_fd()
    }

    /// Returns the finished calls, each as its number, its result, and its error or None.
    fn drain<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for (number, outcome) in self.shared.take() {
            let (value, error) = match outcome.map(|value| value(py)) {
                Ok(Ok(value)) => (value, None),
                Ok(Err(error)) => (py.None().into_bound(py), Some(error)),
                Err(fault) => (py.None().into_bound(py), Some(fault.into_error())),
            };
            let error = error.map(|error| error.into_value(py));
            list.append((number, value, error))?;
        }
        Ok(list)
    }

    /// Cancels a call: its remaining work is not done.
    fn cancel(&self, number: u64) {
        if let Some(Some(task)) = self.shared.lock().running.remove(&number) {
            task.abort();
        }
    }
}

impl Calls {
    /// Starts a call. It may finish immediately.
    pub fn start<'py, F, T>(&self, py: Python<'py>, work: F) -> Started<'py>
    where
        F: Future<Output = Result<T, Fault>> + Send + 'static,
        T: for<'a> IntoPyObject<'a> + Send + 'static,
    {
        let runtime = runtime::handle()?;
        let work = AssertUnwindSafe(work).catch_unwind();
        let mut work =
            Box::pin(work.map(|outcome| {
                outcome.unwrap_or_else(|panic| Err(Fault::of_panic(panic.as_ref())))
            }));
        let ended = py.detach(|| {
            let _entered = runtime.enter();
            work.as_mut().now_or_never()
        });
        if let Some(outcome) = ended {
            let value = outcome.map_err(Fault::into_error)?.into_bound_py_any(py)?;
            return (0, value).into_pyobject(py);
        }
        let number = self.shared.begin();
        let shared = self.shared.clone();
        let task = runtime.spawn(async move {
            let outcome = work.await;
            shared.end(
                number,
                outcome.map(|value| -> Value {
                    Box::new(move |py| {
                        Ok(value.into_pyobject(py).map_err(Into::into)?.into_any().into_bound())
                    })
                }),
            );
        });
        if let Some(place) = self.shared.lock().running.get_mut(&number) {
            *place = Some(task.abort_handle());
        }
        (number, py.None()).into_pyobject(py)
    }
}

impl Shared {
    fn begin(&self) -> u64 {
        let mut waiting = self.lock();
        waiting.last += 1;
        let number = waiting.last;
        waiting.running.insert(number, None);
        number
    }

    fn end(&self, number: u64, outcome: Outcome) {
        let mut waiting = self.lock();
        if waiting.running.remove(&number).is_none() {
            return; // it was cancelled
        }
        waiting.ended.push((number, outcome));
        if !waiting.signalled {
            (&self.writer).write_all(b"x").expect("both ends of the pipe are here");
            waiting.signalled = true;
        }
    }

    fn take(&self) -> Vec<(u64, Outcome)> {
        let mut waiting = self.lock();
        if waiting.signalled {
            (&self.reader).read_exact(&mut [0]).expect("both ends of the pipe are here");
            waiting.signalled = false;
        }
        std::mem::take(&mut waiting.ended)
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock()
    }
}

//! Bytes that Python owns, and when to release the GIL.

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView};

/// Input size in bytes from which the GIL is released. Below it, reacquiring the GIL costs more.
const RELEASE_FROM: usize = 64 << 10;

/// Runs `work`, without the GIL if its input is large.
pub fn unlocked<T: Send>(py: Python<'_>, input: usize, work: impl FnOnce() -> T + Send) -> T {
    if input < RELEASE_FROM { work() } else { py.detach(work) }
}

/// Bytes that cannot change while they are read: a `bytes` object, a view of one, or a copy.
pub enum Input<'py> {
    Shared(Bound<'py, PyBytes>, usize, usize),
    Copied(Vec<u8>),
}

impl Input<'_> {
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Input::Shared(bytes, start, end) => &bytes.as_bytes()[*start..*end],
            Input::Copied(bytes) => bytes,
        }
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Input<'py> {
    type Error = PyErr;

    fn extract(object: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        if let Ok(bytes) = object.cast::<PyBytes>() {
            let size = bytes.as_bytes().len();
            return Ok(Input::Shared(bytes.to_owned(), 0, size));
        }
        let buffer = PyBuffer::<u8>::get(&object)?;
        if object.cast::<PyMemoryView>().is_ok() && buffer.is_c_contiguous() {
            let owner = object.getattr("obj")?;
            if let Ok(bytes) = owner.cast::<PyBytes>() {
                // A view of a view has the same owner, so the addresses tell which part it is.
                let from = bytes.as_bytes().as_ptr() as usize;
                let start = (buffer.buf_ptr() as usize).wrapping_sub(from);
                let end = start.wrapping_add(buffer.len_bytes());
                if start <= end && end <= bytes.as_bytes().len() {
                    return Ok(Input::Shared(bytes.to_owned(), start, end));
                }
            }
        }
        Ok(Input::Copied(buffer.to_vec(object.py())?))
    }
}

//! Replication messages from libpq, many at once.
//!
//! This calls functions of the libpq that psycopg2 has loaded, on psycopg2's connections.
//! psycopg2's own reader would reply to PostgreSQL by itself, with positions that the ingester has
//! not recorded.
#![allow(unsafe_code)]

use std::ffi::{CStr, OsString, c_char, c_int, c_void};

use libloading::Library;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;

use super::changes::Run;

type Connection = *mut c_void;
type Outcome = *mut c_void;
type GetResult = unsafe extern "C" fn(Connection) -> Outcome;
type Status = unsafe extern "C" fn(Outcome) -> c_int;
type ResultText = unsafe extern "C" fn(Outcome) -> *const c_char;
type ResultField = unsafe extern "C" fn(Outcome, c_int) -> *const c_char;
type ConnectionText = unsafe extern "C" fn(Connection) -> *const c_char;
type Clear = unsafe extern "C" fn(Outcome);
type GetCopyData = unsafe extern "C" fn(Connection, *mut *mut c_char, c_int) -> c_int;
type PutCopyData = unsafe extern "C" fn(Connection, *const c_char, c_int) -> c_int;
type OnConnection = unsafe extern "C" fn(Connection) -> c_int;
type FreeMemory = unsafe extern "C" fn(*mut c_void);

/// Maximum messages, and bytes of messages, gathered at once. The last message may exceed them.
const MESSAGES: usize = 8192;
const BYTES: usize = 1 << 20;
/// The status of a result whose command has completed.
const COMMAND_OK: c_int = 1;
/// The error field that has the SQLSTATE.
const SQLSTATE: c_int = b'C' as c_int;

/// An error message from PostgreSQL or libpq, and its SQLSTATE if it has one.
type Failure = (Vec<u8>, Option<Vec<u8>>);

/// The libpq functions in use.
#[derive(Clone, Copy)]
struct Functions {
    result: GetResult,
    status: Status,
    result_error: ResultText,
    result_field: ResultField,
    connection_error: ConnectionText,
    clear: Clear,
    get: GetCopyData,
    put: PutCopyData,
    flush: OnConnection,
    consume: OnConnection,
    free: FreeMemory,
}

/// The result of a poll for a message.
enum Look {
    Message,
    Nothing,
    Ended,
}

impl Functions {
    fn of(library: &Library) -> Result<Self, libloading::Error> {
        // SAFETY: these are the signatures of libpq-fe.h.
        unsafe {
            Ok(Functions {
                result: *library.get::<GetResult>(b"PQgetResult")?,
                status: *library.get::<Status>(b"PQresultStatus")?,
                result_error: *library.get::<ResultText>(b"PQresultErrorMessage")?,
                result_field: *library.get::<ResultField>(b"PQresultErrorField")?,
                connection_error: *library.get::<ConnectionText>(b"PQerrorMessage")?,
                clear: *library.get::<Clear>(b"PQclear")?,
                get: *library.get::<GetCopyData>(b"PQgetCopyData")?,
                put: *library.get::<PutCopyData>(b"PQputCopyData")?,
                flush: *library.get::<OnConnection>(b"PQflush")?,
                consume: *library.get::<OnConnection>(b"PQconsumeInput")?,
                free: *library.get::<FreeMemory>(b"PQfreemem")?,
            })
        }
    }

    /// Appends the next message to `out` if one has arrived.
    fn take(&self, connection: usize, out: &mut Vec<u8>) -> Look {
        let mut message: *mut c_char = std::ptr::null_mut();
        // SAFETY: `connection` is an open connection that only this thread uses, as the callers in
        // Python promise; libpq knows that 0 is none. A message has `length` bytes until it is freed.
        unsafe {
            let length = (self.get)(connection as Connection, &mut message, 1);
            match usize::try_from(length) {
                Err(_) => Look::Ended,
                Ok(0) => Look::Nothing,
                Ok(length) => {
                    out.extend_from_slice(std::slice::from_raw_parts(message.cast(), length));
                    (self.free)(message.cast());
                    Look::Message
                }
            }
        }
    }

    /// Reads received data. Returns whether the connection is intact.
    fn consume(&self, connection: usize) -> bool {
        // SAFETY: as above.
        unsafe { (self.consume)(connection as Connection) != 0 }
    }

    /// Frees a result. Returns its failure unless its command has completed.
    fn judge(&self, connection: usize, outcome: Outcome) -> Option<Failure> {
        // SAFETY: `outcome` comes from libpq and is freed here, once; libpq knows that null is none. Its
        // texts end with a zero, and are copied before it is freed.
        unsafe {
            if !outcome.is_null() && (self.status)(outcome) == COMMAND_OK {
                (self.clear)(outcome);
                return None;
            }
            let mut text = copied((self.connection_error)(connection as Connection));
            let mut code = None;
            if !outcome.is_null() {
                text = copied((self.result_error)(outcome)).filter(|t| !t.is_empty()).or(text);
                code = copied((self.result_field)(outcome, SQLSTATE));
                (self.clear)(outcome);
            }
            Some((text.unwrap_or_default(), code))
        }
    }
}

/// # Safety
/// `text` is null, or ends with a zero.
unsafe fn copied(text: *const c_char) -> Option<Vec<u8>> {
    // SAFETY: promised by the caller.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_bytes().to_vec())
}

/// The libpq that psycopg2 has loaded. A connection is psycopg2's address for it: it must be open,
/// and used by only one thread.
#[pyclass(frozen, module = "streamfold._native")]
pub struct Libpq {
    functions: Functions,
    /// Keeps the functions loaded.
    _library: Library,
}

#[pymethods]
impl Libpq {
    /// Look up the functions in the library at `path` or in those that it links to.
    #[new]
    fn new(path: OsString) -> PyResult<Self> {
        // SAFETY: psycopg2 has loaded it already, so this runs none of its code.
        let library = unsafe { Library::new(path) };
        let library = library.map_err(|error| PyOSError::new_err(error.to_string()))?;
        let functions = Functions::of(&library);
        let functions = functions.map_err(|error| PyOSError::new_err(error.to_string()))?;
        Ok(Libpq { functions, _library: library })
    }

    /// Return why the server ended the connection, or None if it ended normally.
    fn end(&self, py: Python<'_>, connection: usize) -> Option<Failure> {
        py.detach(|| {
            // SAFETY: an open connection, see the class.
            let outcome = unsafe { (self.functions.result)(connection as Connection) };
            self.functions.judge(connection, outcome)
        })
    }

    /// Send a message. Returns whether the connection is intact.
    fn send(&self, py: Python<'_>, connection: usize, message: Vec<u8>) -> PyResult<bool> {
        let size = c_int::try_from(message.len())
            .map_err(|_| PyValueError::new_err("the message is too long"))?;
        // SAFETY: an open connection, see the class; the message has `size` bytes.
        Ok(py.detach(|| unsafe {
            let connection = connection as Connection;
            (self.functions.put)(connection, message.as_ptr().cast(), size) == 1
                && (self.functions.flush)(connection) == 0
        }))
    }
}

/// Gathers replication messages from one connection.
#[pyclass(module = "streamfold._native")]
pub struct MessageReader {
    library: Py<Libpq>,
    raw: Vec<u8>,
    ends: Vec<usize>,
}

#[pymethods]
impl MessageReader {
    #[new]
    fn new(library: Py<Libpq>) -> Self {
        MessageReader { library, raw: Vec::new(), ends: Vec::new() }
    }

    /// Bytes of the gathered messages.
    #[getter]
    fn size(&self) -> usize {
        self.raw.len()
    }

    fn __len__(&self) -> usize {
        self.ends.len()
    }

    /// Gather the received messages without waiting. Returns whether that was all for now, or None
    /// if the connection has ended.
    fn pull(&mut self, py: Python<'_>, connection: usize) -> Option<bool> {
        let library = self.library.get().functions;
        py.detach(|| {
            let mut consumed = false;
            while self.ends.len() < MESSAGES && self.raw.len() < BYTES {
                match library.take(connection, &mut self.raw) {
                    Look::Message => {
                        self.ends.push(self.raw.len());
                        consumed = false;
                    }
                    Look::Nothing if consumed => return Some(true),
                    Look::Nothing if library.consume(connection) => consumed = true,
                    _ => return None,
                }
            }
            Some(false)
        })
    }

    /// Take the gathered pgoutput messages, the WAL end that the last message names, and whether
    /// the server wants a reply. Raises CodecError for a message outside the replication protocol.
    fn take(&mut self) -> PyResult<(Run, u64, bool)> {
        let ends = std::mem::take(&mut self.ends);
        Ok(Run::split(std::mem::take(&mut self.raw), &ends)?)
    }
}

/// Split replication messages as `MessageReader.take` does.
#[pyfunction]
pub fn split_messages(messages: Vec<Vec<u8>>) -> PyResult<(Run, u64, bool)> {
    let mut ends = Vec::with_capacity(messages.len());
    let raw = messages.concat();
    ends.extend(messages.iter().scan(0, |end, message| {
        *end += message.len();
        Some(*end)
    }));
    Ok(Run::split(raw, &ends)?)
}

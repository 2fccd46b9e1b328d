//! SlateDB failures: a code, a message, and the system's error number if there is one.

use std::error::Error;
use std::io;

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use slatedb::{CloseReason, ErrorKind};

use super::disk::SyncFailure;

create_exception!(
    streamfold._native,
    EngineError,
    PyException,
    "A call of the engine failed: `args` are a code, a message, and the system's error number or None."
);

/// A call that failed.
#[derive(Debug)]
pub struct Fault {
    code: &'static str,
    message: String,
    number: Option<i32>,
}

impl Fault {
    pub fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), number: None }
    }

    /// The fault for a panic with this payload.
    pub fn of_panic(payload: &(dyn std::any::Any + Send)) -> Self {
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
        Self::new("panic", format!("panicked: {}", text.unwrap_or_default()))
    }

    pub fn into_error(self) -> PyErr {
        EngineError::new_err((self.code, self.message, self.number))
    }
}

impl From<slatedb::Error> for Fault {
    fn from(error: slatedb::Error) -> Self {
        let code = match error.kind() {
            ErrorKind::Closed(CloseReason::Fenced) => "fenced",
            ErrorKind::Closed(_) => "closed",
            ErrorKind::Unavailable => "unavailable",
            ErrorKind::Data => "data",
            ErrorKind::Invalid => "invalid",
            _ => "internal",
        };
        let code =
            if chain(&error).any(|cause| cause.is::<SyncFailure>()) { "device" } else { code };
        let number =
            chain(&error).find_map(|cause| cause.downcast_ref::<io::Error>()?.raw_os_error());
        Self { code, message: describe(&error), number }
    }
}

/// Joins the messages of an error chain without repeating any.
fn describe(error: &(dyn Error + 'static)) -> String {
    let mut message = error.to_string();
    for more in chain(error).map(ToString::to_string) {
        if !message.contains(&more) {
            message = format!("{message}: {more}");
        }
    }
    message
}

/// Iterates over an error and its causes.
fn chain<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_the_systems_error_is_found_below_others() {
        let disk = io::Error::from_raw_os_error(28);
        let store = object_store::Error::Generic { store: "Disk", source: Box::new(disk) };
        let error = slatedb::Error::unavailable("cannot write".to_owned());
        let fault = Fault::from(error.with_source(Box::new(store)));
        assert_eq!((fault.code, fault.number), ("unavailable", Some(28)));
        assert!(fault.message.contains("cannot write"), "{}", fault.message);
        assert_eq!(fault.message.matches("os error 28").count(), 1, "{}", fault.message);
    }

    #[test]
    fn a_fenced_writer_is_told_apart() {
        let error = slatedb::Error::closed("fenced".to_owned(), CloseReason::Fenced);
        assert_eq!(Fault::from(error).code, "fenced");
    }
}

//! Conversions between the byte forms of records: appends, storage, responses, columns, PostgreSQL
//! rows.
//!
//! Bytes in, bytes out. Python decides which limits apply and words the errors.

pub mod batch;
pub mod changes;
pub mod columns;
pub mod copy;
pub mod fault;
pub mod json;
pub mod libpq;
#[cfg(test)]
mod properties;
mod protobuf;
mod shared;
pub mod stored;
pub mod values;

pub use shared::unlocked;

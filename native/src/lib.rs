//! Bytes, sockets and keys for Streamfold. All decisions are made in Python.

mod codec;
mod door;
mod engine;
mod process;

#[pyo3::pymodule]
mod _native {
    use pyo3::prelude::*;

    #[pymodule_export]
    use super::codec::{
        batch::{Batch, append_records, count_fields, encode_ack, encode_position, parse_append},
        changes::{ChangeEncoder, Run},
        columns::{encode_columns, read_columns},
        copy::LineWriter,
        json::write_records,
        libpq::{Libpq, MessageReader, split_messages},
        stored::{Cut, Index, contents, decode, measure},
        values::write_value,
    };
    #[pymodule_export]
    use super::door::python::Door;
    #[pymodule_export]
    use super::engine::{
        admin::Admin,
        calls::Calls,
        clock::Clock,
        credentials::Credentials,
        database::{Database, Rows, Scan},
        disk::FaultyDisk,
        log::LogReader,
        storage::Storage,
    };
    #[pymodule_export]
    use super::process::{end_with_parent, trim_memory, tune_memory, write_range};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        let py = module.py();
        module.add("CodecError", py.get_type::<super::codec::fault::CodecError>())?;
        module.add("EngineError", py.get_type::<super::engine::fault::EngineError>())
    }
}

//! Decoding faults: a code and up to three numbers, which Python turns into a message.

use pyo3::PyErr;
use pyo3::create_exception;
use pyo3::exceptions::PyException;

create_exception!(
    streamfold._native,
    CodecError,
    PyException,
    "Bytes that cannot be decoded: the code of a fault and its three fields."
);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A varint that is truncated or too long: its offset, and the maximum length.
    Varint(usize, usize),
    /// A tag with an illegal field number: the tag, and its offset.
    Tag(u64, usize),
    /// A field longer than the remaining input: its length, the offset of that length, and the
    /// bytes left.
    CutOff(u64, usize, usize),
    /// A tag with a wire type that is not allowed there: the tag, and the offset after it.
    Kind(u64, usize),
    /// A fixed-size field that exceeds its message: the end of the message.
    Short(usize),
    /// A fencing token that is not UTF-8: its range.
    Token(usize, usize),
    /// More records than one append may have: their minimum count.
    Records(usize),
    /// A payload field that is not a record: its tag, and the offset of its content.
    NotRecord(u32, usize),
    /// A gap in sequence numbers: the record's index, its number, and the one expected.
    Gap(usize, u64, u64),
    /// A sequence number that does not fit a signed column.
    Unsigned(u64),
    /// A payload, or columns, with more bytes than 32-bit offsets can address: their size.
    Large(usize),
    /// Columns with inconsistent offsets: the row.
    Offsets(usize),
    /// A PostgreSQL text that does not fit its type: what was expected.
    Value(&'static str),
    /// A message outside the replication protocol: its first byte.
    Replication(Option<u8>),
}

impl From<Fault> for PyErr {
    fn from(fault: Fault) -> Self {
        let n = |number: usize| number as u64;
        let (code, a, b, c) = match fault {
            Fault::Varint(at, longest) => ("varint", n(at), n(longest), 0),
            Fault::Tag(tag, at) => ("tag", tag, n(at), 0),
            Fault::CutOff(size, at, left) => ("cut_off", size, n(at), n(left)),
            Fault::Kind(tag, at) => ("kind", tag, n(at), 0),
            Fault::Short(end) => ("short", n(end), 0, 0),
            Fault::Token(start, end) => ("token", n(start), n(end), 0),
            Fault::Records(count) => ("records", n(count), 0, 0),
            Fault::NotRecord(tag, at) => ("not_record", tag.into(), n(at), 0),
            Fault::Gap(index, number, expected) => ("gap", n(index), number, expected),
            Fault::Unsigned(number) => ("unsigned", number, 0, 0),
            Fault::Large(size) => ("large", n(size), 0, 0),
            Fault::Offsets(row) => ("offsets", n(row), 0, 0),
            Fault::Value(expected) => (expected, 0, 0, 0),
            Fault::Replication(kind) => ("replication", kind.map_or(256, u64::from), 0, 0),
        };
        CodecError::new_err((code, a, b, c))
    }
}

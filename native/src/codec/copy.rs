//! PostgreSQL COPY lines as records to append.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::fault::Fault;
use super::json::{clean, put_decimal};
use super::protobuf::{
    APPEND_TAGS, RECORDS, field_size, put_field, put_header, put_tagged, varint_size,
};
use super::shared::unlocked;
use super::values::{Kind, put_quoted, put_text, put_value};

struct Column {
    /// The JSON before the value.
    before: Vec<u8>,
    kind: Kind,
    is_key: bool,
}

/// Encodes the COPY lines of one table as records.
#[pyclass(module = "streamfold._native")]
pub struct LineWriter {
    columns: Vec<Column>,
    closing: Vec<u8>,
    /// An encoded header, and the name of a second one, whose value is the row number.
    header: Vec<u8>,
    counter: Vec<u8>,
    /// Metered bytes of a record besides its body and the digits of its number.
    overhead: usize,
    key_max: usize,
    out: Vec<u8>,
    body: Vec<u8>,
    plain: Vec<u8>,
}

/// The output of one call.
#[derive(Default)]
pub struct Progress {
    pub next: usize,
    pub records: usize,
    pub metered: usize,
    line: usize,
    last: usize,
}

#[pymethods]
impl LineWriter {
    /// Each of `columns` is the JSON before its value, its kind, and whether it is part of the key.
    /// All key values together have at most `key_max` bytes.
    #[new]
    pub fn new(
        columns: Vec<(Vec<u8>, u8, bool)>,
        closing: Vec<u8>,
        header: Vec<u8>,
        counter: Vec<u8>,
        overhead: usize,
        key_max: usize,
    ) -> Result<Self, Fault> {
        let column = |(before, kind, is_key): (Vec<u8>, u8, bool)| {
            Ok(Column { before, kind: kind.try_into()?, is_key })
        };
        let columns = columns.into_iter().map(column).collect::<Result<_, Fault>>()?;
        let (out, body, plain) = (Vec::new(), Vec::new(), Vec::new());
        Ok(LineWriter { columns, closing, header, counter, overhead, key_max, out, body, plain })
    }

    /// Encode whole lines from `at` on as at most `records` records of `room` metered bytes. The
    /// first is row `number`.
    ///
    /// Stops before a line that Python must handle. Returns the records, the offset of the next
    /// line, the record count and metered bytes, and where the last line and its record begin.
    fn write<'py>(
        &mut self,
        py: Python<'py>,
        lines: &[u8],
        at: usize,
        number: u64,
        records: usize,
        room: usize,
    ) -> (Bound<'py, PyBytes>, usize, usize, usize, usize, usize) {
        // Reused by the next call: allocating afresh would cost more than writing.
        let mut out = std::mem::take(&mut self.out);
        out.clear();
        let wrote =
            unlocked(py, lines.len(), || self.encode(&mut out, lines, at, number, records, room));
        let Progress { next, records, metered, line, last } = wrote;
        let encoded = PyBytes::new(py, &out);
        self.out = out;
        (encoded, next, records, metered, line, last)
    }
}

impl LineWriter {
    pub fn encode(
        &mut self,
        out: &mut Vec<u8>,
        lines: &[u8],
        at: usize,
        mut number: u64,
        most: usize,
        room: usize,
    ) -> Progress {
        let mut wrote = Progress { next: at, ..Progress::default() };
        let mut digits = Vec::with_capacity(20);
        while wrote.next < lines.len() && wrote.records < most {
            let Some(after) = self.put_body(lines, wrote.next) else { break };
            digits.clear();
            put_decimal(&mut digits, number);
            let weight = self.overhead + digits.len() + self.body.len();
            if wrote.metered + weight > room {
                break;
            }
            (wrote.line, wrote.last) = (wrote.next, out.len());
            let counter = field_size(self.counter.len()) + field_size(digits.len());
            let counter = 1 + varint_size(counter as u64) + counter;
            let size = self.header.len() + counter + field_size(self.body.len());
            put_tagged(out, RECORDS, size as u64);
            out.extend_from_slice(&self.header);
            put_header(out, APPEND_TAGS.headers, &self.counter, &digits);
            put_field(out, APPEND_TAGS.body, &self.body);
            number += 1;
            wrote.records += 1;
            wrote.metered += weight;
            wrote.next = after;
        }
        wrote
    }

    /// Writes the body of the line at `at`. Returns the offset of the next line, or None if Python
    /// must handle the line.
    fn put_body(&mut self, lines: &[u8], mut at: usize) -> Option<usize> {
        self.body.clear();
        let mut key = 0;
        for (index, column) in self.columns.iter().enumerate() {
            self.body.extend_from_slice(&column.before);
            let rest = lines.get(at..)?;
            let mut end = clean(rest);
            let is_clean = matches!(rest.get(end)?, b'\t' | b'\n');
            while !matches!(rest.get(end)?, b'\t' | b'\n') {
                end += 1 + clean(&rest[end + 1..]);
            }
            let value = &rest[..end];
            if is_clean && column.kind == Kind::Text {
                put_quoted(&mut self.body, value);
            } else if value == b"\\N" {
                self.body.extend_from_slice(b"null");
            } else {
                let value = if is_clean { value } else { unescape(&mut self.plain, value)? };
                if column.kind == Kind::Text {
                    put_text(&mut self.body, value);
                } else {
                    put_value(&mut self.body, column.kind, value).ok()?;
                }
            }
            if column.is_key {
                key += end;
            }
            let last = index + 1 == self.columns.len();
            if rest[end] != if last { b'\n' } else { b'\t' } {
                return None;
            }
            at += end + 1;
        }
        self.body.extend_from_slice(&self.closing);
        // Python reports the row that is not UTF-8.
        (key <= self.key_max && std::str::from_utf8(&self.body).is_ok()).then_some(at)
    }
}

/// Removes the escapes of COPY's text form. None if the value has other escapes, or raw bytes that
/// COPY always escapes.
fn unescape<'a>(plain: &'a mut Vec<u8>, value: &[u8]) -> Option<&'a [u8]> {
    plain.clear();
    let mut bytes = value.iter();
    while let Some(&byte) = bytes.next() {
        plain.push(match byte {
            b'\\' => match bytes.next()? {
                b'b' => 0x08,
                b'f' => 0x0C,
                b'n' => b'\n',
                b'r' => b'\r',
                b't' => b'\t',
                b'v' => 0x0B,
                b'\\' => b'\\',
                _ => return None,
            },
            0x08 | 0x0C | b'\r' => return None,
            _ => byte,
        });
    }
    Some(plain)
}

//! Appends: records that wait for their slot in a stream, and acknowledgements.

use std::ops::Range;

use bytes::BufMut;
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use super::fault::Fault;
use super::protobuf::{
    APPEND, APPEND_TAGS, FENCING_TOKEN, Header, MATCH_SEQ_NUM, RECORDS, Reader, Record,
    SEQUENCED_TAGS, number_size, put_field, put_header, put_tagged, varint_size,
};
use super::shared::unlocked;

/// A record: the range of its headers and body, as fields of an AppendRecord, and its timestamp.
pub struct Row {
    pub rest: Range<usize>,
    pub timestamp: Option<u64>,
}

#[derive(Default)]
pub struct Parsed {
    pub rows: Vec<Row>,
    /// The bytes of the rows, if they were not received in canonical form.
    pub rewritten: Option<Vec<u8>>,
    /// Metered bytes, as limits and accounting count them.
    pub metered: u64,
    /// Records with a nameless header.
    nameless: Vec<usize>,
    match_seq_num: Option<u64>,
    fencing_token: Option<Range<usize>>,
}

impl Parsed {
    pub fn parse(raw: &[u8], records_max: usize) -> Result<Self, Fault> {
        let mut parsed = Parsed::default();
        let mut reader = Reader::new(raw, 0);
        while let Some(field) = reader.next()? {
            match field.tag {
                RECORDS => {
                    // Checked before the next record is parsed: a flood of empty records must not
                    // take up memory.
                    if parsed.rows.len() == records_max {
                        return Err(Fault::Records(records_max + 1));
                    }
                    if parsed.rows.is_empty() {
                        // Room for as many records as would fit if all were as large as the first.
                        let rows = raw.len() / reader.at + 1;
                        parsed.rows.reserve(rows.min(records_max));
                    }
                    parsed.add(
                        raw,
                        field.start,
                        &Record::parse::<APPEND>(raw, field.start, field.end, &mut ())?,
                    );
                }
                MATCH_SEQ_NUM => parsed.match_seq_num = Some(field.value),
                FENCING_TOKEN => {
                    if std::str::from_utf8(&raw[field.start..field.end]).is_err() {
                        return Err(Fault::Token(field.start, field.end));
                    }
                    parsed.fencing_token = Some(field.start..field.end);
                }
                _ => {}
            }
        }
        Ok(parsed)
    }

    #[inline(always)]
    fn add(&mut self, raw: &[u8], start: usize, record: &Record) {
        if record.nameless {
            self.nameless.push(self.rows.len());
        }
        self.metered += record.metered;
        let rest = match (&mut self.rewritten, record.rest()) {
            (None, Some((start, end))) => start..end,
            (rewritten, rest) => {
                let rows = &mut self.rows;
                let out = rewritten.get_or_insert_with(|| gather(raw, rows));
                let before = out.len();
                match rest {
                    Some((from, end)) => out.extend_from_slice(&raw[from..end]),
                    None => put_rest(out, raw, start, record),
                }
                before..out.len()
            }
        };
        self.rows.push(Row { rest, timestamp: record.timestamp });
    }
}

/// Copies the rows so far.
fn gather(raw: &[u8], rows: &mut [Row]) -> Vec<u8> {
    let mut out = Vec::with_capacity(raw.len());
    for row in rows {
        let start = out.len();
        out.extend_from_slice(&raw[row.rest.clone()]);
        row.rest = start..out.len();
    }
    out
}

/// Writes headers and body in canonical form.
fn put_rest(out: &mut Vec<u8>, raw: &[u8], start: usize, record: &Record) {
    let mut headers: Vec<Header> = Vec::with_capacity(record.headers);
    // Parsed before: there is no fault in it.
    if Record::parse::<APPEND>(raw, start, record.end, &mut headers).is_ok() {
        for header in &headers {
            put_header(out, APPEND_TAGS.headers, header.name(raw), header.value(raw));
        }
    }
    put_field(out, APPEND_TAGS.body, record.body());
}

/// A record with a nameless header: its index, header count, first header value, and body.
type Nameless<'py> = (usize, usize, Bound<'py, PyBytes>, Bound<'py, PyBytes>);

/// Encoded records that wait for sequence numbers and timestamps.
#[pyclass(frozen, module = "streamfold._native")]
pub struct Batch {
    parsed: Parsed,
    /// The received bytes, if the rows or the token are ranges of them.
    received: Option<Py<PyBytes>>,
}

impl Batch {
    fn received<'a>(&'a self, py: Python<'a>) -> &'a [u8] {
        self.received.as_ref().map_or(b"", |bytes| bytes.as_bytes(py))
    }

    fn bytes<'a>(&'a self, py: Python<'a>) -> &'a [u8] {
        self.parsed.rewritten.as_deref().unwrap_or_else(|| self.received(py))
    }
}

#[pymethods]
impl Batch {
    /// Make a batch of objects with the attributes of `Record`, whose types the caller has checked.
    #[staticmethod]
    fn of(records: &Bound<'_, PyList>) -> PyResult<Self> {
        let py = records.py();
        let (mut out, mut rows, mut nameless) =
            (Vec::new(), Vec::with_capacity(records.len()), Vec::new());
        let mut metered = 0;
        for (index, record) in records.iter().enumerate() {
            let body = record.getattr(intern!(py, "body"))?;
            let headers = record.getattr(intern!(py, "headers"))?;
            let start = out.len();
            metered += 8;
            for header in headers.try_iter()? {
                let header = header?;
                let pair = header
                    .cast::<PyTuple>()
                    .map_err(|_| PyTypeError::new_err("a header is no pair"))?;
                let (name, value) = (pair.get_item(0)?, pair.get_item(1)?);
                let (name, value) =
                    (name.cast::<PyBytes>()?.as_bytes(), value.cast::<PyBytes>()?.as_bytes());
                put_header(&mut out, APPEND_TAGS.headers, name, value);
                metered += 2 + (name.len() + value.len()) as u64;
                if name.is_empty() && nameless.last() != Some(&index) {
                    nameless.push(index);
                }
            }
            let body = body.cast::<PyBytes>()?.as_bytes();
            put_field(&mut out, APPEND_TAGS.body, body);
            metered += body.len() as u64;
            let timestamp = record.getattr(intern!(py, "timestamp"))?.extract()?;
            rows.push(Row { rest: start..out.len(), timestamp });
        }
        let parsed = Parsed { rows, rewritten: Some(out), nameless, metered, ..Parsed::default() };
        Ok(Batch { parsed, received: None })
    }

    /// Make a batch of one record without headers.
    #[staticmethod]
    fn of_one(body: &[u8], timestamp: Option<u64>) -> Self {
        let mut out = Vec::with_capacity(body.len() + 6);
        put_field(&mut out, APPEND_TAGS.body, body);
        let parsed = Parsed {
            rows: vec![Row { rest: 0..out.len(), timestamp }],
            rewritten: Some(out),
            metered: 8 + body.len() as u64,
            ..Parsed::default()
        };
        Batch { parsed, received: None }
    }

    fn __len__(&self) -> usize {
        self.parsed.rows.len()
    }

    #[getter]
    fn metered(&self) -> u64 {
        self.parsed.metered
    }

    #[getter]
    fn match_seq_num(&self) -> Option<u64> {
        self.parsed.match_seq_num
    }

    #[getter]
    fn fencing_token<'a>(&'a self, py: Python<'a>) -> Option<&'a str> {
        std::str::from_utf8(&self.received(py)[self.parsed.fencing_token.clone()?]).ok()
    }

    /// Index of the first record without a timestamp, or None.
    #[getter]
    fn unstamped(&self) -> Option<usize> {
        self.parsed.rows.iter().position(|row| row.timestamp.is_none())
    }

    /// Return the records with a nameless header: index, header count, first header value, and
    /// body.
    fn nameless<'py>(&self, py: Python<'py>) -> PyResult<Vec<Nameless<'py>>> {
        let raw = self.bytes(py);
        let describe = |&index: &usize| {
            let rest = self.parsed.rows[index].rest.clone();
            let mut headers: Vec<Header> = Vec::new();
            let record = Record::parse::<APPEND>(raw, rest.start, rest.end, &mut headers)?;
            let value = headers.first().map_or(&b""[..], |header| header.value(raw));
            Ok((index, record.headers, PyBytes::new(py, value), PyBytes::new(py, record.body())))
        };
        self.parsed.nameless.iter().map(describe).collect()
    }

    /// Encode the records for storage, with sequence numbers from `first`. Returns them with the
    /// timestamps of the first and the last.
    ///
    /// A record without a timestamp gets `now`, and with `arrival` every record does. Unless
    /// `uncapped`, no timestamp exceeds `now` (except to keep the order); none is lower than
    /// `floor` or the one before it.
    fn sequence<'py>(
        &self,
        py: Python<'py>,
        first: u64,
        now: u64,
        floor: u64,
        arrival: bool,
        uncapped: bool,
    ) -> PyResult<(Bound<'py, PyBytes>, u64, u64)> {
        let (raw, rows) = (self.bytes(py), &self.parsed.rows);
        let stamp = |row: &Row, latest: u64| {
            let own = if arrival { now } else { row.timestamp.unwrap_or(now) };
            latest.max(if uncapped { own } else { own.min(now) })
        };
        let content = |row: &Row, seq_num: u64, latest: u64| {
            number_size(seq_num) + number_size(latest) + row.rest.len()
        };
        let (mut size, mut latest, mut earliest) = (0, floor, floor);
        for (index, row) in rows.iter().enumerate() {
            latest = stamp(row, latest);
            if index == 0 {
                earliest = latest;
            }
            let inner = content(row, first.wrapping_add(index as u64), latest);
            size += 1 + varint_size(inner as u64) + inner;
        }
        let write = |mut room: &mut [u8]| {
            let (out, mut latest) = (&mut room, floor);
            for (index, row) in rows.iter().enumerate() {
                latest = stamp(row, latest);
                let seq_num = first.wrapping_add(index as u64);
                put_tagged(out, RECORDS, content(row, seq_num, latest) as u64);
                put_number(out, SEQUENCED_TAGS.seq_num, seq_num);
                put_number(out, SEQUENCED_TAGS.timestamp, latest);
                put_renamed(out, &raw[row.rest.clone()]);
            }
        };
        let payload = PyBytes::new_with(py, size, |room| {
            unlocked(py, size, || write(room));
            Ok(())
        })?;
        Ok((payload, earliest, latest))
    }
}

#[inline(always)]
fn put_number(out: &mut impl BufMut, tag: u32, value: u64) {
    if value != 0 {
        put_tagged(out, tag, value);
    }
}

/// Copies headers and body, replacing their tags with those of a SequencedRecord.
#[inline(always)]
fn put_renamed(out: &mut impl BufMut, rest: &[u8]) {
    let mut reader = Reader::new(rest, 0);
    let mut at = 0;
    // Parsed before: there is no fault in it.
    while let Ok(Some(_)) = reader.take_bytes(APPEND_TAGS.headers) {
        out.put_u8(SEQUENCED_TAGS.headers as u8);
        out.put_slice(&rest[at + 1..reader.at]);
        at = reader.at;
    }
    if at < rest.len() {
        out.put_u8(SEQUENCED_TAGS.body as u8);
        out.put_slice(&rest[at + 1..]);
    }
}

/// Parse an AppendInput. Raises CodecError if it is invalid or has more than `records_max` records.
#[pyfunction]
pub fn parse_append(raw: &Bound<'_, PyBytes>, records_max: usize) -> PyResult<Batch> {
    let bytes = raw.as_bytes();
    let parsed = unlocked(raw.py(), bytes.len(), || Parsed::parse(bytes, records_max))?;
    let needed = parsed.rewritten.is_none() || parsed.fencing_token.is_some();
    Ok(Batch { parsed, received: needed.then(|| raw.clone().unbind()) })
}

/// Count the fields of an AppendInput, its records and their headers.
///
/// Returns more than `most` for more fields than that, and for input with a rare field type or a
/// truncated field.
#[pyfunction]
pub fn count_fields(raw: &[u8], most: usize) -> usize {
    let mut fields = 0;
    let known = add_fields(raw, 0, &[RECORDS, APPEND_TAGS.headers], most, &mut fields);
    if known { fields } else { most + 1 }
}

/// Counts the fields of a message and of its nested messages. Returns false beyond `most`, or for a
/// field that cannot be counted.
fn add_fields(raw: &[u8], start: usize, nested: &[u32], most: usize, fields: &mut usize) -> bool {
    let mut reader = Reader::new(raw, start);
    while reader.at < raw.len() {
        *fields += 1;
        let Some(field) = reader.plain().filter(|_| *fields <= most) else { return false };
        if let Some((&tag, deeper)) = nested.split_first()
            && tag == field.tag
            && !add_fields(&raw[..field.end], field.start, deeper, most, fields)
        {
            return false;
        }
    }
    true
}

type Append<'py> =
    (Option<u64>, Vec<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)>, Bound<'py, PyBytes>);

/// Return the records of an AppendInput, each as timestamp, headers and body. Raises CodecError if
/// it is invalid.
#[pyfunction]
pub fn append_records<'py>(py: Python<'py>, raw: &[u8]) -> PyResult<Vec<Append<'py>>> {
    let (mut records, mut headers) = (Vec::new(), Vec::<Header>::new());
    let mut reader = Reader::new(raw, 0);
    while let Some(field) = reader.next()? {
        if field.tag == RECORDS {
            let record = Record::parse::<APPEND>(raw, field.start, field.end, &mut headers)?;
            let pair = |header: &Header| {
                (PyBytes::new(py, header.name(raw)), PyBytes::new(py, header.value(raw)))
            };
            let pairs = headers.iter().map(pair).collect();
            records.push((record.timestamp, pairs, PyBytes::new(py, record.body())));
        }
    }
    Ok(records)
}

/// Encode an AppendAck: start, end and tail, each as sequence number and timestamp.
#[pyfunction]
pub fn encode_ack(
    py: Python<'_>,
    start: u64,
    start_time: u64,
    end: u64,
    end_time: u64,
    tail: u64,
    tail_time: u64,
) -> Bound<'_, PyBytes> {
    let mut out = Vec::with_capacity(3 * POSITION_MAX);
    put_position(&mut out, 0x0A, start, start_time);
    put_position(&mut out, 0x12, end, end_time);
    put_position(&mut out, 0x1A, tail, tail_time);
    PyBytes::new(py, &out)
}

/// Encode a StreamPosition as the field `tag`.
#[pyfunction]
pub fn encode_position(
    py: Python<'_>,
    tag: u8,
    seq_num: u64,
    timestamp: u64,
) -> Bound<'_, PyBytes> {
    let mut out = Vec::with_capacity(POSITION_MAX);
    put_position(&mut out, tag, seq_num, timestamp);
    PyBytes::new(py, &out)
}

/// Maximum bytes of a position field: tag, length, and two tags with ten bytes of number each.
const POSITION_MAX: usize = 24;

fn put_position(out: &mut Vec<u8>, tag: u8, seq_num: u64, timestamp: u64) {
    out.push(tag);
    out.push((number_size(seq_num) + number_size(timestamp)) as u8);
    put_number(out, SEQUENCED_TAGS.seq_num, seq_num);
    put_number(out, SEQUENCED_TAGS.timestamp, timestamp);
}

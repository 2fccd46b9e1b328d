//! pgoutput messages as records to append.
//!
//! Between calls, Python has the state of the open transaction, so that either side can handle the
//! next message. Python handles those that this code does not understand or that need a decision.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::fault::Fault;
use super::json::put_decimal;
use super::protobuf::{
    APPEND_TAGS, RECORDS, field_size, put_field, put_header, put_tagged, varint_size,
};
use super::shared::unlocked;
use super::values::{Kind, put_value};

/// Message kinds and row kinds, and the sizes of fixed-size messages in bytes.
const BEGIN: u8 = b'B';
const COMMIT: u8 = b'C';
const INSERT: u8 = b'I';
const UPDATE: u8 = b'U';
const DELETE: u8 = b'D';
const NEW_ROW: u8 = b'N';
const OLD_KEY: u8 = b'K';
const OLD_ROW: u8 = b'O';
const BEGIN_BYTES: usize = 21;
const COMMIT_BYTES: usize = 26;
/// Bytes of a change before its first row: message kind and relation.
const ROWS_AT: usize = 5;
/// Microseconds from 1970 to 2000, where PostgreSQL's clock starts.
const EPOCH_US: i64 = 946_684_800_000_000;
/// Bytes of records that one call may write.
const ENCODED_MAX: usize = 4 << 20;
/// Metered bytes of a record with two headers, besides their names and values and the body.
const OVERHEAD: usize = 8 + 2 * 2;

/// Messages in one contiguous buffer.
#[pyclass(frozen, module = "streamfold._native")]
pub struct Run {
    raw: Vec<u8>,
    /// Where each message starts and ends.
    bounds: Vec<(usize, usize)>,
}

impl Run {
    /// Extracts the pgoutput messages from replication messages, which end at `ends`. Returns them
    /// with the WAL end that the last message names, and whether any asks for a reply. Fails at the
    /// first message that is neither data nor a keepalive.
    pub fn split(raw: Vec<u8>, ends: &[usize]) -> Result<(Self, u64, bool), Fault> {
        const DATA_HEAD: usize = 25;
        const KEEPALIVE_BYTES: usize = 18;
        let (mut bounds, mut wal_end, mut asked, mut start) = (Vec::new(), 0, false, 0);
        for &end in ends {
            let message = &raw[start..end];
            match message.first() {
                Some(b'w') if message.len() >= DATA_HEAD => {
                    wal_end = number(message, 9, 8).unwrap_or(0);
                    bounds.push((start + DATA_HEAD, end));
                }
                Some(b'k') if message.len() == KEEPALIVE_BYTES => {
                    wal_end = number(message, 1, 8).unwrap_or(0);
                    asked |= message[KEEPALIVE_BYTES - 1] != 0;
                }
                kind => return Err(Fault::Replication(kind.copied())),
            }
            start = end;
        }
        Ok((Run { raw, bounds }, wal_end, asked))
    }

    fn message(&self, index: usize) -> &[u8] {
        let (start, end) = self.bounds[index];
        &self.raw[start..end]
    }
}

#[pymethods]
impl Run {
    #[staticmethod]
    pub fn of(messages: Vec<Vec<u8>>) -> Self {
        let mut raw = Vec::new();
        let mut bounds = Vec::with_capacity(messages.len());
        for message in messages {
            bounds.push((raw.len(), raw.len() + message.len()));
            raw.extend_from_slice(&message);
        }
        Run { raw, bounds }
    }

    fn __len__(&self) -> usize {
        self.bounds.len()
    }

    fn __getitem__<'py>(&self, py: Python<'py>, index: usize) -> PyResult<Bound<'py, PyBytes>> {
        if index >= self.bounds.len() {
            return Err(pyo3::exceptions::PyIndexError::new_err(index));
        }
        Ok(PyBytes::new(py, self.message(index)))
    }
}

/// Reads a big-endian number of `size` bytes at an offset.
fn number(raw: &[u8], at: usize, size: usize) -> Option<u64> {
    let bytes = raw.get(at..at + size)?;
    Some(bytes.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)))
}

/// A table that PostgreSQL has described.
#[derive(FromPyObject)]
pub struct Table {
    pub stream: usize,
    /// LSN and index of the stream's last change. The index is -1 before the first.
    pub position: (u64, i64),
    /// How the bodies of inserts, updates and deletes begin.
    pub openings: [Vec<u8>; 3],
    /// The JSON before each column's value, and the column's kind.
    pub columns: Vec<(Vec<u8>, u8)>,
    /// Key columns.
    pub key: Vec<usize>,
}

/// A value of a row.
#[derive(Clone, Copy)]
enum Value<'a> {
    Null,
    Unchanged,
    Text(&'a [u8]),
}

type Row<'a> = Vec<Value<'a>>;

/// A change with its parsed rows.
struct Change<'a> {
    kind: u8,
    new: Row<'a>,
    old: Row<'a>,
    /// The kind of the old row, if there is one.
    old_kind: Option<u8>,
}

impl<'a> Change<'a> {
    /// Parses a change. None unless it has the form that PostgreSQL writes for a table of `columns`
    /// columns.
    fn read(message: &'a [u8], columns: usize) -> Option<Self> {
        let (kind, mut rest) = (message[0], message.get(ROWS_AT..)?);
        let mut change = Change { kind, new: Vec::new(), old: Vec::new(), old_kind: None };
        let first = *rest.first()?;
        if kind != INSERT && (first == OLD_KEY || first == OLD_ROW) {
            change.old_kind = Some(first);
            (change.old, rest) = read_row(&rest[1..], columns)?;
        }
        if kind == DELETE {
            return (change.old_kind.is_some() && rest.is_empty()).then_some(change);
        }
        if *rest.first()? != NEW_ROW {
            return None;
        }
        (change.new, rest) = read_row(&rest[1..], columns)?;
        rest.is_empty().then_some(change)
    }

    /// Whether it changes a key and leaves out values that only the old row has.
    fn must_look_up(&self) -> bool {
        let lacks = |value: &Value| matches!(value, Value::Unchanged);
        self.old_kind == Some(OLD_KEY) && self.new.iter().any(lacks)
    }
}

/// Parses a row. Returns its values and the remaining bytes.
fn read_row(raw: &[u8], columns: usize) -> Option<(Row<'_>, &[u8])> {
    if number(raw, 0, 2)? != columns as u64 {
        return None;
    }
    let (mut row, mut rest) = (Vec::with_capacity(columns), &raw[2..]);
    for _ in 0..columns {
        let (kind, after) = rest.split_first()?;
        rest = after;
        row.push(match kind {
            b'n' => Value::Null,
            b'u' => Value::Unchanged,
            b't' => {
                let size = number(rest, 0, 4)? as usize;
                let (text, after) = rest[4..].split_at_checked(size)?;
                rest = after;
                Value::Text(text)
            }
            _ => return None,
        });
    }
    Some((row, rest))
}

/// A change held back until it is known whether it is its transaction's last in the stream.
enum Held {
    Message(usize),
    Body(Vec<u8>),
}

/// The open transaction's state for a stream.
#[derive(Default)]
struct Stream {
    /// Index of the next change.
    index: usize,
    /// The held change, its table and its index.
    held: Option<(Held, usize, usize)>,
}

/// Encodes the changes of a replication slot's tables as records.
#[pyclass(frozen, module = "streamfold._native")]
pub struct ChangeEncoder {
    /// Relation ids in order, each with its table, or None if that is not followed.
    relations: Vec<(u64, Option<usize>)>,
    tables: Vec<Table>,
    kinds: Vec<Vec<Kind>>,
    streams: usize,
    /// Names of the headers for a change's LSN and index.
    names: (Vec<u8>, Vec<u8>),
}

/// Formats an LSN as PostgreSQL does.
fn lsn_text(lsn: u64) -> String {
    format!("{:X}/{:X}", lsn >> 32, lsn & 0xFFFF_FFFF)
}

/// The open transaction: its LSN and commit time in milliseconds since 1970.
type Commit = Option<(u64, u64)>;
/// A stream, the index of its next change, and a held change: its body, table and index.
type OpenStream = (usize, usize, Option<(Vec<u8>, usize, usize)>);
/// A stream, the index of its next change, whether a change is held, and a newly held change: its
/// message, table and index. None if the held change is the one that the caller passed.
type LeftStream = (usize, usize, bool, Option<(usize, usize, usize)>);

/// Indices of the last messages that began the open transaction, ended one, ended one with a
/// record, and began one before any record.
type Marks = [Option<usize>; 4];
const BEGUN: usize = 0;
const ENDED: usize = 1;
const RECORDED: usize = 2;
const QUIET: usize = 3;

/// The result of a call: the next message, records by table, the streams that the open transaction
/// has touched, marks, and batches.
#[pyclass(frozen, get_all, module = "streamfold._native")]
pub struct Encoded {
    next: usize,
    counts: Vec<usize>,
    touched: Vec<LeftStream>,
    marks: Marks,
    /// Stream, number of records, metered bytes, records.
    batches: Vec<(usize, usize, usize, Py<PyBytes>)>,
}

/// A batch of records for one append: stream, record count, metered bytes, and encoded records.
type Records = (usize, usize, usize, Vec<u8>);

/// One call of the encoder.
struct Call<'a> {
    encoder: &'a ChangeEncoder,
    run: &'a Run,
    /// Maximum records of a batch, and maximum metered bytes of a batch and of a record.
    limits: (usize, usize),
    commit: Commit,
    /// Text form of the commit's LSN.
    lsn: String,
    streams: Vec<Stream>,
    touched: Vec<usize>,
    body: Vec<u8>,
    digits: Vec<u8>,
    batches: Vec<Records>,
    /// By stream, its last batch.
    open: Vec<Option<usize>>,
    /// Total bytes of all batches.
    size: usize,
    counts: Vec<usize>,
    marks: Marks,
}

#[pymethods]
impl ChangeEncoder {
    #[new]
    pub fn new(
        mut relations: Vec<(u64, Option<usize>)>,
        tables: Vec<Table>,
        streams: usize,
        names: (Vec<u8>, Vec<u8>),
    ) -> Result<Self, Fault> {
        relations.sort_unstable();
        let kinds =
            |table: &Table| table.columns.iter().map(|(_, kind)| (*kind).try_into()).collect();
        let kinds = tables.iter().map(kinds).collect::<Result<_, Fault>>()?;
        let fits = |table: &Table| {
            table.stream < streams && table.key.iter().all(|&column| column < table.columns.len())
        };
        let known =
            |&(_, table): &(u64, Option<usize>)| table.is_none_or(|table| table < tables.len());
        if streams == 0 || !tables.iter().all(fits) || !relations.iter().all(known) {
            return Err(Fault::Offsets(0));
        }
        Ok(ChangeEncoder { relations, tables, kinds, streams, names })
    }

    /// Encode records for the messages from `at` on, until one that Python must handle.
    ///
    /// `limits` are the maximum records of a batch, and the maximum metered bytes of a batch and of
    /// a record.
    fn encode(
        &self,
        py: Python<'_>,
        run: &Run,
        at: usize,
        commit: Commit,
        open: Vec<OpenStream>,
        limits: (usize, usize),
    ) -> PyResult<Encoded> {
        let mut call = self.call(run, commit, open, limits)?;
        let next = unlocked(py, run.raw.len(), || call.take_messages(at));
        let left = |&number: &usize| {
            let Stream { index, held } = &call.streams[number];
            let message = match held {
                Some((Held::Message(message), table, at)) => Some((*message, *table, *at)),
                _ => None,
            };
            (number, *index, held.is_some(), message)
        };
        Ok(Encoded {
            next,
            touched: call.touched.iter().map(left).collect(),
            counts: call.counts,
            marks: call.marks,
            batches: call
                .batches
                .into_iter()
                .map(|(stream, records, metered, bytes)| {
                    (stream, records, metered, PyBytes::new(py, &bytes).unbind())
                })
                .collect(),
        })
    }
}

impl ChangeEncoder {
    fn call<'a>(
        &'a self,
        run: &'a Run,
        commit: Commit,
        open: Vec<OpenStream>,
        limits: (usize, usize),
    ) -> Result<Call<'a>, Fault> {
        let mut call = Call {
            encoder: self,
            run,
            limits,
            commit,
            lsn: commit.map_or_else(String::new, |(lsn, _)| lsn_text(lsn)),
            streams: (0..self.streams).map(|_| Stream::default()).collect(),
            touched: Vec::new(),
            body: Vec::new(),
            digits: Vec::new(),
            batches: Vec::new(),
            open: vec![None; self.streams],
            size: 0,
            counts: vec![0; self.tables.len()],
            marks: Marks::default(),
        };
        for (number, index, held) in open {
            let stream = call.streams.get_mut(number).ok_or(Fault::Offsets(number))?;
            if let Some((_, table, _)) = held
                && table >= call.counts.len()
            {
                call.counts.resize(table + 1, 0); // a renamed table is no longer described
            }
            let held = held
                .map(|(body, table, at): (Vec<u8>, usize, usize)| (Held::Body(body), table, at));
            *stream = Stream { index, held };
            call.touched.push(number);
        }
        Ok(call)
    }

    /// Does what `encode` does, without Python.
    #[cfg(test)]
    pub fn encoded(
        &self,
        run: &Run,
        at: usize,
        commit: Commit,
        bytes_max: usize,
    ) -> (usize, Vec<Records>) {
        let mut call = self
            .call(run, commit, Vec::new(), (1000, bytes_max))
            .unwrap_or_else(|_| unreachable!());
        let next = call.take_messages(at);
        (next, call.batches)
    }

    /// Returns a relation's table. The outer None means that the relation was not described.
    fn table_of(&self, relation: u64) -> Option<Option<usize>> {
        let at = self.relations.binary_search_by_key(&relation, |&(number, _)| number).ok()?;
        Some(self.relations[at].1)
    }

    /// Writes the body of a message without its transaction.
    fn put_body(&self, out: &mut Vec<u8>, message: &[u8], number: usize) -> Option<()> {
        let table = &self.tables[number];
        let mut change = Change::read(message, table.columns.len())?;
        if change.kind == UPDATE && change.old_kind == Some(OLD_ROW) {
            for (new, old) in change.new.iter_mut().zip(&change.old) {
                if matches!(new, Value::Unchanged) {
                    *new = *old;
                }
            }
        }
        let opening = match change.kind {
            INSERT => 0,
            UPDATE => 1,
            _ => 2,
        };
        out.extend_from_slice(&table.openings[opening]);
        if change.kind != INSERT {
            let row = if change.old_kind.is_some() { &change.old } else { &change.new };
            self.put_image(out, number, row, table.key.iter().copied(), true)?;
        }
        let every = 0..table.columns.len();
        if change.kind != DELETE {
            if change.kind == UPDATE {
                out.extend_from_slice(b",\"after\":{");
            }
            self.put_image(out, number, &change.new, every.clone(), false)?;
        }
        if change.kind == UPDATE {
            if change.old_kind == Some(OLD_ROW) {
                out.extend_from_slice(b",\"before\":{");
                self.put_image(out, number, &change.old, every, false)?;
            }
            put_unchanged(out, table, &change.new);
        }
        Some(())
    }

    /// Writes the values that were sent, or the key, and a closing brace.
    fn put_image(
        &self,
        out: &mut Vec<u8>,
        number: usize,
        row: &[Value],
        columns: impl Iterator<Item = usize>,
        of_key: bool,
    ) -> Option<()> {
        let (table, kinds) = (&self.tables[number], &self.kinds[number]);
        let mut first = true;
        for column in columns {
            let value = row[column];
            if matches!(value, Value::Unchanged) && !of_key {
                continue;
            }
            if !first {
                out.push(b',');
            }
            first = false;
            out.extend_from_slice(&table.columns[column].0);
            match value {
                Value::Text(text) => put_value(out, kinds[column], text).ok()?,
                _ => out.extend_from_slice(b"null"),
            }
        }
        out.push(b'}');
        Some(())
    }
}

/// Writes the names of the columns whose values were not sent, if any.
fn put_unchanged(out: &mut Vec<u8>, table: &Table, row: &[Value]) {
    let mut before: &[u8] = b",\"unchanged\":[";
    for ((name, _), value) in table.columns.iter().zip(row) {
        if matches!(value, Value::Unchanged) {
            out.extend_from_slice(before);
            out.extend_from_slice(name.strip_suffix(b":").unwrap_or(name));
            before = b",";
        }
    }
    if before == b"," {
        out.push(b']');
    }
}

impl Call<'_> {
    /// Handles messages from `at` on. Returns the first that Python must handle.
    fn take_messages(&mut self, mut at: usize) -> usize {
        while at < self.run.bounds.len() && self.take(at).is_some() {
            at += 1;
        }
        at
    }

    /// Handles one message. None if Python must handle it; earlier output stays valid.
    fn take(&mut self, at: usize) -> Option<()> {
        let run = self.run;
        let message = run.message(at);
        match (message.first()?, self.commit) {
            (&(INSERT | UPDATE | DELETE), Some((lsn, _))) => self.change(message, at, lsn),
            (&BEGIN, None) if message.len() == BEGIN_BYTES => self.begin(message, at),
            (&COMMIT, Some(_)) if message.len() == COMMIT_BYTES => self.end(at),
            _ => None,
        }
    }

    fn begin(&mut self, message: &[u8], at: usize) -> Option<()> {
        let moment = (number(message, 9, 8)? as i64).checked_add(EPOCH_US)?;
        let moment = u64::try_from(moment).ok()?;
        let lsn = number(message, 1, 8)?;
        (self.commit, self.lsn) = (Some((lsn, moment / 1000)), lsn_text(lsn));
        self.marks[BEGUN] = Some(at);
        if self.batches.is_empty() {
            self.marks[QUIET] = Some(at);
        }
        Some(())
    }

    fn change(&mut self, message: &[u8], at: usize, lsn: u64) -> Option<()> {
        let followed = self.encoder.table_of(number(message, 1, 4)?)?;
        // The first stream also counts changes of tables that are not followed.
        let number = followed.map_or(0, |table| self.encoder.tables[table].stream);
        let index = self.streams[number].index;
        if let Some(table) = followed
            && (lsn, index as i64) > self.encoder.tables[table].position
        {
            let columns = self.encoder.tables[table].columns.len();
            if message[0] == UPDATE
                && message.get(ROWS_AT) == Some(&OLD_KEY)
                && Change::read(message, columns).is_none_or(|change| change.must_look_up())
            {
                return None;
            }
            self.release(number, false)?;
            self.streams[number].held = Some((Held::Message(at), table, index));
        }
        if index == 0 {
            self.touched.push(number);
        }
        self.streams[number].index += 1;
        Some(())
    }

    /// Ends the transaction. After a None, a further call continues with the next held change.
    fn end(&mut self, at: usize) -> Option<()> {
        let mut recorded = false;
        for order in 0..self.touched.len() {
            let number = self.touched[order];
            recorded |= self.streams[number].held.is_some();
            self.release(number, true)?;
        }
        for number in self.touched.drain(..) {
            self.streams[number] = Stream::default();
        }
        self.commit = None;
        (self.marks[BEGUN], self.marks[ENDED]) = (None, Some(at));
        if recorded {
            self.marks[RECORDED] = Some(at);
        }
        Some(())
    }

    /// Writes the record of the held change, if any. If it cannot, returns None without an effect.
    fn release(&mut self, number: usize, last: bool) -> Option<()> {
        let Some((held, table, index)) = &self.streams[number].held else { return Some(()) };
        let (_, stamp) = self.commit?;
        self.body.clear();
        match held {
            Held::Message(at) => {
                self.encoder.put_body(&mut self.body, self.run.message(*at), *table)?
            }
            Held::Body(body) => self.body.extend_from_slice(body),
        }
        let (lsn, body) = (self.lsn.as_bytes(), &mut self.body);
        body.extend_from_slice(b",\"txn\":{\"id\":\"");
        body.extend_from_slice(lsn);
        body.extend_from_slice(if last { b"\",\"last\":true}}" } else { b"\"}}" });
        self.digits.clear();
        put_decimal(&mut self.digits, *index as u64);
        let (digits, (lsn_name, index_name)) = (&self.digits, &self.encoder.names);
        let texts = lsn_name.len() + lsn.len() + index_name.len() + digits.len();
        let metered = OVERHEAD + texts + body.len();
        let (records_max, bytes_max) = self.limits;
        if metered > bytes_max || self.size + metered > ENCODED_MAX {
            return None;
        }
        let header = |name: &[u8], value: &[u8]| {
            let size = field_size(name.len()) + field_size(value.len());
            1 + varint_size(size as u64) + size
        };
        let headers = header(lsn_name, lsn) + header(index_name, digits);
        let fits = |&at: &usize| {
            let (_, records, sum, _) = &self.batches[at];
            *records < records_max && sum + metered <= bytes_max
        };
        let batch = match self.open[number].filter(fits) {
            Some(batch) => batch,
            None => {
                self.batches.push((number, 0, 0, Vec::new()));
                self.batches.len() - 1
            }
        };
        self.open[number] = Some(batch);
        let (_, records, sum, out) = &mut self.batches[batch];
        *records += 1;
        *sum += metered;
        let before = out.len();
        let size = 1 + varint_size(stamp) + headers + field_size(body.len());
        put_tagged(out, RECORDS, size as u64);
        put_tagged(out, APPEND_TAGS.timestamp, stamp);
        put_header(out, APPEND_TAGS.headers, lsn_name, lsn);
        put_header(out, APPEND_TAGS.headers, index_name, digits);
        put_field(out, APPEND_TAGS.body, body);
        self.size += out.len() - before;
        self.counts[*table] += 1;
        self.streams[number].held = None;
        Some(())
    }
}

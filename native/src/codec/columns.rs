//! Records as columns and back, for columnar engines.

use std::ops::Range;

use numpy::{IntoPyArray, PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::fault::Fault;
use super::protobuf::{
    APPEND_TAGS, Header, RECORDS, Reader, Records, Sink, field_size, put_field, put_header,
    put_tagged, varint_size,
};
use super::shared::unlocked;

/// Concatenated texts: row i is `ends[i]` to `ends[i + 1]` of the content.
struct Texts {
    ends: Vec<i32>,
    content: Vec<u8>,
}

impl Texts {
    /// Returns an empty column with room for `rows` rows and `size` bytes of content.
    fn new(rows: usize, size: usize) -> Self {
        let mut ends = Vec::with_capacity(rows + 1);
        ends.push(0);
        Texts { ends, content: Vec::with_capacity(size) }
    }

    /// Drops all but the first `rows` rows.
    fn truncate(&mut self, rows: usize) {
        self.ends.truncate(rows + 1);
        self.content.truncate(self.ends.last().map_or(0, |&end| end as usize));
    }

    #[inline(always)]
    fn put(&mut self, text: &[u8]) {
        self.content.extend_from_slice(text);
        self.ends.push(self.content.len() as i32);
    }

    fn into_arrays(self, py: Python<'_>) -> TextArrays<'_> {
        (self.ends.into_pyarray(py), self.content.into_pyarray(py))
    }
}

/// Record headers: those of row i are entries `ends[i]` to `ends[i + 1]` of names and values.
pub struct Pairs<'a> {
    raw: &'a [u8],
    ends: Vec<i32>,
    names: Texts,
    values: Texts,
}

impl Sink for Option<Pairs<'_>> {
    #[inline(always)]
    fn begin(&mut self) {
        if let Some(pairs) = self {
            pairs.ends.push(pairs.names.ends.len() as i32 - 1);
        }
    }

    fn again(&mut self) {
        if let Some(pairs) = self {
            let entries = pairs.ends.last().map_or(0, |&end| end as usize);
            pairs.names.truncate(entries);
            pairs.values.truncate(entries);
        }
    }

    #[inline(always)]
    fn put(&mut self, header: Header) {
        if let Some(pairs) = self {
            pairs.names.put(header.name(pairs.raw));
            pairs.values.put(header.value(pairs.raw));
        }
    }
}

pub struct Columns<'a> {
    seq_nums: Vec<i64>,
    timestamps: Vec<u64>,
    headers: Option<Pairs<'a>>,
    bodies: Option<Texts>,
}

pub fn read(raw: &[u8], headers: bool, bodies: bool) -> Result<Columns<'_>, Fault> {
    if raw.len() > i32::MAX as usize {
        return Err(Fault::Large(raw.len()));
    }
    // Room for as many records as would fit if all were as large as the first. The columns grow if
    // there are more.
    let mut first = Reader::new(raw, 0);
    let rows = first.next()?.map_or(0, |_| raw.len() / first.at + 1);
    let (names, values) = (Texts::new(0, 0), Texts::new(0, 0));
    let mut columns = Columns {
        seq_nums: Vec::with_capacity(rows),
        timestamps: Vec::with_capacity(rows),
        headers: headers.then(|| Pairs { raw, ends: Vec::new(), names, values }),
        bodies: bodies.then(|| Texts::new(rows, raw.len())),
    };
    let mut records = Records::new(raw, &mut columns.headers, true);
    while let Some((record, _)) = records.next()? {
        let seq_num = i64::try_from(record.seq_num).map_err(|_| Fault::Unsigned(record.seq_num))?;
        columns.seq_nums.push(seq_num);
        columns.timestamps.push(record.timestamp.unwrap_or(0));
        if let Some(bodies) = &mut columns.bodies {
            bodies.put(record.body());
        }
    }
    columns.headers.begin(); // the end of the last record
    Ok(columns)
}

type Array<'py, T> = Bound<'py, PyArray1<T>>;
type TextArrays<'py> = (Array<'py, i32>, Array<'py, u8>);
type PairArrays<'py> = (Array<'py, i32>, TextArrays<'py>, TextArrays<'py>);
type ColumnArrays<'py> =
    (Array<'py, i64>, Array<'py, u64>, Option<PairArrays<'py>>, Option<TextArrays<'py>>);

/// Split the records of concatenated ReadBatches into columns. Raises CodecError if they are
/// damaged.
#[pyfunction]
pub fn read_columns<'py>(
    py: Python<'py>,
    payload: PyReadonlyArray1<'py, u8>,
    headers: bool,
    bodies: bool,
) -> PyResult<ColumnArrays<'py>> {
    let raw = payload.as_slice()?;
    let columns = unlocked(py, raw.len(), || read(raw, headers, bodies))?;
    let pairs = columns.headers.map(|Pairs { ends, names, values, .. }| {
        (ends.into_pyarray(py), names.into_arrays(py), values.into_arrays(py))
    });
    let bodies = columns.bodies.map(|bodies| bodies.into_arrays(py));
    Ok((columns.seq_nums.into_pyarray(py), columns.timestamps.into_pyarray(py), pairs, bodies))
}

/// The entries of a row.
#[inline(always)]
fn range(ends: &[i32], row: usize) -> Result<Range<usize>, Fault> {
    let end = |at: usize| usize::try_from(*ends.get(at)?).ok();
    end(row).zip(end(row + 1)).map(|(start, end)| start..end).ok_or(Fault::Offsets(row))
}

/// A text column: row i is `ends[i]` to `ends[i + 1]` of the content.
struct Cells<'a> {
    ends: &'a [i32],
    content: &'a [u8],
}

impl<'a> Cells<'a> {
    #[inline(always)]
    fn get(&self, row: usize) -> Result<&'a [u8], Fault> {
        self.content.get(range(self.ends, row)?).ok_or(Fault::Offsets(row))
    }
}

struct Rows<'a> {
    timestamps: &'a [u64],
    stamped: &'a [bool],
    headers: &'a [i32],
    names: Cells<'a>,
    values: Cells<'a>,
    bodies: Cells<'a>,
}

impl<'a> Rows<'a> {
    /// Computes each record's bytes without tag and length, its metered bytes, and the total size.
    fn measure(&self) -> Result<Measured, Fault> {
        let rows = self.timestamps.len();
        let mut measured = Measured {
            records: Vec::with_capacity(rows),
            metered: Vec::with_capacity(rows),
            total: 0,
        };
        for (row, &timestamp) in self.timestamps.iter().enumerate() {
            let body = self.bodies.get(row)?.len();
            let (mut size, mut weight) = (field_size(body), 8 + body);
            if *self.stamped.get(row).ok_or(Fault::Offsets(row))? {
                size += 1 + varint_size(timestamp);
            }
            for entry in range(self.headers, row)? {
                let (name, value) = (self.names.get(entry)?.len(), self.values.get(entry)?.len());
                let inner = field_size(name) + field_size(value);
                size += 1 + varint_size(inner as u64) + inner;
                weight += 2 + name + value;
            }
            measured.records.push(size);
            measured.metered.push(weight as i64);
            measured.total += 1 + varint_size(size as u64) + size;
        }
        Ok(measured)
    }

    /// Writes all rows. Returns where each starts, and the end of the last.
    fn encode(&self, measured: &Measured, mut room: &mut [u8]) -> Result<Vec<i64>, Fault> {
        let mut offsets = Vec::with_capacity(measured.records.len() + 1);
        let out = &mut room;
        for (row, &size) in measured.records.iter().enumerate() {
            offsets.push((measured.total - out.len()) as i64);
            put_tagged(out, RECORDS, size as u64);
            if self.stamped[row] {
                put_tagged(out, APPEND_TAGS.timestamp, self.timestamps[row]);
            }
            for entry in range(self.headers, row)? {
                let (name, value) = (self.names.get(entry)?, self.values.get(entry)?);
                put_header(out, APPEND_TAGS.headers, name, value);
            }
            put_field(out, APPEND_TAGS.body, self.bodies.get(row)?);
        }
        offsets.push((measured.total - out.len()) as i64);
        Ok(offsets)
    }
}

struct Measured {
    records: Vec<usize>,
    metered: Vec<i64>,
    total: usize,
}

type Encoded<'py> = (Bound<'py, PyBytes>, Array<'py, i64>, Array<'py, i64>);
type TextInput<'py> = (PyReadonlyArray1<'py, i32>, PyReadonlyArray1<'py, u8>);

/// Encode rows as records of an AppendInput.
///
/// Returns the records, where each starts and the last one ends, and their metered bytes. Raises
/// CodecError if the offsets do not fit the columns.
#[pyfunction]
pub fn encode_columns<'py>(
    py: Python<'py>,
    timestamps: PyReadonlyArray1<'py, u64>,
    stamped: PyReadonlyArray1<'py, bool>,
    headers: (PyReadonlyArray1<'py, i32>, TextInput<'py>, TextInput<'py>),
    bodies: TextInput<'py>,
) -> PyResult<Encoded<'py>> {
    let (headers, names, values) = headers;
    let rows = Rows {
        timestamps: timestamps.as_slice()?,
        stamped: stamped.as_slice()?,
        headers: headers.as_slice()?,
        names: Cells { ends: names.0.as_slice()?, content: names.1.as_slice()? },
        values: Cells { ends: values.0.as_slice()?, content: values.1.as_slice()? },
        bodies: Cells { ends: bodies.0.as_slice()?, content: bodies.1.as_slice()? },
    };
    let input = rows.bodies.content.len() + rows.names.content.len() + rows.values.content.len();
    let measured = unlocked(py, input, || rows.measure())?;
    let mut offsets = Vec::new();
    let encoded = PyBytes::new_with(py, measured.total, |room| {
        offsets = unlocked(py, input, || rows.encode(&measured, room))?;
        Ok(())
    })?;
    Ok((encoded, offsets.into_pyarray(py), measured.metered.into_pyarray(py)))
}

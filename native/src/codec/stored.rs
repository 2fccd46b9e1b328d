//! Stored payloads: the positions of their records, and their content.

use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use super::fault::Fault;
use super::protobuf::{Header, Records};
use super::shared::{Input, unlocked};

/// A half-open range of records within a payload, in records and in bytes.
#[pyclass(frozen, get_all, eq, module = "streamfold._native")]
#[derive(PartialEq)]
pub struct Cut {
    end_index: usize,
    byte_start: usize,
    byte_end: usize,
    metered: u64,
}

/// The offsets, timestamps and metered bytes of a payload's records.
#[pyclass(frozen, module = "streamfold._native")]
pub struct Index {
    /// Byte offset of each record, and the payload's length.
    #[pyo3(get)]
    pub offsets: Vec<usize>,
    /// One per record.
    #[pyo3(get)]
    pub timestamps: Vec<u64>,
    /// Metered bytes before each record, and the total.
    #[pyo3(get)]
    metered: Vec<u64>,
    /// Sequence number of record 0; the others follow without gaps.
    #[pyo3(get)]
    pub first_seq_num: u64,
}

impl Index {
    pub fn of(raw: &[u8]) -> Result<Self, Fault> {
        let (mut offsets, mut timestamps, mut metered) = (vec![0], Vec::new(), vec![0]);
        let (mut first, mut total) = (0, 0);
        let mut records = Records::new(raw, (), false);
        while let Some((record, end)) = records.next()? {
            let index = timestamps.len();
            if index == 0 {
                first = record.seq_num;
            }
            let expected = first.wrapping_add(index as u64);
            if record.seq_num != expected || expected < first {
                return Err(Fault::Gap(index, record.seq_num, expected));
            }
            total += record.metered;
            offsets.push(end);
            timestamps.push(record.timestamp.unwrap_or(0));
            metered.push(total);
        }
        Ok(Index { offsets, timestamps, metered, first_seq_num: first })
    }

    /// Returns the first record at or after a timestamp.
    fn at_timestamp(&self, timestamp: Option<u64>) -> usize {
        timestamp.map_or(self.timestamps.len(), |least| {
            self.timestamps.partition_point(|&own| own < least)
        })
    }
}

#[pymethods]
impl Index {
    #[getter]
    fn count(&self) -> usize {
        self.timestamps.len()
    }

    /// Return the first record at or after `timestamp`, or `count` if there is none.
    fn index_of_timestamp(&self, timestamp: &Bound<'_, PyAny>) -> PyResult<usize> {
        Ok(self.at_timestamp(number(timestamp)?))
    }

    /// Return the longest run of records from `first_index` within all three limits. It may be
    /// empty.
    ///
    /// At most `count` records, at most `metered` metered bytes, all timestamps below `until`.
    #[pyo3(signature = (first_index, *, count, metered, until))]
    fn cut(
        &self,
        first_index: usize,
        count: &Bound<'_, PyAny>,
        metered: &Bound<'_, PyAny>,
        until: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Cut> {
        let first = first_index.min(self.timestamps.len());
        let before = self.metered[first];
        let count = number(count)?.and_then(|count| usize::try_from(count).ok());
        let mut end = first.saturating_add(count.unwrap_or(usize::MAX)).min(self.timestamps.len());
        if let Some(limit) = number(metered)? {
            let limit = before.saturating_add(limit);
            if self.metered[end] > limit {
                end = self.metered.partition_point(|&sum| sum <= limit) - 1;
            }
        }
        if let Some(until) = until {
            end = end.min(self.at_timestamp(number(until)?));
        }
        end = end.max(first);
        Ok(Cut {
            end_index: end,
            byte_start: self.offsets[first],
            byte_end: self.offsets[end],
            metered: self.metered[end] - before,
        })
    }
}

/// Converts a number: 0 if it is negative, None if it is too large.
fn number(value: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    match value.extract::<u64>() {
        Ok(number) => Ok(Some(number)),
        Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => {
            Ok(if value.lt(0)? { Some(0) } else { None })
        }
        Err(error) => Err(error),
    }
}

/// Find every record of a payload. Raises CodecError if it is damaged.
#[pyfunction]
pub fn measure(py: Python<'_>, payload: Input<'_>) -> PyResult<Index> {
    let raw = payload.as_slice();
    Ok(unlocked(py, raw.len(), || Index::of(raw))?)
}

type Decoded<'py> =
    (Vec<u64>, Vec<u64>, Vec<usize>, Bound<'py, PyList>, Bound<'py, PyList>, Bound<'py, PyList>);

/// Decode a payload: sequence numbers, timestamps, the running header count after each record,
/// names and values of all headers, and bodies. Raises CodecError if it is damaged.
#[pyfunction]
pub fn decode<'py>(py: Python<'py>, payload: Input<'py>) -> PyResult<Decoded<'py>> {
    let raw = payload.as_slice();
    let (mut seq_nums, mut timestamps, mut ends) = (Vec::new(), Vec::new(), Vec::new());
    let (names, values, bodies) = (PyList::empty(py), PyList::empty(py), PyList::empty(py));
    let mut headers = 0;
    let mut records = Records::new(raw, Vec::<Header>::new(), false);
    while let Some((record, _)) = records.next()? {
        seq_nums.push(record.seq_num);
        timestamps.push(record.timestamp.unwrap_or(0));
        headers += record.headers;
        ends.push(headers);
        for header in &records.headers {
            names.append(PyBytes::new(py, header.name(raw)))?;
            values.append(PyBytes::new(py, header.value(raw)))?;
        }
        bodies.append(PyBytes::new(py, record.body()))?;
    }
    Ok((seq_nums, timestamps, ends, names, values, bodies))
}

/// Return the sequence numbers and bodies of all records except command records, which begin with a
/// nameless header. Raises CodecError if the payload is damaged.
#[pyfunction]
pub fn contents<'py>(
    py: Python<'py>,
    payload: Input<'py>,
) -> PyResult<(Vec<u64>, Bound<'py, PyList>)> {
    let raw = payload.as_slice();
    let (mut seq_nums, bodies) = (Vec::new(), PyList::empty(py));
    let mut records = Records::new(raw, Vec::<Header>::new(), false);
    while let Some((record, _)) = records.next()? {
        if records.headers.first().is_none_or(|header| !header.name(raw).is_empty()) {
            seq_nums.push(record.seq_num);
            bodies.append(PyBytes::new(py, record.body()))?;
        }
    }
    Ok((seq_nums, bodies))
}

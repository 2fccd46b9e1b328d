//! Text, numbers and bytes as JSON, and stored records as the elements of an array.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::fault::Fault;
use super::protobuf::{Header, Records};
use super::shared::{Input, unlocked};

const HEX: &[u8; 16] = b"0123456789abcdef";
/// Replaces bytes that are not UTF-8.
const REPLACEMENT: &[u8] = "\u{FFFD}".as_bytes();

/// Returns 0 for a byte that needs no escape, 1 for one written as \u00.., else the letter after
/// the backslash.
#[inline(always)]
fn escape(byte: u8) -> u8 {
    match byte {
        b'"' | b'\\' => byte,
        0x08 => b'b',
        0x09 => b't',
        0x0A => b'n',
        0x0C => b'f',
        0x0D => b'r',
        ..0x20 => 1,
        _ => 0,
    }
}

/// Counts the leading bytes that need no escape, eight at a time as far as possible.
#[inline(always)]
pub fn clean(text: &[u8]) -> usize {
    const EACH: u64 = 0x0101_0101_0101_0101;
    const HIGHEST: u64 = 0x8080_8080_8080_8080;
    let mut done = 0;
    for chunk in text.chunks_exact(8) {
        let word = u64::from_le_bytes(chunk.try_into().unwrap_or_default());
        let (quotes, slashes) = (word ^ (EACH * 34), word ^ (EACH * 92));
        // A byte below a limit sets its highest bit and may borrow from the next byte, so false
        // positives occur only after a true one.
        let below = (word.wrapping_sub(EACH * 32) & !word)
            | (quotes.wrapping_sub(EACH) & !quotes)
            | (slashes.wrapping_sub(EACH) & !slashes);
        if below & HIGHEST != 0 {
            break;
        }
        done += 8;
    }
    done + text[done..].iter().take_while(|&&byte| escape(byte) == 0).count()
}

/// Writes UTF-8 with JSON escapes, without quotes.
pub fn put_escaped(out: &mut Vec<u8>, mut text: &[u8]) {
    loop {
        let (before, rest) = text.split_at(clean(text));
        out.extend_from_slice(before);
        let Some((&byte, after)) = rest.split_first() else { return };
        match escape(byte) {
            1 => {
                out.extend_from_slice(b"\\u00");
                out.extend_from_slice(&[HEX[byte as usize >> 4], HEX[byte as usize & 15]]);
            }
            letter => out.extend_from_slice(&[b'\\', letter]),
        }
        text = after;
    }
}

/// Writes any bytes with JSON escapes, replacing those that are not UTF-8.
fn put_text(out: &mut Vec<u8>, text: &[u8]) {
    if std::str::from_utf8(text).is_ok() {
        return put_escaped(out, text);
    }
    for chunk in text.utf8_chunks() {
        put_escaped(out, chunk.valid().as_bytes());
        if !chunk.invalid().is_empty() {
            out.extend_from_slice(REPLACEMENT);
        }
    }
}

pub fn put_base64(out: &mut Vec<u8>, raw: &[u8]) {
    let start = out.len();
    out.resize(start + raw.len().div_ceil(3) * 4, 0);
    BASE64_STANDARD.encode_slice(raw, &mut out[start..]).expect("four bytes for each three");
}

pub fn put_decimal(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(itoa::Buffer::new().format(value).as_bytes());
}

pub fn put_records(out: &mut Vec<u8>, raw: &[u8], base64: bool) -> Result<(), Fault> {
    let put = if base64 { put_base64 } else { put_text };
    let mut records = Records::new(raw, Vec::<Header>::new(), false);
    while let Some((record, _)) = records.next()? {
        if !out.is_empty() {
            out.push(b',');
        }
        out.extend_from_slice(b"{\"seq_num\":");
        put_decimal(out, record.seq_num);
        out.extend_from_slice(b",\"timestamp\":");
        put_decimal(out, record.timestamp.unwrap_or(0));
        let mut opening: &[u8] = b",\"headers\":[[\"";
        for header in &records.headers {
            out.extend_from_slice(opening);
            put(out, header.name(raw));
            out.extend_from_slice(b"\",\"");
            put(out, header.value(raw));
            out.extend_from_slice(b"\"]");
            opening = b",[\"";
        }
        if record.headers > 0 {
            out.push(b']');
        }
        if !record.body().is_empty() {
            out.extend_from_slice(b",\"body\":\"");
            put(out, record.body());
            out.push(b'"');
        }
        out.push(b'}');
    }
    Ok(())
}

/// Encode the records of a payload as the elements of a JSON array. Raises CodecError if it is
/// damaged.
///
/// Names, values and bodies are base64, or text in which bytes that are not UTF-8 are replaced.
#[pyfunction]
pub fn write_records<'py>(
    py: Python<'py>,
    payload: Input<'py>,
    base64: bool,
) -> PyResult<Bound<'py, PyBytes>> {
    let raw = payload.as_slice();
    let mut out = Vec::with_capacity(raw.len() + raw.len() / 2 + 64);
    unlocked(py, raw.len(), || put_records(&mut out, raw, base64))?;
    Ok(PyBytes::new(py, &out))
}

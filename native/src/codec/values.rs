//! PostgreSQL values, from their text form to JSON without loss.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::fault::Fault;
use super::json::{put_base64, put_escaped};

/// How a column's text becomes JSON. The numbers are those of Python's module `values`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Number,
    Text,
    Bool,
    Float,
    Date,
    Timestamp,
    TimestampTz,
    Bytea,
}

impl TryFrom<u8> for Kind {
    type Error = Fault;

    fn try_from(kind: u8) -> Result<Self, Fault> {
        use Kind::*;
        let kinds = [Number, Text, Bool, Float, Date, Timestamp, TimestampTz, Bytea];
        kinds.get(usize::from(kind)).copied().ok_or(Fault::Value("unknown"))
    }
}

/// Writes a value. If the text does not fit its kind, fails, and the output is unusable.
#[inline(always)]
pub fn put_value(out: &mut Vec<u8>, kind: Kind, raw: &[u8]) -> Result<(), Fault> {
    match kind {
        Kind::Text => {
            let text = std::str::from_utf8(raw).map_err(|_| Fault::Value("utf8"))?;
            put_text(out, text.as_bytes());
        }
        Kind::Number => {
            if whole(raw) != Some(raw.len()) {
                return Err(Fault::Value("whole"));
            }
            out.extend_from_slice(raw);
        }
        Kind::Bool => out.extend_from_slice(match raw {
            b"t" => b"true",
            b"f" => b"false",
            _ => return Err(Fault::Value("boolean")),
        }),
        Kind::Float => put_float(out, raw)?,
        Kind::Bytea => put_bytea(out, raw)?,
        Kind::Date | Kind::Timestamp | Kind::TimestampTz => put_moment(out, raw, kind)?,
    }
    Ok(())
}

/// Writes UTF-8 as a JSON string.
pub fn put_text(out: &mut Vec<u8>, text: &[u8]) {
    out.push(b'"');
    put_escaped(out, text);
    out.push(b'"');
}

/// Writes a text that needs no escapes as a JSON string.
pub fn put_quoted(out: &mut Vec<u8>, text: &[u8]) {
    out.push(b'"');
    out.extend_from_slice(text);
    out.push(b'"');
}

fn digits(raw: &[u8]) -> usize {
    raw.iter().take_while(|byte| byte.is_ascii_digit()).count()
}

/// Length of the JSON integer at the start of the text, in bytes.
#[inline(always)]
fn whole(raw: &[u8]) -> Option<usize> {
    let sign = usize::from(raw.first() == Some(&b'-'));
    let size = digits(&raw[sign..]);
    let padded = size > 1 && raw[sign] == b'0';
    (size > 0 && !padded).then_some(sign + size)
}

fn put_float(out: &mut Vec<u8>, raw: &[u8]) -> Result<(), Fault> {
    if matches!(raw, b"NaN" | b"Infinity" | b"-Infinity") {
        put_quoted(out, raw);
        return Ok(());
    }
    let fault = Fault::Value("number");
    let mut at = whole(raw).ok_or(fault)?;
    let mut pointed = false;
    if raw.get(at) == Some(&b'.') {
        let size = digits(&raw[at + 1..]);
        (at, pointed) = (at + 1 + size, size > 0);
        if !pointed {
            return Err(fault);
        }
    }
    if raw.get(at) == Some(&b'e') && matches!(raw.get(at + 1), Some(b'+' | b'-')) {
        let size = digits(&raw[at + 2..]);
        (at, pointed) = (at + 2 + size, size > 0);
    }
    if at != raw.len() || raw.ends_with(b"+") || raw.ends_with(b"-") {
        return Err(fault);
    }
    out.extend_from_slice(raw);
    if !pointed {
        // The point tells readers without a schema that it is not an integer.
        out.extend_from_slice(b".0");
    }
    Ok(())
}

fn put_bytea(out: &mut Vec<u8>, raw: &[u8]) -> Result<(), Fault> {
    let fault = Fault::Value("bytes");
    let text = raw.strip_prefix(b"\\x").filter(|text| text.len() % 2 == 0).ok_or(fault)?;
    let nibble = |digit: u8| char::from(digit).to_digit(16).map(|value| value as u8).ok_or(fault);
    let mut bytes = Vec::with_capacity(text.len() / 2);
    for pair in text.chunks_exact(2) {
        bytes.push(nibble(pair[0])? << 4 | nibble(pair[1])?);
    }
    out.push(b'"');
    put_base64(out, &bytes);
    out.push(b'"');
    Ok(())
}

/// Whether the text matches a pattern in which zeros stand for digits.
fn like(text: &[u8], form: &[u8]) -> bool {
    let same = |(byte, wanted): (&u8, &u8)| {
        if *wanted == b'0' { byte.is_ascii_digit() } else { byte == wanted }
    };
    text.len() == form.len() && text.iter().zip(form).all(same)
}

/// Writes ISO 8601, which covers the years 1 to 9999, or the infinities. Python handles the rest.
fn put_moment(out: &mut Vec<u8>, raw: &[u8], kind: Kind) -> Result<(), Fault> {
    let greatest = if kind == Kind::Date { i32::MAX.into() } else { i64::MAX };
    match raw {
        b"infinity" => put_quoted(out, greatest.to_string().as_bytes()),
        b"-infinity" => put_quoted(out, (-greatest - 1).to_string().as_bytes()),
        _ if kind == Kind::Date && like(raw, b"0000-00-00") => put_quoted(out, raw),
        _ if kind == Kind::Date => return Err(Fault::Value("moment")),
        _ => put_time(out, raw, kind == Kind::TimestampTz).ok_or(Fault::Value("moment"))?,
    }
    Ok(())
}

fn put_time(out: &mut Vec<u8>, raw: &[u8], zoned: bool) -> Option<()> {
    let local = if zoned { raw.strip_suffix(b"+00")? } else { raw };
    let (time, fraction) = local.split_at_checked(19)?;
    let is_fraction = match fraction {
        [] => true,
        [b'.', rest @ ..] => !rest.is_empty() && digits(rest) == rest.len(),
        _ => false,
    };
    if !is_fraction || !like(time, b"0000-00-00 00:00:00") {
        return None;
    }
    out.push(b'"');
    out.extend_from_slice(&local[..10]);
    out.push(b'T');
    out.extend_from_slice(&local[11..]);
    out.extend_from_slice(if zoned { b"Z\"" } else { b"\"" });
    Some(())
}

/// Encode a value as JSON. Raises CodecError if its text does not fit its kind.
#[pyfunction]
pub fn write_value<'py>(py: Python<'py>, kind: u8, raw: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    let mut out = Vec::with_capacity(raw.len() + 2);
    put_value(&mut out, kind.try_into()?, raw)?;
    Ok(PyBytes::new(py, &out))
}

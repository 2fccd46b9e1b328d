//! Property tests of the codec on arbitrary bytes: `cargo test`, and with more cases `make prove`.

use proptest::collection::vec;
use proptest::prelude::*;

use super::batch::{Parsed, count_fields};
use super::changes::{ChangeEncoder, Run, Table};
use super::columns;
use super::copy::LineWriter;
use super::json::{put_escaped, put_records};
use super::protobuf::{put_field, put_header, put_varint};
use super::stored::Index;
use super::values::{Kind, put_value};

const RECORDS_MAX: usize = 1000;

#[derive(Clone, Debug)]
struct Sample {
    timestamp: Option<u64>,
    headers: Vec<(Vec<u8>, Vec<u8>)>,
    body: Vec<u8>,
}

fn samples() -> impl Strategy<Value = Vec<Sample>> {
    let header = (vec(any::<u8>(), 0..5), vec(any::<u8>(), 0..200));
    let sample = (any::<Option<u64>>(), vec(header, 0..4), vec(any::<u8>(), 0..300))
        .prop_map(|(timestamp, headers, body)| Sample { timestamp, headers, body });
    vec(sample, 1..8)
}

/// A record's fields, in a serializer's order.
fn content(sample: &Sample, headers: u32, body: u32) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, value) in &sample.headers {
        put_header(&mut out, headers, name, value);
    }
    put_field(&mut out, body, &sample.body);
    out
}

fn encode_append(samples: &[Sample]) -> Vec<u8> {
    let mut out = Vec::new();
    for sample in samples {
        let mut record = Vec::new();
        if let Some(timestamp) = sample.timestamp {
            record.push(0x08);
            put_varint(&mut record, timestamp);
        }
        record.extend(content(sample, 0x12, 0x1A));
        out.push(0x0A);
        put_varint(&mut out, record.len() as u64);
        out.extend(record);
    }
    out
}

fn encode_stored(samples: &[Sample], first: u64) -> Vec<u8> {
    let mut out = Vec::new();
    for (index, sample) in samples.iter().enumerate() {
        let mut record = Vec::new();
        for (tag, value) in [(0x08, first + index as u64), (0x10, sample.timestamp.unwrap_or(0))] {
            if value != 0 {
                record.push(tag);
                put_varint(&mut record, value);
            }
        }
        record.extend(content(sample, 0x1A, 0x22));
        out.push(0x0A);
        put_varint(&mut out, record.len() as u64);
        out.extend(record);
    }
    out
}

/// Changes some of the bytes and truncates them.
fn damaged(
    raw: Vec<u8>,
    changes: &[(prop::sample::Index, u8)],
    end: prop::sample::Index,
) -> Vec<u8> {
    let mut raw = raw;
    for (at, byte) in changes {
        if !raw.is_empty() {
            let at = at.index(raw.len());
            raw[at] = *byte;
        }
    }
    raw.truncate(end.index(raw.len() + 1));
    raw
}

fn decode_everything(raw: &[u8]) {
    let parsed = Parsed::parse(raw, RECORDS_MAX);
    if let Ok(parsed) = &parsed {
        assert!(parsed.rows.len() <= RECORDS_MAX);
        assert!(parsed.rewritten.as_ref().is_none_or(|bytes| bytes.len() <= raw.len()));
    }
    assert!(count_fields(raw, 100) <= 101);
    let mut text = Vec::new();
    let written = put_records(&mut text, raw, false);
    if let Ok(index) = Index::of(raw) {
        assert!(written.is_ok() && std::str::from_utf8(&text).is_ok());
        assert!(index.offsets.last().is_some_and(|&end| end <= raw.len()));
    }
    for bodies in [true, false] {
        let (with, without) = (columns::read(raw, true, bodies), columns::read(raw, false, bodies));
        assert_eq!(with.is_ok(), without.is_ok());
    }
}

fn change_encoder() -> ChangeEncoder {
    let table = Table {
        stream: 1,
        position: (0, -1),
        openings: [b"{".to_vec(), b"{".to_vec(), b"{".to_vec()],
        columns: vec![(b"\"a\":".to_vec(), 0), (b"\"b\":".to_vec(), 1)],
        key: vec![0],
    };
    ChangeEncoder::new(
        vec![(1, Some(0)), (2, None)],
        vec![table],
        2,
        (b"lsn".to_vec(), b"index".to_vec()),
    )
    .unwrap_or_else(|_| unreachable!())
}

fn pgoutput_message() -> impl Strategy<Value = Vec<u8>> {
    let value = prop_oneof![
        Just(b"n".to_vec()),
        Just(b"u".to_vec()),
        vec(any::<u8>(), 0..20).prop_map(|text| [
            b"t\0\0\0".as_slice(),
            &[text.len() as u8],
            &text
        ]
        .concat()),
        Just(b"t\0\0\0\x011".to_vec()),
    ];
    let row = vec(value, 2).prop_map(|values| [b"\0\x02".as_slice(), &values.concat()].concat());
    let head = (prop::sample::select(vec![b'I', b'U', b'D']), 1u8..4)
        .prop_map(|(kind, relation)| vec![kind, 0, 0, 0, relation]);
    let old = prop::option::of((prop::sample::select(vec![b'K', b'O']), row.clone()));
    let change = (head, old, row).prop_map(|(mut message, old, new)| {
        if let Some((kind, row)) = old {
            message.push(kind);
            message.extend(row);
        }
        message.push(b'N');
        message.extend(new);
        message
    });
    prop_oneof![
        4 => change,
        1 => vec(any::<u8>(), 20).prop_map(|rest| [vec![b'B'], rest].concat()),
        1 => vec(any::<u8>(), 25).prop_map(|rest| [vec![b'C'], rest].concat()),
        1 => vec(any::<u8>(), 0..60),
    ]
}

proptest! {
    #[test]
    fn any_bytes_are_decoded_or_refused(raw in vec(any::<u8>(), 0..300)) {
        decode_everything(&raw);
    }

    #[test]
    fn damaged_messages_are_decoded_or_refused(
        samples in samples(), stored: bool,
        changes in vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        end: prop::sample::Index,
    ) {
        let raw = if stored { encode_stored(&samples, 300) } else { encode_append(&samples) };
        decode_everything(&damaged(raw, &changes, end));
    }

    #[test]
    fn what_serializers_write_is_parsed_without_a_copy(samples in samples()) {
        let raw = encode_append(&samples);
        let parsed = Parsed::parse(&raw, RECORDS_MAX).unwrap();
        prop_assert!(parsed.rewritten.is_none());
        prop_assert_eq!(parsed.rows.len(), samples.len());
        for (row, sample) in parsed.rows.iter().zip(&samples) {
            prop_assert_eq!(row.timestamp, sample.timestamp);
            prop_assert_eq!(&raw[row.rest.clone()], &content(sample, 0x12, 0x1A)[..]);
        }
    }

    #[test]
    fn a_stored_payload_is_found_record_by_record(samples in samples(), first in 0u64..1 << 60) {
        let raw = encode_stored(&samples, first);
        let index = Index::of(&raw).unwrap();
        prop_assert_eq!(index.first_seq_num, first);
        prop_assert_eq!(index.timestamps.len(), samples.len());
        for (at, sample) in samples.iter().enumerate() {
            prop_assert_eq!(index.timestamps[at], sample.timestamp.unwrap_or(0));
            let part = &raw[index.offsets[at]..index.offsets[at + 1]];
            prop_assert_eq!(part, &encode_stored(std::slice::from_ref(sample), first + at as u64)[..]);
        }
    }

    #[test]
    fn escaped_text_is_ascii_where_it_was_and_has_no_bare_quote(text: String) {
        let mut out = Vec::new();
        put_escaped(&mut out, text.as_bytes());
        prop_assert!(out.iter().all(|&byte| byte >= 0x20));
        let bare = out.iter().enumerate().any(|(at, &byte)| byte == b'"' && out[..at].last() != Some(&b'\\'));
        prop_assert!(!bare);
    }

    #[test]
    fn any_value_is_written_or_refused(kind in 0u8..8, raw in "[-0-9tfeNI.+: \\\\xBC\"a-f]{0,30}") {
        let kind = Kind::try_from(kind).unwrap();
        let mut out = Vec::new();
        let _ = put_value(&mut out, kind, raw.as_bytes());
        let _ = put_value(&mut out, kind, &[raw.as_bytes(), b"\xff"].concat());
    }

    #[test]
    fn any_lines_are_written_or_left(
        parts in vec(prop_oneof![
            Just(b"\t".to_vec()), Just(b"\n".to_vec()), Just(b"1".to_vec()), Just(b"\\N".to_vec()),
            Just(b"\\\\x00".to_vec()), vec(any::<u8>(), 0..20),
        ], 0..40),
        kinds in vec((0u8..8, any::<bool>()), 1..4),
        room in 0usize..3000,
    ) {
        let lines = parts.concat();
        let columns = kinds.into_iter().map(|(kind, is_key)| (b"\"a\":".to_vec(), kind, is_key)).collect();
        let mut writer =
            LineWriter::new(columns, b"}".to_vec(), Vec::new(), b"copy".to_vec(), 8, 100).unwrap();
        let mut out = Vec::new();
        let wrote = writer.encode(&mut out, &lines, 0, 1, 10, room);
        prop_assert!(wrote.next <= lines.len() && wrote.records <= 10 && wrote.metered <= room);
        prop_assert!(wrote.next == 0 || lines[wrote.next - 1] == b'\n');
    }

    #[test]
    fn any_messages_are_written_or_left(messages in vec(pgoutput_message(), 0..20), open: bool) {
        let run = Run::of(messages.clone());
        let commit = open.then_some((7, 8));
        let (next, batches) = change_encoder().encoded(&run, 0, commit, 1 << 20);
        prop_assert!(next <= messages.len());
        for (_, records, metered, bytes) in batches {
            let parsed = Parsed::parse(&bytes, RECORDS_MAX).unwrap();
            prop_assert!(parsed.rewritten.is_none());
            prop_assert_eq!((parsed.rows.len(), parsed.metered), (records, metered as u64));
        }
    }
}

//! The protobuf wire format, and the record messages in it.
//!
//! Decodes every legal encoding, not only the one that serializers write: fields in any order or
//! repeated, overlong varints, unknown fields and groups.

use bytes::BufMut;

use super::fault::Fault;

const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const DELIMITED: u64 = 2;
const GROUP_START: u64 = 3;
const GROUP_END: u64 = 4;
const FIXED32: u64 = 5;

/// Bytes of the longest varint and of the longest tag.
const VARINT_MAX: usize = 10;
const TAG_MAX: usize = 5;
/// Nesting depth of groups at which the official decoders give up.
const GROUP_DEPTH_MAX: usize = 100;

/// s2.v1 tags of an AppendInput and a ReadBatch, and within a Header.
pub const RECORDS: u32 = 0x0A;
pub const MATCH_SEQ_NUM: u32 = 0x10;
pub const FENCING_TOKEN: u32 = 0x1A;
pub const NAME: u32 = 0x0A;
pub const VALUE: u32 = 0x12;

/// Metered bytes of a record besides its headers and body, and of a header besides its name and
/// value.
const RECORD_OVERHEAD: u64 = 8;
const HEADER_OVERHEAD: u64 = 2;

/// The tags of an AppendRecord or a SequencedRecord.
pub struct Tags {
    pub seq_num: u32,
    pub timestamp: u32,
    pub headers: u32,
    pub body: u32,
}

pub const APPEND: bool = true;
pub const SEQUENCED: bool = false;

pub const APPEND_TAGS: Tags = Tags { seq_num: 0, timestamp: 0x08, headers: 0x12, body: 0x1A };
pub const SEQUENCED_TAGS: Tags = Tags { seq_num: 0x08, timestamp: 0x10, headers: 0x1A, body: 0x22 };

/// A field with a number, or with the bytes from `start` to `end`.
#[derive(Clone, Copy)]
pub struct Field {
    pub tag: u32,
    pub value: u64,
    pub start: usize,
    pub end: usize,
}

/// Iterates over the fields of a message that ends with `raw`.
pub struct Reader<'a> {
    raw: &'a [u8],
    pub at: usize,
    /// Whether every field so far has its shortest encoding, and none could have been left out.
    pub shortest: bool,
}

impl<'a> Reader<'a> {
    pub fn new(raw: &'a [u8], at: usize) -> Self {
        Reader { raw, at, shortest: true }
    }

    /// Returns the next field. Checks and skips fields with wire types that none of our messages
    /// has.
    #[inline(always)]
    pub fn next(&mut self) -> Result<Option<Field>, Fault> {
        while self.at < self.raw.len() {
            let tag = self.tag()?;
            match self.content(tag)? {
                None => self.skip(tag)?,
                field => return Ok(field),
            }
        }
        Ok(None)
    }

    /// Returns the next field if it is a number or bytes, and complete.
    pub fn plain(&mut self) -> Option<Field> {
        let tag = self.tag().ok()?;
        self.content(tag).ok()?
    }

    /// Returns the field whose tag was read, if it is a number or bytes.
    #[inline(always)]
    fn content(&mut self, tag: u64) -> Result<Option<Field>, Fault> {
        let (mut value, mut start) = (0, 0);
        match tag & 7 {
            VARINT => value = self.varint(VARINT_MAX)?,
            DELIMITED => start = self.extent()?.0,
            _ => return Ok(None),
        }
        Ok(Some(Field { tag: tag as u32, value, start, end: self.at }))
    }

    /// Reads a number. Bits beyond the 64th are dropped.
    ///
    /// Byte by byte: the processor predicts where each number ends and need not wait for it.
    #[inline(always)]
    fn varint(&mut self, longest: usize) -> Result<u64, Fault> {
        let start = self.at;
        let (mut value, mut shift) = (0u64, 0);
        while let Some(&byte) = self.raw.get(self.at) {
            self.at += 1;
            value |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                self.shortest &= shift == 0 || (byte != 0 && (shift < 63 || byte == 1));
                return Ok(value);
            }
            shift += 7;
            if shift == 7 * longest as u32 {
                break;
            }
        }
        Err(Fault::Varint(start, longest))
    }

    /// Reads the field `tag` if it comes next, with its tag in one byte.
    #[inline(always)]
    fn take_number(&mut self, tag: u32) -> Result<Option<u64>, Fault> {
        if self.raw.get(self.at).is_none_or(|&byte| u32::from(byte) != tag) {
            return Ok(None);
        }
        self.at += 1;
        self.varint(VARINT_MAX).map(Some)
    }

    #[inline(always)]
    pub fn take_bytes(&mut self, tag: u32) -> Result<Option<(usize, usize)>, Fault> {
        if self.raw.get(self.at).is_none_or(|&byte| u32::from(byte) != tag) {
            return Ok(None);
        }
        self.at += 1;
        self.extent().map(Some)
    }

    #[inline(always)]
    fn tag(&mut self) -> Result<u64, Fault> {
        let at = self.at;
        let tag = self.varint(TAG_MAX)?;
        if (8..1 << 32).contains(&tag) { Ok(tag) } else { Err(Fault::Tag(tag, at)) }
    }

    #[inline(always)]
    fn extent(&mut self) -> Result<(usize, usize), Fault> {
        let at = self.at;
        let size = self.varint(VARINT_MAX)?;
        let (start, left) = (self.at, self.raw.len() - self.at);
        if size > left as u64 {
            return Err(Fault::CutOff(size, at, left));
        }
        self.at = start + size as usize;
        Ok((start, self.at))
    }

    /// Skips the field whose tag was read, and the whole group if it starts one.
    fn skip(&mut self, mut tag: u64) -> Result<(), Fault> {
        self.shortest = false;
        let mut groups: Vec<u64> = Vec::new();
        loop {
            match tag & 7 {
                GROUP_START if groups.len() < GROUP_DEPTH_MAX => groups.push(tag >> 3),
                GROUP_END if groups.last() == Some(&(tag >> 3)) => {
                    groups.pop();
                }
                VARINT => {
                    self.varint(VARINT_MAX)?;
                }
                DELIMITED => {
                    self.extent()?;
                }
                FIXED32 => self.at += 4,
                FIXED64 => self.at += 8,
                _ => return Err(Fault::Kind(tag, self.at)),
            }
            if self.at > self.raw.len() {
                return Err(Fault::Short(self.raw.len()));
            }
            if groups.is_empty() {
                return Ok(());
            }
            tag = self.tag()?;
        }
    }
}

/// A name and a value, as offsets.
#[derive(Clone, Copy, Default)]
pub struct Header {
    pub name: (usize, usize),
    pub value: (usize, usize),
    /// Whether it is in canonical form, as a serializer would have written it.
    canonical: bool,
}

impl Header {
    pub fn name<'a>(&self, raw: &'a [u8]) -> &'a [u8] {
        &raw[self.name.0..self.name.1]
    }

    pub fn value<'a>(&self, raw: &'a [u8]) -> &'a [u8] {
        &raw[self.value.0..self.value.1]
    }

    #[inline(always)]
    fn parse(raw: &[u8], start: usize, end: usize) -> Result<Self, Fault> {
        let mut reader = Reader::new(&raw[..end], start);
        // Fast path: what serializers write.
        let (name, value) = (reader.take_bytes(NAME)?, reader.take_bytes(VALUE)?);
        let filled = |field: Option<(usize, usize)>| field.is_none_or(|(start, end)| start < end);
        if reader.at == end && reader.shortest && filled(name) && filled(value) {
            let (name, value) = (name.unwrap_or_default(), value.unwrap_or_default());
            return Ok(Header { name, value, canonical: true });
        }
        Self::parse_any(raw, start, end)
    }

    #[cold]
    #[inline(never)]
    fn parse_any(raw: &[u8], start: usize, end: usize) -> Result<Self, Fault> {
        let mut reader = Reader::new(&raw[..end], start);
        let mut header = Header::default();
        while let Some(field) = reader.next()? {
            match field.tag {
                NAME => header.name = (field.start, field.end),
                VALUE => header.value = (field.start, field.end),
                _ => {}
            }
        }
        Ok(header)
    }
}

/// A record within a message.
#[derive(Default)]
pub struct Record<'a> {
    raw: &'a [u8],
    pub end: usize,
    pub seq_num: u64,
    pub timestamp: Option<u64>,
    pub headers: usize,
    pub body: (usize, usize),
    /// Metered bytes, as limits and accounting count them.
    pub metered: u64,
    /// Whether a header has an empty name.
    pub nameless: bool,
    /// Where headers and body start, if they are in canonical form.
    rest: Option<usize>,
}

impl<'a> Record<'a> {
    /// Parses the record from `start` to `end`, and passes its headers to `sink`.
    #[inline(always)]
    pub fn parse<const KIND: bool>(
        raw: &'a [u8],
        start: usize,
        end: usize,
        sink: &mut impl Sink,
    ) -> Result<Self, Fault> {
        let tags = if KIND == APPEND { APPEND_TAGS } else { SEQUENCED_TAGS };
        let mut reader = Reader::new(&raw[..end], start);
        let mut record = Record::empty(raw, end);
        sink.begin();
        // Fast path: what serializers write, with fields in order and none that could be left out.
        if KIND == SEQUENCED {
            record.seq_num = reader.take_number(tags.seq_num)?.unwrap_or(0);
        }
        record.timestamp = reader.take_number(tags.timestamp)?;
        let rest = reader.at;
        let mut canonical = true;
        while let Some((start, end)) = reader.take_bytes(tags.headers)? {
            let header = Header::parse(raw, start, end)?;
            canonical &= record.add(&header);
            sink.put(header);
        }
        if let Some(body) = reader.take_bytes(tags.body)? {
            record.body = body;
            record.metered += (body.1 - body.0) as u64;
            canonical &= body.0 < body.1;
        }
        if reader.at == end && reader.shortest && canonical {
            record.rest = Some(rest);
            return Ok(record);
        }
        Self::parse_any::<KIND>(raw, start, end, sink)
    }

    #[cold]
    #[inline(never)]
    fn parse_any<const KIND: bool>(
        raw: &'a [u8],
        start: usize,
        end: usize,
        sink: &mut impl Sink,
    ) -> Result<Self, Fault> {
        let tags = if KIND == APPEND { APPEND_TAGS } else { SEQUENCED_TAGS };
        let mut reader = Reader::new(&raw[..end], start);
        let mut record = Record::empty(raw, end);
        sink.again();
        while let Some(field) = reader.next()? {
            if field.tag == tags.body {
                record.body = (field.start, field.end);
            } else if field.tag == tags.headers {
                let header = Header::parse(raw, field.start, field.end)?;
                record.add(&header);
                sink.put(header);
            } else if field.tag == tags.timestamp {
                record.timestamp = Some(field.value);
            } else if KIND == SEQUENCED && field.tag == tags.seq_num {
                record.seq_num = field.value;
            }
        }
        record.metered += (record.body.1 - record.body.0) as u64;
        Ok(record)
    }

    #[inline(always)]
    fn empty(raw: &'a [u8], end: usize) -> Self {
        Record { raw, end, metered: RECORD_OVERHEAD, ..Record::default() }
    }

    /// Counts a header. Returns whether it is in canonical form.
    #[inline(always)]
    fn add(&mut self, header: &Header) -> bool {
        let (name, value) = (header.name, header.value);
        self.headers += 1;
        self.nameless |= name.0 == name.1;
        self.metered += HEADER_OVERHEAD + (name.1 - name.0 + value.1 - value.0) as u64;
        header.canonical
    }

    /// The range of headers and body, if they are in canonical form.
    pub fn rest(&self) -> Option<(usize, usize)> {
        self.rest.map(|start| (start, self.end))
    }

    pub fn body(&self) -> &'a [u8] {
        &self.raw[self.body.0..self.body.1]
    }
}

/// Receives the headers of a record.
pub trait Sink {
    /// A record begins.
    #[inline(always)]
    fn begin(&mut self) {}

    /// The record begins again: discards the headers put since `begin`.
    fn again(&mut self) {
        self.begin();
    }

    #[inline(always)]
    fn put(&mut self, _: Header) {}
}

/// For callers that only count headers.
impl Sink for () {}

/// The headers of the last record.
impl Sink for Vec<Header> {
    #[inline(always)]
    fn begin(&mut self) {
        self.clear();
    }

    #[inline(always)]
    fn put(&mut self, header: Header) {
        self.push(header);
    }
}

impl<S: Sink> Sink for &mut S {
    #[inline(always)]
    fn begin(&mut self) {
        (**self).begin();
    }

    fn again(&mut self) {
        (**self).again();
    }

    #[inline(always)]
    fn put(&mut self, header: Header) {
        (**self).put(header);
    }
}

/// Iterates over the records of concatenated ReadBatches.
pub struct Records<'a, S: Sink> {
    raw: &'a [u8],
    reader: Reader<'a>,
    /// The headers of the last record.
    pub headers: S,
    /// Whether other fields than records are skipped. If not, they are faults.
    others: bool,
}

impl<'a, S: Sink> Records<'a, S> {
    pub fn new(raw: &'a [u8], headers: S, others: bool) -> Self {
        Records { raw, reader: Reader::new(raw, 0), headers, others }
    }

    /// Returns the next record, and the offset after it.
    #[inline(always)]
    pub fn next(&mut self) -> Result<Option<(Record<'a>, usize)>, Fault> {
        while let Some(field) = self.reader.next()? {
            if field.tag == RECORDS {
                let sink = &mut self.headers;
                let record = Record::parse::<SEQUENCED>(self.raw, field.start, field.end, sink)?;
                return Ok(Some((record, field.end)));
            }
            if !self.others {
                let start = if field.tag & 7 == 0 { field.value as usize } else { field.start };
                return Err(Fault::NotRecord(field.tag, start));
            }
        }
        Ok(None)
    }
}

pub fn varint_size(value: u64) -> usize {
    (9 * (64 - (value | 1).leading_zeros() as usize) + 64) / 64
}

/// Bytes of a delimited field. An empty one is left out.
pub fn field_size(size: usize) -> usize {
    if size == 0 { 0 } else { 1 + varint_size(size as u64) + size }
}

/// Bytes of a number field. Zero is left out, as in proto3.
pub fn number_size(value: u64) -> usize {
    if value == 0 { 0 } else { 1 + varint_size(value) }
}

#[inline(always)]
pub fn put_varint(out: &mut impl BufMut, mut value: u64) {
    while value >= 0x80 {
        out.put_u8(value as u8 | 0x80);
        value >>= 7;
    }
    out.put_u8(value as u8);
}

/// Writes a tag and a number.
#[inline(always)]
pub fn put_tagged(out: &mut impl BufMut, tag: u32, value: u64) {
    out.put_u8(tag as u8);
    put_varint(out, value);
}

/// Writes a delimited field, unless it is empty.
#[inline(always)]
pub fn put_field(out: &mut impl BufMut, tag: u32, content: &[u8]) {
    if !content.is_empty() {
        put_tagged(out, tag, content.len() as u64);
        out.put_slice(content);
    }
}

/// Writes a record header with this tag.
#[inline(always)]
pub fn put_header(out: &mut impl BufMut, tag: u32, name: &[u8], value: &[u8]) {
    put_tagged(out, tag, (field_size(name.len()) + field_size(value.len())) as u64);
    put_field(out, NAME, name);
    put_field(out, VALUE, value);
}

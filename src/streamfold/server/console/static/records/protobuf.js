// Protobuf messages without their schema: fields by number, as a tree that the JSON view can show.

import { ExactNumber, plainText, hexLine } from "./record.js";

/** Bytes, fields and depth up to which a body is looked at: any bytes may be sent. */
const BYTES_MAX = 256 * 1024;
const FIELDS_MAX = 5_000;
const DEPTH_MAX = 16;
/** Bytes of a value that is shown in hexadecimal. */
const HEX_MAX = 64;

class NotProtobuf extends Error {}

/** The fields of a message as an object; undefined if the bytes are none. */
export function parseProtobuf(body) {
  if (!body.length || body.length > BYTES_MAX) return undefined;
  try {
    return readMessage(body, { fields: 0 }, 0);
  } catch (error) {
    if (error instanceof NotProtobuf) return undefined;
    throw error;
  }
}

function readMessage(bytes, seen, depth) {
  const found = {};
  let at = 0;
  const varint = () => {
    let value = 0n;
    for (let shift = 0n; shift < 70n; shift += 7n) {
      if (at >= bytes.length) throw new NotProtobuf();
      const byte = bytes[at];
      at += 1;
      value |= BigInt(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    throw new NotProtobuf();
  };
  const take = (count) => {
    if (count > bytes.length - at) throw new NotProtobuf();
    at += count;
    return bytes.subarray(at - count, at);
  };
  while (at < bytes.length) {
    seen.fields += 1;
    const tag = varint();
    const field = tag >> 3n;
    if (seen.fields > FIELDS_MAX || field < 1n || field > 0x1fffffffn) throw new NotProtobuf();
    const value = readValue(Number(tag & 7n), varint, take, seen, depth);
    const name = String(field);
    found[name] = name in found ? [].concat(found[name], [value]) : value;
  }
  return found;
}

function readValue(kind, varint, take, seen, depth) {
  const fixed = (count) => {
    const part = take(count);
    const view = new DataView(part.buffer, part.byteOffset, count);
    return count === 4 ? view.getUint32(0, true) : number(view.getBigUint64(0, true));
  };
  if (kind === 0) return number(varint());
  if (kind === 1) return fixed(8);
  if (kind === 5) return fixed(4);
  if (kind !== 2) throw new NotProtobuf();
  const size = varint();
  if (size > BigInt(BYTES_MAX)) throw new NotProtobuf();
  return readBytes(take(Number(size)), seen, depth);
}

/** Text where bytes are text, a message where they are one, and hexadecimal otherwise. */
function readBytes(part, seen, depth) {
  const text = plainText(part);
  if (text !== null) return text;
  if (depth < DEPTH_MAX) {
    try {
      return readMessage(part, seen, depth + 1);
    } catch (error) {
      if (!(error instanceof NotProtobuf)) throw error;
    }
  }
  return `${hexLine(part.subarray(0, HEX_MAX))}${part.length > HEX_MAX ? " …" : ""}`;
}

const number = (value) => (value <= BigInt(Number.MAX_SAFE_INTEGER) ? Number(value) : new ExactNumber(String(value)));

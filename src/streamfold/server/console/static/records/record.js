// Records as the S2 API returns them, decoded to bytes.

const utf8 = new TextDecoder();
const strict = new TextDecoder("utf-8", { fatal: true });
// Control characters, other than those of ordinary text, mark a body as binary.
const BINARY = /[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]/;
/** Bytes of a body that a row shows. */
const PREVIEW = 400;
/** JSON numbers that a double may not hold exactly. */
const LARGE = /"(seq_num|timestamp)":(\d{16,})/g;

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < bytes.length; at += 1) bytes[at] = binary.charCodeAt(at);
  return bytes;
}

export function toBase64(bytes) {
  let binary = "";
  for (let at = 0; at < bytes.length; at += 0x8000) binary += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  return btoa(binary);
}

/** The records of a batch in base64, and its tail if it has one. */
export function parseBatch(text) {
  const batch = JSON.parse(text.replace(LARGE, '"$1":"$2"'));
  return { records: batch.records.map(toRecord), tail: batch.tail };
}

function toRecord({ seq_num, timestamp, headers = [], body = "" }) {
  const named = headers.map((pair) => pair.map(fromBase64));
  const content = fromBase64(body);
  const size = named.reduce((sum, [name, value]) => sum + 2 + name.length + value.length, 8 + content.length);
  return { seqNum: Number(seq_num), timestamp, headers: named, body: content, size };
}

/** Text of bytes; what is not UTF-8 becomes replacement characters. */
export const text = (bytes) => utf8.decode(bytes);

/** The text of bytes, or null if they are not plain text. */
export function plainText(bytes) {
  try {
    const decoded = strict.decode(bytes);
    return BINARY.test(decoded.slice(0, 4096)) ? null : decoded;
  } catch {
    return null;
  }
}

/** What a command record does, in words; null for other records. */
export function command({ headers, body }) {
  if (headers.length !== 1 || headers[0][0].length) return null;
  const name = text(headers[0][1]);
  if (name === "fence") return { name, argument: text(body) };
  if (name === "trim" && body.length === 8) return { name, argument: String(new DataView(body.buffer, body.byteOffset).getBigUint64(0)) };
  return { name, argument: "" };
}

/** What a record says of the snapshot that it is a frame of, in words; null for other records. */
export function snapshotFrame({ headers }) {
  const said = Object.fromEntries(headers.map(([name, value]) => [text(name), text(value)]));
  const id = said["streamfold-snapshot"];
  if (id === undefined) return null;
  const of = (name) => said[`streamfold-${name}`];
  const parts = [`record ${of("index") ?? "?"} of snapshot ${id}`];
  if (of("covers-before")) parts.push(of("covers-before") === "here" ? "covers everything before it" : `covers everything before ${of("covers-before")}`);
  if (of("codec")) parts.push(`codec ${of("codec")}`);
  if (of("final")) parts.push(`the last: ${of("final")} with a part of the state, ${of("bytes") ?? "?"} bytes`);
  return parts.join(", ");
}

/** One line of text that shows how a body begins, and whether it is binary. */
export function preview(record) {
  if (record.preview) return record.preview;
  const start = record.body.subarray(0, PREVIEW);
  // A character may be cut in two at the end: up to three bytes.
  const decoded = [0, 1, 2, 3].map((cut) => plainText(start.subarray(0, start.length - cut))).find((one) => one !== null);
  const usable = decoded !== undefined && (start.length === record.body.length ? plainText(start) !== null : true);
  record.preview = usable ? { text: decoded.replace(/\s+/g, " "), binary: false } : { text: hexLine(start.subarray(0, 48)), binary: true };
  return record.preview;
}

export const hexLine = (bytes) => [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join(" ");

/** A number as its JSON text has it, where a double would change it. */
export class ExactNumber {
  constructor(source) {
    this.source = source;
  }

  toString() {
    return this.source;
  }
}

/** The value of a JSON text, with large numbers kept exactly; undefined if it is not JSON. */
export function parseJson(source) {
  try {
    return JSON.parse(source, (_, value, context) =>
      typeof value === "number" && context?.source !== undefined && !Number.isSafeInteger(value) && String(value) !== context.source
        ? new ExactNumber(context.source)
        : value,
    );
  } catch {
    return undefined;
  }
}

// Records and other bytes as files; the browser never shows them.

import { plainText, text, toBase64 } from "./record.js";

/** Save bytes or text under a name that any file system takes. */
export function saveFile(name, content) {
  const address = URL.createObjectURL(new Blob([content], { type: "application/octet-stream" }));
  const anchor = document.createElement("a");
  anchor.href = address;
  anchor.download = name.replace(/[^\w.-]+/g, "_");
  anchor.click();
  URL.revokeObjectURL(address);
}

/** A record as a line of JSON, as `streamfold read --json` prints it: in base64, with a mark, if part of it is not text. */
export function recordLine({ seqNum, timestamp, headers, body }) {
  const parts = [body, ...headers.flat()];
  const plain = parts.every((part) => plainText(part) !== null);
  const shown = plain ? text : toBase64;
  // The timestamp may be too large for a number: it is written as it came.
  const rest = JSON.stringify({ headers: headers.map((pair) => pair.map(shown)), body: shown(body), ...(plain ? {} : { encoding: "base64" }) });
  return `{"seq_num":${seqNum},"timestamp":${timestamp},${rest.slice(1)}\n`;
}

/** Save the body of a record. */
export const saveBody = (stream, { seqNum, body }) => saveFile(`${stream}-${seqNum}${plainText(body) === null ? ".bin" : ".txt"}`, body);

/** Save records as lines of JSON, which `streamfold append --format json` takes. */
export const saveRecords = (stream, records) => saveFile(`${stream}.jsonl`, new Blob(records.map(recordLine)));

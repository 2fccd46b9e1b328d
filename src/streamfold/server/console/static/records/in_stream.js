// Snapshots that applications keep in the stream itself, found among its newest records.

import { getJson, streamPath } from "../api.js";
import { parseJson, plainText, text } from "./record.js";
import { readRecords } from "./sources.js";

/** Records of the requests of a look, from the tail backwards: what is near the tail may be large, and an answer has 1 MiB at most. */
const STEPS = [2, 30, 250];
const STEP = 1000;
/** Requests of the first look. */
const REQUESTS = 12;
const decimal = (said) => (/^\d+$/.test(said ?? "") ? Number(said) : null);

/** What a record says of the snapshot that it is, or is a part of; null for other records. */
export function snapshotPart(record) {
  if (!record.headers.length) return plainSnapshot(record);
  const said = Object.fromEntries(record.headers.map(([name, value]) => [text(name), text(value)]));
  const id = said["streamfold-snapshot"];
  if (id === undefined) return null;
  const covers = said["streamfold-covers-before"];
  return {
    id,
    index: decimal(said["streamfold-index"]),
    covers: covers === "here" ? record.seqNum : decimal(covers),
    codec: said["streamfold-codec"] ?? null,
    records: decimal(said["streamfold-final"]),
    size: decimal(said["streamfold-bytes"]),
  };
}

/** A whole snapshot as one JSON object that stands at its cursor; like objects elsewhere are ordinary records. */
function plainSnapshot({ seqNum, body }) {
  const value = body.length && body[0] === 0x7b ? parseJson(plainText(body) ?? "") : undefined;
  const covers = value?.type === "snapshot" && "state" in value ? value.covers_before : undefined;
  if (covers !== seqNum && covers !== seqNum - 1) return null;
  return { id: `plain-${seqNum}`, index: 0, covers, codec: "json", records: 1, size: body.length };
}

/** Look at the newest records until they hold a whole snapshot, with `effort` times as many requests as the first look has at most.
 * Returns the snapshots, newest first, where the look ended (`from`), and whether that is the `beginning` of the stream. */
export async function lookForSnapshots(basin, stream, effort, signal) {
  const { tail } = await getJson(streamPath(stream, "/records/tail"), { basin, signal });
  const end = Number(tail.seq_num);
  const look = { snapshots: [], tail: end, from: end, beginning: end === 0 };
  await lookBack(basin, stream, look, effort, signal);
  look.snapshots.sort((one, other) => other.position - one.position);
  return look;
}

async function lookBack(basin, stream, look, effort, signal) {
  const known = new Map();
  let left = REQUESTS * effort;
  for (let step = 0; left > 0 && !look.beginning && !look.snapshots.some((one) => one.whole); step += 1) {
    const start = Math.max(0, look.from - (STEPS[step] ?? STEP));
    let first = null;
    for (let at = start; at < look.from; left -= 1) {
      const records = left > 0 ? await readRecords(basin, stream, { seq_num: at }, look.from - at, signal) : [];
      if (left <= 0) return; // the rest of this step was not looked at
      first ??= records[0]?.seqNum ?? look.from;
      for (const record of records) add(look.snapshots, known, record);
      at = (records.at(-1)?.seqNum ?? look.from - 1) + 1;
    }
    look.beginning = first > start || start === 0; // what comes before is trimmed, or there is nothing
    look.from = look.beginning ? first : start;
  }
}

/** Take in what a record says of its snapshot. */
function add(snapshots, known, record) {
  const part = snapshotPart(record);
  if (part === null) return;
  let snapshot = known.get(part.id);
  if (snapshot === undefined) {
    snapshot = { id: part.id, position: record.seqNum, covers: null, codec: null, records: null, size: null, timestamp: record.timestamp, whole: false };
    known.set(part.id, snapshot);
    snapshots.push(snapshot);
  }
  for (const name of ["covers", "codec", "records", "size"]) snapshot[name] ??= part[name];
  snapshot.position = Math.min(snapshot.position, record.seqNum);
  snapshot.whole = snapshot.covers !== null && snapshot.records !== null;
}

/** The state of a whole snapshot: the bodies of its records, in order. */
export async function readSnapshot(basin, stream, { id, position, records }, signal) {
  const bodies = new Map();
  for (let at = position; bodies.size < records; ) {
    const batch = await readRecords(basin, stream, { seq_num: at }, STEP, signal);
    if (!batch.length) throw new Error("Some of the snapshot's records are gone.");
    for (const record of batch) {
      const part = snapshotPart(record);
      if (part?.id === id && !bodies.has(part.index)) bodies.set(part.index, record.body);
    }
    at = batch.at(-1).seqNum + 1;
  }
  return new Uint8Array(await new Blob([...bodies.values()]).arrayBuffer());
}

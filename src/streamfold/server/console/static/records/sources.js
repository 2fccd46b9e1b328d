// Where the record list gets its records: a range that is loaded as it is looked at, or matches of a filter.

import { ApiError, connection, events, getJson, request, streamPath, UnreachableError, watchConnection } from "../api.js";
import { parseBatch } from "./record.js";

/** Records and bytes of bodies that a page keeps; what is far from the view is dropped and loaded again. */
const KEPT_RECORDS = 50_000;
const KEPT_BYTES = 64 * 2 ** 20;
/** Records of one request for a part of the range. */
const PAGE = 250;
/** Records behind the tail from which a follower jumps to the tail, and milliseconds between looks. */
const FAR_BEHIND = 5000;
const LOOK_INTERVAL = 2000;
/** Milliseconds of work before the page may draw again. */
const STEP = 10;
/** Matches of a filter before the search pauses, and bytes of them. */
const MATCHES_MAX = 20_000;

/** Keys of which a page holds the latest record. */
const KEYS_MAX = 20_000;

/** Codes of errors that may be over later; the last event of a session has no status. */
const LATER = new Set(["server_draining", "unavailable", "storage", "other"]);

const BINARY_SAFE = { "s2-format": "base64" };

/** Up to `count` records from a start like {seq_num: 5}; none if there are none yet. */
export async function readRecords(basin, stream, start, count, signal) {
  const query = new URLSearchParams({ ...start, count: String(count) });
  try {
    const response = await request(streamPath(stream, `/records?${query}`), { basin, headers: BINARY_SAFE, signal });
    return parseBatch(await response.text()).records;
  } catch (error) {
    if (error instanceof ApiError && error.status === 416) return [];
    throw error;
  }
}

/** What both kinds of sources share: the stream, and a session that reads it from a position. */
class Source {
  constructor(basin, stream, onChange) {
    this.basin = basin;
    this.stream = stream;
    this.first = 0;
    this.tail = 0;
    this.live = false;
    this.error = null;
    this._onChange = onChange;
    this._frame = 0;
    this._session = null;
    this._closed = false;
  }

  /** Have the page draw the new state, once per frame at most. */
  changed() {
    if (this._frame || this._closed) return;
    this._frame = requestAnimationFrame(() => {
      this._frame = 0;
      this._onChange();
    });
  }

  close() {
    this._closed = true;
    this.stop();
    cancelAnimationFrame(this._frame);
  }

  stop() {
    this._session?.abort();
    this._session = null;
  }

  async readTail() {
    const { tail } = await getJson(streamPath(this.stream, "/records/tail"), { basin: this.basin });
    return Number(tail.seq_num);
  }

  pause() {
    this.live = false;
    this.stop();
    this.changed();
  }

  /** The seq_num of the first record at or after a time; the tail if there is none. */
  async seekTime(timestamp) {
    const [record] = await this.read({ timestamp: String(timestamp), clamp: "true" }, 1);
    return record?.seqNum ?? this.readTail();
  }

  read(start, count, signal) {
    return readRecords(this.basin, this.stream, start, count, signal);
  }

  /** Find where the stream begins and ends. */
  async open() {
    this.tail = await this.readTail();
    const [oldest] = await this.read({ seq_num: 0 }, 1);
    this.first = oldest?.seqNum ?? this.tail;
    this.changed();
  }

  /** Run a session until it is stopped, and again when the server comes back. */
  async _run(session) {
    this.stop();
    const control = (this._session = new AbortController());
    while (!control.signal.aborted) {
      try {
        await session(control.signal);
      } catch (error) {
        if (control.signal.aborted) return;
        if (!retryable(error)) {
          this.error = error;
          this.live = false;
          this._session = null;
          this.changed();
          return;
        }
        await whenOnline(control.signal);
      }
    }
  }

  /** Each batch of records from `from` on, and null for each heartbeat, with time to draw in between. */
  async *_batches(from, signal) {
    const query = new URLSearchParams({ seq_num: String(from), clamp: "true" });
    const headers = { ...BINARY_SAFE, accept: "text/event-stream" };
    const response = await request(streamPath(this.stream, `/records?${query}`), { basin: this.basin, headers, signal });
    let started = performance.now();
    for await (const { type, data } of events(response)) {
      if (type === "error") {
        const { code, message } = JSON.parse(data);
        throw new ApiError(0, code, message);
      }
      if (type === "batch") yield parseBatch(data);
      else if (type === "ping") yield { records: [], tail: JSON.parse(data).tail };
      if (performance.now() - started > STEP) {
        await new Promise((resolve) => setTimeout(resolve));
        started = performance.now();
      }
    }
  }
}

/** Whether the same request may succeed later. */
export const retryable = (error) =>
  error instanceof UnreachableError || (error instanceof ApiError && (error.status >= 500 || LATER.has(error.code)));

/** Resolves when the server answers again, after a pause in any case. */
async function whenOnline(signal) {
  await new Promise((resolve) => setTimeout(resolve, 300));
  while (!connection.online && !signal.aborted) {
    await new Promise((resolve) => {
      const stop = watchConnection(() => {
        stop();
        resolve();
      });
      signal.addEventListener("abort", resolve, { once: true });
    });
  }
}

/** All records of a stream: the list asks for those that it shows. */
export class RangeSource extends Source {
  constructor(...given) {
    super(...given);
    this._records = new Map();
    this._bytes = 0;
    this._view = [0, 0];
    this._loading = false;
  }

  get filtered() {
    return false;
  }

  at(seqNum) {
    return this._records.get(seqNum);
  }

  /** Load what is missing of a range; only the newest range that was asked for matters. */
  ensure(from, to) {
    this._view = [Math.max(from, this.first), Math.min(to, this.tail)];
    if (!this._loading) this._load();
  }

  async _load() {
    this._loading = true;
    try {
      for (let missing = this._missing(); missing !== null && !this._closed; missing = this._missing()) {
        const records = await this.read({ seq_num: missing }, PAGE);
        this._add(records);
        if (!records.length) this.tail = await this.readTail();
        else if (records[0].seqNum > missing) this.first = Math.max(this.first, records[0].seqNum);
        if (!records.length && missing < this.tail) this.first = this.tail; // all of it was trimmed
        this.error = null;
        this.changed();
      }
    } catch (error) {
      if (!(error instanceof UnreachableError)) this.error = error;
      this.changed();
    } finally {
      this._loading = false;
    }
  }

  _missing() {
    for (let seqNum = Math.max(this._view[0], this.first); seqNum < Math.min(this._view[1], this.tail); seqNum += 1) {
      if (!this._records.has(seqNum)) return seqNum;
    }
    return null;
  }

  _add(records) {
    for (const record of records) {
      if (!this._records.has(record.seqNum)) this._bytes += record.size;
      this._records.set(record.seqNum, record);
    }
    if (this._records.size <= KEPT_RECORDS && this._bytes <= KEPT_BYTES) return;
    const [from, to] = this._view;
    for (const [seqNum, record] of this._records) {
      if (this._records.size <= KEPT_RECORDS / 2 && this._bytes <= KEPT_BYTES / 2) break;
      if (seqNum >= from && seqNum < to) continue;
      this._records.delete(seqNum);
      this._bytes -= record.size;
    }
  }

  /** Follow the tail until `stop`. */
  follow() {
    this.live = true;
    this._run(async (signal) => {
      let looked = performance.now();
      const tail = await this.readTail();
      if (tail - this.tail > FAR_BEHIND || tail < this.tail) this.tail = tail;
      this.changed();
      for await (const batch of this._batches(this.tail, signal)) {
        this.error = null;
        this._add(batch.records);
        this.tail = Math.max(this.tail, (batch.records.at(-1)?.seqNum ?? -1) + 1);
        this.changed();
        if (batch.tail || performance.now() - looked < LOOK_INTERVAL) continue;
        looked = performance.now();
        if ((await this.readTail()) - this.tail > FAR_BEHIND) return; // it begins again at the tail
      }
    });
  }

}

/** The records of a stream that match a filter, found by reading it from `from`, or from the first record. */
export class MatchSource extends Source {
  constructor(basin, stream, matches, from, onChange) {
    super(basin, stream, onChange);
    this._from = from;
    this.found = [];
    this.scanned = 0;
    this.full = false;
    this._bytes = 0;
    this._matches = matches;
  }

  get filtered() {
    return true;
  }

  at(index) {
    return this.found[index];
  }

  /** The seq_num at which the search began. */
  get start() {
    return Math.min(Math.max(this.first, this._from), this.tail);
  }

  ensure() {}

  /** Search on from where the last search ended, then follow the tail. */
  follow() {
    this.live = true;
    this.full = false;
    let limit = this.found.length + MATCHES_MAX;
    this._run(async (signal) => {
      for await (const { records, tail } of this._batches(Math.max(this.scanned, this.start), signal)) {
        for (const record of records) {
          if (!this._matches(record)) continue;
          this.found.push(record);
          this._bytes += record.size;
        }
        this.scanned = (records.at(-1)?.seqNum ?? this.scanned - 1) + 1;
        this.tail = Math.max(this.tail, this.scanned, Number(tail?.seq_num ?? 0));
        this.error = null;
        this.full = this.found.length >= limit || this._bytes > KEPT_BYTES;
        this.changed();
        if (this.full) {
          limit += MATCHES_MAX;
          this._bytes = 0;
          this.pause();
        }
      }
    });
  }
}

/** The latest record of each key, found by reading the stream from its first record; it stays current. */
export class LatestSource extends Source {
  constructor(basin, stream, keyOf, onChange) {
    super(basin, stream, onChange);
    this.latest = new Map();
    this.scanned = 0;
    this.full = false;
    this._bytes = 0;
    this._keyOf = keyOf;
  }

  follow() {
    this.live = true;
    this._run(async (signal) => {
      for await (const { records, tail } of this._batches(Math.max(this.scanned, this.first), signal)) {
        for (const record of records) this._take(record);
        this.scanned = (records.at(-1)?.seqNum ?? this.scanned - 1) + 1;
        this.tail = Math.max(this.tail, this.scanned, Number(tail?.seq_num ?? 0));
        this.error = null;
        this.full = this.latest.size >= KEYS_MAX || this._bytes > KEPT_BYTES;
        this.changed();
        if (this.full) this.pause();
      }
    });
  }

  _take(record) {
    const key = this._keyOf(record);
    if (key === null) return;
    const before = this.latest.get(key);
    this._bytes += record.size - (before?.size ?? 0);
    this.latest.set(key, record);
  }
}

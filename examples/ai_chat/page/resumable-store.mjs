// assistant-ui's interface for resumable streams (`assistant-stream/resumable`), over Durable Streams. Each
// answer is a JSON stream: who writes it, its chunks in base64, and how it ended.
import { setTimeout as pause } from "node:timers/promises";
import { ResumableStreamError } from "assistant-stream/resumable";

const DAY = 86_400_000;
const JSON_TYPE = { "content-type": "application/json" };

export function createDurableStreamStore(url, { headers = {} } = {}) {
  const writers = new Map(); // of a lease: the number of its next append, and the append before it
  const elected = new Map(); // the leases of callers that do not pass them on

  // Repeated while the server is away: a read has no effect, and a numbered append is stored once.
  async function request(streamId, init = {}, query = "") {
    const all = { ...init, headers: { ...headers, ...init.headers } };
    for (let wait = 100; ; wait = Math.min(2 * wait, 2_000)) {
      try {
        const response = await fetch(`${url}/${encodeURIComponent(streamId)}${query}`, all);
        if (response.status < 500) return response;
        await response.body?.cancel();
      } catch (error) {
        if (!(error instanceof TypeError)) throw error; // aborted
      }
      await pause(wait, undefined, { signal: init.signal });
    }
  }

  const failure = async (streamId, response) =>
    new Error(`stream ${streamId}: ${response.status} ${await response.text()}`);

  function post(streamId, entry, lease, extra = {}) {
    const { token } = lease ?? elected.get(streamId) ?? { token: streamId };
    const writer = writers.get(token) ?? { seq: 0, last: Promise.resolve() };
    writers.set(token, writer);
    const send = async () => {
      const numbers = { "producer-id": token, "producer-epoch": "0", "producer-seq": `${writer.seq}` };
      const body = JSON.stringify([entry]);
      const init = { method: "POST", body, headers: { ...JSON_TYPE, ...numbers, ...extra } };
      const response = await request(streamId, init);
      if (response.ok) writer.seq += 1;
      return response;
    };
    writer.last = writer.last.then(send, send);
    return writer.last;
  }

  async function ownerOf(streamId) {
    const response = await request(streamId, {}, "?offset=-1");
    return response.ok ? (await response.json()).find((entry) => entry?.lease)?.lease : undefined;
  }

  // The first claim in the stream wins. It is also the lease's first number: a stream of the same name that
  // was created later does not know the lease, and refuses the numbers behind it.
  async function acquireLease(streamId, { ttlMs = DAY } = {}) {
    const ttl = String(Math.max(1, Math.ceil(ttlMs / 1000)));
    const created = await request(streamId, { method: "PUT", headers: { ...JSON_TYPE, "stream-ttl": ttl } });
    if (!created.ok && created.status !== 409) throw await failure(streamId, created);
    if (created.status !== 201 && (await ownerOf(streamId))) return { role: "consumer" };
    const lease = { token: crypto.randomUUID() };
    await post(streamId, { lease: lease.token }, lease);
    if ((await ownerOf(streamId)) === lease.token) return { role: "producer", lease };
    writers.delete(lease.token);
    return { role: "consumer" };
  }

  async function* entries(streamId, cursor, signal) {
    let [offset, skip] = cursor ? cursor.split(":") : ["-1", "0"];
    for (let live = ""; ; ) {
      const response = await request(streamId, { signal }, `?offset=${offset}${live}`);
      if (response.status === 404 && live) return; // deleted meanwhile
      if (!response.ok) throw await failure(streamId, response);
      const batch = response.status === 204 ? [] : await response.json();
      for (let at = Number(skip); at < batch.length; at++) {
        yield { behind: `${offset}:${at + 1}`, entry: batch[at] ?? {} };
      }
      if (response.headers.has("stream-closed")) return;
      if (response.headers.has("stream-up-to-date")) live = "&live=long-poll";
      [offset, skip] = [response.headers.get("stream-next-offset"), "0"];
    }
  }

  return {
    acquireLease,

    async acquire(streamId, options) {
      const { role, lease } = await acquireLease(streamId, options);
      if (lease) elected.set(streamId, lease);
      return role;
    },

    async append(streamId, chunk, lease) {
      const response = await post(streamId, { chunk: Buffer.from(chunk).toString("base64") }, lease);
      if (response.ok) return;
      if (response.headers.has("stream-closed")) {
        throw new ResumableStreamError("finalized", `stream ${streamId} has ended`);
      }
      if (response.status === 403 || response.status === 409) {
        throw new ResumableStreamError("missing", `stream ${streamId} has another producer`);
      }
      throw await failure(streamId, response);
    },

    async finalize(streamId, status, error, lease) {
      const response = await post(streamId, { end: status, error }, lease, { "stream-closed": "true" });
      writers.delete(lease?.token ?? elected.get(streamId)?.token);
      elected.delete(streamId);
      if (!response.ok && response.status !== 409) throw await failure(streamId, response);
    },

    async *read(streamId, cursor, signal) {
      try {
        for await (const { behind, entry } of entries(streamId, cursor, signal)) {
          if (entry.end === "error") throw new Error(entry.error ?? "the stream ended with an error");
          if (typeof entry.chunk === "string") {
            yield { cursor: behind, chunk: new Uint8Array(Buffer.from(entry.chunk, "base64")) };
          }
        }
      } catch (error) {
        if (!signal.aborted) throw error;
      }
    },

    async status(streamId) {
      const head = await request(streamId, { method: "HEAD" });
      if (head.status === 404) return "missing";
      if (!head.ok) throw await failure(streamId, head);
      if (!head.headers.has("stream-closed")) return "streaming";
      let status = "done";
      for await (const { entry } of entries(streamId, "")) status = entry.end ?? status;
      return status;
    },

    async delete(streamId) {
      const response = await request(streamId, { method: "DELETE" });
      if (!response.ok && response.status !== 404) throw await failure(streamId, response);
    },
  };
}

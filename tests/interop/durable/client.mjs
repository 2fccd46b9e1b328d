// The official client, unmodified, against the server named by STREAMFOLD_URL. Exits with 0 and a line
// per behaviour when everything holds.
import assert from "node:assert/strict";
import {
  DurableStream,
  DurableStreamError,
  FetchError,
  IdempotentProducer,
  stream,
} from "@durable-streams/client";

const url = (name) => `${process.env.STREAMFOLD_URL}/${name}`;
const quiet = { maxRetries: 0 };

// Everything that a live read delivers until it has `count` items; `write` runs once it has begun.
async function follow(options, count, write) {
  const items = [];
  const response = await stream(options);
  let begun = false;
  await new Promise((resolve, reject) => {
    response.subscribeJson(async (batch) => {
      items.push(...batch.items);
      if (!begun) {
        begun = true;
        write().catch(reject);
      }
      if (items.length >= count) resolve();
    });
    response.closed.catch(reject);
  });
  response.cancel();
  return items;
}

const behaviours = {
  async "a JSON stream is created, appended to and read back"() {
    const handle = await DurableStream.create({ url: url("v1/stream/ts/json"), contentType: "application/json" });
    await handle.append(JSON.stringify({ n: 1 }));
    await handle.append(JSON.stringify([2, 3]));
    const response = await stream({ url: handle.url, live: false });
    assert.deepEqual(await response.json(), [{ n: 1 }, [2, 3]]);
    assert.equal(response.upToDate, true);
    const head = await DurableStream.head({ url: handle.url });
    assert.equal(head.offset, response.offset);
    assert.equal(head.contentType, "application/json");
  },

  async "bytes come back as they were sent, from a bucket too"() {
    const handle = await DurableStream.create({ url: url("ts-bucket/bytes"), contentType: "application/octet-stream" });
    const sent = new Uint8Array(3_000_000).map((_, index) => index % 251);
    await handle.append(sent);
    const response = await stream({ url: handle.url, live: false });
    assert.deepEqual(await response.body(), sent);
  },

  async "a stream that is there with another type is a conflict, a missing one is not found"() {
    const taken = { url: url("v1/stream/ts/json"), contentType: "text/plain", backoffOptions: quiet };
    await assert.rejects(DurableStream.create(taken), (error) => error instanceof DurableStreamError || error.status === 409);
    await assert.rejects(stream({ url: url("v1/stream/ts/none"), live: false, backoffOptions: quiet }), (error) => error.status === 404 || error.code === "NOT_FOUND");
  },

  async "an idempotent producer writes each message once and in order"() {
    const handle = await DurableStream.create({ url: url("v1/stream/ts/producer"), contentType: "application/json" });
    const producer = new IdempotentProducer(handle, "writer-1", { lingerMs: 1, maxBatchBytes: 200, autoClaim: true });
    const sent = Array.from({ length: 300 }, (_, n) => ({ n }));
    for (const message of sent) producer.append(JSON.stringify(message));
    await producer.flush();
    const second = new IdempotentProducer(handle, "writer-1", { epoch: 1 });
    second.append(JSON.stringify({ n: 300 }));
    await second.flush();
    const third = new IdempotentProducer(handle, "writer-1", { autoClaim: true }); // is told, and takes over
    third.append(JSON.stringify({ n: 301 }));
    await third.flush();
    const response = await stream({ url: handle.url, live: false });
    assert.deepEqual(await response.json(), [...sent, { n: 300 }, { n: 301 }]);
    for (const one of [producer, second, third]) await one.detach();
  },

  async "a long-poll delivers what is there and what comes"() {
    const handle = await DurableStream.create({ url: url("v1/stream/ts/poll"), contentType: "application/json" });
    await handle.append(JSON.stringify("first"));
    const write = () => handle.append(JSON.stringify("second"));
    assert.deepEqual(await follow({ url: handle.url, live: "long-poll" }, 2, write), ["first", "second"]);
  },

  async "server-sent events deliver what is there and what comes"() {
    const handle = await DurableStream.create({ url: url("v1/stream/ts/sse"), contentType: "application/json" });
    await handle.append(JSON.stringify("first"));
    const write = () => handle.append(JSON.stringify("second"));
    assert.deepEqual(await follow({ url: handle.url, live: "sse" }, 2, write), ["first", "second"]);
  },

  async "bytes come by server-sent events as well"() {
    const handle = await DurableStream.create({ url: url("v1/stream/ts/binary"), contentType: "application/octet-stream" });
    await handle.append(new Uint8Array([0, 255, 10, 13]));
    await handle.close({ body: new Uint8Array([7]) });
    const response = await stream({ url: handle.url, live: "sse" });
    assert.deepEqual(await response.body(), new Uint8Array([0, 255, 10, 13, 7]));
  },

  async "a closed stream says so to readers and refuses writers"() {
    const handle = await DurableStream.create({ url: url("v1/stream/ts/closed"), contentType: "application/json" });
    await handle.append(JSON.stringify(1));
    const closed = await handle.close();
    const response = await stream({ url: handle.url, live: "long-poll" });
    assert.deepEqual(await response.json(), [1]);
    assert.equal(response.streamClosed, true);
    assert.equal(response.offset, closed.finalOffset);
    const refused = (error) => error.status === 409 && error.headers["stream-closed"] === "true";
    await assert.rejects(handle.append(JSON.stringify(2)), refused);
  },

  async "a deleted stream is gone"() {
    const handle = await DurableStream.create({ url: url("v1/stream/ts/deleted"), contentType: "text/plain" });
    await handle.delete();
    const head = await DurableStream.head({ url: handle.url, backoffOptions: quiet }).catch((error) => error);
    assert.ok(head.exists === false || head.status === 404 || head instanceof FetchError);
  },
};

for (const [name, check] of Object.entries(behaviours)) {
  await check();
  console.log(`ok ${name}`);
}
process.exit(0);

// npm `assistant-stream/resumable`, unmodified, with the example's store, against the server named by
// STREAMFOLD_URL, which is restarted at the line "restart". Exits with 0 and a line per behaviour when
// everything holds.
import assert from "node:assert/strict";
import { once } from "node:events";
import { createResumableStreamContext } from "assistant-stream/resumable";
import { createDurableStreamStore } from "../../../examples/ai_chat/page/resumable-store.mjs";

const url = `${process.env.STREAMFOLD_URL}/v1/stream/resumable`;
const open = () => createResumableStreamContext({ store: createDurableStreamStore(url) });
const bytes = (text) => new TextEncoder().encode(text);
const textOf = async (stream) => new Response(stream).text();
const never = () => assert.fail("there is a producer already");

// A stream that a test writes to.
function written() {
  let controller;
  const stream = new ReadableStream({ start: (its) => (controller = its) });
  return { stream, write: (text) => controller.enqueue(bytes(text)), end: () => controller.close(), fail: (error) => controller.error(error) };
}

const behaviours = {
  async "one of many callers produces, and all read the same"() {
    let producers = 0;
    const make = () => {
      producers += 1;
      return new Blob(["the ", "answer"]).stream();
    };
    const streams = await Promise.all(Array.from({ length: 5 }, () => open().run("many", make)));
    assert.deepEqual(await Promise.all(streams.map(textOf)), Array(5).fill("the answer"));
    assert.equal(producers, 1);
    assert.equal(await textOf(await open().run("many", never)), "the answer");
    assert.equal(await open().status("many"), "done");
  },

  async "an answer is resumed while it is written, also over a restart of the server"() {
    const source = written();
    const first = textOf(await open().run("restart", () => source.stream));
    source.write("one ");
    const resumed = textOf(await open().resume("restart"));
    assert.equal(await open().status("restart"), "streaming");
    console.log("restart");
    await once(process.stdin, "data");
    source.write("two ");
    source.write("three");
    source.end();
    assert.deepEqual(await Promise.all([first, resumed]), ["one two three", "one two three"]);
  },

  async "an error reaches readers, and a missing stream is null"() {
    const source = written();
    const reader = textOf(await open().run("failing", () => source.stream));
    source.fail(new Error("the model is overloaded"));
    await assert.rejects(reader, /the model is overloaded/);
    assert.equal(await open().status("failing"), "error");
    assert.equal(await open().resume("never-written"), null);
  },

  async "a producer whose stream was deleted and begun again is shut out"() {
    const [old, other] = [createDurableStreamStore(url), createDurableStreamStore(url)];
    const { lease } = await old.acquireLease("again");
    await old.delete("again");
    assert.equal((await other.acquireLease("again")).role, "producer");
    await assert.rejects(old.append("again", bytes("late"), lease), { code: "missing" });
    await old.finalize("again", "done", undefined, lease);
    assert.equal(await other.status("again"), "streaming");
  },

  async "a reader goes on behind its cursor, and stops when it is told to"() {
    const store = createDurableStreamStore(url);
    const { lease } = await store.acquireLease("cursors");
    for (const text of ["a", "b", "c"]) await store.append("cursors", bytes(text), lease);
    const stop = new AbortController();
    const seen = [];
    for await (const entry of store.read("cursors", "", stop.signal)) {
      seen.push(entry);
      if (seen.length === 3) stop.abort();
    }
    for (const [index, { cursor }] of seen.entries()) {
      const rest = [];
      const stopped = new AbortController();
      if (index === 2) setTimeout(() => stopped.abort(), 50);
      for await (const { chunk } of store.read("cursors", cursor, stopped.signal)) {
        rest.push(String.fromCharCode(...chunk));
        if (rest.length === 2 - index) stopped.abort();
      }
      assert.deepEqual(rest, ["a", "b", "c"].slice(index + 1));
    }
    await store.finalize("cursors", "done", undefined, lease);
    await assert.rejects(store.append("cursors", bytes("d"), lease), { code: "finalized" });
  },
};

for (const [name, run] of Object.entries(behaviours)) {
  await run();
  console.log(`ok ${name}`);
}
process.exit(0);

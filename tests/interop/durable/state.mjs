// npm `@durable-streams/state`, unmodified, against the server named by STREAMFOLD_URL. Exits with 0 and a
// line per behaviour when everything holds.
import assert from "node:assert/strict";
import { DurableStream, stream } from "@durable-streams/client";
import { createStateSchema } from "@durable-streams/state";
import { createStreamDB } from "@durable-streams/state/db";

const anything = { "~standard": { version: 1, vendor: "test", validate: (value) => ({ value }) } };
const schema = createStateSchema({ users: { schema: anything, type: "user", primaryKey: "id" } });
const user = (key, operation, name) => ({ type: "user", key, value: { name }, headers: { operation } });

const behaviours = {};
for (const live of ["long-poll", "sse"]) {
  behaviours[`a state is materialised by ${live}, and each change has a cursor`] = async () => {
    const url = `${process.env.STREAMFOLD_URL}/v1/stream/state/${live}`;
    const handle = await DurableStream.create({ url, contentType: "application/json" });
    // The client would make one message of an array.
    const body = JSON.stringify([user("a", "insert", "Ada"), user("b", "insert", "Bob")]);
    await fetch(url, { method: "POST", headers: { "content-type": "application/json" }, body });
    const events = [];
    let seen;
    const all = new Promise((resolve) => (seen = resolve));
    const db = createStreamDB({
      streamOptions: { url, contentType: "application/json" },
      state: schema,
      live,
      onEvent: (event) => {
        events.push(event);
        if (events.length === 3) seen();
      },
    });
    await db.preload();
    await handle.append(JSON.stringify(user("a", "update", "Ada Lovelace")));
    await all;
    assert.equal(db.collections.users.get("a").name, "Ada Lovelace");
    assert.equal(db.collections.users.get("b").name, "Bob");
    db.close();
    // Each cursor continues behind its own change, also within one append.
    for (const [index, event] of events.entries()) {
      const rest = await stream({ url, offset: event.headers.offset, live: false });
      assert.deepEqual((await rest.json()).map((item) => item.key), ["a", "b", "a"].slice(index + 1));
    }
  };
}

for (const [name, run] of Object.entries(behaviours)) {
  await run();
  console.log(`ok ${name}`);
}
process.exit(0);

// A to-do list in TanStack DB, whose changes are a stream. The list is named in the URL, after the #.
import { createStateSchema } from "@durable-streams/state";
import { createStreamDB } from "@durable-streams/state/db";
import { DurableStream } from "@durable-streams/client";
import { createLiveQueryCollection } from "@tanstack/db";

const server = new URLSearchParams(location.search).get("streamfold") ?? "http://localhost:8080";
const url = `${server}/v1/stream/lists/${location.hash.slice(1) || "first"}`;

const validate = (value) =>
  typeof value?.title === "string" ? { value } : { issues: [{ message: "an item has a title" }] };
const schema = createStateSchema({
  items: {
    schema: { "~standard": { version: 1, vendor: "example", validate } },
    type: "item",
    primaryKey: "id",
  },
});

await DurableStream.create({ url, contentType: "application/json" });
const db = createStreamDB({
  streamOptions: { url, contentType: "application/json" },
  live: "long-poll", // reconnects on its own after any failure, which "sse" does not
  state: schema,
  actions: ({ db, stream }) => {
    // The page shows a change at once, and takes it back if it is not stored.
    const store = async (event) => {
      await stream.append(JSON.stringify(event));
      await db.utils.awaitTxId(event.headers.txid, 60_000);
    };
    const headers = () => ({ txid: crypto.randomUUID() });
    return {
      add: {
        onMutate: (item) => db.collections.items.insert(item),
        mutationFn: (item) => store(schema.items.insert({ value: item, headers: headers() })),
      },
      finish: {
        onMutate: ({ id }) => db.collections.items.update(id, (item) => { item.done = true; }),
        mutationFn: ({ id, ...item }) =>
          store(schema.items.update({ key: id, value: { ...item, id, done: true }, headers: headers() })),
      },
    };
  },
});
await db.preload();

const open = createLiveQueryCollection({
  startSync: true,
  query: (query) => query.from({ item: db.collections.items }).orderBy(({ item }) => item.added),
});
const list = document.getElementById("list");
function show() {
  list.replaceChildren(
    ...open.toArray.map((item) => {
      const line = document.createElement("li");
      line.textContent = item.done ? `${item.title} ✓` : item.title;
      line.addEventListener("click", () => db.actions.finish(item));
      return line;
    }),
  );
}
open.subscribeChanges(show);
show();

const form = document.getElementById("form");
form.addEventListener("submit", (event) => {
  event.preventDefault();
  const title = event.target.title.value;
  db.actions.add({ id: crypto.randomUUID(), title, done: false, added: Date.now() });
  event.target.reset();
});
form.querySelector("button").disabled = false; // before, a browser would submit the form itself

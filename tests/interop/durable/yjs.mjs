// npm `@durable-streams/y-durable-streams`, unmodified, against the gateway named by STREAMFOLD_URL. Exits
// with 0 and a line per behaviour when everything holds.
import assert from "node:assert/strict";
import { setTimeout as pause } from "node:timers/promises";
import { YjsProvider } from "@durable-streams/y-durable-streams";
import { Awareness } from "y-protocols/awareness";
import * as Y from "yjs";

const baseUrl = `${process.env.STREAMFOLD_URL}/v1/yjs/interop`;

async function until(condition) {
  while (!(await condition())) await pause(5);
}

async function open(docId, { awareness = false } = {}) {
  const doc = new Y.Doc();
  const options = awareness ? { awareness: new Awareness(doc) } : {};
  const provider = new YjsProvider({ doc, baseUrl, docId, ...options });
  await until(() => provider.synced);
  return { doc, provider, text: doc.getText("text") };
}

const behaviours = {
  async "a document above 1 MiB converges, and a new reader gets it from a snapshot"() {
    const first = await open("large");
    for (let part = 0; part < 15; part++) first.text.insert(0, String(part).repeat(100_000));
    first.text.insert(7, "x".repeat(1_500_000));
    await first.provider.flush();
    await until(async () => {
      const found = await fetch(`${baseUrl}/docs/large?offset=snapshot`, { redirect: "manual" });
      return found.headers.get("location").endsWith("_snapshot");
    });
    const second = await open("large");
    assert.equal(second.text.length, 3_500_000);
    second.text.insert(0, "from the second ");
    first.text.insert(first.text.length, " from the first");
    await until(() => second.text.toString().endsWith(" from the first"));
    await until(() => first.text.toString().startsWith("from the second "));
    assert.equal(first.text.toString(), second.text.toString());
    first.provider.destroy();
    second.provider.destroy();
  },

  async "edits after a reconnection reach others"() {
    const [first, second] = [await open("again"), await open("again")];
    first.text.insert(0, "before ");
    await until(() => second.text.toString() === "before ");
    await first.provider.disconnect();
    await first.provider.connect();
    first.text.insert(7, "after");
    await until(() => second.text.toString() === "before after");
    first.provider.destroy();
    second.provider.destroy();
  },

  async "presence comes and goes"() {
    const [first, second] = [await open("who", { awareness: true }), await open("who", { awareness: true })];
    const shown = () => second.provider.awareness.getStates().get(first.doc.clientID)?.name;
    await until(() => {
      first.provider.awareness.setLocalStateField("name", "Ada"); // what is sent too early, nobody hears
      return shown() === "Ada";
    });
    first.provider.destroy();
    await until(() => shown() === undefined);
    second.provider.destroy();
  },
};

for (const [name, run] of Object.entries(behaviours)) {
  await run();
  console.log(`ok ${name}`);
}
process.exit(0);

// A text that several pages edit at once. The document is named in the URL, after the #.
import * as Y from "yjs";
import { YjsProvider } from "@durable-streams/y-durable-streams";

const server = new URLSearchParams(location.search).get("yjs") ?? "http://localhost:4438";
const doc = new Y.Doc();
const text = doc.getText("text");
const provider = new YjsProvider({
  doc,
  baseUrl: `${server}/v1/yjs/texts`,
  docId: location.hash.slice(1) || "first",
  connect: false,
});

// The provider sends only what is edited while it is connected, and stays disconnected after an error.
let unsent = false;
doc.on("update", (update, origin) => (unsent ||= origin !== "server" && !provider.connected));
provider.on("error", () => {
  unsent = true;
  setTimeout(() => provider.connect(), 500);
});
provider.on("status", (status) => {
  document.querySelector("[role=status]").textContent = status;
  if (status === "connected" && unsent) {
    unsent = false;
    doc.emit("update", [Y.encodeStateAsUpdate(doc), "unsent", doc]); // what others know is no change
  }
});
provider.connect();

const area = document.getElementById("text");
area.addEventListener("input", () => {
  const before = text.toString();
  const after = area.value;
  let start = 0;
  while (start < before.length && before[start] === after[start]) start++;
  let same = 0;
  const most = Math.min(before.length, after.length) - start;
  while (same < most && before.at(-1 - same) === after.at(-1 - same)) same++;
  doc.transact(() => {
    text.delete(start, before.length - start - same);
    text.insert(start, after.slice(start, after.length - same));
  });
});
text.observe((event, transaction) => {
  if (!transaction.local) area.value = text.toString();
});

// Calls of the server's public HTTP APIs, with the token of this browser tab.

const ROOT = new URL("../", document.baseURI);
const TOKEN_KEY = "streamfold-token";
/** Milliseconds between attempts to reach a server that does not answer. */
const PROBE_INTERVAL = 1000;

/** An answer that is not a success: its code, and the server's own sentence. */
export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The server cannot be reached, or the connection broke. */
export class UnreachableError extends Error {}

// What the page shows of the connection: `online`, how often it came back, and whether a token is missing or was refused.
export const connection = { online: true, returns: 0, needsToken: false, refusal: "", settings: null };
const watchers = new Set();

/** Call `watcher` whenever the state of the connection changes; returns how to stop that. */
export function watchConnection(watcher) {
  watchers.add(watcher);
  return () => watchers.delete(watcher);
}

function update(changes) {
  if (Object.entries(changes).every(([name, value]) => connection[name] === value)) return;
  Object.assign(connection, changes);
  for (const watcher of [...watchers]) watcher();
}

export const token = () => sessionStorage.getItem(TOKEN_KEY) ?? "";

/** Keep the token for this tab alone, until it is closed. */
export function logIn(secret) {
  sessionStorage.setItem(TOKEN_KEY, secret);
  update({ needsToken: false, refusal: "" });
}

export function logOut() {
  sessionStorage.removeItem(TOKEN_KEY);
  update({ needsToken: true, refusal: "" });
}

/** Keys of encrypted streams, by basin and path of the stream; never stored. */
const keys = new Map();
const keyName = (basin, path) => `${basin} ${path.split("/").slice(0, 3).join("/")}`;

/** Send `key` with every request for the records of a stream; an empty one removes it. */
export function setKey(basin, stream, key) {
  const name = keyName(basin, streamPath(stream));
  if (key) keys.set(name, key);
  else keys.delete(name);
}

export const url = (path) => new URL(path, ROOT);
/** The address of the server, as a command line takes it. */
export const endpoint = () => ROOT.href.replace(/\/$/, "");

/** Send a request; returns the response if it is a success, and throws otherwise. A POST that only `reads` is sent from a read-only console, too. */
export async function request(path, { basin, headers = {}, method = "GET", reads = method === "GET" || method === "HEAD", ...rest } = {}) {
  if (!reads && connection.settings?.read_only) {
    throw new ApiError(0, "read_only", "This console is read-only: the server was started with --console-read-only.");
  }
  const all = new Headers(headers);
  if (basin !== undefined) all.set("s2-basin", basin);
  const key = keys.get(keyName(basin, path.split("?")[0]));
  if (key) all.set("s2-encryption-key", key);
  if (token()) all.set("authorization", `Bearer ${token()}`);
  let response;
  try {
    response = await fetch(url(path), { method, headers: all, cache: "no-store", ...rest });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    lost();
    throw new UnreachableError("The server cannot be reached.");
  }
  found();
  if (response.ok) return response;
  const problem = await problemOf(response, method);
  if (response.status === 401) update({ needsToken: true, refusal: token() ? problem.message : "" });
  throw problem;
}

async function problemOf(response, method) {
  const text = method === "HEAD" ? "" : await response.text().catch(() => "");
  let body = {};
  try {
    body = JSON.parse(text);
  } catch {
    // Not every answer is JSON: a proxy may have sent it.
  }
  const message = body.message ?? text.slice(0, 300) ?? "";
  return new ApiError(response.status, body.code ?? "", message || `The server answered with status ${response.status}.`);
}

/** The server answers, again if it was away. */
function found() {
  if (!connection.online) update({ online: true, returns: connection.returns + 1 });
}

/** Show that the server is away, and look for it until it answers. */
function lost() {
  if (!connection.online) return;
  update({ online: false });
  const probe = async () => {
    try {
      await fetch(url("health"), { cache: "no-store" });
      found();
    } catch {
      setTimeout(probe, PROBE_INTERVAL);
    }
  };
  setTimeout(probe, PROBE_INTERVAL);
}

/** The parsed JSON of an answer. */
export async function getJson(path, options) {
  return (await request(path, { ...options, headers: { accept: "application/json", ...options?.headers } })).json();
}

/** Send JSON; returns the parsed answer, or null if it has no body. */
export async function sendJson(method, path, value, { headers, ...options } = {}) {
  const response = await request(path, {
    ...options,
    method,
    headers: { "content-type": "application/json", ...headers },
    body: value === undefined ? undefined : JSON.stringify(value),
  });
  const text = await response.text();
  return text ? JSON.parse(text) : null;
}

export async function loadSettings() {
  const response = await fetch(url("console/settings.json"), { cache: "no-cache" });
  const settings = await response.json();
  update({ settings, needsToken: settings.guarded && !token() });
}

/** All items of a listing up to `limit`, and whether there are more. */
export async function list(path, member, { limit = 1000, prefix = "", startAfter = "", ...options } = {}) {
  const query = new URLSearchParams({ prefix, start_after: startAfter, limit: String(limit) });
  const page = await getJson(`${path}?${query}`, options);
  return { items: page[member], more: page.has_more };
}

/** The events of a response of type text/event-stream, as they arrive. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let piece;
      try {
        piece = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        lost();
        throw new UnreachableError("The connection to the server broke.");
      }
      if (piece.done) return;
      const parts = (rest + piece.value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) yield parseEvent(part);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parseEvent(text) {
  const event = { type: "message", data: "" };
  for (const line of text.split("\n")) {
    const at = line.indexOf(": ");
    const name = line.slice(0, at);
    if (name === "event") event.type = line.slice(at + 2);
    if (name === "data") event.data += line.slice(at + 2);
  }
  return event;
}

export const streamPath = (stream, part = "") => `v1/streams/${encodeURIComponent(stream)}${part}`;

// What the server does now, and what is wrong with it, in words.

import { html, useRef, useState, useEffect } from "../vendor/htm-preact.js";
import { ApiError, connection, endpoint, getJson, list, request } from "../api.js";
import { Sparkline } from "../charts.js";
import { bytes, latency, number, plural, short } from "../format.js";
import { parseHistory, parseMetrics, quantile, sample } from "../metrics.js";
import { link } from "../routes.js";
import { CopyButton, Notice, useConnection, useInterval, useLoaded } from "../widgets.js";
import { Usage } from "./usage.js";

/** Milliseconds between readings, and the time that charts show at most, and at least. */
const INTERVAL = 2000;
const HOUR = 3_600_000;
const MINUTE = 60_000;
/** Damaged places that are listed. */
const DAMAGE = 20;
/** Streams that the list of the busiest has room for, so that nothing moves when there are fewer. */
const BUSIEST = 5;
/** Seconds that acknowledgements may take before the page calls them slow. */
const SLOW_ACK = 1;
/** Shares of a limit that the page warns about. */
const NEARLY = 0.9;

const rate = (before, after, name, seconds) =>
  (sample(after, name) - sample(before, name)) / seconds;

/** What one reading of the metrics shows. */
const gauges = (now) => ({
  followers: sample(now, "streamfold_followers"),
  connections: sample(now, "streamfold_connections"),
  memory: sample(now, "process_resident_memory_bytes"),
  disk: sample(now, "streamfold_store_bytes", { state: "disk" }),
});

/** One point of every chart from two readings of the metrics. */
function point(before, after, seconds) {
  return {
    batches: rate(before, after, "s2_append_ack_latency_seconds_count", seconds),
    records: rate(before, after, "s2_append_batch_records_sum", seconds),
    bytes: rate(before, after, "s2_append_batch_bytes_sum", seconds),
    p50: quantile(before, after, "s2_append_ack_latency_seconds", 0.5),
    p99: quantile(before, after, "s2_append_ack_latency_seconds", 0.99),
    ...gauges(after),
  };
}

/** Points of the hour before the page was opened: the server keeps its own figures. */
async function earlierPoints() {
  try {
    const readings = parseHistory(await getJson("console/history"));
    return readings.slice(1).map(({ at, now }, index) => ({ at, ...point(readings[index].now, now, (at - readings[index].at) / 1000) }));
  } catch (error) {
    if (error instanceof ApiError) return []; // the metrics themselves say what is wrong
    throw error;
  }
}

/** Sentences about what is wrong; [kind, text] each, the worst first. */
function problems(now, latest, readiness, damage) {
  const found = [];
  for (const text of damage?.summary ?? []) found.push(["bad", `Storage is damaged: ${text}.`]);
  if (readiness) found.push(["bad", `The server accepts no new requests: ${readiness}`]);
  if (sample(now, "streamfold_storage_full") === 1) {
    found.push(["bad", "Storage is full: appends are refused. Free space, or trim and delete streams; reads and trims still work."]);
  }
  const free = sample(now, "streamfold_storage_free_bytes");
  const reserve = sample(now, "streamfold_storage_reserve_bytes");
  if (free !== undefined && free < 2 * reserve && free > reserve) {
    found.push(["warn", `Only ${bytes(free)} are free; below ${bytes(reserve)} appends are refused.`]);
  }
  const waiting = sample(now, "streamfold_flush_queue_waiting");
  if (waiting > 0) found.push(["warn", `${plural(waiting, "append")} waiting for room: storage is slower than the writers.`]);
  if (latest?.p99 > SLOW_ACK) found.push(["warn", `Acknowledgements take ${latency(latest.p99)}: storage is slow.`]);
  for (const [name, text] of [["connections", "connections"], ["unread_bytes", "bytes for clients that do not read"], ["body_bytes", "bytes for arriving bodies"]]) {
    const used = sample(now, `streamfold_${name}`);
    const most = sample(now, `streamfold_${name}_max`);
    if (used > NEARLY * most) found.push(["warn", `${number(used)} of ${number(most)} ${text} are in use.`]);
  }
  return found;
}

function useHistory() {
  const [state, setState] = useState({ now: null, points: [], readiness: "", busiest: null, damage: null, error: null });
  const last = useRef(null);
  const read = async () => {
    try {
      const [text, readiness, busiest, damage] = await Promise.all([(await request("metrics")).text(), notReady(), busiestStreams(), knownDamage()]);
      const now = parseMetrics(text);
      const at = performance.now();
      const before = last.current;
      last.current = { now, at };
      const points = before ? [{ at: Date.now(), ...point(before.now, now, (at - before.at) / 1000) }] : await earlierPoints();
      setState((state) => {
        const first = points[0]?.at ?? 0;
        const all = before ? [...state.points, ...points] : [...state.points.filter((one) => one.at < first), ...points];
        return { now, readiness, busiest, damage, error: null, points: all.filter((one) => one.at > Date.now() - HOUR) };
      });
    } catch (error) {
      last.current = null;
      if (error instanceof ApiError) setState((state) => ({ ...state, error }));
    }
  };
  useEffect(() => void read(), []);
  useInterval(read, INTERVAL);
  return state;
}

/** Why the server takes no new work; empty if it does. */
async function notReady() {
  try {
    await request("ready");
    return "";
  } catch (error) {
    if (error instanceof ApiError) return error.message;
    throw error;
  }
}

/** The streams that most is appended to; null if this caller may not see them. */
async function busiestStreams() {
  try {
    return (await getJson("v1/busiest-streams")).streams;
  } catch (error) {
    if (error instanceof ApiError) return null;
    throw error;
  }
}

/** What cannot be read because storage is damaged; null if this caller may not see it. */
async function knownDamage() {
  try {
    return await getJson("v1/damage");
  } catch (error) {
    if (error instanceof ApiError) return null;
    throw error;
  }
}

const Damage = ({ damage }) => html`<section class="card damage"><header><h2>Damaged storage</h2><span class="muted">found since the server opened its storage</span></header>
  <div class="scroll"><table><thead><tr><th>Effect</th><th>File to restore</th></tr></thead>
  <tbody>${damage.places.slice(0, DAMAGE).map((one) => html`<tr key=${one.effect}>
    <td>${one.stream === undefined ? one.effect : html`<a href=${link(["basins", one.basin, one.stream])}>${one.effect}</a>`}</td>
    <td class="name">${one.file ?? "–"}</td></tr>`)}
  ${damage.places.length === 0 && damage.files.map((file) => html`<tr key=${file}><td>Reads are slower.</td><td class="name">${file}</td></tr>`)}</tbody></table></div>
  ${damage.places.length > DAMAGE && html`<p class="body muted">${plural(damage.places.length - DAMAGE, "more place")}: GET /v1/damage lists all.</p>`}</section>`;

const Busiest = ({ streams }) => html`<section class="card"><header><h2>Busiest streams</h2><span class="muted">appends of the last few seconds</span></header>
  <div class="scroll busiest">${streams.length === 0 ? html`<p class="body muted">No appends in the last few seconds.</p>` : html`<table><thead><tr><th>Stream</th><th class="number">Records</th><th class="number">Bytes</th></tr></thead>
  <tbody>${streams.slice(0, BUSIEST).map((one) => html`<tr key=${`${one.basin}/${one.stream}`}>
    <td><a class="name" href=${link(["basins", one.basin, one.stream])}>${one.basin}/${one.stream}</a></td>
    <td class="number">${short(one.records_per_second)} /s</td><td class="number">${bytes(one.bytes_per_second)}/s</td></tr>`)}</tbody></table>`}</div></section>`;

const Figure = ({ what, value, more, values, label }) => html`<section class="card figure">
  <div class="what">${what}</div><div class="value">${value}</div><div class="more">${more}</div>
  ${values && html`<${Sparkline} points=${values} span=${MINUTE} label=${label ?? `${what}, last hour`} />`}
</section>`;

/** What to do on a server that holds nothing yet. */
function FirstSteps({ guarded }) {
  const commands = [
    `export S2_ACCOUNT_ENDPOINT=${endpoint()} S2_BASIN_ENDPOINT=${endpoint()}${guarded ? " S2_ACCESS_TOKEN=…" : ""}`,
    "streamfold create-basin my-basin --retention-policy infinite",
    "streamfold create-stream my-basin/clicks",
    "echo hello | streamfold append my-basin/clicks",
  ].join("\n");
  return html`<section class="card"><header><h2>First steps</h2><span class="end"><${CopyButton} text=${commands}>Copy<//></span></header><div class="body fields">
    <p>This server has no basins yet. <a href=${link(["basins"])}>Create a basin</a> here, or paste this into a terminal:</p>
    <pre class="content">${commands}</pre>
    <p class="muted">The record then appears on its stream's page. Any S2 or Durable Streams client can append and read, too.</p></div></section>`;
}

export function OverviewPage() {
  const { now, points, readiness, busiest, damage, error } = useHistory();
  const basins = useLoaded(() => list("v1/basins", "basins"), []);
  useInterval(() => basins.value?.items.length === 0 && basins.reload(), INTERVAL);
  const location = useLoaded(() => getJson("v1/locations/default"), []);
  const latest = points.at(-1) ?? (now && gauges(now));
  const of = (name) => points.map((one) => [one.at, one[name]]);
  const { online } = useConnection();
  const wrong = online ? problems(now, latest, readiness, damage) : [["bad", "The server does not respond. This page shows its last answers."]];
  const worst = wrong.some(([kind]) => kind === "bad") ? "bad" : wrong.length ? "warn" : "";
  const value = (name, format) => (latest && latest[name] !== undefined ? format(latest[name]) : "–");
  const free = sample(now, "streamfold_storage_free_bytes");
  const url = now?.get("streamfold_storage_info")?.[0].labels.url;
  const dead = sample(now, "streamfold_store_bytes", { state: "dead" });
  return html`
    <div class="page-head"><h1>Overview</h1></div>
    <${Notice} kind="warn" error=${error} />
    <section class=${`card state ${worst}`} aria-live="polite"><span class="dot"></span><div>
      <h2>${!now ? "Reading the server's state …" : wrong.length ? "Something needs attention" : "Everything works"}</h2>
      ${wrong.length
        ? html`<ul>${wrong.map(([, text]) => html`<li key=${text}>${text}</li>`)}</ul>`
        : html`<p class="muted">Storage responds, and the server accepts requests.</p>`}
    </div></section>
    ${basins.value?.items.length === 0 && html`<${FirstSteps} guarded=${connection.settings.guarded} />`}
    <div class="figures">
      <${Figure} what="Records appended" value=${`${value("records", short)} /s`} more=${`${value("batches", short)} batches/s`} values=${of("records")} />
      <${Figure} what="Bytes appended" value=${`${value("bytes", bytes)}/s`} more="metered size" values=${of("bytes")} />
      <${Figure} what="Append latency" value=${value("p50", latency)} more=${`p50; p99 ${value("p99", latency)}`} values=${of("p50")} />
      <${Figure} what="Followers" value=${value("followers", number)} more=${`${value("connections", number)} of ${number(sample(now, "streamfold_connections_max") ?? 0)} connections in use`} values=${of("followers")} />
      <${Figure} what="Memory" value=${value("memory", bytes)} more="of the server's process" values=${of("memory")} />
      <${Figure} what="Storage" value=${value("disk", bytes)} more=${`${dead === undefined ? "" : `${bytes(dead)} to be reclaimed`}${free === undefined ? "" : `, ${bytes(free)} free`}`} values=${of("disk")} />
    </div>
    ${damage?.summary.length > 0 && html`<${Damage} damage=${damage} />`}
    ${busiest && html`<${Busiest} streams=${busiest} />`}
    <section class="card"><header><h2>Storage</h2></header><div class="body facts">
      <span>Location <b class="name">${url ?? location.value?.name ?? "–"}</b></span>
      <span>Basins <b>${basins.value ? `${number(basins.value.items.length)}${basins.value.more ? "+" : ""}` : "–"}</b></span>
      <a href=${link(["basins"])}>All basins</a>
    </div></section>
    <${Usage} />`;
}

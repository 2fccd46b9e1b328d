// Tables that are published as files: the chain of bases and diffs, rows and changes at any position, checks.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { connection, events, getJson, request } from "../api.js";
import { ago, bytes, number, plural, zoned } from "../format.js";
import { link } from "../routes.js";
import { Button, Choice, Empty, Field, Notice, useInterval, useLoaded } from "../widgets.js";
import { Snapshotters } from "./snapshotters.js";

const HEIGHT = 26;
const WIDTH = 1000;
/** The least width of what is drawn, so that it can be seen and pointed at. */
const LEAST = 3;

/** Milliseconds between readings of a manifest. */
const INTERVAL = 5000;
/** Why a base was written, in words; others are limits that were reached. */
const REASONS = { first: "the first base of the table", forced: "asked for by an operator", gap: "after changes that are missing" };

const table = (uri) => `console/tables/${encodeURIComponent(uri)}`;
const epochs = (chain) => [...new Set(chain.map(({ epoch }) => epoch))];

export function TablesPage() {
  const { tables, snapshotters } = connection.settings;
  return html`<div class="page-head"><h1>Tables</h1></div>${tables && html`<${Published} />`}${snapshotters && html`<${Snapshotters} />`}
    ${!tables && !snapshotters && html`<section class="card"><${Empty} title="This server shows no tables.">
      <p>Start it with <code>--tables FOLDER</code> to show the tables published there, and with <code>--snapshotter URL</code> to show their snapshotter.</p><//></section>`}`;
}

function Published() {
  const { value, error, reload } = useLoaded(() => getJson("console/tables"), []);
  useInterval(reload, INTERVAL);
  return html`<${Notice} error=${error} />
    <section class="card">${value?.tables.length === 0
      ? html`<${Empty} title="No tables were found."><p>A snapshotter publishes them: <code>streamfold snapshotter run</code>.</p><//>`
      : html`<div class="scroll"><table><thead><tr><th>Table</th><th>Head</th><th class="number optional">Artifacts</th><th class="number optional">Size</th><th>Updated</th></tr></thead>
      <tbody>${value?.tables.map((one) => html`<tr key=${one.uri}>
        <td><a class="name" href=${link(["tables", one.uri])}>${one.table ?? one.uri}</a><div class="hint name">${one.uri}</div>
          ${one.incomplete_before && html`<span class="badge bad">incomplete</span>`}</td>
        ${one.error
          ? html`<td colspan="4"><${Notice}>${one.error}<//></td>`
          : html`<td class="mono">${one.head_position}</td><td class="number optional">${number(one.artifacts)}</td><td class="number optional">${bytes(one.size_bytes)}</td>
            <td class="age" title=${one.updated_at}>${ago(Date.parse(one.updated_at))}</td>`}</tr>`)}</tbody></table></div>`}</section>`;
}

/** What an artifact is, in words. */
const words = (one) =>
  [
    one.kind === "base" ? `base at ${one.to_position}` : `diff (${one.from_position}, ${one.to_position}]`,
    bytes(one.size_bytes), one.kind === "base" ? plural(one.rows ?? 0, "row") : plural(one.changes ?? 0, "change"),
    `written ${zoned(Date.parse(one.created_at))}`, one.reason && (REASONS[one.reason] ?? `because ${one.reason} was reached`)].filter(Boolean).join(", ");

/** The chain with its ends in time instead of positions: a diff begins when what it follows was written. */
function inTime(chain) {
  let before = null;
  return chain.map((one) => {
    const at = Date.parse(one.created_at);
    const from = one.kind === "base" ? null : before ?? at;
    before = at;
    return { ...one, from_rank: from, to_rank: at };
  });
}

/** One lane for each epoch, to scale; a base is a mark, diffs are bars, missing positions are dashed. */
function Chain({ chain, chosen, onChoose }) {
  const first = Math.min(...chain.map((one) => one.from_rank ?? one.to_rank));
  const last = Math.max(...chain.map((one) => one.to_rank));
  const x = (rank) => 10 + ((rank - first) / Math.max(1, last - first)) * (WIDTH - 20);
  const lanes = epochs(chain);
  const largest = Math.max(...chain.map((one) => one.size_bytes), 1);
  const tall = (one) => 6 + (HEIGHT - 12) * Math.sqrt(one.size_bytes / largest);
  const head = (epoch) => Math.max(...chain.filter((one) => one.epoch === epoch).map((one) => one.to_rank));
  const base = (epoch) => chain.find((one) => one.epoch === epoch && one.kind === "base");
  // Bases last: a diff begins where its base is, and would cover half of it.
  const drawn = chain.map((one, at) => [one, at]).sort(([a], [b]) => Number(a.kind === "base") - Number(b.kind === "base"));
  return html`<div class="chain"><div class="lanes">${lanes.map((epoch) => html`<div key=${epoch}>epoch ${epoch}</div>`)}</div>
    <svg viewBox=${`0 0 ${WIDTH} ${lanes.length * HEIGHT}`} height=${lanes.length * HEIGHT} preserveAspectRatio="none" role="img"
      aria-label=${`${plural(lanes.length, "epoch")} of bases and diffs, ${chain[0].to_position} to ${chain.at(-1).to_position}`}>
      ${lanes.slice(1).map((epoch, at) => base(epoch)?.to_rank > head(lanes[at]) && html`<line key=${epoch} class="gap" x1=${x(head(lanes[at]))} x2=${x(base(epoch).to_rank)}
        y1=${(at + 1.5) * HEIGHT} y2=${(at + 1.5) * HEIGHT}><title>no diffs lead here</title></line>`)}
      ${drawn.map(([one, at]) => {
        const middle = (lanes.indexOf(one.epoch) + 0.5) * HEIGHT;
        const start = one.kind === "base" ? x(one.to_rank) - LEAST : x(one.from_rank);
        const width = one.kind === "base" ? 2 * LEAST : Math.max(LEAST, x(one.to_rank) - start - 1);
        return html`<rect key=${at} class=${`${one.kind} ${at === chosen ? "chosen" : ""}`} x=${start} width=${width} y=${middle - tall(one) / 2} height=${tall(one)}
          onClick=${() => onChoose(at)}><title>${words(one)}</title></rect>`;
      })}
    </svg></div>`;
}

/** What changed from one position to the chosen one. */
function ChangesTo({ uri, chain, at }) {
  const until = chain[at].to_position;
  const written = new Map(chain.slice(0, at).map((one) => [one.to_position, Date.parse(one.created_at)]));
  const earlier = [...written.keys()].filter((one) => one !== until).reverse();
  const [wanted, setWanted] = useState(null);
  const since = earlier.includes(wanted) ? wanted : earlier[0];
  const { value, error, loading } = useLoaded(
    async (signal) => since && getJson(`${table(uri)}/changes?${new URLSearchParams({ since, until })}`, { signal }), [uri, since, until]);
  return html`<section class="card"><header><h2>What changed</h2>
      <span class="end muted">${loading ? "reading …" : value && `${plural(value.changes.length, "change")}${value.more ? ", and more" : ""}`}</span></header>
    ${since === undefined ? html`<div class="body muted">This is the oldest position: there is none before it to compare with.</div>` : html`
    <div class="body"><${Field} label="Since"><select value=${since} onChange=${(event) => setWanted(event.target.value)}>
      ${earlier.map((position) => html`<option key=${position} value=${position}>${`${zoned(written.get(position))}, position ${position}`}</option>`)}</select><//></div>
    <${Notice} error=${error} />
    ${value && html`<div class="scroll preview"><table><thead><tr><th>Position</th><th>Action</th><th>Key</th><th>Before</th><th>After</th></tr></thead>
      <tbody>${value.changes.map((one, row) => html`<tr key=${row}><td class="mono">${one.position}</td><td><span class=${`badge ${one.action}`}>${one.action}</span></td>
        <td class="mono">${one.key}</td><td class="mono">${one.before}</td><td class="mono">${one.after}</td></tr>`)}</tbody></table></div>`}`}</section>`;
}

/** Checks every file of the table, and shows how far it is. */
function Check({ uri }) {
  const [state, setState] = useState({ step: "idle" });
  const stopper = useRef(null);
  useEffect(() => () => stopper.current?.abort(), [uri]);
  const run = async () => {
    stopper.current = new AbortController();
    setState({ step: "running", checked: 0, files: 0 });
    try {
      const response = await request(`${table(uri)}/check`, { signal: stopper.current.signal });
      for await (const { type, data } of events(response)) {
        const value = JSON.parse(data);
        if (type === "progress") setState({ step: "running", ...value });
        if (type === "result") setState({ step: "done", result: value });
        if (type === "problem") setState({ step: "failed", error: value });
      }
    } catch (error) {
      if (error.name !== "AbortError") setState({ step: "failed", error });
    }
  };
  const { result } = state;
  return html`<section class="card"><header><h2>Check</h2><span class="end">
      <${Button} disabled=${state.step === "running"} onClick=${run}>Check every file<//></span></header>
    <div class="body" aria-live="polite">
      ${state.step === "idle" && html`<span class="muted">Reads every file of the table and compares sizes, hashes and counts with the manifest.</span>`}
      ${state.step === "running" && html`<progress aria-label="Files checked" max=${state.files || 1} value=${state.checked}></progress> <span class="muted">${number(state.checked)} of ${plural(state.files, "file")}</span>`}
      ${state.step === "failed" && html`<${Notice} error=${state.error} />`}
      ${result && (result.problems.length
        ? html`<${Notice}>${plural(result.problems.length, "file")} cannot be used: write the table again from its stream.<//>
          <ul>${result.problems.map((one) => html`<li key=${one.path}><span class="mono">${one.path}</span>: ${one.message}</li>`)}</ul>`
        : html`<${Notice} kind="good">All ${plural(result.files, "file")} are what the manifest says: ${bytes(result.size_bytes)}, ${plural(result.rows, "row and change", "rows and changes")}.<//>`)}
    </div></section>`;
}

function Rows({ uri, position }) {
  const { value, error, loading } = useLoaded((signal) => getJson(`${table(uri)}/rows?${new URLSearchParams({ position })}`, { signal }), [uri, position]);
  return html`<section class="card"><header><h2>Rows at ${position}</h2><span class="end muted">${loading ? "reading …" : value && `${plural(value.rows.length, "row")}${value.more ? ", and more" : ""}`}</span></header>
    <${Notice} error=${error} />
    ${value && html`<div class="scroll preview"><table><thead><tr>${value.columns.map((name) => html`<th key=${name}>${name}</th>`)}</tr></thead>
      <tbody>${value.rows.map((row, at) => html`<tr key=${at}>${row.map((cell, column) => html`<td key=${column} class="mono">${cell === null ? html`<span class="muted">null</span>` : cell}</td>`)}</tr>`)}</tbody></table></div>`}</section>`;
}

const artifact = ({ epoch, kind, to_position: position }) => `${epoch} ${kind} ${position}`;

/** The table of a name, as soon as it is published. */
export function NamedTablePage({ name }) {
  const { value, error, reload } = useLoaded(() => getJson("console/tables"), [name]);
  const tables = value?.tables.filter((one) => one.table === name) ?? [];
  useInterval(() => tables.length || reload(), INTERVAL);
  if (tables.length === 1) return html`<${TablePage} uri=${tables[0].uri} />`;
  return html`<div class="page-head"><div class="crumbs"><a href=${link(["tables"])}>Tables</a><span>/</span></div><h1>${name}</h1></div>
    <${Notice} error=${error} />
    ${value && html`<section class="card">${tables.length
      ? html`<${Empty} title="Several tables have this name."><p><a href=${link(["tables"])}>All tables</a></p><//>`
      : html`<${Empty} title="No table of this name is published yet."><p>This page shows it as soon as its first base is written.</p><//>`}</section>`}`;
}

export function TablePage({ uri }) {
  const { value, error, reload } = useLoaded(() => getJson(table(uri)), [uri]);
  useInterval(reload, INTERVAL);
  // Names of artifacts; null is the newest, whichever that is.
  const [moved, setMoved] = useState(null);
  const [settled, setSettled] = useState(null);
  const chain = value?.chain ?? [];
  const nameAt = (at) => (at === chain.length - 1 ? null : artifact(chain[at]));
  const placeOf = (name) => {
    const at = name === null ? -1 : chain.findIndex((one) => artifact(one) === name);
    return at < 0 ? chain.length - 1 : at;
  };
  const chosen = placeOf(moved);
  const shown = chain[placeOf(settled)];
  const choose = (at) => (setMoved(nameAt(at)), setSettled(nameAt(at)));
  const [scale, setScale] = useState("position");
  return html`<div class="page-head"><div class="crumbs"><a href=${link(["tables"])}>Tables</a><span>/</span></div><h1>${value?.table ?? uri}</h1></div>
    <${Notice} error=${error} />
    ${value && html`<div class="facts"><span>Head <b>${value.head_position}</b></span><span title=${zoned(Date.parse(value.updated_at))}>Updated <b>${ago(Date.parse(value.updated_at))}</b></span>
        <span>Oldest position <b>${value.oldest_readable_position}</b></span><span>Size <b>${bytes(value.size_bytes)}</b></span>
        ${value.key_fields && html`<span>Key <b>${value.key_fields.join(", ")}</b></span>`}${value.source && html`<span>Source <b class="name">${value.source}</b></span>`}
        ${value.dead_letters > 0 && html`<span class="badge bad">${plural(value.dead_letters, "dead letter")}</span>`}
        <span class="name">${value.uri}</span></div>
      ${value.incomplete_before && html`<${Notice}>This table is incomplete: changes before position ${value.incomplete_before} are missing, because its stream had lost them when the archive began.<//>`}
      <section class="card"><header><h2>Bases and diffs</h2><span class="end muted">${plural(epochs(chain).length, "epoch")}, ${plural(chain.length, "artifact")}</span>
          <${Choice} label="Scale" options=${[["position", "Positions"], ["time", "Time"]]} value=${scale} onChange=${setScale} /></header>
        <div class="body fields"><${Chain} chain=${scale === "time" ? inTime(chain) : chain} chosen=${chosen} onChoose=${choose} />
        <div class="legend"><span class="base">base</span><span>diff</span><span class="chosen">chosen</span></div>
        <${Field} label="Position" hint=${words(chain[chosen])}><input type="range" min="0" max=${chain.length - 1} value=${chosen}
          onInput=${(event) => setMoved(nameAt(Number(event.target.value)))} onChange=${(event) => setSettled(nameAt(Number(event.target.value)))} /><//></div></section>
      <${Rows} uri=${uri} position=${shown.to_position} />
      <${ChangesTo} uri=${uri} chain=${chain} at=${chain.indexOf(shown)} />
      <${Check} uri=${uri} />`}`;
}

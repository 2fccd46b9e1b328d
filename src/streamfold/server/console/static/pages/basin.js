// One basin: its streams and its configuration.

import { html, useRef, useState } from "../vendor/htm-preact.js";
import { ApiError, getJson, list, request, sendJson, streamPath } from "../api.js";
import { ago, bytes, number, plural, short, zoned } from "../format.js";
import { go, link } from "../routes.js";
import { storedBytesOfAll } from "../sizes.js";
import { Button, Choice, Confirm, Empty, Notice, Pager, Tabs, useConnection, useInterval, useLoaded } from "../widgets.js";
import { Search } from "./basins.js";
import { BasinDialog, CreateStreamDialog, retentionText } from "./config.js";
import { Usage } from "./usage.js";

/** Streams that one page of the list shows. */
const PAGE = 200;

/** Streams that are gathered into groups, at most: as many as one request lists. */
const GROUPED = 1000;
/** Milliseconds between readings of tails, and of sizes, of which the server has one per minute. */
const INTERVAL = 3000;
const SIZES_INTERVAL = 60_000;
/** Readings of tails that a rate is an average of. */
const READINGS = 6;

/** Tails of streams by name, with the time of the last record. Empty where this token may not see them. */
async function tailsOf(basin, names) {
  if (!names.length) return new Map();
  try {
    const { tails } = await sendJson("POST", "v1/tails", { streams: names }, { basin, reads: true });
    return new Map(tails.filter((one) => one.tail).map(({ stream, tail }) => [stream, tail]));
  } catch (error) {
    if (error instanceof ApiError) return new Map();
    throw error;
  }
}

/** Tails of streams, read again and again; the second function returns a stream's records per second over the last readings. */
function useTails(basin, names) {
  const readings = useRef([]);
  const { value, reload } = useLoaded(async () => {
    const reading = { at: performance.now(), tails: await tailsOf(basin, names) };
    readings.current = [...readings.current, reading].slice(-READINGS);
    return reading.tails;
  }, [basin, names.join("\n")]);
  useInterval(reload, INTERVAL);
  const rateOf = (name) => {
    const mine = readings.current.filter(({ tails }) => tails.has(name));
    if (mine.length < 2) return undefined;
    const [first, last] = [mine[0], mine.at(-1)];
    return ((last.tails.get(name).seq_num - first.tails.get(name).seq_num) * 1000) / (last.at - first.at);
  };
  return [(name) => value?.get(name), rateOf];
}

/** The streams directly below `prefix`, and the groups that longer names share up to their next slash. */
function grouped(items, prefix) {
  const groups = new Map();
  const streams = [];
  for (const item of items) {
    const end = item.name.indexOf("/", prefix.length);
    if (end < 0) streams.push(item);
    else groups.set(item.name.slice(0, end + 1), (groups.get(item.name.slice(0, end + 1)) ?? 0) + 1);
  }
  return { groups: [...groups], streams };
}

const GroupPath = ({ basin, group }) => {
  const parts = group.split("/").slice(0, -1);
  return html`<div class="crumbs"><a href=${link(["basins", basin], { view: "groups" })}>all groups</a>${parts.map((part, at) => html`<span>/</span>
    <a key=${at} class="name" href=${link(["basins", basin], { view: "groups", group: `${parts.slice(0, at + 1).join("/")}/` })}>${part || "(empty)"}</a>`)}</div>`;
};

function StreamList({ basin, config, prefix, round, onDelete, byGroup }) {
  const [after, setAfter] = useState([]);
  const { settings } = useConnection();
  const load = () => list("v1/streams", "streams", { basin, prefix, limit: byGroup ? GROUPED : PAGE, startAfter: after.at(-1) ?? "" });
  const { value, error } = useLoaded(load, [prefix, after, round, byGroup]);
  const { groups, streams } = byGroup ? grouped(value?.items ?? [], prefix) : { groups: [], streams: value?.items ?? [] };
  const names = streams.filter((one) => !one.deleted_at).map((one) => one.name);
  // A request for the tail of a stream that was just deleted would create it again in some basins.
  const harmless = config !== undefined && !config.create_stream_on_read;
  const [tailOf, rateOf] = useTails(basin, harmless ? names : []);
  const sizes = useLoaded((signal) => storedBytesOfAll(names.map((name) => [basin, name]), signal), [names.join("\n")]);
  useInterval(sizes.reload, SIZES_INTERVAL);
  if (error) return error.status !== 404 && html`<${Notice} error=${error} />`; // the page says that the basin is missing
  if (value?.items.length === 0 && !after.length) {
    return html`<section class="card"><${Empty} title=${prefix ? "No stream name starts with this." : "This basin has no streams yet."}>
      ${!prefix && html`<p>Create one, or run <code>streamfold create-stream ${basin}/my-stream</code>.</p>`}<//></section>`;
  }
  return html`<section class="card"><div class="scroll"><table>
    <thead><tr><th>Name</th><th class="number">Tail</th><th class="number optional" title="Bodies and headers, and 8 bytes for each record: what S2 meters">Metered size</th><th class="number optional">Records/s</th><th class="optional">Last record</th><th class="optional">Created</th><th><span class="visually-hidden">Actions</span></th></tr></thead>
    <tbody>${groups.map(([name, count]) => html`<tr key=${name}>
      <td colspan="7"><a class="name" href=${link(["basins", basin], { view: "groups", group: name })}>${name}</a> <span class="muted">${plural(count, "stream")}${value.more ? " or more" : ""}</span></td></tr>`)}
    ${streams.map(({ name, created_at, deleted_at, cipher }) => html`<tr key=${name}>
      <td><a class="name" href=${link(["basins", basin, name])}>${name}</a> ${cipher && html`<span class="badge">${cipher}</span>`}
        ${deleted_at && html` <span class="badge warn">being deleted</span>`}</td>
      <td class="number">${tailOf(name) ? number(tailOf(name).seq_num) : "–"}</td>
      <td class="number optional">${sizes.value?.get(name) === undefined ? "–" : bytes(sizes.value.get(name))}</td>
      <td class="number optional">${rateOf(name) === undefined ? "–" : short(rateOf(name))}</td>
      <td class="optional age">${tailOf(name)?.timestamp ? html`<span title=${zoned(tailOf(name).timestamp)}>${ago(tailOf(name).timestamp)}</span>` : "–"}</td>
      <td class="optional age" title=${created_at}>${ago(Date.parse(created_at))}</td>
      <td><div class="row-actions"><${Button} icon="trash" kind="quiet" label=${`Delete stream ${name}`} disabled=${settings.read_only || Boolean(deleted_at)}
        onClick=${() => onDelete(name)} /></div></td>
    </tr>`)}</tbody></table></div>
    <${Pager} cursors=${after} next=${value?.more ? value.items.at(-1).name : null} onMove=${setAfter} />
  </section>`;
}

function Facts({ config }) {
  if (!config) return html`<div class="facts"></div>`;
  const streams = config.default_stream_config;
  return html`<div class="facts">
    <span>Records of new streams <b>${retentionText(streams?.retention_policy)}</b></span>
    <span>Appends create streams <b>${config.create_stream_on_append ? "yes" : "no"}</b></span>
    <span>Reads create streams <b>${config.create_stream_on_read ? "yes" : "no"}</b></span>
    ${config.stream_cipher && html`<span>Encryption <b>${config.stream_cipher}</b></span>`}
  </div>`;
}

export function BasinPage({ basin, tab, group }) {
  const [prefix, setPrefix] = useState("");
  const [dialog, setDialog] = useState(null);
  const [round, setRound] = useState(0);
  const { settings } = useConnection();
  const config = useLoaded(() => getJson(`v1/basins/${encodeURIComponent(basin)}`), [basin, round]);
  const close = () => setDialog(null);
  const changed = () => setRound((count) => count + 1);
  const remove = async (stream) => {
    await request(streamPath(stream), { basin, method: "DELETE" });
    changed();
  };
  return html`
    <div class="page-head">
      <div class="crumbs"><a href=${link(["basins"])}>Basins</a><span>/</span></div>
      <h1>${basin}</h1>
      <div class="actions">
        <${Button} icon="gear" disabled=${settings.read_only || !config.value} onClick=${() => setDialog({ configure: true })}>Configure<//>
        <${Button} icon="plus" kind="primary" disabled=${settings.read_only} onClick=${() => setDialog({ create: true })}>Create stream<//>
      </div>
    </div>
    <${Notice} error=${config.error} />
    <${Facts} config=${config.value} />
    <${Tabs} label="Parts of the basin" current=${tab} items=${[{ id: "streams", text: "Streams", href: link(["basins", basin]) },
      { id: "usage", text: "Usage", href: link(["basins", basin], { tab: "usage" }) }]} />
    ${tab === "usage" ? html`<${Usage} basin=${basin} />` : html`
      <div class="toolbar"><${Search} label="Find by prefix" value=${prefix} onInput=${setPrefix} />
        <${Choice} label="Order" value=${group === null ? "all" : "groups"} options=${[["all", "All streams"], ["groups", "Groups"]]}
          onChange=${(id) => go(["basins", basin], id === "groups" ? { view: "groups" } : {})} /></div>
      ${group && html`<${GroupPath} basin=${basin} group=${group} />`}
      <${StreamList} key=${`${group} ${prefix}`} basin=${basin} config=${config.value} prefix=${`${group ?? ""}${prefix}`} byGroup=${group !== null} round=${round} onDelete=${(stream) => setDialog({ remove: stream })} />`}
    ${dialog?.create && html`<${CreateStreamDialog} basin=${basin} defaults=${config.value?.default_stream_config} onClose=${close} onDone=${(name) => go(["basins", basin, name])} />`}
    ${dialog?.configure && html`<${BasinDialog} basin=${basin} config=${config.value} onClose=${close} onDone=${changed} />`}
    ${dialog?.remove && html`<${Confirm} title="Delete stream" action="Delete stream" name=${dialog.remove} onClose=${close} submit=${() => remove(dialog.remove)}>
      The stream <code class="name">${dialog.remove}</code> and all its records are deleted. This cannot be undone.<//>`}`;
}

// One stream: its records, its configuration, and what can be done with it.

import { html, useState } from "../vendor/htm-preact.js";
import { getJson, list, request, setKey, streamPath } from "../api.js";
import { ago, bytes, number, zoned } from "../format.js";
import { AppendDialog, FenceDialog, TrimDialog } from "../records/append.js";
import { RecordBrowser } from "../records/browser.js";
import { go, link } from "../routes.js";
import { storedBytes } from "../sizes.js";
import { Button, Confirm, Field, FormDialog, Notice, Tabs, useConnection, useInterval, useLoaded } from "../widgets.js";
import { retentionText, StreamConfigDialog } from "./config.js";
import { Forks, forksOf, Origin } from "./forks.js";
import { Latest } from "./latest.js";
import { Producers } from "./producers.js";
import { Snapshots } from "./snapshots.js";
import { Usage } from "./usage.js";

/** Milliseconds between readings of the size. */
const INTERVAL = 30_000;

const TABS = { records: "Records", latest: "Latest", snapshots: "Snapshots", forks: "Forks", producers: "Producers", usage: "Usage" };

/** What Durable Streams reports of a stream; an empty object where its name has no such path. */
async function durableState(basin, stream) {
  try {
    const { headers } = await request(`${basin}/${encodeURIComponent(stream)}`, { method: "HEAD" });
    return { type: headers.get("content-type"), closed: headers.get("stream-closed") === "true", ttl: headers.get("stream-ttl"), expires: headers.get("stream-expires-at") };
  } catch {
    return {};
  }
}

/** The entry of a listing: when the stream was created, and how it is encrypted. */
async function infoOf(basin, stream) {
  const { items } = await list("v1/streams", "streams", { basin, prefix: stream, limit: 1 });
  return items[0]?.name === stream ? items[0] : {};
}

async function tailOf(basin, stream) {
  return Number((await getJson(streamPath(stream, "/records/tail"), { basin })).tail.seq_num);
}

/** Asks for the key of an encrypted stream. */
function KeyDialog({ basin, stream, cipher, onClose, onDone }) {
  const [key, setValue] = useState("");
  const submit = async () => {
    setKey(basin, stream, key.trim());
    onDone();
  };
  return html`<${FormDialog} title="Key of the stream" action="Use key" onClose=${onClose} submit=${submit}>
    <p class="muted">The records are encrypted with ${cipher}. The console holds the key until this page is closed, and sends it only with reads and appends of this stream.</p>
    <${Field} label="Key" hint="32 bytes in base64; empty removes it"><input type="password" autocomplete="off" value=${key} onInput=${(event) => setValue(event.target.value)} /><//><//>`;
}

function Facts({ basin, config, state, range, tail, size, info, origin }) {
  return html`<div class="facts">
    ${origin && html`<span>Forked from <${Origin} basin=${basin} origin=${origin} /></span>`}
    ${info?.created_at && html`<span title=${zoned(Date.parse(info.created_at))}>Created <b>${ago(Date.parse(info.created_at))}</b></span>`}
    ${range && html`<span>Records <b>${number(range.tail - range.first)}</b></span>`}
    ${tail !== undefined && html`<span>Tail <b>${number(tail)}</b></span>`}
    ${size !== undefined && html`<span title="Bodies and headers, and 8 bytes for each record: what S2 meters">Metered size <b>${bytes(size)}</b></span>`}
    ${config && html`<span>Retention <b>${retentionText(config.retention_policy)}</b></span><span>Timestamps <b>${config.timestamping.mode}</b></span>`}
    ${state?.type && html`<span>Content type <b>${state.type}</b></span>`}
    ${state?.ttl && html`<span>Expires when unused for <b>${state.ttl} s</b></span>`}
    ${state?.expires && html`<span>Expires <b>${state.expires}</b></span>`}
    ${info?.cipher && html`<span class="badge accent">encrypted, ${info.cipher}</span>`}
    ${state?.closed && html`<span class="badge warn">closed</span>`}
  </div>`;
}

export function StreamPage({ basin, stream, query }) {
  const [dialog, setDialog] = useState(null);
  const [round, setRound] = useState(0);
  const [range, setRange] = useState(null);
  const { settings } = useConnection();
  const config = useLoaded(() => getJson(streamPath(stream), { basin }), [round]);
  const info = useLoaded(() => infoOf(basin, stream), [round]);
  const [keyed, setKeyed] = useState(0);
  const state = useLoaded(() => durableState(basin, stream), [round]);
  const origin = useLoaded(async () => (await forksOf(basin, stream)).origin, [round]);
  const tab = TABS[query.get("tab")] ? query.get("tab") : "records";
  const loaded = useLoaded(() => tailOf(basin, stream), [tab]);
  const size = useLoaded((signal) => storedBytes([basin, stream], signal), [round]);
  useInterval(size.reload, INTERVAL);
  const tail = tab === "records" && range ? range.tail : loaded.value ?? undefined;
  const close = () => setDialog(null);
  const changed = () => setRound((count) => count + 1);
  const remove = async () => {
    await request(streamPath(stream), { basin, method: "DELETE" });
    go(["basins", basin]);
  };
  const frozen = settings.read_only;
  const missing = config.error?.status === 404;
  const basinConfig = useLoaded(async () => missing && getJson(`v1/basins/${encodeURIComponent(basin)}`), [basin, missing]);
  const creates = Boolean(basinConfig.value?.create_stream_on_append);
  const named = { basin, stream, onClose: close };
  return html`
    <div class="page-head">
      <div class="crumbs"><a href=${link(["basins"])}>Basins</a><span>/</span><a class="name" href=${link(["basins", basin])}>${basin}</a><span>/</span></div>
      <h1>${stream}</h1>
      <div class="actions">
        ${info.value?.cipher && html`<${Button} icon="tokens" onClick=${() => setDialog("key")}>Key<//>`}
        <${Button} disabled=${frozen || !config.value} onClick=${() => setDialog("configure")}>Configure<//>
        <${Button} disabled=${frozen || missing} onClick=${() => setDialog("trim")}>Trim<//>
        <${Button} disabled=${frozen || missing} onClick=${() => setDialog("fence")}>Fence<//>
        <${Button} icon="trash" label="Delete stream" disabled=${frozen || missing} onClick=${() => setDialog("delete")} />
        <${Button} icon="plus" kind="primary" disabled=${frozen || (missing && !creates)} onClick=${() => setDialog("append")}>${missing && creates ? "Create by append" : "Append"}<//>
      </div>
    </div>
    <${Notice} error=${config.error} />
    ${missing && html`<p class="muted">${creates ? "The first append creates it: this basin creates streams on append." : html`Create it on the page of <a class="name" href=${link(["basins", basin])}>its basin</a>.`}</p>`}
    <${Facts} basin=${basin} config=${config.value} state=${state.value} range=${range} tail=${tail} size=${size.value ?? undefined} info=${info.value} origin=${origin.value} />
    <${Tabs} label="Parts of the stream" current=${tab} items=${Object.entries(TABS).map(([id, text]) => ({
      id, text, href: link(["basins", basin, stream], { tab: id === "records" ? undefined : id }) }))} />
    ${tab === "records" && !missing && html`<${RecordBrowser} key=${keyed} basin=${basin} stream=${stream} query=${query} onTail=${setRange} />`}
    ${tab === "latest" && !missing && html`<${Latest} basin=${basin} stream=${stream} query=${query} />`}
    ${tab === "snapshots" && html`<${Snapshots} basin=${basin} stream=${stream} />`}
    ${tab === "forks" && html`<${Forks} basin=${basin} stream=${stream} tail=${tail} />`}
    ${tab === "producers" && html`<${Producers} basin=${basin} stream=${stream} />`}
    ${tab === "usage" && html`<${Usage} basin=${basin} stream=${stream} />`}
    ${dialog === "append" && html`<${AppendDialog} ...${named} onDone=${missing ? changed : () => {}} />`}
    ${dialog === "key" && html`<${KeyDialog} ...${named} cipher=${info.value.cipher} onDone=${() => setKeyed((count) => count + 1)} />`}
    ${dialog === "trim" && html`<${TrimDialog} ...${named} tail=${tail} onDone=${() => {}} />`}
    ${dialog === "fence" && html`<${FenceDialog} ...${named} onDone=${() => {}} />`}
    ${dialog === "configure" && html`<${StreamConfigDialog} ...${named} config=${config.value} onDone=${changed} />`}
    ${dialog === "delete" && html`<${Confirm} title="Delete stream" action="Delete stream" name=${stream} onClose=${close} submit=${remove}>
      The stream <code class="name">${stream}</code> and all its records are deleted. This cannot be undone.<//>`}`;
}

// The snapshots of a stream: those that the server stores, those in its records, and what a new reader would get.

import { html, useState } from "../vendor/htm-preact.js";
import { getJson, request, streamPath } from "../api.js";
import { ago, bytes, number, plural, time } from "../format.js";
import { lookForSnapshots } from "../records/in_stream.js";
import { link } from "../routes.js";
import { Button, Check, Empty, Field, FormDialog, Notice, useConnection, useLoaded } from "../widgets.js";

function PublishDialog({ basin, stream, tail, onClose, onDone }) {
  const [at, setAt] = useState(String(tail));
  const [type, setType] = useState("application/json");
  const [text, setText] = useState("");
  const [file, setFile] = useState(null);
  const [trims, setTrims] = useState(false);
  const choose = (event) => {
    const [chosen] = event.target.files;
    setFile(chosen ?? null);
    if (chosen?.type) setType(chosen.type);
  };
  const submit = async () => {
    const headers = { "content-type": type, ...(trims ? { "stream-trim-on-snapshot": "true" } : {}) };
    await request(streamPath(stream, `/snapshot/${at}`), { basin, method: "PUT", headers, body: file ?? text });
    onDone();
  };
  return html`<${FormDialog} title="Publish snapshot" action="Publish" submit=${submit} onClose=${onClose} ready=${/^\d+$/.test(at)}>
    <p class="muted">A snapshot is the state that all records before a position make. New readers start with the newest one.</p>
    <div class="columns">
      <${Field} label="Position" hint="The first seq_num that it does not cover"><input name="position" inputmode="numeric" value=${at} onInput=${(event) => setAt(event.target.value)} /><//>
      <${Field} label="Content type"><input name="type" value=${type} onInput=${(event) => setType(event.target.value)} /><//>
    </div>
    <${Field} label="File"><input type="file" onChange=${choose} /><//>
    ${!file && html`<${Field} label="or text"><textarea name="content" rows="5" value=${text} onInput=${(event) => setText(event.target.value)}></textarea><//>`}
    <${Check} label="Trim the records that it covers" checked=${trims} onChange=${(event) => setTrims(event.target.checked)} />
  <//>`;
}

/** Save what the server has of a snapshot as a file; the browser never shows it. */
async function download(basin, stream, offset) {
  const response = await request(streamPath(stream, `/snapshot/${offset}`), { basin });
  const address = URL.createObjectURL(new Blob([await response.blob()], { type: "application/octet-stream" }));
  const anchor = document.createElement("a");
  anchor.href = address;
  anchor.download = `${stream.replace(/[^\w.-]+/g, "_")}-${offset}.snapshot`;
  anchor.click();
  URL.revokeObjectURL(address);
}

const Stored = ({ basin, stream, snapshots, onProblem }) => html`<section class="card"><header><h2>Stored with the stream</h2></header>
  ${snapshots?.length === 0
    ? html`<${Empty} title="No snapshot is stored with the stream."><p>Publish one here, or with <code>streamfold snapshot</code>.</p><//>`
    : html`<div class="scroll"><table><thead><tr><th>Position</th><th class="number">Size</th><th class="optional">Content type</th><th>Published</th><th><span class="visually-hidden">Actions</span></th></tr></thead>
    <tbody>${snapshots?.map((one, at) => html`<tr key=${one.offset}><td>${number(Number(one.offset))}${at === 0 && html` <span class="badge accent">newest</span>`}</td>
      <td class="number">${bytes(one.size_bytes)}</td><td class="optional name">${one.content_type}</td><td class="age" title=${time(one.created_at)}>${ago(one.created_at)}</td>
      <td><div class="row-actions"><${Button} icon="download" kind="quiet" label=${`Download snapshot at ${one.offset}`}
        onClick=${() => download(basin, stream, one.offset).catch(onProblem)} /></div></td></tr>`)}</tbody></table></div>`}</section>`;

const unknown = html`<span class="muted" title="Its first record is further back.">–</span>`;

/** Whether some records of a snapshot are missing: its last one was not written yet, or its first one is gone. */
const incomplete = ({ covers, records }, { beginning }) => records === null || (beginning && covers === null);

/** Which records were looked at, in words. */
const looked = ({ tail, from, beginning }) => (beginning ? "all records" : `the newest ${plural(tail - from, "record")}`);

const Inside = ({ basin, stream, look, error, loading, onFurther }) => html`<section class="card"><header><h2>Kept in the stream</h2>
    <span class="end">${look && html`<span class="muted">searched ${looked(look)}</span>`}
    ${look && !look.beginning && !look.snapshots.some((one) => one.whole) && html`<${Button} icon="search" disabled=${loading} onClick=${onFurther}>Look further back<//>`}</span></header>
  ${error && html`<div class="body"><${Notice}>The records of the stream cannot be searched for snapshots: ${error.message}<//></div>`}
  ${look && (look.snapshots.length === 0
    ? html`<${Empty} title=${look.tail === look.from ? "The stream has no records." : `No snapshot among ${looked(look)}.`}><p>Applications keep snapshots there with <code>follow(…, snapshots=in_stream())</code>.</p><//>`
    : html`<div class="scroll"><table><thead><tr><th>Position</th><th>Covers all before</th><th class="number">Size</th><th class="optional">Codec</th><th class="optional number">Records</th><th>Written</th></tr></thead>
    <tbody>${look.snapshots.map((one) => html`<tr key=${one.id}>
      <td><a href=${link(["basins", basin, stream], { seq: one.position })}>${number(one.position)}</a>${incomplete(one, look) && html` <span class="badge warn">incomplete</span>`}</td>
      <td>${one.covers === null ? unknown : number(one.covers)}</td><td class="number">${one.size === null ? unknown : bytes(one.size)}</td>
      <td class="optional name">${one.codec ?? unknown}</td><td class="optional number">${one.records === null ? unknown : number(one.records)}</td>
      <td class="age" title=${time(one.timestamp)}>${ago(one.timestamp)}</td></tr>`)}</tbody></table></div>`)}</section>`;

/** What a new reader gets, as far as the server can know. */
function Summary({ snapshots, tail, look }) {
  const [newest] = snapshots;
  if (newest) {
    return html`A new reader gets the snapshot at <b>${number(Number(newest.offset))}</b> (${bytes(newest.size_bytes)}) and then <b>${plural(tail - Number(newest.offset), "record")}</b>.`;
  }
  const inside = look?.snapshots.find((one) => one.whole);
  return inside
    ? html`No snapshot is stored with this stream. The newest in it covers all records before <b>${number(inside.covers)}</b>; <b>${plural(look.tail - inside.covers, "record")}</b> follow.`
    : html`No snapshot is stored with this stream: a reader without one gets all records, up to <b>${number(tail)}</b> of them.`;
}

export function Snapshots({ basin, stream }) {
  const [publishing, setPublishing] = useState(false);
  const [problem, setProblem] = useState(null);
  const [effort, setEffort] = useState(1);
  const { settings } = useConnection();
  const load = async () => {
    const [{ snapshots }, { tail }] = await Promise.all([
      getJson(streamPath(stream, "/snapshots"), { basin }), getJson(streamPath(stream, "/records/tail"), { basin })]);
    return { snapshots, tail: tail.seq_num };
  };
  const { value, error, reload } = useLoaded(load, [basin, stream]);
  const inside = useLoaded((signal) => lookForSnapshots(basin, stream, effort, signal), [basin, stream, effort]);
  return html`
    <div class="facts wrap">${value && html`<span><${Summary} ...${value} look=${inside.value} /></span>`}
      <${Button} icon="plus" kind="primary" disabled=${settings.read_only || !value} onClick=${() => setPublishing(true)}>Publish snapshot<//></div>
    <${Notice} error=${problem ?? error} />
    <${Stored} basin=${basin} stream=${stream} snapshots=${value?.snapshots} onProblem=${setProblem} />
    <${Inside} basin=${basin} stream=${stream} look=${inside.value} error=${inside.error} loading=${inside.loading} onFurther=${() => setEffort(4 * effort)} />
    <p class="muted">Snapshots that applications keep elsewhere, in a folder or a bucket, are not visible here.</p>
    ${publishing && html`<${PublishDialog} basin=${basin} stream=${stream} tail=${value.tail} onClose=${() => setPublishing(false)} onDone=${reload} />`}`;
}

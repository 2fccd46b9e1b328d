// The snapshots of a stream: those that the server stores, those in its records, and what a new reader would get.

import { html, useState } from "../vendor/htm-preact.js";
import { getJson, request, streamPath } from "../api.js";
import { ago, bytes, number, plural, zoned } from "../format.js";
import { Body } from "../records/bodies.js";
import { saveFile } from "../records/download.js";
import { lookForSnapshots, readSnapshot } from "../records/in_stream.js";
import { link } from "../routes.js";
import { Button, Check, Dialog, Empty, Field, FormDialog, Notice, useConnection, useLoaded } from "../widgets.js";

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
    <p class="muted">A snapshot is the state after all records before a position. New readers start with the newest one.</p>
    <div class="columns">
      <${Field} label="Position" hint="The first seq_num it does not cover"><input name="position" inputmode="numeric" value=${at} onInput=${(event) => setAt(event.target.value)} /><//>
      <${Field} label="Content type"><input name="type" value=${type} onInput=${(event) => setType(event.target.value)} /><//>
    </div>
    <${Field} label="File"><input type="file" onChange=${choose} /><//>
    ${!file && html`<${Field} label="or text"><textarea name="content" rows="5" value=${text} onInput=${(event) => setText(event.target.value)}></textarea><//>`}
    <${Check} label="Trim the records it covers" checked=${trims} onChange=${(event) => setTrims(event.target.checked)} />
  <//>`;
}

/** Bytes of a snapshot that the page shows; larger ones can be downloaded. */
const SHOWN_MAX = 4 * 2 ** 20;

/** A snapshot of either kind as the page shows it: a name, a size if that is known, and how to read its state. */
const stored = (basin, stream, { offset, size_bytes: size }) => ({
  name: offset, size,
  read: async (signal) => new Uint8Array(await (await request(streamPath(stream, `/snapshot/${offset}`), { basin, signal })).arrayBuffer()),
});
const inside = (basin, stream, one) => ({ name: String(one.position), size: one.size, read: (signal) => readSnapshot(basin, stream, one, signal) });

/** Save the state of a snapshot as a file. */
const download = async (stream, { name, read }) => saveFile(`${stream}-${name}.snapshot`, await read());

const Actions = ({ stream, snapshot, onProblem, onShow }) => html`<div class="row-actions">
  <${Button} icon="search" kind="quiet" label=${snapshot.size > SHOWN_MAX ? "Too large to show: download it" : `Show snapshot at ${snapshot.name}`}
    disabled=${snapshot.size > SHOWN_MAX} onClick=${() => onShow(snapshot)} />
  <${Button} icon="download" kind="quiet" label=${`Download snapshot at ${snapshot.name}`} onClick=${() => download(stream, snapshot).catch(onProblem)} /></div>`;

/** Shows the content of a snapshot, as a record's body is shown. */
function ContentDialog({ snapshot, onClose }) {
  const { value, error } = useLoaded(snapshot.read, [snapshot]);
  return html`<${Dialog} title=${`Snapshot at ${snapshot.name}`} wide onClose=${onClose}><div class="content">
    <${Notice} error=${error} />${value ? html`<${Body} body=${value} />` : !error && html`<p class="muted">reading …</p>`}</div><//>`;
}

const Stored = ({ basin, stream, snapshots, onProblem, onShow }) => html`<section class="card"><header><h2>Stored with the stream</h2></header>
  ${snapshots?.length === 0
    ? html`<${Empty} title="No snapshot is stored with the stream."><p>Publish one here, or with <code>streamfold snapshot</code>.</p><//>`
    : html`<div class="scroll"><table><thead><tr><th>Position</th><th class="number">Size</th><th class="optional">Content type</th><th>Published</th><th><span class="visually-hidden">Actions</span></th></tr></thead>
    <tbody>${snapshots?.map((one, at) => html`<tr key=${one.offset}><td>${number(Number(one.offset))}${at === 0 && html` <span class="badge accent">newest</span>`}</td>
      <td class="number">${bytes(one.size_bytes)}</td><td class="optional name">${one.content_type}</td><td class="age" title=${zoned(one.created_at)}>${ago(one.created_at)}</td>
      <td><${Actions} stream=${stream} snapshot=${stored(basin, stream, one)} onProblem=${onProblem} onShow=${onShow} /></td></tr>`)}</tbody></table></div>`}</section>`;

const unknown = html`<span class="muted" title="Its first record is further back.">–</span>`;

/** Whether some records of a snapshot are missing: its last one was not written yet, or its first one is gone. */
const incomplete = ({ covers, records }, { beginning }) => records === null || (beginning && covers === null);

/** Which records were looked at, in words. */
const looked = ({ tail, from, beginning }) => (beginning ? "all records" : `the newest ${plural(tail - from, "record")}`);

const Inside = ({ basin, stream, look, error, loading, onFurther, onProblem, onShow }) => html`<section class="card"><header><h2>Stored in the stream</h2>
    <span class="end">${look && html`<span class="muted">searched ${looked(look)}</span>`}
    ${look && !look.beginning && !look.snapshots.some((one) => one.whole) && html`<${Button} icon="search" disabled=${loading} onClick=${onFurther}>Look further back<//>`}</span></header>
  ${error && html`<div class="body"><${Notice}>The records of the stream cannot be searched for snapshots: ${error.message}<//></div>`}
  ${look && (look.snapshots.length === 0
    ? html`<${Empty} title=${look.tail === look.from ? "The stream has no records." : `No snapshot among ${looked(look)}.`}><p>Applications store snapshots there with <code>follow(…, snapshots=in_stream())</code>.</p><//>`
    : html`<div class="scroll"><table><thead><tr><th>Position</th><th>Covers all before</th><th class="number">Size</th><th class="optional">Codec</th><th class="optional number">Records</th><th class="optional">Written</th><th><span class="visually-hidden">Actions</span></th></tr></thead>
    <tbody>${look.snapshots.map((one) => html`<tr key=${one.id}>
      <td><a href=${link(["basins", basin, stream], { seq: one.position })}>${number(one.position)}</a>${incomplete(one, look) && html` <span class="badge warn">incomplete</span>`}</td>
      <td>${one.covers === null ? unknown : number(one.covers)}</td><td class="number">${one.size === null ? unknown : bytes(one.size)}</td>
      <td class="optional name">${one.codec ?? unknown}</td><td class="optional number">${one.records === null ? unknown : number(one.records)}</td>
      <td class="optional age" title=${zoned(one.timestamp)}>${ago(one.timestamp)}</td>
      <td>${one.whole && html`<${Actions} stream=${stream} snapshot=${inside(basin, stream, one)} onProblem=${onProblem} onShow=${onShow} />`}</td></tr>`)}</tbody></table></div>`)}</section>`;

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
  const [shown, setShown] = useState(null);
  const { settings } = useConnection();
  const load = async () => {
    const [{ snapshots }, { tail }] = await Promise.all([
      getJson(streamPath(stream, "/snapshots"), { basin }), getJson(streamPath(stream, "/records/tail"), { basin })]);
    return { snapshots, tail: tail.seq_num };
  };
  const { value, error, reload } = useLoaded(load, [basin, stream]);
  const look = useLoaded((signal) => lookForSnapshots(basin, stream, effort, signal), [basin, stream, effort]);
  return html`
    <div class="facts wrap">${value && html`<span><${Summary} ...${value} look=${look.value} /></span>`}
      <${Button} icon="plus" kind="primary" disabled=${settings.read_only || !value} onClick=${() => setPublishing(true)}>Publish snapshot<//></div>
    <${Notice} error=${problem ?? error} />
    <${Stored} basin=${basin} stream=${stream} snapshots=${value?.snapshots} onProblem=${setProblem} onShow=${setShown} />
    ${shown !== null && html`<${ContentDialog} snapshot=${shown} onClose=${() => setShown(null)} />`}
    <${Inside} basin=${basin} stream=${stream} look=${look.value} error=${look.error} loading=${look.loading}
      onFurther=${() => setEffort(4 * effort)} onProblem=${setProblem} onShow=${setShown} />
    <p class="muted">Snapshots that applications store elsewhere, in a folder or a bucket, are not visible here.</p>
    ${publishing && html`<${PublishDialog} basin=${basin} stream=${stream} tail=${value.tail} onClose=${() => setPublishing(false)} onDone=${reload} />`}`;
}

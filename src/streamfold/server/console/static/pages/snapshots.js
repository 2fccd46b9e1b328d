// The snapshots of a stream: list, download, publish, and what a new reader would get.

import { html, useState } from "../vendor/htm-preact.js";
import { getJson, request, streamPath } from "../api.js";
import { ago, bytes, number, plural, time } from "../format.js";
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

export function Snapshots({ basin, stream }) {
  const [publishing, setPublishing] = useState(false);
  const [problem, setProblem] = useState(null);
  const { settings } = useConnection();
  const load = async () => {
    const [{ snapshots }, { tail }] = await Promise.all([
      getJson(streamPath(stream, "/snapshots"), { basin }), getJson(streamPath(stream, "/records/tail"), { basin })]);
    return { snapshots, tail: tail.seq_num };
  };
  const { value, error, reload } = useLoaded(load, [basin, stream]);
  const newest = value?.snapshots[0];
  const behind = newest ? value.tail - Number(newest.offset) : value?.tail;
  return html`
    <div class="facts wrap">${value && html`<span>${newest
      ? html`A new reader gets the snapshot at <b>${number(Number(newest.offset))}</b> (${bytes(newest.size_bytes)}) and then <b>${plural(behind, "record")}</b>.`
      : html`There is no snapshot: a new reader gets all records, up to <b>${number(behind)}</b> of them.`}</span>`}
      <${Button} icon="plus" kind="primary" disabled=${settings.read_only || !value} onClick=${() => setPublishing(true)}>Publish snapshot<//></div>
    <${Notice} error=${problem ?? error} />
    <section class="card">${value?.snapshots.length === 0
      ? html`<${Empty} title="No snapshots."><p>Publish one here, or with <code>streamfold snapshot</code>.</p><//>`
      : html`<div class="scroll"><table><thead><tr><th>Position</th><th class="number">Size</th><th class="optional">Content type</th><th>Published</th><th><span class="visually-hidden">Actions</span></th></tr></thead>
      <tbody>${value?.snapshots.map((one, at) => html`<tr key=${one.offset}><td>${number(Number(one.offset))}${at === 0 && html` <span class="badge accent">newest</span>`}</td>
        <td class="number">${bytes(one.size_bytes)}</td><td class="optional name">${one.content_type}</td><td class="age" title=${time(one.created_at)}>${ago(one.created_at)}</td>
        <td><div class="row-actions"><${Button} icon="download" kind="quiet" label=${`Download snapshot at ${one.offset}`}
          onClick=${() => download(basin, stream, one.offset).catch(setProblem)} /></div></td></tr>`)}</tbody></table></div>`}</section>
    ${publishing && html`<${PublishDialog} basin=${basin} stream=${stream} tail=${value.tail} onClose=${() => setPublishing(false)} onDone=${reload} />`}`;
}

// One basin: its streams and its configuration.

import { html, useState } from "../vendor/htm-preact.js";
import { getJson, list, request, streamPath } from "../api.js";
import { ago } from "../format.js";
import { go, link } from "../routes.js";
import { Button, Confirm, Empty, Notice, Pager, Tabs, useConnection, useLoaded } from "../widgets.js";
import { Search } from "./basins.js";
import { BasinDialog, CreateStreamDialog, retentionText } from "./config.js";
import { Usage } from "./usage.js";

/** Streams that one page of the list shows. */
const PAGE = 200;

function StreamList({ basin, prefix, round, onDelete }) {
  const [after, setAfter] = useState([]);
  const { settings } = useConnection();
  const load = () => list("v1/streams", "streams", { basin, prefix, limit: PAGE, startAfter: after.at(-1) ?? "" });
  const { value, error } = useLoaded(load, [prefix, after, round]);
  if (error) return error.status !== 404 && html`<${Notice} error=${error} />`; // the page says that the basin is missing
  if (value?.items.length === 0 && !after.length) {
    return html`<section class="card"><${Empty} title=${prefix ? "No stream begins like that." : "This basin has no streams yet."}>
      ${!prefix && html`<p>Create one, or run <code>streamfold create-stream ${basin}/my-stream</code>.</p>`}<//></section>`;
  }
  return html`<section class="card"><div class="scroll"><table>
    <thead><tr><th>Name</th><th class="optional">Created</th><th><span class="visually-hidden">Actions</span></th></tr></thead>
    <tbody>${value?.items.map(({ name, created_at, deleted_at, cipher }) => html`<tr key=${name}>
      <td><a class="name" href=${link(["basins", basin, name])}>${name}</a> ${cipher && html`<span class="badge">${cipher}</span>`}
        ${deleted_at && html` <span class="badge warn">being deleted</span>`}</td>
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

export function BasinPage({ basin, tab }) {
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
      <${Search} label="Find by prefix" value=${prefix} onInput=${setPrefix} />
      <${StreamList} key=${prefix} basin=${basin} prefix=${prefix} round=${round} onDelete=${(stream) => setDialog({ remove: stream })} />`}
    ${dialog?.create && html`<${CreateStreamDialog} basin=${basin} defaults=${config.value?.default_stream_config} onClose=${close} onDone=${(name) => go(["basins", basin, name])} />`}
    ${dialog?.configure && html`<${BasinDialog} basin=${basin} config=${config.value} onClose=${close} onDone=${changed} />`}
    ${dialog?.remove && html`<${Confirm} title="Delete stream" action="Delete stream" name=${dialog.remove} onClose=${close} submit=${() => remove(dialog.remove)}>
      The stream <code class="name">${dialog.remove}</code> and all its records are deleted. This cannot be undone.<//>`}`;
}

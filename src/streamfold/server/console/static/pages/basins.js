// The basins of the server.

import { html, useState } from "../vendor/htm-preact.js";
import { list, request } from "../api.js";
import { ago, bytes } from "../format.js";
import { go, link } from "../routes.js";
import { storedBytesOfAll } from "../sizes.js";
import { Button, Confirm, Empty, Icon, Notice, useConnection, useLoaded } from "../widgets.js";
import { BasinDialog } from "./config.js";

/** Basins whose sizes are shown: each is a request. */
const SIZES = 200;

export const Search = ({ label, value, onInput }) => html`<div class="search"><${Icon} name="search" />
  <input type="search" aria-label=${label} placeholder=${label} value=${value} onInput=${(event) => onInput(event.target.value)} /></div>`;

export function BasinsPage() {
  const [prefix, setPrefix] = useState("");
  const [dialog, setDialog] = useState(null);
  const { settings } = useConnection();
  const { value, error, reload } = useLoaded(() => list("v1/basins", "basins", { prefix }), [prefix]);
  const names = value?.items.filter((one) => !one.deleted_at).map((one) => one.name).slice(0, SIZES) ?? [];
  const sizes = useLoaded((signal) => storedBytesOfAll(names.map((name) => [name]), signal), [names.join()]);
  const close = () => setDialog(null);
  const remove = async (name) => {
    await request(`v1/basins/${encodeURIComponent(name)}`, { method: "DELETE" });
    reload();
  };
  return html`
    <div class="page-head"><h1>Basins</h1>
      <div class="actions"><${Button} icon="plus" kind="primary" disabled=${settings.read_only} onClick=${() => setDialog({ create: true })}>Create basin<//></div></div>
    <${Search} label="Find by prefix" value=${prefix} onInput=${setPrefix} />
    <${Notice} error=${error} />
    <section class="card">${value?.items.length === 0
      ? html`<${Empty} title=${prefix ? "No basin name starts with this." : "There are no basins yet."}>
          ${!prefix && html`<p>A basin is a namespace for streams. Create one, or run <code>streamfold create-basin my-basin</code>.</p>`}<//>`
      : html`<div class="scroll"><table><thead><tr><th>Name</th><th class="number optional" title="Bodies and headers, and 8 bytes for each record: what S2 meters">Metered size</th><th class="optional">Created</th><th><span class="visually-hidden">Actions</span></th></tr></thead>
        <tbody>${value?.items.map(({ name, created_at, deleted_at }) => html`<tr key=${name}>
          <td><a class="name" href=${link(["basins", name])}>${name}</a> ${deleted_at && html`<span class="badge warn">being deleted</span>`}</td>
          <td class="number optional">${sizes.value?.get(name) === undefined ? "–" : bytes(sizes.value.get(name))}</td>
          <td class="optional age" title=${created_at}>${ago(Date.parse(created_at))}</td>
          <td><div class="row-actions"><${Button} icon="trash" kind="quiet" label=${`Delete basin ${name}`} disabled=${settings.read_only || Boolean(deleted_at)}
            onClick=${() => setDialog({ remove: name })} /></div></td>
        </tr>`)}</tbody></table></div>`}
      ${value?.more && html`<p class="body muted">Only the first 1,000 are shown: type a longer prefix.</p>`}
    </section>
    ${dialog?.create && html`<${BasinDialog} onClose=${close} onDone=${(name) => go(["basins", name])} />`}
    ${dialog?.remove && html`<${Confirm} title="Delete basin" action="Delete basin" name=${dialog.remove} onClose=${close} submit=${() => remove(dialog.remove)}>
      All streams of <code class="name">${dialog.remove}</code> and their records are deleted. This cannot be undone.<//>`}`;
}

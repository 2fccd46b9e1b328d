// Access tokens: issue, look at their scope, revoke.

import { html, useState } from "../vendor/htm-preact.js";
import { list, request, sendJson } from "../api.js";
import { time } from "../format.js";
import { Button, Check, Confirm, CopyButton, Dialog, Empty, Field, FormDialog, Notice, useConnection, useLoaded } from "../widgets.js";
import { parseDuration } from "./config.js";

const GROUPS = [["stream", "Records of streams"], ["basin", "Streams of basins"], ["account", "Basins and tokens"]];
const KINDS = { all: "all", prefix: "that begin with", exact: "named", none: "none" };

const resources = ({ kind, text }) => (kind === "none" ? undefined : kind === "exact" ? { exact: text } : { prefix: kind === "all" ? "" : text });

const expiry = (at) => (at ? time(Date.parse(at)).slice(0, 16) : "never");

/** A set of names in words. */
function inWords(set) {
  if (!set) return "none";
  if (set.exact !== undefined && set.exact !== null) return set.exact;
  return set.prefix ? `${set.prefix}…` : "all";
}

function permissions({ op_groups: groups, ops }) {
  const found = GROUPS.flatMap(([group]) => ["read", "write"].filter((kind) => groups?.[group]?.[kind]).map((kind) => `${group} ${kind}`));
  return [...found, ...(ops ?? [])].join(", ") || "nothing";
}

function ResourceField({ label, value, onChange }) {
  return html`<div class="field"><span class="label">${label}</span><div class="pair two">
    <select aria-label=${label} value=${value.kind} onChange=${(event) => onChange({ ...value, kind: event.target.value })}>
      ${Object.entries(KINDS).map(([id, text]) => html`<option key=${id} value=${id}>${text}</option>`)}</select>
    ${(value.kind === "prefix" || value.kind === "exact") && html`<input aria-label=${`${label}: name`} value=${value.text} onInput=${(event) => onChange({ ...value, text: event.target.value })} />`}
  </div></div>`;
}

function IssueDialog({ onClose, onIssued }) {
  const [form, setForm] = useState({
    id: "", lifetime: "", prefixed: false, basins: { kind: "all", text: "" }, streams: { kind: "all", text: "" }, tokens: { kind: "none", text: "" },
    groups: { stream: { read: true, write: false }, basin: { read: true, write: false }, account: { read: false, write: false } },
  });
  const set = (changes) => setForm({ ...form, ...changes });
  const submit = async () => {
    const expiry = form.lifetime.trim() ? { expires_at: new Date(Date.now() + parseDuration(form.lifetime) * 1000).toISOString() } : {};
    const { access_token: secret } = await sendJson("POST", "v1/access-tokens", {
      id: form.id, ...expiry, auto_prefix_streams: form.prefixed,
      scope: { basins: resources(form.basins), streams: resources(form.streams), access_tokens: resources(form.tokens), op_groups: form.groups },
    });
    onIssued({ id: form.id, secret });
  };
  const permit = (group, kind) => (event) => set({ groups: { ...form.groups, [group]: { ...form.groups[group], [kind]: event.target.checked } } });
  return html`<${FormDialog} title="Issue token" action="Issue" submit=${submit} onClose=${onClose} ready=${form.id !== ""}>
    <div class="columns">
      <${Field} label="Id" hint="A name to recognize it by"><input name="id" autocomplete="off" value=${form.id} onInput=${(event) => set({ id: event.target.value })} /><//>
      <${Field} label="Valid for" hint="For example 30d; empty: never expires"><input name="lifetime" value=${form.lifetime} onInput=${(event) => set({ lifetime: event.target.value })} /><//>
    </div>
    <table class="permissions"><thead><tr><th>May</th><th>read</th><th>write</th></tr></thead><tbody>
      ${GROUPS.map(([group, text]) => html`<tr key=${group}><td>${text}</td>${["read", "write"].map((kind) => html`<td key=${kind}><input type="checkbox" aria-label=${`${text}: ${kind}`}
        checked=${form.groups[group][kind]} onChange=${permit(group, kind)} /></td>`)}</tr>`)}</tbody></table>
    <${ResourceField} label="Basins" value=${form.basins} onChange=${(basins) => set({ basins })} />
    <${ResourceField} label="Streams" value=${form.streams} onChange=${(streams) => set({ streams })} />
    <${ResourceField} label="Tokens" value=${form.tokens} onChange=${(tokens) => set({ tokens })} />
    <${Check} label="Add the streams' prefix to names" hint="Clients with the token see stream names without it." checked=${form.prefixed} onChange=${(event) => set({ prefixed: event.target.checked })} />
  <//>`;
}

const Issued = ({ id, secret, onClose }) => html`<${Dialog} title=${`Token ${id}`} onClose=${onClose}><div class="content">
  <p>Copy it now. It is not shown again: the server stores only its hash.</p>
  <pre class="content">${secret}</pre>
  <footer><${CopyButton} text=${secret}>Copy<//><${Button} kind="primary" onClick=${onClose}>Done<//></footer></div><//>`;

export function TokensPage() {
  const [dialog, setDialog] = useState(null);
  const { settings } = useConnection();
  const { value, error, reload } = useLoaded(() => list("v1/access-tokens", "access_tokens"), []);
  const close = () => setDialog(null);
  const issued = (token) => {
    reload();
    setTimeout(() => setDialog({ issued: token }));
  };
  const revoke = async (id) => {
    await request(`v1/access-tokens/${encodeURIComponent(id)}`, { method: "DELETE" });
    reload();
  };
  return html`
    <div class="page-head"><h1>Access tokens</h1><div class="actions">
      <${Button} icon="plus" kind="primary" disabled=${settings.read_only} onClick=${() => setDialog({ issue: true })}>Issue token<//></div></div>
    ${!settings.guarded && html`<${Notice} kind="warn">This server does not check tokens. Start it with <code class="option">--auth</code> to require them.<//>`}
    <${Notice} error=${error} />
    <section class="card">${value?.items.length === 0
      ? html`<${Empty} title="No tokens have been issued."><p>The root token is not listed.</p><//>`
      : html`<div class="scroll"><table><thead><tr><th>Token</th><th>Operations</th><th class="optional">Basins</th><th class="optional">Streams</th><th class="optional">Expires</th><th><span class="visually-hidden">Actions</span></th></tr></thead>
      <tbody>${value?.items.map(({ id, scope, expires_at }) => html`<tr key=${id}><td class="name"><b>${id}</b></td><td class="muted">${permissions(scope)}
          <div class="narrow">basins ${inWords(scope.basins)}<br />streams ${inWords(scope.streams)}<br />expires ${expiry(expires_at)}</div></td>
        <td class="optional name">${inWords(scope.basins)}</td><td class="optional name">${inWords(scope.streams)}</td>
        <td class="optional muted">${expiry(expires_at)}</td>
        <td><div class="row-actions"><${Button} icon="trash" kind="quiet" label=${`Revoke token ${id}`} disabled=${settings.read_only} onClick=${() => setDialog({ revoke: id })} /></div></td></tr>`)}</tbody></table></div>`}</section>
    ${dialog?.issue && html`<${IssueDialog} onClose=${close} onIssued=${issued} />`}
    ${dialog?.issued && html`<${Issued} ...${dialog.issued} onClose=${close} />`}
    ${dialog?.revoke && html`<${Confirm} title="Revoke token" action="Revoke" onClose=${close} submit=${() => revoke(dialog.revoke)}>
      Clients that use <code class="name">${dialog.revoke}</code> are refused at once, and their sessions end.<//>`}`;
}

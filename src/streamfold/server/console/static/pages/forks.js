// What a stream was forked from, and the streams that are forked from it.

import { html, useState } from "../vendor/htm-preact.js";
import { getJson, request, streamPath } from "../api.js";
import { ago, number, zoned } from "../format.js";
import { go, link } from "../routes.js";
import { Button, Empty, Field, FormDialog, Notice, Pager, useConnection, useLoaded } from "../widgets.js";

/** A page of forks after `cursor`, which the page before it gave. */
export const forksOf = (basin, stream, cursor = 0) => getJson(streamPath(stream, `/forks?start_after=${cursor}`), { basin });

/** Where a fork starts: the stream, unless this token may not see it, and the position, linked to its record. */
export function Origin({ basin, origin: { stream, seq_num: at, sub_offset: rest } }) {
  const position = html`<b>${number(at)}</b>${rest > 0 && html`, ${number(rest)} into the append there`}`;
  return stream === null
    ? html`a stream that this token may not see, at ${position}`
    : html`<a class="name" href=${link(["basins", basin, stream], { seq: Math.max(0, at - 1) })}>${stream}</a> at ${position}`;
}

/** Asks for the name and the position of a new fork. */
function ForkDialog({ basin, stream, tail, onClose, onDone }) {
  const [name, setName] = useState("");
  const [at, setAt] = useState(tail === undefined ? "" : String(tail));
  const submit = async () => {
    const headers = {
      "stream-forked-from": `/${encodeURIComponent(basin)}/${encodeURIComponent(stream)}`,
      "stream-fork-offset": `${at.padStart(16, "0")}_${"0".repeat(16)}`,
    };
    await request(`${encodeURIComponent(basin)}/${encodeURIComponent(name)}`, { method: "PUT", headers });
    onDone(name);
  };
  return html`<${FormDialog} title="Create fork" action="Create" submit=${submit} onClose=${onClose} ready=${name !== "" && /^\d{1,16}$/.test(at)}>
    <p class="muted">A fork shares all records before a position and continues on its own. Nothing is copied.</p>
    <${Field} label="Name"><input name="fork-name" autocomplete="off" value=${name} onInput=${(event) => setName(event.target.value)} /><//>
    <${Field} label="Position" hint="The seq_num of the fork's first own record"><input name="position" inputmode="numeric" value=${at} onInput=${(event) => setAt(event.target.value)} /><//>
  <//>`;
}

export function Forks({ basin, stream, tail }) {
  const [creating, setCreating] = useState(false);
  const { settings } = useConnection();
  return html`<div class="facts wrap"><span></span><${Button} icon="plus" kind="primary" disabled=${settings.read_only} onClick=${() => setCreating(true)}>Create fork<//></div>
    <${ForkList} basin=${basin} stream=${stream} />
    ${creating && html`<${ForkDialog} basin=${basin} stream=${stream} tail=${tail} onClose=${() => setCreating(false)} onDone=${(name) => go(["basins", basin, name])} />`}`;
}

function ForkList({ basin, stream }) {
  const [cursors, setCursors] = useState([]);
  const { value, error } = useLoaded(() => forksOf(basin, stream, cursors.at(-1)), [basin, stream, cursors]);
  if (error) return html`<${Notice} error=${error} />`;
  if (value?.forks.length === 0 && value.next === null && !cursors.length) {
    return html`<section class="card"><${Empty} title="This stream has no forks.">
      <p>A fork shares the records before a position and continues on its own; nothing is copied. Create one here, or with Durable Streams: <code>PUT</code> with <code>Stream-Forked-From</code>.</p><//></section>`;
  }
  return html`<section class="card"><div class="scroll"><table>
    <thead><tr><th>Fork</th><th>Forked from</th><th class="optional">Created</th></tr></thead>
    <tbody>${value?.forks.map((fork) => html`<tr key=${fork.stream}>
      <td><a class="name" href=${link(["basins", basin, fork.stream])}>${fork.stream}</a>${fork.deleted_at !== null && html` <span class="badge warn">deleted</span>`}</td>
      <td><${Origin} basin=${basin} origin=${fork.origin} /></td>
      <td class="optional age" title=${zoned(fork.created_at)}>${ago(fork.created_at)}</td></tr>`)}</tbody></table></div>
    <${Pager} cursors=${cursors} next=${value?.next} onMove=${setCursors} /></section>`;
}

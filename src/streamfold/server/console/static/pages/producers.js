// The producers of a stream: how far each has come.

import { html, useState } from "../vendor/htm-preact.js";
import { getJson, streamPath } from "../api.js";
import { ago, number, zoned } from "../format.js";
import { Button, Empty, Notice, Pager, useLoaded } from "../widgets.js";

const producersOf = (basin, stream, after = "") =>
  getJson(streamPath(stream, `/producers?${new URLSearchParams({ start_after: after })}`), { basin });

export function Producers({ basin, stream }) {
  const [cursors, setCursors] = useState([]);
  const { value, error, reload } = useLoaded(() => producersOf(basin, stream, cursors.at(-1)), [basin, stream, cursors]);
  if (error) return html`<${Notice} error=${error} />`;
  if (value?.producers.length === 0 && !cursors.length) {
    return html`<section class="card"><${Empty} title="No producer has appended to this stream.">
      <p>A producer numbers its appends, so that a repeated append is stored only once. It sends <code>Producer-Id</code>, <code>Producer-Epoch</code> and <code>Producer-Seq</code> through Durable Streams.</p><//></section>`;
  }
  return html`<div class="facts wrap"><span>Each producer must send its next sequence number. Appends from an older epoch are refused.</span><${Button} onClick=${reload}>Refresh<//></div>
    <section class="card"><div class="scroll"><table>
    <thead><tr><th>Producer</th><th class="number">Epoch</th><th class="number">Next seq</th><th>Last append</th></tr></thead>
    <tbody>${value?.producers.map((one) => html`<tr key=${one.id}><td class="name mono">${one.id}</td><td class="number">${number(one.epoch)}</td>
      <td class="number">${number(one.next_seq)}</td><td class="age" title=${zoned(one.last_seen_at)}>${ago(one.last_seen_at)}</td></tr>`)}</tbody></table></div>
    <${Pager} cursors=${cursors} next=${value?.has_more ? value.producers.at(-1).id : null} onMove=${setCursors} /></section>`;
}

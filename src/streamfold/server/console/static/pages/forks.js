// What a stream was forked from, and the streams that are forked from it.

import { html, useState } from "../vendor/htm-preact.js";
import { getJson, streamPath } from "../api.js";
import { ago, number, time } from "../format.js";
import { link } from "../routes.js";
import { Empty, Notice, Pager, useLoaded } from "../widgets.js";

/** A page of forks after `cursor`, which the page before it gave. */
export const forksOf = (basin, stream, cursor = 0) => getJson(streamPath(stream, `/forks?start_after=${cursor}`), { basin });

/** Where a fork starts: the stream, unless this token may not see it, and the position, linked to its record. */
export function Origin({ basin, origin: { stream, seq_num: at, sub_offset: rest } }) {
  const position = html`<b>${number(at)}</b>${rest > 0 && html`, ${number(rest)} into the append there`}`;
  return stream === null
    ? html`a stream that this token may not see, at ${position}`
    : html`<a class="name" href=${link(["basins", basin, stream], { seq: Math.max(0, at - 1) })}>${stream}</a> at ${position}`;
}

export function Forks({ basin, stream }) {
  const [cursors, setCursors] = useState([]);
  const { value, error } = useLoaded(() => forksOf(basin, stream, cursors.at(-1)), [basin, stream, cursors]);
  if (error) return html`<${Notice} error=${error} />`;
  if (value?.forks.length === 0 && value.next === null && !cursors.length) {
    return html`<section class="card"><${Empty} title="No stream is forked from this one.">
      <p>A fork shares the records before a position and continues on its own; nothing is copied. Create one with Durable Streams: <code>PUT</code> with <code>Stream-Forked-From</code>.</p><//></section>`;
  }
  return html`<section class="card"><div class="scroll"><table>
    <thead><tr><th>Fork</th><th>Forked from</th><th class="optional">Created</th></tr></thead>
    <tbody>${value?.forks.map((fork) => html`<tr key=${fork.stream}>
      <td><a class="name" href=${link(["basins", basin, fork.stream])}>${fork.stream}</a>${fork.deleted_at !== null && html` <span class="badge warn">deleted</span>`}</td>
      <td><${Origin} basin=${basin} origin=${fork.origin} /></td>
      <td class="optional age" title=${time(fork.created_at)}>${ago(fork.created_at)}</td></tr>`)}</tbody></table></div>
    <${Pager} cursors=${cursors} next=${value?.next} onMove=${setCursors} /></section>`;
}

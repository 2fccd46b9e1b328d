// One record: position, headers, body, and how to get it elsewhere.

import { html } from "../vendor/htm-preact.js";
import { ago, bytes, number, zoned } from "../format.js";
import { link } from "../routes.js";
import { Button, CopyButton, useConnection } from "../widgets.js";
import { Body } from "./bodies.js";
import { saveBody } from "./download.js";
import { command, hexLine, plainText, snapshotFrame } from "./record.js";
import { readSnippets } from "./snippets.js";

const shown = (content) => plainText(content) ?? hexLine(content.subarray(0, 64));

function Headers({ headers }) {
  if (!headers.length) return null;
  return html`<section><h3>Headers</h3><div class="scroll"><table class="headers"><tbody>
    ${headers.map(([name, value], at) => html`<tr key=${at}><th scope="row" class="mono">${shown(name) || "(empty)"}</th><td class="mono">${shown(value)}</td></tr>`)}
  </tbody></table></div></section>`;
}

export function Detail({ basin, stream, record, onClose, onStep }) {
  const { settings } = useConnection();
  const snippets = readSnippets(basin, stream, record.seqNum, settings.guarded);
  const done = command(record);
  const frame = snapshotFrame(record);
  const address = () => new URL(link(["basins", basin, stream], { seq: record.seqNum }), location.href).href;
  return html`<aside class="card detail" aria-label=${`Record ${record.seqNum}`}>
    <header><h2>Record ${number(record.seqNum)}</h2><div class="end">
      <${Button} icon="up" label="Previous record" kind="quiet" onClick=${() => onStep(-1)} />
      <${Button} icon="down" label="Next record" kind="quiet" onClick=${() => onStep(1)} />
      <${Button} icon="close" label="Close record" kind="quiet" onClick=${onClose} /></div></header>
    <div class="body">
      <dl>
        <dt>seq_num</dt><dd class="mono">${String(record.seqNum)}</dd>
        <dt>timestamp</dt><dd><span class="mono">${String(record.timestamp)}</span> <span class="whole muted">${zoned(record.timestamp)}, ${ago(record.timestamp)}</span></dd>
        <dt>size</dt><dd>${bytes(record.body.length)} body, ${bytes(record.size)} metered with headers</dd>
        ${done && html`<dt>command</dt><dd><span class="badge accent">${done.name}</span> <span class="mono name">${done.argument || "(empty)"}</span></dd>`}
        ${frame && html`<dt>snapshot</dt><dd>${frame}</dd>`}
      </dl>
      <div class="copies" role="group" aria-label="Copy">
        <${CopyButton} text=${address}>Link<//>
        <${CopyButton} text=${() => plainText(record.body) ?? hexLine(record.body)}>Body<//>
        <${CopyButton} text=${snippets.curl}>curl<//><${CopyButton} text=${snippets.cli}>CLI<//><${CopyButton} text=${snippets.python}>Python<//>
        <${Button} icon="download" kind="quiet" onClick=${() => saveBody(stream, record)}>Download<//>
      </div>
      <${Headers} headers=${record.headers} />
      <section><h3>Body</h3><${Body} key=${record.seqNum} body=${record.body} /></section>
    </div>
  </aside>`;
}

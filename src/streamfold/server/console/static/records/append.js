// Append records from the page; trim and fence, which are records too.

import { html, useState } from "../vendor/htm-preact.js";
import { sendJson, streamPath } from "../api.js";
import { number } from "../format.js";
import { Button, Check, Field, FormDialog, Notice } from "../widgets.js";
import { toBase64 } from "./record.js";

const encoder = new TextEncoder();
const base64 = (text) => toBase64(encoder.encode(text));
/** Bodies that one request carries. */
const BATCH_MAX = 1000;

function append(basin, stream, input) {
  return sendJson("POST", streamPath(stream, "/records"), input, { basin, headers: { "s2-format": "base64" } });
}

function HeaderFields({ headers, setHeaders }) {
  const set = (at, part, value) => setHeaders(headers.map((pair, index) => (index === at ? Object.assign([...pair], { [part]: value }) : pair)));
  return html`<div class="field"><span class="label">Headers</span>
    ${headers.map(([name, value], at) => html`<div class="pair" key=${at}>
      <input aria-label="Header name" placeholder="name" value=${name} onInput=${(event) => set(at, 0, event.target.value)} />
      <input aria-label="Header value" placeholder="value" value=${value} onInput=${(event) => set(at, 1, event.target.value)} />
      <${Button} icon="close" kind="quiet" label="Remove header" onClick=${() => setHeaders(headers.filter((_, index) => index !== at))} /></div>`)}
    <div><${Button} icon="plus" kind="quiet" onClick=${() => setHeaders([...headers, ["", ""]])}>Add header<//></div></div>`;
}

export function AppendDialog({ basin, stream, onClose, onDone }) {
  const [body, setBody] = useState("");
  const [lines, setLines] = useState(false);
  const [headers, setHeaders] = useState([]);
  const [conditions, setConditions] = useState({ match: "", fence: "" });
  const submit = async () => {
    const bodies = lines ? body.split("\n").filter((line, at, all) => line || at < all.length - 1) : [body];
    if (bodies.length > BATCH_MAX) throw new Error(`${number(bodies.length)} lines are too many: ${number(BATCH_MAX)} records at most are appended together.`);
    const pairs = headers.filter(([name]) => name).map((pair) => pair.map(base64));
    const ack = await append(basin, stream, {
      records: bodies.map((one) => ({ body: base64(one), ...(pairs.length ? { headers: pairs } : {}) })),
      ...(conditions.match ? { match_seq_num: Number(conditions.match) } : {}),
      ...(conditions.fence ? { fencing_token: conditions.fence } : {}),
    });
    onDone(ack);
  };
  const condition = (name) => (event) => setConditions({ ...conditions, [name]: event.target.value });
  return html`<${FormDialog} title="Append" action="Append" wide submit=${submit} onClose=${onClose}>
    <${Field} label="Body"><textarea name="body" autofocus rows="8" spellcheck=${false} value=${body} onInput=${(event) => setBody(event.target.value)}></textarea><//>
    <${Check} label="One record per line" checked=${lines} onChange=${(event) => setLines(event.target.checked)} />
    <${HeaderFields} headers=${headers} setHeaders=${setHeaders} />
    <details><summary>Conditions</summary><div class="columns inset">
      <${Field} label="Only if the next seq_num is"><input name="match" inputmode="numeric" pattern="[0-9]*" value=${conditions.match} onInput=${condition("match")} /><//>
      <${Field} label="Only if the fencing token is"><input name="fence" maxlength="36" value=${conditions.fence} onInput=${condition("fence")} /><//>
    </div></details>
  <//>`;
}

export function TrimDialog({ basin, stream, tail, onClose, onDone }) {
  const [text, setText] = useState("");
  const chosen = /^\d{1,19}$/.test(text);
  const submit = async () => {
    const bytes = new Uint8Array(8);
    new DataView(bytes.buffer).setBigUint64(0, BigInt(text));
    onDone(await append(basin, stream, { records: [{ headers: [["", base64("trim")]], body: toBase64(bytes) }] }));
  };
  return html`<${FormDialog} title="Trim stream" action="Trim" danger submit=${submit} onClose=${onClose} ready=${chosen}>
    <p>Removes all records before a seq_num. This cannot be undone.${tail !== undefined && html` The tail is ${number(tail)}.`}</p>
    <${Field} label="Oldest seq_num to keep"><input name="seq-num" inputmode="numeric" value=${text} onInput=${(event) => setText(event.target.value)} /><//>
    ${chosen && tail !== undefined && BigInt(text) >= BigInt(tail) && html`<${Notice} kind="warn">No record that is stored now is kept.<//>`}
  <//>`;
}

export function FenceDialog({ basin, stream, onClose, onDone }) {
  const [token, setToken] = useState("");
  const submit = async () => onDone(await append(basin, stream, { records: [{ headers: [["", base64("fence")]], body: base64(token) }] }));
  return html`<${FormDialog} title="Set fencing token" action="Set token" submit=${submit} onClose=${onClose}>
    <p>Writers that send another token are refused from then on. Writers that send none are not.</p>
    <${Field} label="Token" hint="Up to 36 bytes; empty removes the token."><input name="fence" maxlength="36" value=${token} onInput=${(event) => setToken(event.target.value)} /><//>
  <//>`;
}

// Append records from the page; trim and fence, which are records too.

import { html, useState } from "../vendor/htm-preact.js";
import { sendJson, streamPath } from "../api.js";
import { number } from "../format.js";
import { Button, Check, Choice, Field, FormDialog, Notice } from "../widgets.js";
import { toBase64 } from "./record.js";

const encoder = new TextEncoder();
const base64 = (text) => toBase64(encoder.encode(text));
/** How a typed body becomes bytes. */
const FORMS = {
  text: ["Text", (body) => base64(body)],
  hex: ["Hex", (body) => {
    const digits = body.replace(/\s+/g, "");
    if (digits.length % 2 || /[^\da-f]/i.test(digits)) throw new Error("The body is not hexadecimal: write two digits for each byte, as in 00 ff.");
    return toBase64(Uint8Array.from(digits.match(/../g) ?? [], (pair) => parseInt(pair, 16)));
  }],
  base64: ["Base64", (body) => {
    const packed = body.replace(/\s+/g, "");
    try {
      atob(packed);
    } catch {
      throw new Error("The body is not base64.");
    }
    return packed;
  }],
};
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

const splitLines = (body) => body.split("\n").filter((line, at, all) => line || at < all.length - 1);

/** The bodies of what was typed, in base64. */
const typedBodies = (body, form, lines) => (lines ? splitLines(body) : [body]).map(FORMS[form][1]);

/** The bodies of files, in base64: each file whole, or its lines. */
async function fileBodies(chosen, lines) {
  const bodies = [];
  for (const file of chosen) {
    if (lines) bodies.push(...splitLines(await file.text()).map(base64));
    else bodies.push(toBase64(new Uint8Array(await file.arrayBuffer())));
  }
  return bodies;
}

export function AppendDialog({ basin, stream, onClose, onDone }) {
  const [body, setBody] = useState("");
  const [lines, setLines] = useState(false);
  const [form, setForm] = useState("text");
  const [chosen, setChosen] = useState([]);
  const [headers, setHeaders] = useState([]);
  const [conditions, setConditions] = useState({ match: "", fence: "" });
  const submit = async () => {
    const bodies = chosen.length ? await fileBodies(chosen, lines) : typedBodies(body, form, lines);
    if (bodies.length > BATCH_MAX) throw new Error(`${number(bodies.length)} lines are too many: one append takes at most ${number(BATCH_MAX)} records.`);
    const pairs = headers.filter(([name]) => name).map((pair) => pair.map(base64));
    const ack = await append(basin, stream, {
      records: bodies.map((one) => ({ body: one, ...(pairs.length ? { headers: pairs } : {}) })),
      ...(conditions.match ? { match_seq_num: Number(conditions.match) } : {}),
      ...(conditions.fence ? { fencing_token: conditions.fence } : {}),
    });
    onDone(ack);
  };
  const condition = (name) => (event) => setConditions({ ...conditions, [name]: event.target.value });
  return html`<${FormDialog} title="Append" action="Append" wide submit=${submit} onClose=${onClose}>
    ${!chosen.length && html`<${Field} label="Body"><textarea name="body" autofocus rows="8" spellcheck=${false} value=${body} onInput=${(event) => setBody(event.target.value)}></textarea><//>
    <${Choice} label="Written as" value=${form} onChange=${setForm} options=${Object.entries(FORMS).map(([id, [text]]) => [id, text])} />`}
    <${Field} label="or files, each of which becomes a record"><input type="file" multiple onChange=${(event) => setChosen([...event.target.files])} /><//>
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
    ${chosen && tail !== undefined && BigInt(text) >= BigInt(tail) && html`<${Notice} kind="warn">This removes every record stored now.<//>`}
  <//>`;
}

export function FenceDialog({ basin, stream, onClose, onDone }) {
  const [token, setToken] = useState("");
  const submit = async () => onDone(await append(basin, stream, { records: [{ headers: [["", base64("fence")]], body: base64(token) }] }));
  return html`<${FormDialog} title="Set fencing token" action="Set token" submit=${submit} onClose=${onClose}>
    <p>Appends with a different token are refused from then on. Appends without a token are not.</p>
    <${Field} label="Token" hint="Up to 36 bytes; empty removes the token."><input name="fence" maxlength="36" value=${token} onInput=${(event) => setToken(event.target.value)} /><//>
  <//>`;
}

// The body of a record as text, as a tree of JSON or protobuf, or as bytes in hexadecimal: never as markup.

import { html, useMemo, useState } from "../vendor/htm-preact.js";
import { bytes as sizeText, number } from "../format.js";
import { Button, Choice } from "../widgets.js";
import { parseProtobuf } from "./protobuf.js";
import { ExactNumber, parseJson, plainText, text } from "./record.js";

/** Characters, bytes and children that are shown at first, and with each further click. */
const TEXT_STEP = 20_000;
const HEX_STEP = 2048;
const CHILDREN_STEP = 100;
/** Bytes beyond which a body is not parsed for a tree until that is asked for. */
const JSON_MAX = 4 * 2 ** 20;
/** Bytes of a line in hexadecimal: as many as fit beside their text on a phone. */
const HEX_ROW = 8;

function More({ shown, total, unit, onMore }) {
  if (shown >= total) return null;
  return html`<div class="more"><span class="muted">${number(shown)} of ${number(total)} ${unit}</span>
    <${Button} onClick=${onMore}>Show more<//></div>`;
}

function TextBody({ content }) {
  const [shown, setShown] = useState(TEXT_STEP);
  return html`<pre class="content">${content.slice(0, shown)}</pre>
    <${More} shown=${shown} total=${content.length} unit="characters" onMore=${() => setShown(shown * 4)} />`;
}

function HexBody({ body }) {
  const [shown, setShown] = useState(HEX_STEP);
  const lines = [];
  for (let at = 0; at < Math.min(shown, body.length); at += HEX_ROW) {
    const row = [...body.subarray(at, at + HEX_ROW)];
    const hex = row.map((byte) => byte.toString(16).padStart(2, "0")).join(" ").padEnd(HEX_ROW * 3 - 1);
    const ascii = row.map((byte) => (byte > 31 && byte < 127 ? String.fromCharCode(byte) : "·")).join("");
    lines.push(`${at.toString(16).padStart(6, "0")}  ${hex}  ${ascii}`);
  }
  return html`<pre class="content hex">${lines.join("\n")}</pre>
    <${More} shown=${Math.min(shown, body.length)} total=${body.length} unit="bytes" onMore=${() => setShown(shown * 4)} />`;
}

const isNode = (value) => value !== null && typeof value === "object" && !(value instanceof ExactNumber);

function Scalar({ value }) {
  const kind = value === null ? "null" : value instanceof ExactNumber ? "number" : typeof value;
  const shown = kind === "string" ? JSON.stringify(value) : String(value);
  return html`<span class=${`json-${kind}`}>${shown.length > 2000 ? `${shown.slice(0, 2000)}…` : shown}</span>`;
}

/** A value of a JSON document; children are made when it is opened. */
function Tree({ name, value, depth }) {
  const [open, setOpen] = useState(depth < 2);
  const [shown, setShown] = useState(CHILDREN_STEP);
  const label = name === null ? null : html`<span class="json-key">${name}</span><span class="muted">: </span>`;
  if (!isNode(value)) return html`<li class="leaf">${label}<${Scalar} value=${value} /></li>`;
  const keys = Array.isArray(value) ? null : Object.keys(value);
  const total = keys ? keys.length : value.length;
  const summary = keys ? `{${total}}` : `[${total}]`;
  const children = [];
  if (open) {
    for (let at = 0; at < Math.min(total, shown); at += 1) {
      const key = keys ? keys[at] : at;
      children.push(html`<${Tree} key=${key} name=${String(key)} value=${value[key]} depth=${depth + 1} />`);
    }
  }
  return html`<li><button type="button" class="json-toggle" aria-expanded=${open} onClick=${() => setOpen(!open)}>
      <span class="arrow" aria-hidden="true">${open ? "▾" : "▸"}</span>${label}<span class="muted">${summary}</span></button>
    ${open && html`<ul>${children}</ul>`}
    ${open && html`<${More} shown=${shown} total=${total} unit="members" onMore=${() => setShown(shown * 4)} />`}</li>`;
}

export function Body({ body }) {
  const content = useMemo(() => plainText(body), [body]);
  const [forced, force] = useState(false);
  const json = useMemo(() => (content !== null && (forced || body.length <= JSON_MAX) ? parseJson(content) : undefined), [content, forced]);
  const message = useMemo(() => (content === null ? parseProtobuf(body) : undefined), [body]);
  const natural = json !== undefined && isNode(json) ? "json" : content === null ? "hex" : "text";
  const [chosen, choose] = useState(null);
  const view = chosen ?? natural;
  if (!body.length) return html`<p class="muted">The body is empty.</p>`;
  return html`<div class="body-head"><${Choice} label="Show the body as" value=${view} onChange=${(id) => (id === "json" && force(true), choose(id))}
      options=${[["text", "Text"], ["json", "JSON"], ...(message ? [["protobuf", "Protobuf"]] : []), ["hex", "Hex"]]} /><span class="muted">${sizeText(body.length)}</span></div>
    ${view === "text" && html`<${TextBody} content=${content ?? text(body)} />`}
    ${view === "hex" && html`<${HexBody} body=${body} />`}
    ${view === "protobuf" && html`<ul class="json"><${Tree} name=${null} value=${message} depth=${0} /></ul>`}
    ${view === "json" && (json === undefined ? html`<p class="muted">The body is not JSON.</p>` : html`<ul class="json"><${Tree} name=${null} value=${json} depth=${0} /></ul>`)}`;
}

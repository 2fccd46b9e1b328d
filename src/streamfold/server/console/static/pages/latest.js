// A stream as a table: the latest record of each key.

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { ago, number, plural, zoned } from "../format.js";
import { saveRecords } from "../records/download.js";
import { parseKey } from "../records/filter.js";
import { preview } from "../records/record.js";
import { LatestSource } from "../records/sources.js";
import { link, replaceQuery } from "../routes.js";
import { Button, Empty, Field, Notice, useConnection } from "../widgets.js";

/** Rows that are shown at first, and more with each click. */
const STEP = 200;
/** Numbers in keys are ordered by their value: 2 comes before 10. */
const byName = new Intl.Collator("en", { numeric: true });

function useLatest(basin, stream, key) {
  const [, draw] = useState(0);
  const [source, setSource] = useState(null);
  const [error, setError] = useState(null);
  const { online, needsToken } = useConnection();
  useEffect(() => {
    if (!key || !online || needsToken) return undefined;
    setError(null);
    let made;
    try {
      made = new LatestSource(basin, stream, parseKey(key), () => draw((count) => count + 1));
    } catch (malformed) {
      setSource(null);
      setError(malformed);
      return undefined;
    }
    setSource(made);
    made.open().then(() => made.follow(), setError);
    return () => made.close();
  }, [basin, stream, key, online, needsToken]);
  return [source, error ?? source?.error];
}

const Rows = ({ basin, stream, rows }) => html`<div class="scroll"><table>
  <thead><tr><th>Key</th><th class="number">seq_num</th><th class="optional">Time</th><th>Latest record</th></tr></thead>
  <tbody>${rows.map(([key, record]) => html`<tr key=${key}><td class="mono name">${key}</td>
    <td class="number"><a href=${link(["basins", basin, stream], { seq: record.seqNum })}>${number(record.seqNum)}</a></td>
    <td class="optional age" title=${zoned(record.timestamp)}>${ago(record.timestamp)}</td>
    <td class="mono name">${record.body.length ? preview(record).text : html`<span class="muted">empty body</span>`}</td></tr>`)}</tbody></table></div>`;

export function Latest({ basin, stream, query }) {
  const [key, setKey] = useState(query.get("key") ?? "");
  const [text, setText] = useState(key);
  const [shown, setShown] = useState(STEP);
  const [source, error] = useLatest(basin, stream, key);
  const submit = (event) => {
    event.preventDefault();
    setKey(text.trim());
    replaceQuery({ tab: "latest", key: text.trim() });
  };
  const rows = source ? [...source.latest].sort(([one], [other]) => byName.compare(one, other)) : [];
  const searching = source && source.scanned < source.tail;
  return html`<form onSubmit=${submit}><${Field} label="Key" hint="A header, as in header:item, or a path in a JSON body, as in $.item"><div class="pair two latest">
      <input name="key" autocomplete="off" spellcheck=${false} value=${text} onInput=${(event) => setText(event.target.value)} />
      <button type="submit" class="button primary"><span>Show latest records</span></button></div><//></form>
    <${Notice} error=${error} />
    ${source && html`<section class="card"><header><h2>${plural(source.latest.size, "key")}</h2><span class="end muted" role="status">
        ${number(Math.max(0, source.scanned - source.first))} of ${number(source.tail - source.first)} read
        ${searching && html` <progress aria-label="Records read" max=${source.tail - source.first || 1} value=${Math.max(0, source.scanned - source.first)}></progress>`}
        ${source.full && " and stopped: there are too many keys for a page"}</span>
        ${rows.length > 0 && html`<${Button} kind="quiet" icon="download" onClick=${() => saveRecords(stream, rows.map(([, record]) => record))}>Download<//>`}</header>
      ${rows.length === 0 ? !searching && html`<${Empty} title="No record has this key." />`
        : html`<${Rows} basin=${basin} stream=${stream} rows=${rows.slice(0, shown)} />`}
      ${rows.length > shown && html`<div class="body more"><span class="muted">${number(shown)} of ${number(rows.length)} keys</span><${Button} onClick=${() => setShown(shown * 4)}>Show more<//></div>`}
    </section>`}`;
}

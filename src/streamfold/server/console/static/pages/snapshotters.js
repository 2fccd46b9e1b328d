// The status of snapshotters, table by table: positions, lag, last artifacts, and what is wrong.

import { html } from "../vendor/htm-preact.js";
import { getJson } from "../api.js";
import { ago, bytes, number, plural } from "../format.js";
import { Notice, useInterval, useLoaded } from "../widgets.js";

/** Milliseconds between readings. */
const INTERVAL = 3000;
const GOOD = ["running", "closed"];

const age = (one) => (one ? ago(Date.parse(one.at)) : "–");

const lag = (one) =>
  [
    one.lag_records !== null && `${number(one.lag_records)} records`,
    one.lag_seconds !== null && `${one.lag_seconds.toFixed(1)} s`,
    one.source_lag_bytes !== null && one.source_lag_bytes !== undefined && `${bytes(one.source_lag_bytes)} of the database's log`,
  ].filter(Boolean).join(", ") || "unknown";

function Tables({ tables }) {
  return html`<div class="scroll"><table><thead><tr><th>Table</th><th>State</th><th class="optional">Head</th><th class="optional">Lag</th><th class="optional">Last diff</th><th class="optional">Last base</th><th class="optional" title="Since the snapshotter started">Spark</th></tr></thead>
    <tbody>${Object.entries(tables).map(([name, one]) => html`<tr key=${name}>
      <td class="name">${one.table ?? name}<div class="hint name">${one.stream}</div></td>
      <td><span class=${`badge ${GOOD.includes(one.state) ? "" : "bad"}`}>${one.state}</span>${!one.ready && html` <span class="hint">not ready</span>`}
        ${one.dead_letters && html` <span class="badge bad">${plural(one.dead_letters.total, "dead letter")}</span><div class="hint name">
          ${one.dead_letters.reason && html`record ${one.dead_letters.seq_num}: ${one.dead_letters.reason}<br />`}in ${one.dead_letters.location}</div>`}
        ${one.incomplete_before && html` <span class="badge bad">incomplete before ${one.incomplete_before}</span>`}
        ${one.last_error && html`<div class="hint name">${one.last_error.message}</div>`}
        <div class="narrow hint">head ${one.manifest_head ?? "–"}<br />lag ${lag(one)}</div></td>
      <td class="optional mono">${one.manifest_head ?? "–"}</td><td class="optional">${lag(one)}</td>
      <td class="optional age">${age(one.last_diff)}</td><td class="optional age">${age(one.last_base)}</td>
      <td class="optional">${one.spark ? html`${plural(one.spark.jobs, "job")}, ${plural(one.spark.tasks, "task")}<div class="hint">${plural(one.spark.rows, "row")}, ${bytes(one.spark.bytes)}</div>` : "–"}</td></tr>`)}</tbody></table></div>`;
}

export function Snapshotters() {
  const { value, error, reload } = useLoaded(() => getJson("console/snapshotters"), []);
  useInterval(reload, INTERVAL);
  return html`<${Notice} error=${error} />${value?.snapshotters.map((one) => html`<section class="card" key=${one.url}>
    <header><h2>Snapshotter</h2><span class="end muted name">${one.url}</span></header>
    ${one.error ? html`<div class="body"><${Notice}>This snapshotter does not show its status: ${one.error}.<//></div>`
      : html`<${Tables} tables=${one.status.tables ?? {}} />`}</section>`)}`;
}

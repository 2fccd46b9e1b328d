// The servers of the store: the active one, which serves this page, and those that stand by.

import { html } from "../vendor/htm-preact.js";
import { getJson } from "../api.js";
import { ago, duration, zoned } from "../format.js";
import { Notice, useInterval, useLoaded } from "../widgets.js";

/** Milliseconds between readings. */
const INTERVAL = 2000;
/** How a state is shown, and what it means. */
const STATES = {
  active: ["accent", "active", "It serves the store."],
  standby: ["", "standby", "It takes over when the active server stops, dies or loses storage."],
  unsure: ["bad", "unsure", "It could not renew its lease: another server may have taken over."],
  "not ready": ["warn", "not ready", "It takes no new work."],
  away: ["bad", "no answer", "It does not respond."],
};

const State = ({ state }) => html`<span class=${`badge ${STATES[state][0]}`}>${STATES[state][1]}</span>`;

const Other = ({ one, doubled }) => html`<tr><td class="name"><b>${one.url}</b></td><td><${State} state=${one.state} /></td>
  <td class="name">${doubled ? "It is active, too: it does not serve this store, or one of the two is about to stop." : STATES[one.state][2]}${one.reason && html`<div class="hint">${one.reason}</div>`}</td></tr>`;

export function ServersPage() {
  const { value, error, reload } = useLoaded(() => getJson("console/servers"), []);
  const locations = useLoaded(() => getJson("v1/locations"), []);
  useInterval(reload, INTERVAL);
  const { this: own, others = [] } = value ?? {};
  return html`<div class="page-head"><h1>Servers</h1></div>
    <${Notice} error=${error} />
    ${own && html`<div class="facts"><span>Store <b class="name">${own.location}</b></span>
        ${locations.value && html`<span>Location <b>${locations.value.map(({ name }) => name).join(", ")}</b></span>`}
        <span>Version <b>${own.version}</b></span>
        <span>Lease <b>${own.lease_expiry === null ? "none" : `expires after ${duration(own.lease_expiry)}`}</b></span></div>
      <section class="card"><div class="scroll"><table><thead><tr><th>Server</th><th>State</th><th>What that means</th></tr></thead>
        <tbody><tr><td class="name"><b>${own.name}</b><div class="hint">this server, process ${own.process}</div></td><td><${State} state=${own.state} /></td>
          <td>${STATES[own.state][2]}<div class="hint">${own.reason ?? html`Active since ${zoned(own.active_since)}, ${ago(own.active_since)}.`}</div></td></tr>
        ${others.map((one) => html`<${Other} key=${one.url} one=${one} doubled=${one.state === "active"} />`)}</tbody></table></div></section>
      ${own.lease_expiry === null
        ? html`<p class="muted">A store on object storage can have a server that stands by; one on local disk or in memory has a single server.</p>`
        : others.length === 0 && html`<p class="muted">Start the same command on a second machine to have it stand by, and this server with <code>--server URL</code> to see the other one here.</p>`}`}`;
}

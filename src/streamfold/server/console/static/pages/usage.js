// Usage over time, from the metrics API.

import { html, useState } from "../vendor/htm-preact.js";
import { getJson } from "../api.js";
import { BarPlot } from "../charts.js";
import { bytes, short, time } from "../format.js";
import { Choice, Notice, useInterval, useLoaded } from "../widgets.js";

const HOUR = 3600;
const DAY = 24 * HOUR;
/** Spans that can be chosen: seconds, and the interval of one point. */
const SPANS = { hour: ["1 hour", HOUR, "minute"], day: ["1 day", DAY, "hour"], week: ["7 days", 7 * DAY, "hour"], month: ["30 days", 30 * DAY, "day"] };
const STEPS = { minute: 60, hour: HOUR, day: DAY };
/** Bars of one plot at most; more points are gathered. */
const BARS = 120;
/** Milliseconds between readings. */
const INTERVAL = 30_000;

/** Sets with their titles, and the seconds between points where they are more than a minute. */
const BASIN_SETS = [
  ["append-throughput", "Bytes appended"], ["append-ops", "Batches appended"], ["read-throughput", "Bytes read"],
  ["read-ops", "Reads"], ["basin-ops", "Other operations"], ["storage", "Stored", HOUR],
];
const SETS = { account: [["account-ops", "Operations on basins and tokens"]], basin: BASIN_SETS, stream: [["storage", "Stored"]] };

/** The series of a set, with points gathered into bars of `step` seconds. */
function gather(values, step) {
  return values.map((one) => {
    const { name, unit, values: points } = one.accumulation ?? one.gauge;
    const bars = new Map();
    for (const [at, value] of points) {
      const bar = Math.floor(at / step) * step;
      bars.set(bar, one.accumulation ? (bars.get(bar) ?? 0) + value : value);
    }
    return { name, unit, summed: Boolean(one.accumulation), bars, total: points.reduce((sum, [, value]) => sum + value, 0) };
  });
}

function Plot({ path, set, title, finest, span }) {
  const [, seconds, wished] = SPANS[span];
  const load = async () => {
    const end = Math.floor(Date.now() / 1000) + 1; // a minute that has just begun has the newest reading
    const start = end - seconds;
    const interval = set === "storage" ? {} : { interval: wished };
    const { values } = await getJson(`${path}?${new URLSearchParams({ set, start, end, ...interval })}`);
    const step = Math.max(STEPS[wished], finest, Math.ceil(seconds / BARS / 60) * 60);
    return { series: gather(values, step), start: Math.floor(start / step) * step, end, step };
  };
  const { value, error, reload } = useLoaded(load, [path, set, span]);
  useInterval(reload, INTERVAL);
  const series = value?.series ?? [];
  const format = series[0]?.unit === "bytes" ? bytes : short;
  const summed = new Map();
  for (const { bars } of series) for (const [at, amount] of bars) summed.set(at, (summed.get(at) ?? 0) + amount);
  const points = [...summed].sort(([one], [other]) => one - other);
  const latest = points.at(-1)?.[1] ?? 0;
  const total = series.reduce((sum, one) => sum + one.total, 0);
  const formatTime = (at) => (seconds > 2 * DAY ? time(at * 1000).slice(5, 10) : time(at * 1000).slice(11, 16));
  return html`<section class="card"><header><h2>${title}</h2><span class="end muted">${value && (series[0]?.summed === false ? format(latest) : `${format(total)} in all`)}</span></header>
    <div class="body plot-body">
      <${Notice} error=${error} />
      <${BarPlot} points=${points} start=${value?.start ?? 0} end=${value?.end ?? 1} step=${value?.step ?? 60} format=${format}
        binary=${format === bytes} formatTime=${value ? formatTime : () => ""} label=${`${title}, last ${SPANS[span][0]}`} />
      ${series.length > 1 && html`<div class="facts">${series.filter((one) => one.total).map((one) => html`<span key=${one.name}>${one.name} <b>${format(one.total)}</b></span>`)}</div>`}
    </div></section>`;
}

/** Plots of the account, of a basin, or of a stream. */
export function Usage({ basin, stream }) {
  const [span, setSpan] = useState("hour");
  const level = stream !== undefined ? "stream" : basin !== undefined ? "basin" : "account";
  const path = ["v1/metrics", ...[basin, stream].filter((name) => name !== undefined).map(encodeURIComponent)].join("/");
  return html`<div><${Choice} label="Time span" value=${span} onChange=${setSpan} options=${Object.entries(SPANS).map(([id, [text]]) => [id, text])} /></div>
    <div class="plots">${SETS[level].map(([set, title, finest = 60]) => html`<${Plot} key=${set} path=${path} set=${set} title=${title} finest=${finest} span=${span} />`)}</div>`;
}

// Usage over time, from the metrics API.

import { html, useRef, useState } from "../vendor/htm-preact.js";
import { getJson, streamPath } from "../api.js";
import { BarPlot } from "../charts.js";
import { bytes, number, short, time } from "../format.js";
import { readRecords } from "../records/sources.js";
import { Choice, Notice, useInterval, useLoaded } from "../widgets.js";

const HOUR = 3600;
const DAY = 24 * HOUR;
/** Spans that can be chosen: seconds, and the interval of one point. */
const SPANS = { hour: ["1 hour", HOUR, "minute"], day: ["1 day", DAY, "hour"], week: ["7 days", 7 * DAY, "hour"], month: ["30 days", 30 * DAY, "day"] };
const STEPS = { minute: 60, hour: HOUR, day: DAY };
/** Bars of one plot at most; more points are gathered. A bar of records takes a read. */
const BARS = 120;
const RECORD_BARS = 30;
/** Milliseconds between readings. */
const INTERVAL = 30_000;

/** Sets with their titles, and the seconds between points where they are more than a minute. */
const BASIN_SETS = [
  ["append-throughput", "Metered bytes appended"], ["append-ops", "Batches appended"], ["read-throughput", "Metered bytes read"],
  ["read-ops", "Reads"], ["basin-ops", "Other operations"], ["storage", "Stored, metered", HOUR],
];
const SETS = { account: [["account-ops", "Operations on basins and tokens"]], basin: BASIN_SETS, stream: [["storage", "Stored, metered"]] };

/** How a time is written on the axis of a plot of so many seconds. */
const timeOn = (seconds) => (at) => (seconds > 2 * DAY ? time(at * 1000).slice(5, 10) : time(at * 1000).slice(11, 16));

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
  return html`<section class="card"><header><h2>${title}</h2><span class="end muted">${value && (series[0]?.summed === false ? format(latest) : `${format(total)} in all`)}</span></header>
    <div class="body plot-body">
      <${Notice} error=${error} />
      <${BarPlot} points=${points} start=${value?.start ?? 0} end=${value?.end ?? 1} step=${value?.step ?? 60} format=${format}
        binary=${format === bytes} formatTime=${value ? timeOn(seconds) : () => ""} label=${`${title}, last ${SPANS[span][0]}`} />
      ${series.length > 1 && html`<div class="facts">${series.filter((one) => one.total).map((one) => html`<span key=${one.name}>${one.name} <b>${format(one.total)}</b></span>`)}</div>`}
    </div></section>`;
}

/** Records of a stream by their time. They are in the order of their times: a read at the start of each bar says how many are before it. */
function RecordsPlot({ basin, stream, span }) {
  const [, seconds] = SPANS[span];
  const seqNums = useRef(new Map());
  const seqNumAt = async (at, tail, signal) => {
    if (seqNums.current.has(at)) return seqNums.current.get(at);
    const [record] = await readRecords(basin, stream, { timestamp: at * 1000, clamp: "true" }, 1, signal);
    if (record) seqNums.current.set(at, record.seqNum);
    return record?.seqNum ?? tail;
  };
  const load = async (signal) => {
    const step = Math.ceil(seconds / RECORD_BARS / 60) * 60;
    const end = Math.floor(Date.now() / 1000);
    const start = Math.floor((end - seconds) / step) * step;
    const { tail } = await getJson(streamPath(stream, "/records/tail"), { basin, signal });
    const bars = [];
    for (let at = start; at <= end; at += step) bars.push(at);
    const firsts = await Promise.all(bars.map((at) => seqNumAt(at, tail.seq_num, signal)));
    const points = bars.map((at, index) => [at, (firsts[index + 1] ?? tail.seq_num) - firsts[index]]);
    return { points, start, end: bars.at(-1) + step, step };
  };
  const { value, error, reload } = useLoaded(load, [basin, stream, span]);
  useInterval(reload, INTERVAL);
  const { points = [], start = 0, end = 1, step = 60 } = value ?? {};
  const total = points.reduce((sum, [, count]) => sum + count, 0);
  return html`<section class="card"><header><h2>Records by time</h2><span class="end muted">${value && `${number(total)} in all`}</span></header>
    <div class="body plot-body"><${Notice} error=${error} />
      <${BarPlot} points=${points} start=${start} end=${end} step=${step} format=${short} formatTime=${value ? timeOn(seconds) : () => ""} label=${`Records by time, last ${SPANS[span][0]}`} />
    </div></section>`;
}

/** Plots of the account, of a basin, or of a stream. */
export function Usage({ basin, stream }) {
  const [span, setSpan] = useState("hour");
  const level = stream !== undefined ? "stream" : basin !== undefined ? "basin" : "account";
  const path = ["v1/metrics", ...[basin, stream].filter((name) => name !== undefined).map(encodeURIComponent)].join("/");
  return html`<div><${Choice} label="Time span" value=${span} onChange=${setSpan} options=${Object.entries(SPANS).map(([id, [text]]) => [id, text])} /></div>
    <div class="plots">${stream !== undefined && html`<${RecordsPlot} basin=${basin} stream=${stream} span=${span} />`}
    ${SETS[level].map(([set, title, finest = 60]) => html`<${Plot} key=${set} path=${path} set=${set} title=${title} finest=${finest} span=${span} />`)}</div>`;
}

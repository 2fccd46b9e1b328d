// Small charts, drawn as SVG.

import { html, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";

const WIDTH = 200;
const HEIGHT = 44;

/** A line without axes, of `points` like [milliseconds, value]; values that are not numbers leave a gap. It covers `span` milliseconds, or more if the points do. */
export function Sparkline({ points, span, label }) {
  const end = points.at(-1)?.[0] ?? 0;
  const start = Math.min(points[0]?.[0] ?? 0, end - span);
  const top = Math.max(...points.map(([, value]) => value).filter(Number.isFinite), 0) || 1;
  const x = (at) => ((at - start) * WIDTH) / (end - start);
  const y = (value) => HEIGHT - 2 - (value / top) * (HEIGHT - 6);
  const runs = [];
  let run = null;
  points.forEach(([at, value]) => {
    if (!Number.isFinite(value)) run = null;
    else if (run) run.push([x(at), y(value)]);
    else runs.push((run = [[x(at), y(value)]]));
  });
  const line = runs.map((drawn) => `M${drawn.map((point) => point.map((one) => one.toFixed(1)).join(" ")).join("L")}`).join("");
  const area = runs
    .filter((drawn) => drawn.length > 1)
    .map((drawn) => `M${drawn[0][0]} ${HEIGHT}L${drawn.map((point) => point.join(" ")).join("L")}L${drawn.at(-1)[0]} ${HEIGHT}Z`)
    .join("");
  return html`<svg class="spark" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${label}>
    <path class="area" d=${area || "M0 0"} /><path d=${line || "M0 0"} /></svg>`;
}

const PLOT_HEIGHT = 190;
/** Pixels for one label of the time axis. */
const LABEL = 90;
const LEFT = 58;
const BOTTOM = 22;

/** Bars over time: `points` are [seconds since 1970, value], one for each `step` seconds from `start` to `end`. */
export function BarPlot({ points, start, end, step, format, formatTime, label, binary }) {
  const [element, whole] = useWidth();
  const top = niceTop(Math.max(...points.map(([, value]) => value), 0), binary);
  const width = ((whole - LEFT) * step) / (end - start);
  const x = (at) => LEFT + ((at - start) / (end - start)) * (whole - LEFT);
  const y = (value) => 8 + (1 - value / top) * (PLOT_HEIGHT - BOTTOM - 8);
  const marks = [0, 0.5, 1].map((share) => share * top);
  const labels = Math.max(2, Math.min(5, Math.floor((whole - LEFT) / LABEL)));
  const times = Array.from({ length: labels }, (_, at) => start + (at / (labels - 1)) * (end - start));
  return html`<svg class="plot" ref=${element} role="img" aria-label=${label}>
    ${marks.map((mark) => html`<line key=${mark} x1=${LEFT} x2=${whole} y1=${y(mark)} y2=${y(mark)} />
      <text x=${LEFT - 8} y=${y(mark) + 4} text-anchor="end">${format(mark)}</text>`)}
    ${times.map((at, number) => html`<text key=${at} x=${x(at)} y=${PLOT_HEIGHT - 4}
      text-anchor=${number === 0 ? "start" : number === labels - 1 ? "end" : "middle"}>${formatTime(at)}</text>`)}
    ${points.map(([at, value]) => value > 0 && html`<rect key=${at} class="bar" x=${x(at) + 0.5} width=${Math.max(1, width - 1)}
      y=${y(value)} height=${Math.max(1, y(0) - y(value))}><title>${`${formatTime(at)}: ${format(value)}`}</title></rect>`)}
  </svg>`;
}

/** The width of an element in pixels, kept up to date. */
function useWidth() {
  const element = useRef(null);
  const [width, setWidth] = useState(600);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(() => setWidth(element.current.clientWidth || 600));
    observer.observe(element.current);
    return () => observer.disconnect();
  }, []);
  return [element, width];
}

/** A round number for the top of the axis, whose half is round too: a power of two for bytes, an even count otherwise. */
function niceTop(value, binary) {
  if (value <= 0) return binary ? 1024 : 2;
  if (binary) return 2 ** Math.ceil(Math.log2(value));
  const power = 10 ** Math.floor(Math.log10(value));
  return Math.max(2, [1, 2, 4, 6, 10].map((step) => step * power).find((step) => step >= value));
}

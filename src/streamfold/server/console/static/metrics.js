// Reads the server's Prometheus metrics, and keeps their last minutes for small charts.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Samples of a text in Prometheus' format: by name, each with labels and a value. */
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = line[0] === "#" ? null : LINE.exec(line);
    if (!match) continue;
    const [, name, labels = "", value] = match;
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({ labels: Object.fromEntries([...labels.matchAll(LABEL)].map((one) => [one[1], one[2]])), value: Number(value) });
  }
  return found;
}

/** Readings of the server's own history, oldest first: when they were taken, and samples as `parseMetrics` returns them. */
export function parseHistory({ series, readings }) {
  return readings.map(([at, ...values]) => {
    const now = new Map();
    series.forEach(({ name, labels }, index) => {
      if (values[index] === null || values[index] === undefined) return;
      if (!now.has(name)) now.set(name, []);
      now.get(name).push({ labels, value: values[index] });
    });
    return { at, now };
  });
}

/** The value of a series; undefined if the server does not report it. */
export const sample = (metrics, name, labels = {}) =>
  metrics?.get(name)?.find((one) => Object.entries(labels).every(([key, value]) => one.labels[key] === value))?.value;

/** A quantile of what a histogram counted between two readings; NaN if it counted nothing. */
export function quantile(before, after, name, share) {
  const buckets = (after.get(`${name}_bucket`) ?? []).map(({ labels, value }) => ({
    bound: labels.le === "+Inf" ? Infinity : Number(labels.le),
    count: value - (sample(before, `${name}_bucket`, { le: labels.le }) ?? 0),
  }));
  const total = buckets.at(-1)?.count ?? 0;
  if (total <= 0) return NaN;
  let low = 0;
  let below = 0;
  for (const { bound, count } of buckets) {
    if (count >= share * total) {
      if (bound === Infinity) return low;
      return low + ((bound - low) * (share * total - below)) / Math.max(1, count - below);
    }
    low = bound;
    below = count;
  }
  return low;
}

// How numbers, sizes and times are written.

const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];
const SPANS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
const whole = new Intl.NumberFormat("en");

export const number = (value) => whole.format(value);

export function bytes(value) {
  let unit = 0;
  while (value >= 1024 && unit < BYTES.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit && value < 100 ? value.toFixed(1) : whole.format(Math.round(value))} ${BYTES[unit]}`;
}

/** A rate or a count, short. */
export function short(value) {
  if (!Number.isFinite(value)) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  if (value >= 100 || Number.isInteger(value)) return whole.format(Math.round(value));
  return value.toFixed(1);
}

/** Seconds in the two largest units. */
export function duration(seconds) {
  const parts = [];
  for (const [name, size] of SPANS) {
    const count = Math.floor(seconds / size);
    seconds -= count * size;
    if (count) parts.push(`${count} ${name}`);
    if (parts.length === 2) break;
  }
  return parts.join(" ") || "0 s";
}

export function latency(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  return `${seconds.toFixed(1)} s`;
}

/** Milliseconds since 1970 as local time, or the bare number where that is not a sensible time. */
export function time(ms, { date = true } = {}) {
  const value = Number(ms);
  // Timestamps are any number of 64 bits: only some of them are times of a calendar.
  if (!(value >= 0 && value < 253402300800000)) return String(ms);
  const when = new Date(value);
  const pad = (part, digits = 2) => String(part).padStart(digits, "0");
  const day = `${when.getFullYear()}-${pad(when.getMonth() + 1)}-${pad(when.getDate())}`;
  const clock = `${pad(when.getHours())}:${pad(when.getMinutes())}:${pad(when.getSeconds())}.${pad(when.getMilliseconds(), 3)}`;
  return date ? `${day} ${clock}` : clock;
}

/** The zone in which the page writes a time, such as UTC+02:00: it changes with the seasons. */
export function zone(ms = Date.now()) {
  const minutes = -new Date(Number(ms)).getTimezoneOffset();
  if (!minutes || Number.isNaN(minutes)) return "UTC";
  const pad = (part) => String(part).padStart(2, "0");
  return `UTC${minutes < 0 ? "−" : "+"}${pad(Math.trunc(Math.abs(minutes) / 60))}:${pad(Math.abs(minutes) % 60)}`;
}

/** A time with its zone. */
export const zoned = (ms) => (time(ms) === String(ms) ? String(ms) : `${time(ms)} ${zone(ms)}`);

export function ago(ms, now = Date.now()) {
  const seconds = Math.round((now - Number(ms)) / 1000);
  if (seconds < 0) return `in ${duration(-seconds)}`;
  return seconds < 2 ? "just now" : `${duration(seconds).split(" ").slice(0, 2).join(" ")} ago`;
}

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

// Stored bytes of basins and streams, from the metrics API.

import { ApiError, getJson } from "./api.js";

/** Seconds before now that hold the newest reading: of a stream there is one per minute, of a basin one per hour. */
const BEFORE = { stream: 600, basin: 7200 };
/** Seconds after now: clocks differ. */
const AFTER = 30;
/** Requests at once: browsers allow six connections for all pages of a server. */
const AT_ONCE = 3;

/** Stored bytes of [basin] or [basin, stream]; undefined if there is no reading yet. */
export async function storedBytes(names, signal) {
  const now = Math.floor(Date.now() / 1000);
  const before = names.length > 1 ? BEFORE.stream : BEFORE.basin;
  const query = new URLSearchParams({ set: "storage", start: now - before, end: now + AFTER });
  const { values } = await getJson(`v1/metrics/${names.map(encodeURIComponent).join("/")}?${query}`, { signal });
  return values[0]?.gauge.values.at(-1)?.[1];
}

/** Stored bytes by last name, for many like `storedBytes`; those are missing that have no reading or that this token may not see. */
export async function storedBytesOfAll(all, signal) {
  const sizes = new Map();
  const rest = [...all];
  const work = async () => {
    for (let names = rest.pop(); names; names = rest.pop()) {
      try {
        sizes.set(names.at(-1), await storedBytes(names, signal));
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        if (error.status === 403) rest.length = 0; // nor the others
      }
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  return sizes;
}

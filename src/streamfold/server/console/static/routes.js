// Addresses within the console: everything after the # of the URL.

import { useEffect, useState } from "./vendor/htm-preact.js";

/** The decoded segments of the path, and the query, of the current address. */
export function parseRoute(hash = location.hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  try {
    return { segments: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
  } catch {
    return { segments: ["not-found"], query: new URLSearchParams() };
  }
}

export function useRoute() {
  const [route, setRoute] = useState(parseRoute());
  useEffect(() => {
    const change = () => setRoute(parseRoute());
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  return route;
}

/** The address of a page; undefined parameters are left out. */
export function link(segments, parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== undefined && value !== ""));
  const text = query.toString();
  return `#/${segments.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

export const go = (segments, parameters) => {
  location.hash = link(segments, parameters);
};

/** Change the query of the current address without a new entry in the history. */
export function replaceQuery(parameters) {
  history.replaceState(null, "", link(parseRoute().segments, parameters));
}

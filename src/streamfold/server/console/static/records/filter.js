// Filters of records: terms that must all match.
//
//   paid                 the body contains this text, in any case
//   "two words"          the same with spaces
//   header:trace         there is a header with this name
//   header:trace=abc     and its value contains this text
//   $.user.id            the body is JSON and has this path
//   $.user.id=7          and its value is this; also == != < <= > >= and ~ (contains)

import { parseJson, text } from "./record.js";

const TERM = /(?:[^\s"]+|"[^"]*")+/g;
const PATH = /^\$((?:\.[^.[\]=!<>~]+|\[\d+\])+)(?:(!=|==?|<=?|>=?|~)(.*))?$/s;
const STEP = /\.([^.[\]]+)|\[(\d+)\]/g;

/** A function that says whether a record matches; throws a sentence if the filter is malformed. */
export function parseFilter(source) {
  const terms = (source.match(TERM) ?? []).map((term) => parseTerm(term.replaceAll('"', "")));
  return (record) => {
    const lazy = { text: undefined, json: undefined };
    return terms.every((matches) => matches(record, lazy));
  };
}

function parseTerm(term) {
  if (term.startsWith("header:")) return headerTerm(term.slice(7));
  if (term.startsWith("$")) return pathTerm(term);
  const wanted = term.toLowerCase();
  return (record, lazy) => bodyText(record, lazy).toLowerCase().includes(wanted);
}

function headerTerm(term) {
  const [name, ...rest] = term.split("=");
  const wanted = rest.join("=");
  if (!name) throw new Error("A header term needs a name, as in header:trace=abc.");
  return ({ headers }) => headers.some(([key, value]) => text(key) === name && (!rest.length || text(value).includes(wanted)));
}

function pathTerm(term) {
  const match = PATH.exec(term);
  if (!match) throw new Error(`"${term}" is not a JSON path: write it like $.user.id or $.items[0].price>10.`);
  const steps = [...match[1].matchAll(STEP)].map(([, name, index]) => name ?? Number(index));
  const [, , operator, wanted] = match;
  return (record, lazy) => {
    if (lazy.json === undefined) lazy.json = parseJson(bodyText(record, lazy)) ?? null;
    let value = lazy.json;
    for (const step of steps) {
      if (value === null || typeof value !== "object" || !Object.hasOwn(value, step)) return false;
      value = value[step];
    }
    return compares(value, operator, wanted);
  };
}

/** A function that returns the key of a record, or null if it has none: the value of a header (`header:item`), or of a path in a JSON body (`$.item`). */
export function parseKey(source) {
  if (source.startsWith("header:") && source.length > 7) {
    const name = source.slice(7);
    return ({ headers }) => {
      const pair = headers.find(([key]) => text(key) === name);
      return pair ? text(pair[1]) : null;
    };
  }
  const match = PATH.exec(source);
  if (!match || match[2]) throw new Error(`"${source}" is not a key: write header:name, or a JSON path like $.user.id.`);
  const steps = [...match[1].matchAll(STEP)].map(([, name, index]) => name ?? Number(index));
  return (record) => {
    let value = parseJson(text(record.body));
    for (const step of steps) {
      if (value === null || typeof value !== "object" || !Object.hasOwn(value, step)) return null;
      value = value[step];
    }
    return value !== null && typeof value === "object" && value.source === undefined ? JSON.stringify(value) : String(value);
  };
}

function compares(value, operator, wanted) {
  const shown = value !== null && typeof value === "object" && value.source === undefined ? JSON.stringify(value) : String(value);
  switch (operator) {
    case undefined:
      return true;
    case "=":
    case "==":
      return shown === wanted;
    case "!=":
      return shown !== wanted;
    case "~":
      return shown.toLowerCase().includes(wanted.toLowerCase());
    case "<":
      return Number(shown) < Number(wanted);
    case "<=":
      return Number(shown) <= Number(wanted);
    case ">=":
      return Number(shown) >= Number(wanted);
    default:
      return Number(shown) > Number(wanted);
  }
}

function bodyText(record, lazy) {
  lazy.text ??= text(record.body);
  return lazy.text;
}

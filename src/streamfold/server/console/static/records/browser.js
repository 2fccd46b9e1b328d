// The record browser: seek, follow live, filter, look at one record.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/htm-preact.js";
import { UnreachableError } from "../api.js";
import { bytes, number, plural, time, zone, zoned } from "../format.js";
import { replaceQuery } from "../routes.js";
import { Button, Empty, Icon, Notice, useConnection, useInterval } from "../widgets.js";
import { Detail } from "./detail.js";
import { saveRecords } from "./download.js";
import { parseFilter } from "./filter.js";
import { VirtualList } from "./list.js";
import { command, preview } from "./record.js";
import { MatchSource, RangeSource, retryable } from "./sources.js";

/** Rows that the list has at first, and at most: browsers limit the height of a page. */
const WINDOW = 200_000;
const WINDOW_MAX = 2 * WINDOW;
/** Rows from an edge of the window at which it moves. */
const EDGE = 500;
/** Milliseconds after the last key before a filter is applied. */
const TYPING = 350;
/** Milliseconds before a request that failed is sent again. */
const RETRY = 1000;

const Row = ({ index, record, seqNum, trimmed, selected, onSelect }) => {
  // A live list moves between press and release, and no row would get a click: the press decides.
  const press = (event) => event.button === 0 && onSelect();
  if (!record) {
    const choose = trimmed ? {} : { onMouseDown: press, onClick: onSelect };
    return html`<div class="row" role="option" id=${`record-${index}`} aria-selected=${selected} ...${choose}><span class="seq">${seqNum === null ? "" : number(seqNum)}</span>
      <span class="muted">${trimmed ? "trimmed" : "…"}</span></div>`;
  }
  const done = command(record);
  const { text, binary } = preview(record);
  return html`<div class="row" role="option" id=${`record-${index}`} aria-selected=${selected} onMouseDown=${press} onClick=${onSelect}>
    <span class="seq">${number(record.seqNum)}</span>
    <span class="when" title=${`${record.timestamp}: ${zoned(record.timestamp)}`}>${time(record.timestamp)}</span>
    <span class="what">${done
      ? html`<span class="badge accent">${done.name}</span> <span class="mono">${done.argument}</span>`
      : html`${record.headers.length > 0 && html`<span class="badge count">${plural(record.headers.length, "header")}</span> `}${record.body.length
          ? html`<span class=${binary ? "mono muted" : "mono"}>${text}</span>`
          : html`<span class="muted">empty body</span>`}`}</span>
    <span class="size" title=${`${bytes(record.size)} metered`}>${bytes(record.body.length)}</span>
  </div>`;
};

const Headings = () => html`<div class="row headings" role="presentation"><span>seq_num</span><span class="when">Time, ${zone()}</span>
  <span>Record</span><span class="size">Body</span></div>`;

function Jump({ onJump, action }) {
  const [kind, setKind] = useState("seq_num");
  const [text, setText] = useState("");
  const submit = (event) => {
    event.preventDefault();
    onJump(kind, text);
  };
  return html`<form class=${`jump ${action === "Go" ? "" : "searches"}`} onSubmit=${submit} aria-label="Go to">
    <select aria-label="Go to" value=${kind} onChange=${(event) => (setKind(event.target.value), setText(""))}>
      <option value="seq_num">seq_num</option><option value="time">time</option><option value="back">from the tail</option></select>
    ${kind === "time"
      ? html`<input key="time" type="datetime-local" step="0.001" required aria-label="Time" value=${text} onInput=${(event) => setText(event.target.value)} />`
      : html`<input key="number" inputmode="numeric" pattern="[0-9]+" required aria-label=${kind === "back" ? "Records from the tail" : "seq_num"}
          placeholder=${kind === "back" ? "100" : "0"} value=${text} onInput=${(event) => setText(event.target.value)} />`}
    <button type="submit" class="button"><span>${action}</span></button>
  </form>`;
}

function useSource(basin, stream, applied, from, start) {
  const [, draw] = useState(0);
  const [opened, setOpened] = useState(null);
  const [error, setError] = useState(null);
  const [attempt, setAttempt] = useState(0);
  const { online, returns, needsToken } = useConnection();
  const source = useRef(null);
  useEffect(() => {
    if (!online || needsToken || (source.current?.applied === applied && source.current?.from === from)) return;
    source.current?.close();
    const onChange = () => draw((count) => count + 1);
    let made;
    try {
      made = applied ? new MatchSource(basin, stream, parseFilter(applied), from, onChange) : new RangeSource(basin, stream, onChange);
    } catch (malformed) {
      source.current = null;
      setError(malformed);
      return;
    }
    source.current = made;
    Object.assign(made, { applied, from });
    setError(null);
    made.open().then(
      () => source.current === made && (start(made), setOpened(made)),
      (failure) => {
        if (source.current !== made) return;
        made.applied = null; // it is tried again
        if (!(failure instanceof UnreachableError)) setError(failure);
        if (retryable(failure)) setTimeout(() => setAttempt((count) => count + 1), RETRY);
      },
    );
  }, [applied, from, online, returns, needsToken, attempt]);
  useEffect(() => () => source.current?.close(), []);
  useEffect(() => {
    // A hidden page gives its connection back: browsers allow six for all pages of a server.
    const change = () => {
      if (!source.current?.live) return;
      if (document.hidden) source.current.stop();
      else source.current.follow();
    };
    document.addEventListener("visibilitychange", change);
    return () => document.removeEventListener("visibilitychange", change);
  }, []);
  return [opened && opened === source.current ? opened : null, error, returns];
}

export function RecordBrowser({ basin, stream, query, onTail }) {
  const [filter, setFilter] = useState(query.get("filter") ?? "");
  const [applied, setApplied] = useState(filter.trim());
  /** Where a filter begins to search. */
  const [from, setFrom] = useState(Number(query.get("from") ?? 0));
  const [base, setBase] = useState(0);
  const [stuck, setStuck] = useState(true);
  const [selected, setSelected] = useState(null);
  const [problem, setProblem] = useState(null);
  const list = useRef(null);
  const filterInput = useRef(null);
  const toShow = useRef(null);
  const view = useRef([0, 0]);

  const [source, error, returns] = useSource(basin, stream, applied, applied ? from : 0, (made) => {
    const wanted = made.filtered ? null : selected?.record?.seqNum ?? (query.has("seq") ? Number(query.get("seq")) : null);
    const trimmed = wanted !== null && wanted < made.first;
    if (trimmed) setProblem(new Error(`Record ${number(wanted)} was trimmed: the oldest record is ${number(made.first)}.`));
    setBase(made.filtered ? 0 : windowAt(made, wanted ?? made.tail));
    setStuck(wanted === null);
    setSelected(wanted === null || trimmed ? null : { key: wanted });
    if (wanted !== null) toShow.current = { key: Math.max(wanted, made.first), where: "start" };
    made.follow();
  });
  /** What the address of the page says: a link to it shows the same. */
  const inLink = (more = {}, terms = applied, start = from) => ({ ...more, filter: terms, from: terms && start ? start : undefined });
  const filtered = source?.filtered ?? false;
  const searching = filtered && source.scanned < source.tail;
  const count = !source ? 0 : filtered ? source.found.length : Math.min(source.tail - base, WINDOW_MAX);
  const keyAt = (index) => (filtered ? index : base + index);

  useEffect(() => onTail?.(source && { first: source.first, tail: source.tail }), [source?.first, source?.tail]);
  useEffect(() => {
    const timer = setTimeout(() => {
      if (filter.trim() === applied) return;
      setApplied(filter.trim());
      replaceQuery(inLink({ seq: selected?.record?.seqNum }, filter.trim()));
    }, TYPING);
    return () => clearTimeout(timer);
  }, [filter]);
  useEffect(() => {
    const press = (event) => {
      if (event.key !== "/" || event.target.closest("input, textarea, select, dialog")) return;
      event.preventDefault();
      filterInput.current?.focus();
    };
    document.addEventListener("keydown", press);
    return () => document.removeEventListener("keydown", press);
  }, []);
  const load = () => source?.ensure(keyAt(view.current[0]), keyAt(view.current[1]));
  useEffect(load, [returns]);
  useInterval(load, RETRY); // a request for the rows in view may have failed
  // After the rows exist: scroll to what was asked for.
  useLayoutEffect(() => {
    if (!toShow.current || !source || !list.current) return;
    const { key, where, offset = 0 } = toShow.current;
    toShow.current = null;
    list.current.show(key - (filtered ? 0 : base) + offset, where);
  });
  // A record that was selected before it was loaded.
  const record = selected && (selected.record ?? source?.at(selected.key));
  if (record && !selected.record) selected.record = record;

  const select = (index) => {
    const key = keyAt(index);
    const found = source.at(key);
    setProblem(null);
    setSelected({ key, record: found });
    setStuck(false);
    replaceQuery(inLink({ seq: found?.seqNum ?? (filtered ? undefined : key) }));
  };
  const unselect = () => {
    setSelected(null);
    replaceQuery(inLink());
    list.current?.focus();
  };
  const step = (by) => {
    const index = selected.key - (filtered ? 0 : base) + by;
    if (index < 0 || index >= count) return;
    select(index);
    list.current.show(index);
  };
  /** Go to a seq_num; says so if there is no such record. */
  const seekRecord = (seqNum) => {
    if (seqNum < source.first) setProblem(new Error(`Record ${number(seqNum)} was trimmed: the oldest record is ${number(source.first)}.`));
    if (seqNum >= source.tail) setProblem(new Error(`There is no record ${number(seqNum)} yet: the tail is ${number(source.tail)}.`));
    seek(seqNum);
  };
  const seek = (seqNum) => {
    const wanted = Math.max(source.first, Math.min(seqNum, source.tail));
    const inside = wanted >= base && wanted < base + WINDOW;
    if (!inside) setBase(windowAt(source, wanted));
    toShow.current = { key: wanted, where: "start" };
    setStuck(wanted >= source.tail);
    setBase((now) => now);
    source.changed();
  };
  const searchFrom = (start) => {
    setFrom(start);
    replaceQuery(inLink({}, applied, start));
  };
  const jump = async (kind, text) => {
    setProblem(null);
    try {
      const wanted = kind === "seq_num" ? Number(text) : kind === "back" ? source.tail - Number(text) : await source.seekTime(new Date(text).getTime());
      if (filtered) searchFrom(Math.max(0, wanted));
      else if (kind === "seq_num") seekRecord(wanted);
      else seek(wanted);
    } catch (failure) {
      setProblem(failure);
    }
  };
  const looked = (from, to) => {
    if (from !== view.current[0]) source?.changed(); // the slider shows it
    view.current = [from, to];
    if (!source || filtered) return;
    source.ensure(base + from, base + to);
    const atStart = from < EDGE && base > source.first;
    const atEnd = to > count - EDGE && base + count < source.tail;
    if (!atStart && !atEnd && count < WINDOW_MAX) return;
    const moved = windowAt(source, base + from);
    if (moved === base) return;
    toShow.current = { key: base, where: "start", offset: list.current.topRow() };
    setBase(moved);
  };
  const follow = () => {
    setStuck(true);
    setBase(windowAt(source, source.tail));
  };
  const following = Boolean(source?.live) && (filtered || stuck);
  /** A list that was scrolled up receives records but does not follow: the button takes it to the tail. */
  const toggle = () => {
    if (!source.live) source.follow();
    else if (following) return source.pause();
    if (!filtered) follow();
    return undefined;
  };
  const pressed = (event) => {
    if (event.key === "Escape" && selected) unselect();
    if (event.key === " " && event.target.classList.contains("virtual")) {
      event.preventDefault();
      toggle();
    }
  };
  const row = (index) => {
    const key = keyAt(index);
    return html`<${Row} key=${key} index=${index} record=${source.at(key)} seqNum=${filtered ? null : key} trimmed=${!filtered && key < source.first}
      selected=${selected?.key === key} onSelect=${() => select(index)} />`;
  };

  return html`<div class="browser" onKeyDown=${pressed}>
    <div class="toolbar">
      <${Button} icon=${following ? "pause" : "play"} kind=${following ? "on" : ""} disabled=${!source} aria-pressed=${following} onClick=${toggle}>
        ${searching ? (source.live ? "Stop search" : "Continue") : !source || following ? "Live" : source.live ? "Follow" : "Paused"}<//>
      <div class="search wide"><${Icon} name="search" /><input ref=${filterInput} type="search" aria-label="Filter records" value=${filter}
        placeholder="Filter: text, header:name, $.path=value" onInput=${(event) => setFilter(event.target.value)} /></div>
      <${Jump} onJump=${jump} action=${filtered ? "Search from" : "Go"} />
    </div>
    <${Notice} error=${problem ?? error ?? source?.error} />
    <div class=${`panes ${record ? "split" : ""}`}>
      <section class="card list">
        <div class="status" role="status">${!source ? !error && "Opening …" : filtered
          ? html`<span>${plural(source.found.length, "match", "matches")}</span><span>${number(Math.max(0, source.scanned - source.start))} of ${number(source.tail - source.start)} read${source.start > source.first && `, from ${number(source.start)}`}</span>
              ${searching && html`<progress aria-label="Records searched" max=${source.tail - source.start || 1} value=${Math.max(0, source.scanned - source.start)}></progress>`}
              ${source.found.length > 0 && html`<${Button} kind="quiet" icon="download" onClick=${() => saveRecords(stream, source.found)}>Download matches<//>`}
              ${source.full && html`<span>paused after many matches: continue, or narrow the filter</span>`}`
          : html`<span>${plural(source.tail - source.first, "record")}</span><span>tail ${number(source.tail)}</span>${!source.live && html`<span>paused</span>`}`}
          ${source && !filtered && !stuck && html`<${Button} kind="quiet" icon="down" onClick=${follow}>To the tail<//>`}
        </div>
        ${source && count === 0
          ? html`<${Empty} title=${filtered ? "No record matches yet." : "No records yet."}>
              ${!filtered && html`<p>Append one here or from any client: it appears at once.</p>`}<//>`
          : html`<${Headings} /><${VirtualList} count=${count} row=${row} label="Records" handle=${list} stuck=${stuck}
              selected=${selected === null ? null : selected.key - (filtered ? 0 : base)}
              onSelect=${select} onView=${looked} onAtEnd=${setStuck} />`}
        ${source && !filtered && source.tail - source.first > 100 && html`<div class="seekbar">
          <span>${number(source.first)}</span>
          <input type="range" aria-label="Position in the stream" min=${source.first} max=${source.tail} step="1"
            value=${stuck ? source.tail : Math.min(source.tail, base + view.current[0] + (view.current[0] ? 12 : 0))} onInput=${(event) => seek(Number(event.target.value))} />
          <span>${number(source.tail)}</span></div>`}
      </section>
      ${record && html`<${Detail} basin=${basin} stream=${stream} record=${record} onClose=${unselect} onStep=${step} />`}
    </div>
  </div>`;
}

/** The first seq_num of a window of rows around a position. */
function windowAt(source, seqNum) {
  if (source.tail - source.first <= WINDOW) return source.first;
  return Math.max(source.first, Math.min(seqNum - WINDOW / 2, source.tail - WINDOW));
}

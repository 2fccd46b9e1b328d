// A list of any length that draws only the rows in view.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/htm-preact.js";

/** Pixels of a row, as in records.css. */
export const ROW = 30;
/** Rows that are drawn beyond each edge of the view. */
const MARGIN = 12;

/**
 * `count` rows, drawn by `row(index)`. `handle.current` gets `show(index, where)`; `onView(from, to)` is called with
 * the rows in view, and `onAtEnd` with whether the last one is among them. While `stuck`, the list stays at its end.
 */
export function VirtualList({ count, row, label, handle, selected, onSelect, onView, onAtEnd, onOpen, stuck }) {
  const element = useRef(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  const byHand = useRef(false);
  const from = Math.max(0, Math.floor(view.top / ROW) - MARGIN);
  const to = Math.min(count, Math.ceil((view.top + view.height) / ROW) + MARGIN);

  const measure = () => {
    const { scrollTop, clientHeight } = element.current;
    setView((before) => (before.top === scrollTop && before.height === clientHeight ? before : { top: scrollTop, height: clientHeight }));
  };
  useLayoutEffect(() => {
    handle.current = {
      show(index, where = "nearest") {
        const box = element.current;
        const top = index * ROW;
        if (where === "start") box.scrollTop = top;
        else if (top < box.scrollTop) box.scrollTop = top;
        else if (top + ROW > box.scrollTop + box.clientHeight) box.scrollTop = top + ROW - box.clientHeight;
        measure();
      },
      topRow: () => element.current.scrollTop / ROW,
      focus: () => element.current.focus({ preventScroll: true }),
    };
    const observer = new ResizeObserver(measure);
    observer.observe(element.current);
    return () => observer.disconnect();
  }, []);
  useLayoutEffect(() => {
    if (!stuck) return;
    element.current.scrollTop = count * ROW;
    measure();
  }, [stuck, count, view.height]);
  useEffect(() => onView(from, to), [from, to, count]);

  const scrolled = () => {
    measure();
    if (!byHand.current) return;
    const { scrollTop, clientHeight } = element.current;
    onAtEnd(scrollTop + clientHeight >= count * ROW - ROW / 2);
  };
  const pressed = (event) => {
    byHand.current = true;
    const page = Math.max(1, Math.floor(view.height / ROW) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in moves && count) {
      event.preventDefault();
      const start = selected ?? (moves[event.key] > 0 ? Math.ceil(view.top / ROW) - 1 : Math.ceil(view.top / ROW));
      const next = Math.max(0, Math.min(count - 1, start + moves[event.key]));
      onSelect(next);
      handle.current.show(next);
      onAtEnd(next === count - 1);
    } else if (event.key === "Enter") onOpen?.();
  };
  const touched = () => {
    byHand.current = true;
  };
  const rows = [];
  for (let index = from; index < to; index += 1) rows.push(row(index));
  return html`<div class="virtual" ref=${element} role="listbox" tabindex="0" aria-label=${label}
    aria-activedescendant=${selected === null ? undefined : `record-${selected}`}
    onScroll=${scrolled} onKeyDown=${pressed} onWheel=${touched} onTouchMove=${touched} onPointerDown=${touched}>
    <div class="spacer" style=${{ height: `${count * ROW}px` }}>
      <div class="window" style=${{ transform: `translateY(${from * ROW}px)` }}>${rows}</div>
    </div>
  </div>`;
}

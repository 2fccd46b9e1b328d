// Parts that all pages use. Text of others only ever becomes text nodes and attributes.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";
import { connection, watchConnection } from "./api.js";

const ICONS = {
  overview: "M3 12h4l3 7 4-14 3 7h4",
  basins: "M4 6c0-1.700 3.600-3 8-3s8 1.300 8 3-3.600 3-8 3-8-1.300-8-3zm0 0v12c0 1.700 3.600 3 8 3s8-1.300 8-3V6M4 12c0 1.700 3.600 3 8 3s8-1.300 8-3",
  tables: "M4 5h16v14H4zM4 10h16M4 14.500h16M10 10v9",
  servers: "M4 4h16v7H4zM4 13h16v7H4zM7.500 7.500h1M7.500 16.500h1",
  tokens: "M8 16a4.500 4.500 0 1 0 0-9 4.500 4.500 0 0 0 0 9zm4.500-4.500H21V15m-4-3.500V14",
  plus: "M12 5v14M5 12h14",
  play: "M8 5v14l11-7z",
  pause: "M8 5v14M16 5v14",
  close: "M6 6l12 12M18 6 6 18",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  link: "M10 14a4 4 0 0 0 5.700 0l3-3a4 4 0 0 0-5.700-5.700l-1 1M14 10a4 4 0 0 0-5.700 0l-3 3a4 4 0 0 0 5.700 5.700l1-1",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  gear: "M12 9a3 3 0 1 0 0 6 3 3 0 0 0 0-6zm0-6v3m0 12v3M3 12h3m12 0h3M5.600 5.600l2.100 2.100m8.600 8.600 2.100 2.100m0-12.800-2.100 2.100M7.700 16.300l-2.100 2.100",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zm0-5v2m0 14v2M3 12h2m14 0h2M5.600 5.600 7 7m10 10 1.400 1.400m0-12.800L17 7M7 17l-1.400 1.400",
  moon: "M20 14.500A8.500 8.500 0 0 1 9.500 4 8.500 8.500 0 1 0 20 14.500z",
  auto: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  up: "M6 15l6-6 6 6",
  down: "M6 9l6 6 6-6",
  next: "M9 6l6 6-6 6",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14zm5 12 4 4",
  refresh: "M20 11a8 8 0 1 0-2 6m2-11v5h-5",
  out: "M14 4h5v16h-5M4 12h11m-4-4 4 4-4 4",
  download: "M12 4v11m-5-4 5 5 5-5M5 20h14",
};

export const Icon = ({ name }) => html`
  <svg class="icon" viewBox="0 0 24 24" aria-hidden="true" focusable="false"><path d=${ICONS[name]} /></svg>`;

/** A button; without visible text, `label` is its accessible name. */
export const Button = ({ icon, label, kind = "", children, ...rest }) => html`
  <button type="button" class=${`button ${kind} ${children ? "" : "bare"}`} aria-label=${children ? undefined : label}
    title=${children ? undefined : label} ...${rest}>
    ${icon && html`<${Icon} name=${icon} />`}${children && html`<span>${children}</span>`}
  </button>`;

/** Renders again whenever the state of the connection changes. */
export function useConnection() {
  const [, render] = useState(0);
  useEffect(() => {
    const draw = () => render((count) => count + 1);
    const stop = watchConnection(draw);
    draw(); // effects run after the first paint: the connection may have changed before this one
    return stop;
  }, []);
  return connection;
}

/**
 * What `load` returns, loaded again when an input changes, when the server is back, or on `reload`.
 * The last value stays on the page meanwhile, so that nothing jumps. `load` gets a signal that aborts once its answer is not needed.
 */
export function useLoaded(load, inputs) {
  const [state, setState] = useState({ value: undefined, error: null, loading: true });
  const [round, setRound] = useState(0);
  const { online, returns, needsToken } = useConnection();
  useEffect(() => {
    if (!online || needsToken) return undefined;
    let current = true;
    const stopper = new AbortController();
    setState((before) => ({ ...before, loading: true }));
    load(stopper.signal).then(
      (value) => current && setState({ value, error: null, loading: false }),
      (error) => current && setState((before) => ({ value: before.value, error, loading: false })),
    );
    return () => {
      current = false;
      stopper.abort();
    };
  }, [...inputs, round, online, returns, needsToken]);
  return { ...state, reload: () => setRound((count) => count + 1) };
}

/** Call `action` every `interval` milliseconds while the page is visible. */
export function useInterval(action, interval) {
  const latest = useRef(action);
  latest.current = action;
  useEffect(() => {
    const timer = setInterval(() => document.hidden || latest.current(), interval);
    return () => clearInterval(timer);
  }, [interval]);
}

/** A sentence that stands out; `error` is anything that was thrown. */
export const Notice = ({ kind = "bad", error, children }) =>
  (error || children) && html`<div class=${`notice ${kind}`} role=${kind === "bad" ? "alert" : "status"}>
    ${error ? error.message : children}</div>`;

export function Dialog({ title, onClose, wide, children }) {
  const element = useRef(null);
  useLayoutEffect(() => {
    element.current.showModal();
    const first = element.current.querySelector("[autofocus], input, textarea, select");
    first?.focus();
  }, []);
  const cancel = (event) => {
    event.preventDefault();
    onClose();
  };
  return html`<dialog ref=${element} class=${wide ? "wide" : ""} aria-label=${title} onCancel=${cancel}
    onMouseDown=${(event) => event.target === element.current && onClose()}>
    <header><h2>${title}</h2><${Button} icon="close" label="Close" kind="quiet" onClick=${onClose} /></header>
    ${children}
  </dialog>`;
}

/** A form in a dialog: `submit` may throw, and its error is shown; the dialog closes when it returns. */
export function FormDialog({ title, action, danger, wide, submit, onClose, ready = true, children }) {
  const [state, setState] = useState({ busy: false, error: null });
  const send = async (event) => {
    event.preventDefault();
    setState({ busy: true, error: null });
    try {
      if ((await submit()) !== false) onClose();
      else setState({ busy: false, error: null });
    } catch (error) {
      setState({ busy: false, error });
    }
  };
  return html`<${Dialog} title=${title} wide=${wide} onClose=${onClose}>
    <form onSubmit=${send}>
      <div class="fields">${children}</div>
      <${Notice} error=${state.error} />
      <footer>
        <${Button} onClick=${onClose}>Cancel<//>
        <button type="submit" class=${`button ${danger ? "danger" : "primary"}`} disabled=${state.busy || !ready}>
          <span>${action}</span></button>
      </footer>
    </form>
  <//>`;
}

/** Names that a keyboard can repeat; for others "delete" is to be typed. */
const TYPEABLE = /^[\x21-\x7e](?:[\x20-\x7e]{0,58}[\x21-\x7e])?$/;

/** Ask before something is lost: the name must be typed where `name` is given. */
export function Confirm({ title, action, name, submit, onClose, children }) {
  const [text, setText] = useState("");
  const typed = name === undefined || TYPEABLE.test(name) ? name : "delete";
  return html`<${FormDialog} title=${title} action=${action} danger submit=${submit} onClose=${onClose}
    ready=${!typed || text === typed}>
    <p>${children}</p>
    ${typed && html`<${Field} label=${html`Type <code class="name">${typed}</code> to confirm`}>
      <input name="confirm" autocomplete="off" spellcheck=${false} value=${text} onInput=${(event) => setText(event.target.value)} /><//>`}
  <//>`;
}

export const Field = ({ label, hint, children }) => html`
  <label class="field"><span class="label">${label}</span>${children}${hint && html`<span class="hint">${hint}</span>`}</label>`;

export const Check = ({ label, hint, ...rest }) => html`
  <label class="check"><input type="checkbox" ...${rest} /><span>${label}${hint && html`<span class="hint">${hint}</span>`}</span></label>`;

/** Copies `text` and says so. */
export function CopyButton({ text, label, children }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await copyText(typeof text === "function" ? text() : text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1200);
  };
  return html`<${Button} icon="copy" label=${label} kind="quiet" onClick=${copy}>${copied ? "Copied" : children}<//>`;
}

async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Without TLS, browsers have no clipboard API except on localhost.
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  return undefined;
}

export const Empty = ({ title, children }) => html`<div class="empty"><p class="title">${title}</p>${children}</div>`;

/** Buttons to move between pages of a list: `cursors` are those of the pages up to this one, `next` that of the next. */
export const Pager = ({ cursors, next, onMove }) => (cursors.length > 0 || (next ?? null) !== null) && html`<div class="body pager">
  <${Button} disabled=${!cursors.length} onClick=${() => onMove(cursors.slice(0, -1))}>Previous<//>
  <${Button} disabled=${(next ?? null) === null} onClick=${() => onMove([...cursors, next])}>Next<//></div>`;

/** Tabs of a page, as links, so that each has an address. */
export const Tabs = ({ label, items, current }) => html`<nav class="tabs" aria-label=${label}>
  ${items.map(({ id, href, text }) => html`<a key=${id} href=${href} aria-current=${id === current ? "page" : undefined}>${text}</a>`)}
</nav>`;

/** A choice among few: buttons of which one is pressed. */
export const Choice = ({ label, options, value, onChange }) => html`<div class="choice" role="group" aria-label=${label}>
  ${options.map(([id, text]) => html`<button type="button" key=${id} aria-pressed=${id === value} onClick=${() => onChange(id)}>${text}</button>`)}
</div>`;

// The configuration of streams and basins, as forms.

import { html, useState } from "../vendor/htm-preact.js";
import { sendJson, streamPath } from "../api.js";
import { duration } from "../format.js";
import { Check, Field, FormDialog } from "../widgets.js";

const UNITS = { s: 1, m: 60, min: 60, h: 3600, d: 86400, w: 604800 };

/** Seconds of a text like 7d, 1h30m or 90; throws a sentence otherwise. */
export function parseDuration(text) {
  const parts = [...text.trim().matchAll(/(\d+)\s*(min|[smhdw])?\s*/gy)];
  const seconds = parts.reduce((sum, [, count, unit]) => sum + Number(count) * UNITS[unit ?? "s"], 0);
  if (!parts.length || parts.map(([whole]) => whole).join("") !== text.trim()) {
    throw new Error(`"${text}" is not a duration: write it like 7d, 12h, 30m or 90s.`);
  }
  return seconds;
}

/** Seconds for which records are kept where neither a stream nor its basin says otherwise, as S2 has it. */
const DEFAULT_AGE = 604_800;

export const retentionText = (policy) =>
  policy?.infinite ? "kept until trimmed" : `kept for ${duration(policy?.age ?? DEFAULT_AGE)}, then removed`;

/** What becomes of the records of a new stream: `inherited` is the retention of its basin. */
function RetentionNote({ form, inherited, where }) {
  const kept = form.retention === "infinite" || (form.retention === "" && inherited?.infinite);
  const age = form.retention === "age" ? form.age : duration(inherited?.age ?? DEFAULT_AGE);
  return html`<p class="hint">${kept
    ? "Records are kept until they are trimmed."
    : `Records are removed ${age} after they arrive. To keep them, choose “until they are trimmed” under ${where}.`}</p>`;
}

const durationText = (seconds) => (seconds === undefined ? "" : duration(seconds).replaceAll(" ", "").replaceAll("min", "m"));

/** What the form edits, from a configuration as the server has it. */
export const formOf = (config) => ({
  storageClass: config?.storage_class ?? "",
  retention: config?.retention_policy ? (config.retention_policy.infinite ? "infinite" : "age") : "",
  age: durationText(config?.retention_policy?.age ?? DEFAULT_AGE),
  mode: config?.timestamping?.mode ?? "",
  uncapped: config?.timestamping?.uncapped ?? false,
  emptyAge: config?.delete_on_empty?.min_age_secs ? durationText(config.delete_on_empty.min_age_secs) : "",
  trims: config?.trim_on_snapshot ?? false,
});

/** The configuration that a form describes: null stands for the default. */
export function configOf(form) {
  return {
    storage_class: form.storageClass || null,
    retention_policy: form.retention === "infinite" ? { infinite: {} } : form.retention === "age" ? { age: parseDuration(form.age) } : null,
    timestamping: { mode: form.mode || null, uncapped: form.uncapped },
    delete_on_empty: { min_age_secs: form.emptyAge.trim() ? parseDuration(form.emptyAge) : 0 },
    ...(form.trims ? { trim_on_snapshot: true } : {}),
  };
}

export function StreamConfigFields({ form, setForm, inherits }) {
  const set = (name) => (event) =>
    setForm({ ...form, [name]: event.target.type === "checkbox" ? event.target.checked : event.target.value });
  const unset = inherits ? "Default of the basin" : "Default";
  return html`
    <div class="columns">
      <${Field} label="Records are kept"><select name="retention" value=${form.retention} onChange=${set("retention")}>
        <option value="">${unset}</option><option value="age">for a time</option><option value="infinite">until they are trimmed</option></select><//>
      ${form.retention === "age" && html`<${Field} label="For" hint="like 7d, 12h or 30m"><input name="age" value=${form.age} onInput=${set("age")} /><//>`}
    </div>
    <div class="columns">
      <${Field} label="Timestamps"><select name="mode" value=${form.mode} onChange=${set("mode")}>
        <option value="">${unset}</option><option value="client-prefer">the client's, else arrival</option>
        <option value="client-require">the client's, required</option><option value="arrival">arrival</option></select><//>
      <${Field} label="Storage class"><select name="class" value=${form.storageClass} onChange=${set("storageClass")}>
        <option value="">${unset}</option><option value="standard">standard</option><option value="express">express</option></select><//>
    </div>
    <${Field} label="Delete when empty for" hint="Empty: never."><input name="empty-age" value=${form.emptyAge} placeholder="never" onInput=${set("emptyAge")} /><//>
    <${Check} label="Timestamps may be in the future" checked=${form.uncapped} onChange=${set("uncapped")} />
    <${Check} label="Snapshots trim the records they cover" checked=${form.trims} onChange=${set("trims")} />`;
}

export function StreamConfigDialog({ basin, stream, config, onClose, onDone }) {
  const [form, setForm] = useState(formOf(config));
  const submit = async () => {
    const changes = configOf(form);
    if (form.trims !== (config.trim_on_snapshot ?? false)) changes.trim_on_snapshot = form.trims;
    await sendJson("PATCH", streamPath(stream), changes, { basin });
    onDone();
  };
  return html`<${FormDialog} title="Configure stream" action="Save" submit=${submit} onClose=${onClose}>
    <${StreamConfigFields} form=${form} setForm=${setForm} inherits /><//>`;
}

/** `defaults` is what the basin gives to its streams, as far as that is known. */
export function CreateStreamDialog({ basin, defaults, onClose, onDone }) {
  const [name, setName] = useState("");
  const [form, setForm] = useState(formOf(null));
  const submit = async () => {
    await sendJson("POST", "v1/streams", { stream: name, config: configOf(form) }, { basin });
    onDone(name);
  };
  return html`<${FormDialog} title="Create stream" action="Create" submit=${submit} onClose=${onClose} ready=${name !== ""}>
    <${Field} label="Name" hint="Any text up to 512 bytes; slashes group streams.">
      <input name="stream" autofocus autocomplete="off" spellcheck=${false} value=${name} onInput=${(event) => setName(event.target.value)} /><//>
    <${RetentionNote} form=${form} inherited=${defaults?.retention_policy} where="Configuration" />
    <details><summary>Configuration</summary><div class="fields inset"><${StreamConfigFields} form=${form} setForm=${setForm} inherits /></div></details>
  <//>`;
}

/** Creates a basin, or changes the configuration of one that exists. */
export function BasinDialog({ basin, config, onClose, onDone }) {
  const [name, setName] = useState(basin ?? "");
  const [form, setForm] = useState(formOf(config?.default_stream_config));
  const [rest, setRest] = useState({
    create_stream_on_append: config?.create_stream_on_append ?? false,
    create_stream_on_read: config?.create_stream_on_read ?? false,
    stream_cipher: config?.stream_cipher ?? "",
  });
  const submit = async () => {
    const wanted = { default_stream_config: configOf(form), ...rest, stream_cipher: rest.stream_cipher || null };
    if (basin) await sendJson("PATCH", `v1/basins/${encodeURIComponent(basin)}`, wanted);
    else await sendJson("POST", "v1/basins", { basin: name, config: wanted });
    onDone(name);
  };
  const check = (member) => (event) => setRest({ ...rest, [member]: event.target.checked });
  return html`<${FormDialog} title=${basin ? "Configure basin" : "Create basin"} action=${basin ? "Save" : "Create"}
    submit=${submit} onClose=${onClose} ready=${name !== ""}>
    ${!basin && html`<${Field} label="Name" hint="8 to 48 lower-case letters, digits and hyphens.">
      <input name="basin" autofocus autocomplete="off" spellcheck=${false} value=${name} onInput=${(event) => setName(event.target.value)} /><//>`}
    <${Check} label="Appending to a missing stream creates it" checked=${rest.create_stream_on_append} onChange=${check("create_stream_on_append")} />
    <${Check} label="Reading a missing stream creates it" checked=${rest.create_stream_on_read} onChange=${check("create_stream_on_read")} />
    <${Field} label="Encryption of new streams" hint="Clients provide the key. Without it, this console cannot read the records.">
      <select name="cipher" value=${rest.stream_cipher} onChange=${(event) => setRest({ ...rest, stream_cipher: event.target.value })}>
        <option value="">none</option><option value="aegis-256">aegis-256</option><option value="aes-256-gcm">aes-256-gcm</option></select><//>
    <${RetentionNote} form=${form} where="Defaults of its streams" />
    <details open=${Boolean(basin)}><summary>Defaults of its streams</summary><div class="fields inset"><${StreamConfigFields} form=${form} setForm=${setForm} /></div></details>
  <//>`;
}

// The frame around all pages: navigation, theme, state of the connection, login.

import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { connection, loadSettings, logIn, logOut, token } from "./api.js";
import { BasinPage } from "./pages/basin.js";
import { BasinsPage } from "./pages/basins.js";
import { OverviewPage } from "./pages/overview.js";
import { ServersPage } from "./pages/servers.js";
import { StreamPage } from "./pages/stream.js";
import { NamedTablePage, TablePage, TablesPage } from "./pages/tables.js";
import { TokensPage } from "./pages/tokens.js";
import { link, useRoute } from "./routes.js";
import { Button, Empty, Field, Icon, Notice, useConnection } from "./widgets.js";

const THEMES = { auto: "System theme", light: "Light theme", dark: "Dark theme" };
const THEME_ICONS = { auto: "auto", light: "sun", dark: "moon" };

function pageOf({ segments, query }) {
  const [first, basin, stream] = segments;
  if (first === undefined) return { section: "overview", title: "Overview", page: html`<${OverviewPage} />` };
  if (first === "basins") {
    if (basin === undefined) return { section: "basins", title: "Basins", page: html`<${BasinsPage} />` };
    if (stream === undefined) {
      const tab = query.get("tab") ?? "streams";
      return { section: "basins", title: basin, page: html`<${BasinPage} key=${basin} basin=${basin} tab=${tab} group=${query.get("view") === "groups" ? query.get("group") ?? "" : null} />` };
    }
    return {
      section: "basins",
      title: stream,
      page: html`<${StreamPage} key=${`${basin}/${stream}`} basin=${basin} stream=${stream} query=${query} />`,
    };
  }
  if (first === "tables") {
    if (basin === undefined) return { section: "tables", title: "Tables", page: html`<${TablesPage} />` };
    const page = basin.includes("://") ? html`<${TablePage} key=${basin} uri=${basin} />` : html`<${NamedTablePage} key=${basin} name=${basin} />`;
    return { section: "tables", title: "Tables", page };
  }
  if (first === "servers") return { section: "servers", title: "Servers", page: html`<${ServersPage} />` };
  if (first === "tokens") return { section: "tokens", title: "Access tokens", page: html`<${TokensPage} />` };
  return {
    section: "",
    title: "Not found",
    page: html`<${Empty} title="There is no such page."><p><a href="#/">Overview</a></p><//>`,
  };
}

function ThemeButton() {
  const [theme, setTheme] = useState(document.documentElement.dataset.theme ?? "auto");
  const change = () => {
    const names = Object.keys(THEMES);
    const next = names[(names.indexOf(theme) + 1) % names.length];
    setTheme(next);
    if (next === "auto") {
      localStorage.removeItem("streamfold-theme");
      delete document.documentElement.dataset.theme;
    } else {
      localStorage.setItem("streamfold-theme", next);
      document.documentElement.dataset.theme = next;
    }
  };
  return html`<${Button} icon=${THEME_ICONS[theme]} label=${`${THEMES[theme]}: change`} kind="quiet" onClick=${change} />`;
}

function Navigation({ section }) {
  const { settings } = useConnection();
  const item = (id, href, text) => html`<a href=${href} aria-current=${section === id ? "page" : undefined}>
    <${Icon} name=${id} /><span>${text}</span></a>`;
  return html`<header class="bar">
    <a class="brand" href="#/"><img src="icon.svg" alt="" width="24" height="24" /><span>Streamfold</span></a>
    <nav aria-label="Pages">
      ${item("overview", "#/", "Overview")}
      ${item("basins", link(["basins"]), "Basins")}
      ${(settings?.tables || settings?.snapshotters) && item("tables", link(["tables"]), "Tables")}
      ${item("servers", link(["servers"]), "Servers")}
      ${item("tokens", link(["tokens"]), "Tokens")}
    </nav>
    <div class="bar-end">
      ${settings?.read_only && html`<span class="badge">read-only</span>`}
      <${ThemeButton} />
      ${settings?.guarded && token() && html`<${Button} icon="out" label="Log out" kind="quiet" onClick=${logOut} />`}
      <span class="version">${settings?.version ?? ""}</span>
    </div>
  </header>`;
}

function Login() {
  const [secret, setSecret] = useState("");
  const field = useRef(null);
  useEffect(() => field.current.focus(), []); // also after a refusal
  const submit = (event) => {
    event.preventDefault();
    if (secret.trim()) logIn(secret.trim());
  };
  return html`<main class="login"><form class="card" onSubmit=${submit}>
    <h1>Log in</h1>
    <p class="muted">This server requires an access token. The console stores it in this browser tab only.</p>
    <${Notice} >${connection.refusal}<//>
    <${Field} label="Access token">
      <input type="password" name="token" autocomplete="off" ref=${field} value=${secret} onInput=${(event) => setSecret(event.target.value)} /><//>
    <button type="submit" class="button primary"><span>Log in</span></button>
  </form></main>`;
}

function App() {
  const route = useRoute();
  const { online, needsToken, settings } = useConnection();
  const { section, title, page } = pageOf(route);
  useEffect(() => {
    document.title = `${title} · Streamfold`;
  }, [title]);
  if (!settings) return null;
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to content</a>
    <${Navigation} section=${section} />
    <div class=${`offline ${online ? "" : "shown"}`} role="status">
      ${!online && "The server cannot be reached. Is it running? This page continues as soon as it responds."}</div>
    ${needsToken ? html`<${Login} />` : html`<main id="main" tabindex="-1">${page}</main>`}`;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

render(html`<${App} />`, document.getElementById("app"));
await loadSettings();

// The page of `clusterkit web`, and of a report, which holds the server's answers itself.
// Output of programs is only ever added as text, by `el`, never as markup.
// page.py joins page.curves.js, page.log.js and this file, in this order, to one strict function.

const $ = (id) => document.getElementById(id);
const report = $("data") && JSON.parse($("data").textContent);
const token = takeToken();
const TABS = ["curves", "ranks", "events", "log", "config", "plan"];
const DEFAULT_METRICS = "loss and tokens/s";
const POINTS = 2000, MOST_LINES = 5000;
const PAUSE = 1000, BEHIND_PAUSE = 100, PATIENCE = 20000, OUTDATED = 5;
// Okabe and Ito's palette, which people with any kind of colour vision can distinguish.
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
const state = {
  runs: [], run: null, about: null, tab: "curves", picked: null, ticked: new Set(), abouts: {},
  curves: {}, zoom: null, charts: [], log: null, news: null, turn: 0, timer: null, heard: Date.now(), lost: false,
};

// ---- requests

// Keep the token for this tab, and take it out of the address bar and of the history.
function takeToken() {
  if (report) return "";
  const given = new URLSearchParams(location.search).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname + location.hash);
  }
  return given || sessionStorage.getItem("token") || "";
}

async function get(path, query = []) {
  if (report) {
    if (path in report.answers) return report.answers[path];
    throw new Error("this report does not hold that");
  }
  return ask("GET", path + (query.length ? "?" + new URLSearchParams(query) : ""));
}

async function ask(method, url) {
  let response;
  try {
    // To cancel a run may take longer, and is not to be given up.
    const signal = method === "GET" ? AbortSignal.timeout(PATIENCE) : undefined;
    response = await fetch(url, { method, signal, headers: { Authorization: `Bearer ${token}` } });
  } catch {
    throw new Error("clusterkit web has ended, or cannot be reached");
  }
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.hint ? `${answer.error} (${answer.hint})` : answer.error);
  return answer;
}

const showMessage = (text) => { $("link").textContent = text; };
// Wrap a handler so that its errors are shown in the page.
const guarded = (handler) => async (...given) => {
  try { await handler(...given); } catch (error) { showMessage(error.message); }
};

// ---- elements and formats

function el(name, about = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(about)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...inside.filter((each) => each !== null && each !== undefined));
  return made;
}
const fill = (place, ...inside) => place.replaceChildren(...inside);
const two = (number) => String(number).padStart(2, "0");
const clockOf = (date) => [date.getHours(), date.getMinutes(), date.getSeconds()].map(two).join(":");
const clock = (at) => (at ? clockOf(new Date(at * 1000)) : "");
// ISO dates in local time, without the year where it is this one.
function when(at) {
  if (!at) return "";
  const date = new Date(at * 1000), year = date.getFullYear();
  const day = `${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${year === new Date().getFullYear() ? "" : `${year}-`}${day} ${clockOf(date)}`;
}
function number(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "-" : String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(5));
}
function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}
const options = (list, chosen) =>
  list.map(([value, text]) => el("option", { value, textContent: text, selected: String(value) === String(chosen) }));
function choices(select, list) {
  // Replaced only if they have changed: an open menu would close.
  const key = JSON.stringify(list);
  if (select.dataset.key === key) return;
  select.dataset.key = key;
  const before = select.value;
  fill(select, ...options(list, before));
  if (select.selectedIndex < 0) select.selectedIndex = 0;
}

// ---- runs

function showRuns() {
  const words = $("filter").value.toLowerCase().split(/\s+/);
  const fits = (run) => words.every((word) => `${run.run} ${run.job} ${run.cluster} ${run.state}`.toLowerCase().includes(word));
  const shown = state.runs.filter(fits);
  const held = document.activeElement && document.activeElement.dataset.run;
  fill($("runs"), ...shown.map((run) => el("li", { className: run.run === state.run ? "chosen" : "" },
    el("input", { type: "checkbox", checked: state.ticked.has(run.run), ariaLabel: `Compare ${run.run}`,
      onchange: guarded(() => tick(run.run)) }),
    el("button", { type: "button", "data-run": run.run, onclick: () => choose(run.run),
      "aria-current": run.run === state.run ? "true" : "false" },
      el("span", { className: "name" }, run.run),
      el("small", {}, el("span", { className: `state ${run.state}` }, run.state),
        ` ${run.cluster} ${when(run.started_at)}`)))));
  if (held) [...$("runs").querySelectorAll("button")].find((each) => each.dataset.run === held)?.focus();
}

async function loadRuns() {
  state.runs = await get("/api/runs");
  showRuns();
  choices($("other"), [["", "nothing"], ...state.runs.filter((run) => run.run !== state.run).map((run) => [run.run, run.run])]);
}

async function tick(run) {
  if (!state.ticked.delete(run)) state.ticked.add(run);
  showRuns();
  await loadCurves(true);
}

// Not by the hashchange event, which comes too late for the next key: it is for the run chosen here.
// Without a tab, the run opens on its own: `openingTab`.
function choose(run, tab = state.picked) {
  history.pushState(null, "", `#${run}${tab ? `/${tab}` : ""}`);
  fromHash();
}

function step(by) {
  const names = [...$("runs").querySelectorAll("button")].map((each) => each.dataset.run);
  const next = names[Math.max(0, Math.min(names.length - 1, names.indexOf(state.run) + by))];
  if (next) choose(next);
}

const fromHash = guarded(async () => {
  const [run, tab, others] = decodeURIComponent(location.hash.slice(1)).split("/");
  if (others) state.ticked = new Set(others.split(","));
  const wanted = run || state.run || (state.runs[0] && state.runs[0].run);
  state.picked = TABS.includes(tab) ? tab : null;
  state.tab = state.picked || state.tab;
  showTab();
  if (!wanted) { fill($("summary"), el("p", { className: "quiet" }, "There are no runs yet.")); return; }
  if (wanted !== state.run) {
    state.run = wanted;
    Object.assign(state, { about: null, zoom: null, log: null });
    fill($("lines"));
    for (const id of ["attempt", "node", "rank"]) $(id).selectedIndex = 0;
    await loadRuns();
    poll();
  }
  await loadRun();
  if (!state.about) return;  // another run has been chosen meanwhile
  if (!state.picked) openingTab();
  await showPanel();
});

// A failed run opens on what the rank that failed first has printed, any other on its curves.
function openingTab() {
  const { state: is, failure, ranks } = state.about;
  state.tab = is === "FAILED" ? "log" : "curves";
  showTab();
  if (is !== "FAILED" || !failure || failure.node === null) return;
  const first = ranks.find((each) => each.node === failure.node && each.rank === failure.rank);
  showLogOf(failure.node, first && first.heard_at ? failure.rank : null);
}

// ---- one run

async function about(run) {
  return (state.abouts[run] = await get(`/api/runs/${run}`));
}

async function loadRun() {
  const run = state.run;
  const found = await about(run);
  if (run !== state.run) return;
  state.about = found;
  showSummary();
  const nodes = Math.max(found.nodes.length, found.shape.nodes);
  choices($("attempt"), [["", "newest"], ...Array.from({ length: found.attempt }, (_, at) => [at + 1, String(at + 1)]).reverse()]);
  choices($("node"), Array.from({ length: nodes }, (_, node) => [node, found.nodes[node] ? `${node} ${found.nodes[node].host}` : String(node)]));
  showRankChoices();
  choices($("metric"), [DEFAULT_METRICS, ...found.metrics.map((each) => each.name)].map((name) => [name, name]));
  if (state.tab === "ranks") showRanks();
  if (state.tab === "events") showEvents();
}

function showRankChoices() {
  const here = state.about.ranks.filter((rank) => rank.node === Number($("node").value) && rank.rank !== null);
  choices($("rank"), [["", "all"], ...here.map((rank) => [rank.rank, String(rank.rank)])]);
}

function showSummary() {
  const run = state.about;
  const last = Object.fromEntries(run.metrics.map((each) => [each.name, each.last]));
  const fact = (name, value) => el("span", {}, el("b", {}, name), ` ${value}`);
  const parts = [
    el("span", { className: `state ${run.state}` }, run.state),
    fact("job", run.job), fact("cluster", `${run.cluster} (${run.backend})`),
    fact("nodes", run.nodes.length || run.shape.nodes), fact("ranks", run.shape.world_size), fact("attempt", run.attempt),
  ];
  if (run.started_at) parts.push(fact("time", duration((run.finished_at || run.now) - run.started_at)));
  if (run.step) parts.push(fact("step", run.steps ? `${number(run.step)} of ${number(run.steps)}` : number(run.step)));
  if ("loss" in last) parts.push(fact("loss", number(last.loss)));
  if ("tokens_per_second" in last) parts.push(fact("tokens/s", number(last.tokens_per_second)));
  if (run.standstill && !run.final) {
    const title = run.standstill.waiting.length ? "Who waits for whom: " : "Hang: ";
    parts.push(el("div", { className: "note bad", role: "alert" }, el("b", {}, title), run.standstill.text));
  }
  for (const text of run.notes) parts.push(el("div", { className: "note" }, text));
  if (run.failure) {
    const hint = run.failure.hint ? `\nhint: ${run.failure.hint}` : "";
    parts.push(el("div", { className: "note bad" }, el("b", {}, "Failed first: "), `${run.failure.who}: ${run.failure.cause}${hint}`));
    if (run.failure.traceback) parts.push(el("details", { className: "note" }, el("summary", {}, "Traceback"), el("pre", {}, run.failure.traceback)));
  }
  if (run.behind) parts.push(el("div", { className: "note" }, "Its log is still being read."));
  fill($("summary"), ...parts);
  $("title").textContent = run.run;
  document.title = `${run.run} ${run.state}`;
  $("cancel").hidden = Boolean(report) || run.final;
}

const size = (bytes) => (bytes >= 2 ** 30 ? `${(bytes / 2 ** 30).toFixed(1)} GiB` : `${Math.round(bytes / 2 ** 20)} MiB`);

// The columns of `clusterkit top`; those of CPU, memory and GPU where some rank has them.
function rankColumns(run) {
  const now = run.finished_at || run.now;
  const used = (key) => run.ranks.some((rank) => rank.usage && rank.usage[key] !== null);
  const of = (key, text) => (rank) => (rank.usage && rank.usage[key] !== null ? text(rank.usage[key]) : "");
  return [
    ["Step", (rank) => (rank.step === null ? "" : number(rank.step))],
    ["s/step", (rank) => (rank.step_seconds === null ? "" : String(+rank.step_seconds.toPrecision(3)))],
    ["Quiet", (rank) => (rank.heard_at ? duration(now - rank.heard_at) : "")],
    ...(used("memory") ? [["CPUs", of("cpus", (cpus) => cpus.toFixed(1))], ["Memory", of("memory", size)]] : []),
    ...(used("gpu") ? [["GPU", of("gpu", (percent) => `${percent} %`)], ["GPU memory", of("gpu_memory", size)]] : []),
  ];
}

function showRanks() {
  const run = state.about, hang = run.final ? null : run.standstill;
  const kind = (rank) => (hang && hang.missing.includes(rank) ? "missing" : hang && hang.waiting.includes(rank) ? "waiting" : "");
  const columns = rankColumns(run);
  const nodes = new Map(run.nodes.map((node) => [node.node, []]));
  for (const rank of run.ranks) nodes.set(rank.node, [...(nodes.get(rank.node) || []), rank]);
  const nodeRow = (node) => {
    const status = run.nodes.find((each) => each.node === node);
    const head = el("th", { scope: "colgroup", colSpan: columns.length + 3 }, `node ${node}`);
    if (status) head.append(` ${status.host} `, el("span", { className: `state ${status.state}` }, status.state));
    if (status && status.reason) head.append(` ${status.reason}`);
    return el("tr", { className: "node" }, head);
  };
  const rankRow = (rank) => {
    const waits = kind(rank.rank);
    const word = { missing: "MISSING", waiting: "WAITS", "": rank.state }[waits];
    return el("tr", { className: waits },
      el("td", {}, el("button", { type: "button", title: "Show its log", onclick: () => openLog(rank.node, rank.rank) },
        rank.rank === null ? "launcher" : String(rank.rank))),
      el("td", { className: `state ${word}` }, word),
      ...columns.map(([, text]) => el("td", { className: "figure" }, text(rank))),
      el("td", { className: "last", title: rank.last || "" }, rank.last || ""));
  };
  fill($("ranks"), table(["Rank", "State", ...columns.map(([name]) => name), "Last line"],
    [...nodes].sort((a, b) => a[0] - b[0]).flatMap(([node, ranks]) => [nodeRow(node), ...ranks.map(rankRow)])));
}

function showLogOf(node, rank) {
  $("node").value = String(node);
  showRankChoices();
  $("rank").value = rank === null ? "" : String(rank);
}

function openLog(node, rank) {
  showLogOf(node, rank);
  state.log = null;
  choose(state.run, "log");
}

function table(header, rows) {
  return el("div", { className: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...header.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...rows)));
}

function showEvents() {
  const run = state.about;
  const cell = (text) => el("td", {}, text);
  const rounds = run.attempts.map((each) => el("tr", {}, cell(String(each.attempt)),
    el("td", { className: `state ${each.state}` }, each.state), cell(when(each.started_at)),
    cell(duration(each.finished_at - each.started_at)), cell(each.failure ? `${each.failure.who}: ${each.failure.cause}` : "")));
  rounds.push(el("tr", {}, cell(String(run.attempt)), el("td", { className: `state ${run.state}` }, run.state),
    cell(when(run.running_since || run.started_at)), cell(""), cell(run.failure ? `${run.failure.who}: ${run.failure.cause}` : "")));
  const events = run.events.map((event) => el("tr", {}, cell(when(event.at)), cell(String(event.attempt)), cell(event.text)));
  fill($("events"), el("h2", {}, "Rounds"), table(["Round", "State", "Began", "Took", "Why it ended"], rounds),
    el("h2", {}, "Events"), events.length ? table(["When", "Round", "What"], events) : el("p", { className: "quiet" }, "No events."));
}

// ---- config and plan

function flat(value, name = "", into = {}) {
  if (value !== null && typeof value === "object" && Object.keys(value).length) {
    for (const [key, inner] of Object.entries(value)) flat(inner, name ? `${name}.${key}` : key, into);
  } else into[name] = value !== null && typeof value === "object" ? JSON.stringify(value) : String(value);
  return into;
}

async function showConfig() {
  const mine = flat(state.about.documents);
  const other = $("other").value;
  const theirs = other ? flat((state.abouts[other] || (await about(other))).documents) : null;
  let names = [...new Set([...Object.keys(mine), ...Object.keys(theirs || {})])].sort();
  if (theirs && $("differing").checked) names = names.filter((name) => mine[name] !== theirs[name]);
  const rows = names.map((name) => el("tr", {}, el("td", {}, name), ...[mine, ...(theirs ? [theirs] : [])].map((each) =>
    el("td", { className: theirs && mine[name] !== theirs[name] ? "differs text" : "text" }, name in each ? each[name] : "-"))));
  fill($("keys"), names.length ? table(["Key", state.run, ...(theirs ? [other] : [])], rows) : el("p", { className: "quiet" }, "Nothing differs."));
}

async function showPlan() {
  const run = state.run;
  const text = (await get(`/api/runs/${run}/plan`)).text;
  if (run === state.run) $("plantext").textContent = text;
}

// ---- tabs and updates

function showTab() {
  for (const name of TABS) {
    $(name).hidden = name !== state.tab;
    $(`tab-${name}`).setAttribute("aria-selected", String(name === state.tab));
    $(`tab-${name}`).tabIndex = name === state.tab ? 0 : -1;
  }
}

async function showPanel() {
  if (state.tab === "curves") await loadCurves(false);
  if (state.tab === "ranks") showRanks();
  if (state.tab === "events") showEvents();
  if (state.tab === "log") await loadLog("newer");
  if (state.tab === "config") await showConfig();
  if (state.tab === "plan") await showPlan();
}

// Ask what is new, not by a stream: a browser opens six connections to a host, and each tab would
// hold one of them. A tab that nobody sees does not ask.
async function poll() {
  if (report) return;
  clearTimeout(state.timer);
  const turn = ++state.turn;
  let pause = PAUSE;
  if (!document.hidden) {
    try {
      const answer = await get("/api/news", compared().map((run) => ["run", run]));
      state.heard = Date.now();
      if (turn !== state.turn) return;  // asked again meanwhile, for other runs
      const before = state.news || { of: {} };
      state.news = answer;
      if (answer.behind) pause = BEHIND_PAUSE;
      if (state.lost) showMessage("");
      state.lost = false;
      await update(before, answer);
    } catch (error) {
      state.lost = true;
      showMessage(error.message);
    }
  }
  if (turn === state.turn) state.timer = setTimeout(poll, pause);
}

async function update(before, now) {
  // A run that was not asked about before may have changed since it was loaded.
  const changed = (run, ...parts) => !before.of[run] || !now.of[run] || parts.some((part) => before.of[run][part] !== now.of[run][part]);
  if (before.runs !== now.runs) await loadRuns();
  if (now.of[state.run] && changed(state.run, ...Object.keys(now.of[state.run]))) {
    await loadRun();
    if (state.tab === "log" && $("follow").checked) await loadLog("newer");
  }
  if (state.tab === "curves" && !state.zoom && compared().some((run) => now.of[run] && changed(run, "metrics"))) await loadCurves(false);
}

function showAge() {
  const seconds = Math.round((Date.now() - state.heard) / 1000);
  $("age").textContent = seconds > OUTDATED && !document.hidden ? `not updated for ${duration(seconds)}` : "";
}

// ---- actions and keys

function question(text, answers) {
  return new Promise((resolve) => {
    fill($("words"), text);
    fill($("answers"), ...answers.map(([value, words]) => el("button", { value }, words)));
    $("dialog").returnValue = "";
    $("dialog").onclose = () => resolve($("dialog").returnValue);
    $("dialog").showModal();
  });
}

async function cancel() {
  const run = state.run;
  if ((await question(`Cancel ${run} and everything it started?`, [["", "No"], ["yes", "Cancel the run"]])) !== "yes") return;
  showMessage("cancelling ...");
  await ask("POST", `/api/runs/${run}/cancel`);
  showMessage("");
  await loadRun();
  await loadRuns();
}

function keys() {
  const rows = [["j, k", "next, previous run"], ["x", "compare this run with others, or no more"], ["1 to 6", "curves, ranks, events, log, config, plan"],
    ["/", "search the log"], ["r", "filter runs"], ["f", "follow the log"], ["l", "logarithmic"], ["z", "all steps"], ["t", "dark or light"], ["Esc", "leave a field"]];
  question(table(["Key", "Does"], rows.map((row) => el("tr", {}, ...row.map((text) => el("td", {}, text))))), [["", "Close"]]);
}

const theme = () => document.documentElement.dataset.theme;
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  drawCurves();
}

const unzoom = guarded(async () => { state.zoom = null; await loadCurves(true); });
const toTab = (name) => { if (state.run) choose(state.run, name); };
const KEY_ACTIONS = {
  j: () => step(1), k: () => step(-1), x: guarded(() => tick(state.run)), t: () => setTheme(theme() === "dark" ? "light" : "dark"),
  "/": () => { toTab("log"); $("search").focus(); }, r: () => $("filter").focus(),
  f: () => $("follow").click(), l: () => $("logscale").click(), z: unzoom, "?": keys,
};
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input[type=search], select, dialog[open]");
  if (event.key === "Escape" && typing && !$("dialog").open) { event.target.blur(); return; }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const tab = TABS[Number(event.key) - 1];
  const act = tab ? () => toTab(tab) : KEY_ACTIONS[event.key];
  if (act) { event.preventDefault(); act(); }
});
$("tabs").addEventListener("keydown", (event) => {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  const next = TABS[(TABS.indexOf(state.tab) + by + TABS.length) % TABS.length];
  toTab(next);
  $(`tab-${next}`).focus();
});
for (const name of TABS) $(`tab-${name}`).addEventListener("click", () => toTab(name));
const debounced = (what, pause = 250) => { let timer; return () => { clearTimeout(timer); timer = setTimeout(guarded(what), pause); }; };
$("filter").addEventListener("input", showRuns);
$("metric").addEventListener("change", guarded(() => loadCurves(true)));
$("logscale").addEventListener("change", drawCurves);
$("unzoom").addEventListener("click", unzoom);
for (const id of ["attempt", "rank"]) $(id).addEventListener("change", guarded(() => loadLog(null)));
$("node").addEventListener("change", guarded(async () => { showRankChoices(); await loadLog(null); }));
$("search").addEventListener("input", debounced(() => loadLog(null)));
$("older").addEventListener("click", guarded(() => { $("follow").checked = false; return loadLog("older"); }));
$("lines").addEventListener("scroll", () => {
  // Do not follow while the user has scrolled up to read.
  const place = $("lines");
  if (place.scrollTop + place.clientHeight < place.scrollHeight - 40) $("follow").checked = false;
});
$("other").addEventListener("change", guarded(showConfig));
$("differing").addEventListener("change", guarded(showConfig));
$("cancel").addEventListener("click", guarded(cancel));
$("theme").addEventListener("click", KEY_ACTIONS.t);
$("help").addEventListener("click", keys);
$("report").addEventListener("click", () => {
  const query = new URLSearchParams([["token", token], ...compared().map((run) => ["run", run])]);
  el("a", { href: `/report.html?${query}`, download: "" }).click();
});
window.addEventListener("hashchange", fromHash);
document.addEventListener("visibilitychange", poll);
new ResizeObserver(debounced(() => {
  for (const chart of state.charts) chart.setSize({ width: chart.root.parentElement.clientWidth, height: 280 });
}, 50)).observe($("charts"));

setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
if (report) {
  $("report").hidden = true;
  $("follow").parentElement.hidden = true;
  showMessage(`as of ${when(report.at)}`);
} else setInterval(showAge, 1000);
guarded(async () => { await loadRuns(); if (report) state.ticked = new Set(state.runs.slice(1).map((run) => run.run)); await fromHash(); })();

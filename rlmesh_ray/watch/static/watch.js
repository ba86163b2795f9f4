// The page: it asks for JSON every few seconds while it is visible.

const $ = (id) => document.getElementById(id);
const DASH = "–";
const STATISTICS_MS = 3000, SESSIONS_MS = 2000, RUNS_MS = 5000, TIMEOUT_MS = 20000, PAGE_EPISODES = 50;
const chosen = { endpoint: "", episode: "", first: 0 };
let endpoints = [], pace = {};
const token = new URLSearchParams(location.hash.slice(1)).get("token") ?? sessionStorage.getItem("token") ?? "";
sessionStorage.setItem("token", token);
history.replaceState(null, "", location.pathname);  // so that no token is copied with the address

class Refused extends Error {}

async function ask(path, values = {}) {
  const signal = AbortSignal.timeout(TIMEOUT_MS);
  const headers = { authorization: `Bearer ${token}` };
  const response = await fetch(`api/${path}?${new URLSearchParams(values)}`, { signal, headers });
  if (response.status === 401) showLogin();
  return response;
}

async function get(path, values) {
  const response = await ask(path, values);
  if (!response.ok) throw new Refused(await response.text());
  return response.json();
}

// What each part of the page has to say; what is shown below is old while the endpoints' part fails.
const reports = { endpoints: "", live: "", picture: "", runs: "", replay: "" };

function report(part, text, isOld = $("main").classList.contains("old")) {
  reports[part] = text;
  put($("status"), [...new Set(Object.values(reports).filter(Boolean))].join("; "));
  $("main").classList.toggle("old", isOld);
}

function showProblem(part, error) {
  const isRefused = error instanceof Refused;
  report(part, isRefused ? error.message : "no connection to the page's server; it tries again", part === "endpoints" || undefined);
}

// Runs a task now and after each pause, one at a time; a hidden page asks for nothing.
function repeat(part, task, pauseMs) {
  let timer = 0, isRunning = false, isAgain = false;
  const run = async () => {
    clearTimeout(timer);
    if (isRunning) { isAgain = true; return; }
    isRunning = true;
    let pause = pauseMs;
    try {
      if (!document.hidden && !$("main").hidden) pause = (await task()) ?? pauseMs;
      if (part === "live" || part === "picture") report(part, "");
    } catch (error) { showProblem(part, error); }
    isRunning = false;
    timer = setTimeout(run, isAgain ? 0 : pause);
    isAgain = false;
  };
  document.addEventListener("visibilitychange", run);
  return run;
}

// --- text and elements ---------------------------------------------------------------------------

const isNumber = (value) => typeof value === "number";
const formatted = (value, options) => isNumber(value) ? value.toLocaleString("en", options) : DASH;
const round = (value) => formatted(value, { maximumFractionDigits: Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0 });
const short = (value) => formatted(value, { notation: "compact", maximumFractionDigits: 1 });
const moment = (seconds) => new Date(seconds * 1000).toLocaleString("sv");
function duration(s) {
  if (!isNumber(s)) return DASH;
  if (s >= 3600) return `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
  if (s >= 60) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
  if (s >= 1) return `${round(s)} s`;
  return s >= 1e-3 ? `${round(s * 1e3)} ms` : `${round(s * 1e6)} µs`;
}
const times = (row, name) => isNumber(row[`${name}_p50_s`])
  ? `${duration(row[`${name}_p50_s`])}, ${duration(row[`${name}_p99_s`])}` : DASH;

function put(element, text, className = element.className) {
  if (element.textContent !== text) element.textContent = text;
  if (element.className !== className) element.className = className;
}

function add(parent, kind, text, properties = {}) {
  return parent.appendChild(Object.assign(document.createElement(kind), { textContent: text, ...properties }));
}

// Fills a table. A row keeps its line while it is there, and with it the keyboard's focus; the first
// cell of each is a button. A column is: header, class, text of a row, class of a row.
function fill(table, columns, rows, { key, isChosen, choose, name, empty }) {
  if (!table.tHead) {
    const head = table.createTHead().insertRow();
    for (const [label, className] of columns) add(head, "th", label, { scope: "col", className });
    table.createTBody();
    table.createCaption();
  }
  put(table.caption, rows.length ? "" : empty);
  table.tHead.hidden = !rows.length;
  const body = table.tBodies[0];
  const lines = new Map([...body.rows].map((line) => [line.dataset.key, line]));
  rows.forEach((row) => lines.delete(key(row)));
  for (const line of lines.values()) line.remove();
  const kept = new Map([...body.rows].map((line) => [line.dataset.key, line]));
  rows.forEach((row, index) => {
    const line = kept.get(key(row)) ?? document.createElement("tr");
    if (body.rows[index] !== line) body.insertBefore(line, body.rows[index] ?? null);
    line.dataset.key = key(row);
    columns.forEach(([, className, text, classOf = () => ""], at) => {
      const cell = line.cells[at] ?? line.insertCell();
      if (at) { put(cell, text(row), `${className} ${classOf(row)}`.trim()); return; }
      const button = cell.firstChild ?? add(cell, "button", "", { type: "button" });
      put(button, text(row));
      button.ariaPressed = isChosen(row);
      button.ariaLabel = name(row);
      button.onclick = () => choose(row);
    });
  });
}

function facts(list, values) {
  list.replaceChildren();
  for (const [name, text] of Object.entries(values).filter(([, text]) => text)) {
    const part = add(list, "div", "");
    add(part, "dt", name);
    add(part, "dd", text);
  }
}

function offer(select, values, none) {
  const text = JSON.stringify(values) + none;
  select.disabled = !values.length;
  if (select.dataset.values === text) return;
  const before = select.dataset.before = select.value || select.dataset.before || "";  // it may come back
  select.dataset.values = text;
  select.replaceChildren(...(values.length ? values : [["", none]]).map(([value, label]) => new Option(label, value)));
  if (values.some(([value]) => value === before)) select.value = before;
}

function chart(figure, points, xName, yName) {
  const known = points.filter(({ x, y }) => isNumber(x) && isNumber(y));
  if (!known.length) {
    figure.replaceChildren();
    add(figure, "p", "Nothing to draw yet.", { className: "empty" });
    return;
  }
  const W = Math.max(figure.clientWidth, 260), H = 220, left = 44, right = 8, bottom = 34, top = 26;
  const [xs, ys] = [known.map(({ x }) => x), known.map(({ y }) => y)];
  const [x0, x1, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const [y0, y1] = low === high ? [low - 1, high + 1] : [low, high];
  const atX = (x) => left + (x1 === x0 ? .5 : (x - x0) / (x1 - x0)) * (W - left - right);
  const atY = (y) => H - bottom - (y - y0) / (y1 - y0) * (H - bottom - top);
  const make = (parent, kind, attributes, text = "") => {
    const element = parent.appendChild(document.createElementNS("http://www.w3.org/2000/svg", kind));
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    return element;
  };
  figure.replaceChildren();
  const svg = make(figure, "svg", { viewBox: `0 0 ${W} ${H}`, role: "img",
    "aria-label": `${yName} over ${xName}: ${round(ys.at(-1))} after ${round(xs.at(-1))}, from ${round(low)} to ${round(high)}` });
  for (const [share, anchor] of [[0, "start"], [.5, "middle"], [1, "end"]]) {
    const [x, y] = [x0 + share * (x1 - x0), y0 + share * (y1 - y0)];
    make(svg, "line", { class: "grid", x1: left, x2: W - right, y1: atY(y), y2: atY(y) });
    make(svg, "text", { x: left - 8, y: atY(y) + 4, "text-anchor": "end" }, short(y));
    make(svg, "text", { x: atX(x), y: H - bottom + 16, "text-anchor": anchor }, short(x));
  }
  make(svg, "text", { x: 0, y: 11 }, yName);
  make(svg, "text", { x: W - right, y: H - 2, "text-anchor": "end" }, xName);
  const line = known.map(({ x, y }) => `${atX(x).toFixed(1)},${atY(y).toFixed(1)}`);
  if (line.length === 1) line.push(`${atX(xs[0]) + 3},${atY(ys[0])}`);
  make(svg, "polyline", { class: "curve", points: line.join(" ") });
}

// --- endpoints and their lanes -------------------------------------------------------------------

function trouble(row) {
  const counts = { "sessions lost": row.sessions_lost, refused: row.sessions_refused,
    "workers replaced": row.worker_restarts, "values out of range": row.deviations, ...row.errors };
  const parts = Object.entries(counts).filter(([, n]) => n).map(([name, n]) => `${name} ${short(n)}`);
  return [row.problem, ...parts].filter(Boolean).join(", ");
}

const num = (label, text) => [label, "number", text];
const wide = (label, text) => [label, "number wide", text];
const NAME = ["endpoint", "", (row) => row.endpoint_id], STATE = ["state", "", (row) => row.state, (row) => row.state];
const RESTARTS = wide("restarts", (row) => round(row.restarts)), TROUBLE = ["trouble", "trouble", trouble];
const ENVS = [NAME, STATE, num("sessions", (row) => round(row.sessions)),
  num("steps/s", (row) => round(row.lane_steps_per_s)), wide("step p50, p99", (row) => times(row, "step")),
  wide("episodes", (row) => short(row.episodes)), RESTARTS, TROUBLE];
const MODELS = [NAME, STATE, num("version", (row) => round(row.policy_version)),
  num("predictions/s", (row) => round(row.predictions_per_s)), wide("sessions", (row) => round(row.sessions)),
  wide("rows a batch", (row) => round(row.rows_per_batch)), wide("queue p50, p99", (row) => times(row, "queue")),
  wide("forward p50, p99", (row) => times(row, "forward")), RESTARTS, TROUBLE];
const RUNNERS = [["runner", "", (row) => row.name], num("sessions", (row) => round(row.num_sessions)),
  ["endpoints", "", (row) => row.endpoint_ids.join(", ")], wide("node", (row) => row.node || DASH),
  num("last heard", (row) => `${duration(Math.max(1, Math.round(row.silent_s)))} ago`)];
const GATEWAYS = [NAME, STATE, num("address", (row) => row.address), RESTARTS, TROUBLE];

function showEndpoints() {
  const table = { key: (row) => row.key, isChosen: (row) => row.key === chosen.endpoint, choose: chooseEndpoint };
  fill($("envs"), ENVS, endpoints.filter((row) => row.service === "env" || row.service === ""),
    { ...table, name: (row) => `Watch ${row.endpoint_id}`, empty: "No environment is served here." });
  fill($("models"), MODELS, endpoints.filter((row) => row.service === "model"),
    { ...table, name: (row) => `Show ${row.endpoint_id}`, empty: "No policy is served here." });
  $("runners-part").hidden = !pace.runners?.length;
  fill($("runners"), RUNNERS, pace.runners ?? [], { key: (row) => `${row.fleet} ${row.name} ${row.runner_id}`,
    isChosen: () => false, choose: chooseRunner, name: (row) => `Show an environment of ${row.name}`, empty: "" });
  const gateways = endpoints.filter((row) => row.service === "gateway");
  $("gateways-part").hidden = !gateways.length;
  fill($("gateways"), GATEWAYS, gateways, { ...table, name: (row) => `Show ${row.endpoint_id}`, empty: "" });
}

function chooseRunner({ fleet, endpoint_ids }) {
  const row = endpoints.find((each) => each.fleet === fleet && each.endpoint_id === endpoint_ids[0]);
  if (row) chooseEndpoint(row);
}

function chooseEndpoint(row) {
  chosen.endpoint = row.key;
  offer($("session"), [], DASH);
  offer($("lane"), [], DASH);
  showPicture(null, "");
  showEndpoints();
  refreshSessions();
}

const refreshEndpoints = repeat("endpoints", async () => {
  pace = await get("endpoints");
  endpoints = pace.endpoints;
  const envs = endpoints.filter((row) => row.service === "env");
  const first = envs.find((row) => row.sessions) ?? envs[0] ?? endpoints[0];
  if (first && !endpoints.some((row) => row.key === chosen.endpoint)) chooseEndpoint(first);
  showEndpoints();
  const count = `${endpoints.length} endpoint${endpoints.length === 1 ? "" : "s"}`;
  report("endpoints", pace.problem || (pace.source ? `${pace.source}: ${count}` : "no endpoints are watched"), Boolean(pace.problem));
}, STATISTICS_MS);

const picked = () => [chosen.endpoint, $("session").value, $("lane").value].join(" ");
let wanted = "", shown = { key: "", times: [] };

const refreshSessions = repeat("live", async () => {
  const endpoint = endpoints.find((row) => row.key === chosen.endpoint);
  if (!endpoint) {  // the last one has left
    offer($("session"), [], DASH);
    offer($("lane"), [], DASH);
    facts($("session-facts"), {});
    return showPicture(null, "Choose an environment to see its lanes.");
  }
  const isPolicy = endpoint.service === "model", hasNone = isPolicy || endpoint.service === "gateway";
  const { sessions, problem } = hasNone ? { sessions: [] } : await get("sessions", { endpoint: endpoint.key });
  if (endpoint.key !== chosen.endpoint) return;
  offer($("session"), sessions.map((each) => [each.name, `${each.name}, ${each.peer}`]), "none is open");
  const session = sessions.find((each) => each.name === $("session").value);
  const steps = session?.step_counts ?? [];
  offer($("lane"), steps.map((_, lane) => [`${lane}`, `${lane} of ${steps.length}`]), DASH);
  const lane = Number($("lane").value);
  facts($("session-facts"), {
    endpoint: endpoint.endpoint_id, address: endpoint.address, node: endpoint.node, up: duration(endpoint.uptime_s),
    restarts: endpoint.restarts ? round(endpoint.restarts) : "", trouble: trouble(endpoint),
    ...(isPolicy && { "policy version": `${endpoint.policy_version}`,
      inference: [endpoint.inference, endpoint.torch_reason].filter(Boolean).join(": "), batches: short(endpoint.batches),
      sessions: round(endpoint.sessions), "rows a batch": round(endpoint.rows_per_batch), "queue p50, p99": times(endpoint, "queue"),
      "forward p50, p99": times(endpoint, "forward") }),
    ...(!hasNone && { "step p50, p99": times(endpoint, "step"), "all episodes": short(endpoint.episodes) }),
    ...(session && { transport: session.transport, steps: short(session.num_steps), episodes: short(session.num_episodes),
      "lane's step": round(steps[lane]), "lane's return": round(session.cumulative_rewards[lane]) }),
  });
  const nothing = hasNone ? `A ${isPolicy ? "policy" : "gateway"} has no lanes to show.` : "No session is open: nothing steps here now.";
  if (!session) showPicture(null, problem || nothing);
  if (wanted !== picked()) { wanted = picked(); refreshPicture(); }
}, SESSIONS_MS);

function showPicture(blob, problem) {
  const image = $("picture");
  URL.revokeObjectURL(image.src);
  image.hidden = !blob;
  $("no-picture").hidden = Boolean(blob) || !problem;
  put($("no-picture"), problem);
  if (blob) image.src = URL.createObjectURL(blob);
  else { image.removeAttribute("src"); put($("pace"), ""); }
}

const refreshPicture = repeat("picture", async () => {
  const [session, lane, key] = [$("session").value, $("lane").value, picked()];
  if (!session || lane === "") return 60000;
  const response = await ask("picture", { endpoint: chosen.endpoint, session, lane });
  if (key !== picked()) return 0;
  if (shown.key !== key) shown = { key, times: [] };
  if (response.status >= 400) showPicture(null, await response.text());
  if (response.status === 200) {
    showPicture(await response.blob(), "");
    $("picture").alt = `Lane ${lane} of session ${session}`;
    shown.times = [...shown.times.slice(-9), performance.now()];
    const rate = (shown.times.length - 1) / (performance.now() - shown.times[0]) * 1000;
    put($("pace"), `${shown.times.length > 1 ? `${rate.toFixed(1)} pictures a second` : "first picture"}; at most `
      + `${pace.pictures_per_s} a second and ${round(pace.picture_share * 100)} % of the session's time, `
      + `${duration(Number(response.headers.get("x-took-s")))} each`);
  }
  const waitS = Math.max(Number(response.headers.get("x-wait-s") ?? 2), .1);
  return waitS * 1000 * (1 + Math.random() / 5);  // pages take turns
}, 2000);

$("picture").onload = ({ target }) => target.classList.toggle("small", target.naturalWidth < 320);
$("session").onchange = refreshSessions;
$("lane").onchange = () => { showPicture(null, ""); refreshSessions(); };

// --- trainings and recordings --------------------------------------------------------------------

const refreshRuns = repeat("runs", async () => {
  const { runs, recordings, folder, problem } = await get("runs");
  offer($("run"), runs.map((run) => [run.name, run.name + (run.is_running ? " (running)" : "")]), `none in ${folder}`);
  offer($("recording"), recordings.map((name) => [name, name]), `none in ${folder}`);
  const parts = await Promise.allSettled([showCurve(), showEpisodes()]);  // one may fail alone
  const failed = parts.find(({ status }) => status === "rejected");
  if (failed) throw failed.reason;
  report("runs", problem);
}, RUNS_MS);

async function showCurve() {
  const run = $("run").value;
  const rows = run ? await get("curve", { run }) : [];
  chart($("curve"), rows.map((row) => ({ x: row.env_steps, y: row.return_mean })), "env steps", "mean return");
  const last = rows.at(-1);
  facts($("curve-facts"), last ? { iteration: round(last.iteration), "env steps": short(last.env_steps),
    "mean return": round(last.return_mean), episodes: short(last.episodes), time: duration(last.wall_s) } : {});
}

const end = (row) => row.terminated ? "terminated" : row.truncated ? "truncated" : "cut off";
const maybe = (value) => value === null || value === "" ? DASH : `${value}`;
const EPISODES = [["episode", "", (row) => row.id], num("return", (row) => round(row.return_)),
  num("length", (row) => round(row.length)), wide("seed", (row) => maybe(row.seed)), wide("lane", (row) => round(row.lane)),
  wide("policy version", (row) => maybe(row.policy_version)), ["end", "", end], ["recorded", "wide", (row) => moment(row.ended_at)]];

async function showEpisodes() {
  const [recording, first] = [$("recording").value, chosen.first];
  const { total, episodes } = recording ? await get("episodes", { recording, order: $("order").value, first })
    : { total: 0, episodes: [] };
  if (recording !== $("recording").value) return;  // another one was chosen meanwhile
  fill($("episodes"), EPISODES, episodes, { key: (row) => row.id, isChosen: (row) => row.id === chosen.episode,
    choose: (row) => replay(row.id).catch((error) => showProblem("replay", error)), name: (row) => `Replay episode ${row.id}`, empty: "No episode is recorded here." });
  $("previous").parentElement.hidden = total <= episodes.length;
  $("previous").disabled = !first;
  $("next").disabled = first + episodes.length >= total;
  put($("pages"), `${first + 1} to ${first + episodes.length} of ${total.toLocaleString("en")}`);
}

async function replay(episode) {
  const recording = $("recording").value;
  const found = await get("episode", { recording, episode });
  report("replay", "");
  if (recording !== $("recording").value) return;
  chosen.episode = episode;
  $("replay").hidden = false;
  put($("replay-title"), `Episode ${episode}`);
  $("replay-title").focus();
  const video = $("video");
  video.hidden = !found.video;
  video.ariaLabel = `Video of episode ${episode}`;
  if (found.video) video.src = `api/video?${new URLSearchParams({ recording, episode, token })}`;
  else video.removeAttribute("src");
  $("no-video").hidden = found.video && !found.problem;
  put($("no-video"), found.problem || "This episode has no video.");
  chart($("returns"), found.returns, "step", "return so far");
  facts($("episode-facts"), { return: round(found.return_), length: round(found.length), seed: maybe(found.seed),
    lane: round(found.lane), endpoint: found.endpoint, "policy version": maybe(found.policy_version), end: end(found),
    recorded: moment(found.ended_at) });
  await showEpisodes();
}

$("video").onerror = ({ target }) => {
  target.hidden = true;
  $("no-video").hidden = false;
  put($("no-video"), "The video cannot be played; its file may have been deleted.");
};

function turn(first) { chosen.first = Math.max(0, first); refreshRuns(); }
$("previous").onclick = () => turn(chosen.first - PAGE_EPISODES);
$("next").onclick = () => turn(chosen.first + PAGE_EPISODES);
$("order").onchange = () => turn(0);
$("recording").onchange = () => {
  $("replay").hidden = true;
  chosen.episode = "";
  fill($("episodes"), EPISODES, [], { empty: "" });  // its rows are those of the former recording
  turn(0);
};
$("run").onchange = refreshRuns;

// --- the token -----------------------------------------------------------------------------------

function showLogin() {
  $("main").hidden = true;
  $("login").hidden = false;
  put($("refused"), token && "this token is not the page's");
  $("token").focus();
}

$("login").onsubmit = (event) => {
  event.preventDefault();
  location.hash = new URLSearchParams({ token: $("token").value.trim() });
  location.reload();
};

refreshEndpoints();
refreshRuns();

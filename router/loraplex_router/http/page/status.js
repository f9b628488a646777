"use strict";
const STATES = {
  WORKER_STATE_SERVING: ["serving", ""], WORKER_STATE_STARTING: ["starting", ""], WORKER_STATE_DRAINING: ["draining", "worry"],
  WORKER_STATE_LEAVING: ["leaving", "worry"], WORKER_STATE_STALLED: ["not responding", "wrong"],
  WORKER_STATE_UNREACHABLE: ["not reachable", "wrong"],
};
const SERVES = ["WORKER_STATE_SERVING", "WORKER_STATE_STARTING"];
const TIERS = { 4: ["D", "on the device"], 3: ["H", "in the host's memory"], 2: ["S", "in the store on disk"] };
const LOOK_MS = 5000; // a router that takes longer may be frozen
let timer = null;
let isLooking = false;

const share = (part, whole) => (Number(whole) ? `${(100 * Number(part) / Number(whole)).toFixed(0)} %` : "");
const rate = (activity) => Number(activity.tokens) / Math.max(activity.window_s, 1);
const milliseconds = (seconds) => (seconds ? `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms` : "");

function duration(seconds) {
  if (seconds < 120) return `${seconds.toFixed(0)} s`;
  return seconds < 7200 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

// A row of cells: texts, or elements as they are. `kinds` has the class of each cell where it has one.
function row(tag, cells, kinds = [], kind = "") {
  const made = element("tr", "", kind);
  cells.forEach((cell, index) => {
    const one = cell instanceof Element ? element(tag) : element(tag, String(cell), kinds[index] ?? "");
    if (cell instanceof Element) one.append(cell);
    made.append(one);
  });
  return made;
}

function showFigures(status) {
  const { activity } = status;
  const queued = status.workers.reduce((sum, worker) => sum + worker.queued_requests, 0);
  const serving = status.workers.filter((worker) => SERVES.includes(worker.state)).length;
  const figures = [
    [`${serving} of ${status.workers.length}`, "workers serve"],
    [rate(activity).toFixed(0), "tokens/s"],
    [milliseconds(activity.time_to_first_p50_s) || "–", "to the first message, half of streams"],
    [milliseconds(activity.time_to_first_p99_s) || "–", "99 of 100 streams"],
    [share(activity.accepted_tokens, activity.drafted_tokens) || "–", "of drafted tokens accepted"],
    [status.requests_in_flight, "requests under way here"],
    [queued, "wait at workers"],
    [`${activity.failed_requests} of ${activity.requests}`, "requests failed"],
  ].map(([value, text]) => {
    const figure = element("div", "", "figure");
    figure.append(element("b", String(value)), element("span", text));
    return figure;
  });
  byId("figures").replaceChildren(...figures);
}

function showRate(counts) {
  const most = Math.max(...counts, 1);
  const step = 600 / Math.max(counts.length - 1, 1);
  const points = counts.map((count, index) => `${index * step},${78 - (76 * count) / most}`);
  byId("rate-line").setAttribute("points", points.join(" "));
  byId("most").textContent = `, ${most} at most`;
}

function fill(worker) {
  const bar = element("progress");
  bar.max = worker.total_kv_blocks || 1;
  bar.value = worker.total_kv_blocks - worker.free_kv_blocks;
  bar.title = `${bar.value} of ${worker.total_kv_blocks} KV blocks`;
  return bar;
}

function showWorkers(workers) {
  const head = ["", "worker", "state", "running", "queued", "here", "pending tokens", "KV", "adapters", "on device",
    "tokens/s", "p50", "p99", "accepted", "failed", "reason"];
  const rows = workers.map((worker, index) => {
    const { activity } = worker;
    const [state, kind] = STATES[worker.state] ?? [worker.state, "wrong"];
    return row("td", [
      index + 1, worker.worker_id, state, `${worker.running_requests} / ${worker.max_running_requests}`, worker.queued_requests,
      worker.requests_in_flight, worker.pending_tokens, fill(worker), worker.adapters,
      `${worker.device_adapters} / ${worker.max_device_adapters}`, rate(activity).toFixed(0),
      milliseconds(activity.time_to_first_p50_s), milliseconds(activity.time_to_first_p99_s),
      share(activity.accepted_tokens, activity.drafted_tokens), activity.failed_requests, worker.error,
    ], ["", "text", "text", ...Array(12).fill(""), "message"], kind);
  });
  byId("workers").replaceChildren(row("th", head, ["", "text", "text", ...Array(12).fill(""), "text"]), ...rows);
}

function showAdapters(status) {
  const { workers, adapters } = status;
  const names = workers.map((_, index) => {
    const head = element("span", String(index + 1));
    head.title = workers[index].worker_id;
    return head;
  });
  const rows = adapters.map((adapter) => {
    const made = row("td", [adapter.adapter_id, adapter.work_tokens], [adapter.waiting ? "text waiting" : "text"]);
    [...adapter.tiers].forEach((tier, index) => {
      const [letter, where] = TIERS[tier] ?? ["", "not there"];
      const cell = element("td", letter, `tier tier${tier}`);
      cell.title = `${workers[index]?.worker_id}: ${where}`;
      made.append(cell);
    });
    return made;
  });
  byId("adapters").replaceChildren(row("th", ["adapter", "work", ...names], ["text"]), ...rows);
  byId("counted").textContent = `${adapters.length} of ${status.total_adapters}`;
}

function showErrors(errors) {
  const rows = errors.map((error) => row("td", [
    duration(error.age_s), error.code, error.reason, error.method, error.worker_id, error.tenant, error.request_id,
    error.message,
  ], ["", ...Array(6).fill("text"), "message"]));
  const head = ["ago", "code", "reason", "method", "worker", "tenant", "request", "message"];
  byId("errors").replaceChildren(...(rows.length ? [row("th", head, ["", ...Array(7).fill("text")]), ...rows]
    : [row("td", ["none"], ["text"])]));
}

async function look() {
  const line = byId("listing");
  try {
    const answer = await fetch(`v1/status?prefix=${encodeURIComponent(byId("filter").value)}`,
      { headers: headers(), signal: AbortSignal.timeout(LOOK_MS) });
    if (!answer.ok) throw new Error(await errorOf(answer));
    const status = await answer.json();
    showFigures(status);
    showRate(status.tokens_by_second);
    showWorkers(status.workers);
    showAdapters(status);
    showErrors(status.errors);
    const state = status.draining ? "draining, " : "";
    line.textContent = `${status.model_id || "no model yet"} · router ${status.router_id} ${status.version}, `
      + `${state}up for ${duration(status.uptime_s)}`;
    line.className = "";
  } catch (error) {
    const why = error.name === "TimeoutError" ? `no answer for ${LOOK_MS / 1000} s` : error.message;
    line.textContent = `the status could not be read: ${why}`;
    line.className = "error";
  }
}

// One look at a time; none while nobody sees the page.
async function run() {
  if (isLooking) return;
  isLooking = true;
  clearTimeout(timer);
  if (!byId("paused").checked && !document.hidden) await look();
  isLooking = false;
  timer = setTimeout(run, 1000 * Math.max(1, Number(byId("interval").value) || 2));
}

for (const id of ["filter", "token", "interval", "paused"]) byId(id).addEventListener("change", run);
document.addEventListener("visibilitychange", () => document.hidden || run());
run();

"use strict";
const MAX_SHOWN_MODELS = 200;
const MAX_ANSWERS = 24;
const SPECULATIONS = ["off", "auto", "prompt_lookup", "medusa"];
const chosen = new Set();
let models = [];
let running = null;

function choice(name, isChecked, onChange) {
  const label = element("label");
  const box = element("input");
  box.type = "checkbox";
  box.checked = isChecked;
  box.value = name;
  if (onChange) box.addEventListener("change", () => onChange(box.checked));
  label.append(box, ` ${name}`);
  return label;
}

// --- models --------------------------------------------------------------------------------------------------------

async function listModels() {
  const line = byId("listing");
  line.className = "";
  try {
    const answer = await fetch("v1/models", { headers: headers() });
    if (!answer.ok) throw new Error(await errorOf(answer));
    models = (await answer.json()).data.map((card) => card.id);
  } catch (error) {
    line.textContent = `the models could not be listed: ${error.message}`;
    line.className = "error";
    return;
  }
  if (!chosen.size) models.slice(0, 3).forEach((name) => chosen.add(name));
  showModels();
}

function showModels() {
  const part = byId("filter").value.toLowerCase();
  const found = models.filter((name) => name.toLowerCase().includes(part));
  const rows = found.slice(0, MAX_SHOWN_MODELS).map((name) =>
    choice(name, chosen.has(name), (isOn) => {
      isOn ? chosen.add(name) : chosen.delete(name);
      showCount(found.length, rows.length);
    }));
  byId("models").replaceChildren(...rows);
  showCount(found.length, rows.length);
}

function showCount(numFound, numShown) {
  const shown = numShown < numFound ? `, the first ${numShown} shown` : "";
  byId("listing").textContent = `${numFound} of ${models.length}${shown}; ${chosen.size} chosen`;
}

// --- one answer ----------------------------------------------------------------------------------------------------

function bodyOf(model, speculation) {
  const prompt = byId("prompt").value;
  const number = (id) => Number(byId(id).value);
  const common = {
    model, speculation, max_tokens: number("max-tokens"), seed: number("seed"),
    temperature: number("temperature"), stream: true, stream_options: { include_usage: true }, return_token_ids: true,
  };
  return byId("chat").checked
    ? ["v1/chat/completions", { ...common, messages: [{ role: "user", content: prompt }], logprobs: true }]
    : ["v1/completions", { ...common, prompt, logprobs: 0 }];
}

async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

// The text of a chunk in parts: those that were drafted and accepted, and those that the model added. A step's accepted
// tokens come first and one of the model's own follows. Where a message has several steps, their order is not known.
function partsOf(text, tokens, numTokens, numAccepted) {
  if (!numAccepted) return [[text, ""]];
  if (tokens.join("") === text && numTokens <= numAccepted + 1) {
    const at = tokens.slice(0, numAccepted).join("").length;
    return [[text.slice(0, at), "accepted"], [text.slice(at), ""]];
  }
  return [[text, "mixed"]];
}

class Answer {
  constructor(model, speculation) {
    this.model = model;
    this.speculation = speculation;
    this.text = element("pre");
    this.figures = element("footer", "waiting");
    this.card = element("article");
    this.card.append(element("h2", `${model} · ${speculation}`), this.text, this.figures);
    this.numTokens = 0;
  }

  async run(signal) {
    const start = performance.now();
    try {
      const [path, body] = bodyOf(this.model, this.speculation);
      const answer = await fetch(path, {
        method: "POST", body: JSON.stringify(body), signal,
        headers: { ...headers(), "content-type": "application/json" },
      });
      if (!answer.ok) throw new Error(await errorOf(answer));
      for await (const event of eventsOf(answer)) {
        if (event.error) throw new Error(event.error.message);
        for (const one of event.choices) this.add(one, start);
        if (event.usage) this.end(event);
      }
    } catch (error) {
      this.figures.textContent = error.name === "AbortError" ? "stopped" : error.message;
      this.figures.className = error.name === "AbortError" ? "" : "error";
    }
  }

  add(one, start) {
    const text = one.text ?? one.delta?.content ?? "";
    const logprobs = one.logprobs ?? {};
    const tokens = logprobs.tokens ?? (logprobs.content ?? []).map((row) => row.token);
    const ids = one.token_ids ?? [];
    const drafts = one.loraplex ?? {};
    for (const [part, kind] of partsOf(text, tokens, ids.length, drafts.accepted_tokens ?? 0)) {
      if (!part) continue;
      const span = element("span", part, kind);
      if (kind) span.title = `${drafts.proposer}: ${drafts.accepted_tokens} of ${drafts.drafted_tokens} accepted`;
      this.text.append(span);
    }
    this.numTokens += ids.length;
    const seconds = (performance.now() - start) / 1000;
    if (this.numTokens) this.figures.textContent = `${(this.numTokens / seconds).toFixed(0)} tokens/s`;
  }

  end({ usage, loraplex }) {
    const seconds = Math.max(loraplex.total_s - loraplex.queue_s, 1e-6);
    const figures = [
      `${usage.completion_tokens} tokens`,
      `${(usage.completion_tokens / seconds).toFixed(0)} tokens/s`,
      `${(usage.completion_tokens / Math.max(loraplex.steps, 1)).toFixed(2)} tokens per step`,
      ...(loraplex.drafted_tokens ? [`${loraplex.accepted_tokens} of ${loraplex.drafted_tokens} drafted tokens accepted`] : []),
      `first after ${(1000 * loraplex.time_to_first_token_s).toFixed(0)} ms`,
    ];
    const proposers = Object.keys(loraplex.proposers);
    if (proposers.length) figures.push(`by ${proposers.join(", ")}`);
    this.figures.textContent = figures.join(" · ");
    this.card.dataset.done = "true";
  }
}

// --- the form ------------------------------------------------------------------------------------------------------

async function send(event) {
  event.preventDefault();
  if (running) return;
  const boxes = [...byId("speculations").querySelectorAll("input:checked")].map((box) => box.value);
  const others = byId("others").value.split(",").map((name) => name.trim()).filter(Boolean);
  const answers = [...chosen].flatMap((model) => [...boxes, ...others].map((kind) => new Answer(model, kind)));
  const line = byId("status");
  if (!answers.length || answers.length > MAX_ANSWERS) {
    line.textContent = `choose adapters and kinds of speculation for 1 to ${MAX_ANSWERS} answers; they are ${answers.length}`;
    return;
  }
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  line.textContent = `${answers.length} answers under way`;
  byId("answers").replaceChildren(...answers.map((answer) => answer.card));
  await Promise.all(answers.map((answer) => answer.run(running.signal)));
  running = null;
  byId("send").disabled = false;
  byId("stop").disabled = true;
  line.textContent = "done";
}

byId("speculations").replaceChildren(
  ...SPECULATIONS.map((name) => choice(name, name === "off" || name === "prompt_lookup")));
byId("form").addEventListener("submit", send);
byId("stop").addEventListener("click", () => running?.abort());
byId("filter").addEventListener("input", showModels);
byId("filter").addEventListener("keydown", (event) => event.key === "Enter" && event.preventDefault());
byId("reload").addEventListener("click", listModels);
listModels();

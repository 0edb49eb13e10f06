// A conversation with the served model. Each question is sent with all turns before it, so that the cache is seen at work.

import { AnswerView } from "./answer.js";
import { Refused, read, request } from "./stream.js";
import { byId, count, make, seconds, show } from "./text.js";

const KEY = "prefixcache-key";
const KEPT = "prefixcache-chat";
const LONGEST_ANSWER = 4 << 20;

let model = "";
let turns = [];
let running = null;

const key = () => sessionStorage.getItem(KEY) ?? "";

function report(problem) {
  show(byId("problem"), problem);
}

function save() {
  try {
    sessionStorage.setItem(KEPT, JSON.stringify({ turns, system: byId("system").value }));
  } catch {
    report("The conversation is too long to be kept when this tab is loaded again.");
  }
}

function messages() {
  const said = turns.flatMap(({ question, answer, thoughts }) => [
    { role: "user", content: question },
    { role: "assistant", content: answer, ...(thoughts && { reasoning_content: thoughts }) },
  ]);
  const system = byId("system").value.trim();
  return system ? [{ role: "system", content: system }, ...said] : said;
}

// What a turn cost: a bar of the prompt's tokens that were cached, and numbers.
function showCost(view, { prompt, cached, tokens, first, last, ending }) {
  const speed = (1000 * (tokens - 1)) / (last - first);
  const words = [
    prompt && `${count(cached)} of ${count(prompt)} prompt tokens cached`,
    first && `first token after ${seconds(first / 1000)}`,
    tokens && `${count(tokens)} tokens`,
    speed > 0 && speed < Infinity && `${speed.toFixed(1)} tokens/s`,
    ending,
  ];
  Object.assign(view.bar, { max: prompt || 1, value: cached, hidden: !prompt });
  show(view.cost, words.filter(Boolean).join(", "));
}

function showTotal() {
  const sum = (field) => turns.reduce((all, turn) => all + turn[field], 0);
  show(byId("total"), turns.length ? `In all, ${count(sum("cached"))} of ${count(sum("prompt"))} prompt tokens cached` : "");
  byId("welcome").hidden = byId("reset").hidden = false;
  byId(turns.length ? "welcome" : "reset").hidden = true;
}

function makeTurn(question) {
  const element = make("article");
  const said = make("p", question, "question");
  said.dir = "auto";
  const thoughts = make("details");
  thoughts.append(make("summary", "Thoughts"));
  thoughts.hidden = true;
  const answer = make("div", "", "answer");
  const cost = make("p", "", "cost note");
  const bar = make("progress");
  bar.setAttribute("aria-label", "Share of the prompt that was cached");
  const words = make("span");
  cost.append(bar, words);
  element.append(said, thoughts, answer, cost);
  byId("turns").append(element);
  bar.hidden = true;
  return { element, thoughts, bar, cost: words, answer: new AnswerView(answer), thinking: new AnswerView(thoughts) };
}

function showTurn(turn) {
  const view = makeTurn(turn.question);
  view.thoughts.hidden = !turn.thoughts;
  view.thinking.add(turn.thoughts);
  view.answer.add(turn.answer);
  view.thinking.end();
  view.answer.end();
  showCost(view, turn);
}

// Draws what has come, once for each frame, and follows the end of the answer unless somebody scrolled away from it.
class Drawing {
  constructor(view, turn) {
    Object.assign(this, { view, turn, answered: 0, thought: 0, frame: 0 });
  }

  plan() {
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const page = document.scrollingElement;
    const follows = page.scrollHeight - page.scrollTop - innerHeight < 60;
    const { view, turn } = this;
    view.thoughts.hidden = !turn.thoughts;
    view.thinking.add(turn.thoughts.slice(this.thought));
    view.answer.add(turn.answer.slice(this.answered));
    [this.thought, this.answered] = [turn.thoughts.length, turn.answer.length];
    showCost(view, turn);
    if (follows) page.scrollTop = page.scrollHeight;
  }

  end() {
    this.draw();
    this.view.thinking.end();
    this.view.answer.end();
  }
}

const ENDINGS = { length: "ended at the most tokens", stopped: "stopped", too_long: "stopped: the answer is too long for this page" };

async function stream(turn, drawing, controller) {
  const begun = performance.now();
  let hasEnded = false;
  const body = {
    model,
    messages: [...messages(), { role: "user", content: turn.question }],
    stream: true,
    stream_options: { continuous_usage_stats: true }, // an answer that is stopped has its numbers too
    cache_hit_threshold: 0,
  };
  const response = await request("v1/chat/completions", key(), { signal: controller.signal, body });
  await read(response, ({ error, usage, choices = [] }) => {
    if (error) throw new Error(String(error.message));
    if (usage) {
      const { prompt_tokens: prompt, completion_tokens: tokens, prompt_tokens_details: details } = usage;
      Object.assign(turn, { prompt, tokens, cached: details?.cached_tokens ?? 0 });
    }
    for (const { delta = {}, finish_reason: reason } of choices) {
      const [text, thought] = [delta.content ?? "", delta.reasoning_content ?? ""];
      turn.answer += text;
      turn.thoughts += thought;
      if (text || thought) turn.last = performance.now() - begun;
      turn.first ||= turn.last;
      if (reason) hasEnded = true;
      turn.ending = ENDINGS[reason] ?? turn.ending;
    }
    if (turn.answer.length + turn.thoughts.length > LONGEST_ANSWER) controller.abort(ENDINGS.too_long);
    drawing.plan();
  });
  if (!hasEnded) throw new Error("The server ended the stream before the answer.");
}

function setRunning(controller) {
  running = controller;
  byId("stop").hidden = !controller;
  byId("send").hidden = Boolean(controller);
  byId("turns").setAttribute("aria-busy", String(Boolean(controller)));
}

// Adds a turn. One that has no answer is taken back, and its question can be sent again.
async function send(question) {
  const turn = { question, answer: "", thoughts: "", prompt: 0, cached: 0, tokens: 0, first: 0, last: 0, ending: "" };
  const controller = new AbortController();
  const drawing = new Drawing(makeTurn(question), turn);
  byId("welcome").hidden = true;
  drawing.view.element.scrollIntoView({ block: "end" });
  report("");
  setRunning(controller);
  try {
    await stream(turn, drawing, controller);
  } catch (error) {
    turn.ending = controller.signal.aborted ? controller.signal.reason : "cut by an error";
    if (!controller.signal.aborted) refuse(error);
  }
  if (running !== controller) return;
  drawing.end();
  if (turn.answer || turn.thoughts || !turn.ending) turns.push(turn);
  else {
    drawing.view.element.remove();
    byId("question").value ||= question;
  }
  setRunning(null);
  showTotal();
  save();
}

function refuse(error) {
  if (!(error instanceof Refused)) return report(error.message);
  const problem = error.status !== 401 ? error.message : key() ? "The server does not know this key." : "";
  sessionStorage.removeItem(KEY);
  askForKey(problem);
}

function askForKey(message) {
  byId("login").hidden = false;
  byId("forget").hidden = true;
  report(message);
  byId("key").focus();
}

async function load() {
  try {
    const { data } = await (await request("v1/models", key())).json();
    model = data[0].id;
    show(byId("model"), model);
    report("");
    byId("login").hidden = true;
    byId("forget").hidden = !key();
    byId("question").focus();
  } catch (error) {
    refuse(error);
  }
}

function restore() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(KEPT)) ?? { turns: [], system: "" };
    kept.turns.forEach(showTurn);
    turns = kept.turns;
    byId("system").value = kept.system;
  } catch { /* of another version of this page */ }
  showTotal();
}

function reset() {
  running?.abort(ENDINGS.stopped);
  setRunning(null);
  turns = [];
  byId("turns").replaceChildren();
  report("");
  showTotal();
  save();
  byId("question").focus();
}

byId("question-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = byId("question").value.trim();
  if (!question || running) return;
  if (!model) return load();
  byId("question").value = "";
  send(question);
});
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("question-form").requestSubmit();
});
byId("stop").addEventListener("click", () => running?.abort(ENDINGS.stopped));
byId("reset").addEventListener("click", reset);
byId("system").addEventListener("change", save);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  byId("key").value = "";
  load();
});
byId("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  byId("system").value = "";
  reset();
  askForKey("The key and the conversation are forgotten.");
});

restore();
load();

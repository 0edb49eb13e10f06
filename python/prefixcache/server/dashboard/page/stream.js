// Server-sent events over fetch: unlike EventSource it sends a key in a header, and says why it was refused.

const LONGEST_EVENT = 4 << 20;
const DONE = "data: [DONE]";
const FIRST_WAIT = 1000;
const LONGEST_WAIT = 30000;

export class Refused extends Error {}

// Header values are bytes: a key is sent as those of its UTF-8, as command lines send it.
export function bearer(key) {
  const bytes = new TextEncoder().encode(key);
  return "Bearer " + Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
}

// The answer to a GET, or to a POST of `body` as JSON; throws what the server says where it is none.
export async function request(url, key, { signal, body } = {}) {
  const headers = key ? { Authorization: bearer(key) } : {};
  const post = body && { method: "POST", body: JSON.stringify(body) };
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(url, { headers, signal, cache: "no-store", redirect: "error", ...post });
  if (response.ok) return response;
  const text = (await response.text()).slice(0, 10000);
  let message = `The server answered ${response.status}.`;
  try {
    message = String(JSON.parse(text).error.message);
  } catch { /* something before the server answered */ }
  const { status } = response;
  throw Object.assign(new (status === 401 || status === 403 ? Refused : Error)(message), { status });
}

// Calls `tell` with the payload of each event, until the stream ends.
export async function read(response, tell) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += decoder.decode(value, { stream: true });
    const events = text.split("\n\n");
    text = events.pop();
    if (text.length > LONGEST_EVENT) throw new Error("An event is too long.");
    for (const event of events) {
      const data = event.split("\n").find((line) => line.startsWith("data: "));
      if (data && data !== DONE) tell(JSON.parse(data.slice(6)));
    }
  }
}

// Reads while the page is visible, and again after what went wrong; a refusal ends it.
export class Stream {
  constructor(url, { onEvent, onState, onRefused }) {
    Object.assign(this, { url, onEvent, onState, onRefused, key: "", wait: FIRST_WAIT });
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
  }

  start(key = this.key) {
    this.stop();
    this.key = key;
    if (!document.hidden) this.#run((this.controller = new AbortController()));
  }

  stop() {
    this.controller?.abort();
    clearTimeout(this.timer);
  }

  async #run(controller) {
    const tell = (event) => {
      this.wait = FIRST_WAIT;
      this.onEvent(event);
    };
    let problem = "The stream ended.";
    try {
      const response = await request(this.url, this.key, controller);
      if (controller.signal.aborted) return;
      this.onState("");
      await read(response, tell);
    } catch (error) {
      if (controller.signal.aborted) return;
      if (error instanceof Refused) return this.onRefused(error.message);
      problem = error.message;
    }
    if (controller.signal.aborted) return;
    controller.abort();
    this.onState(problem);
    this.timer = setTimeout(() => this.start(), this.wait);
    this.wait = Math.min(2 * this.wait, LONGEST_WAIT);
  }
}

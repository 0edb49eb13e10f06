// Tiles, memory, requests, prefixes and misses.

import { ago, byId, bytes, clock, count, make, percent, rate, seconds, show, sync } from "./text.js";

function cells(...classes) {
  const row = make("tr");
  row.append(...classes.map((name) => make("td", "", name)));
  return row;
}

function fillRow(row, texts) {
  texts.forEach((text, place) => show(row.children[place], text));
}

// Shares of the pool: blocks with content that can be hit or that requests use.
function fullness(map) {
  const sum = (state) => map[state].reduce((all, blocks) => all + blocks, 0);
  const used = sum("held") + sum("cached") + sum("pinned");
  return used / (used + sum("free") || 1);
}

// `latest` are the last known values of the charts.
export function showTiles({ cache, map, failed, refused }, latest, uptime) {
  const state = cache.is_sleeping ? "asleep" : cache.is_paused ? "paused" : cache.enabled ? "serving" : "cache off";
  const saved = Math.min(cache.queried_tokens, cache.hit_tokens + cache.disk_cached_tokens);
  const tiles = [
    ["Engine", state, "What the engine does now"],
    ["Hit ratio", cache.recent_queries ? percent(cache.recent_hit_ratio) : "none", "Prompt tokens found in memory, of the last requests"],
    ["Tokens saved", count(saved), `Since the start, ${count(cache.disk_cached_tokens)} of them from a disk; ${count(cache.queried_tokens - saved)} were computed`],
    ["TTFT, median", seconds(latest.ttft_p50), "Time to first token, when there was one last"],
    ["Running, waiting", `${count(latest.running)}, ${count(latest.waiting)}`, "Requests in the engine"],
    ["Cache full", percent(fullness(map)), `Of ${count(cache.num_blocks)} blocks of ${cache.block_size} tokens`],
    ["Failed, refused", `${count(failed)}, ${count(refused)}`, "Since the start: answers that ended in an error, and requests that came while too many waited"],
    ["Output", rate(latest.generated_tokens), "Generated tokens"],
    ["Evictions", rate(latest.evictions), `${count(cache.evictions)} since the start`],
    ["Preemptions", count(cache.preemptions), "Requests recomputed because blocks ran out, since the start"],
    ["Uptime", seconds(uptime), "Since the server began to answer"],
  ];
  sync(byId("tiles"), tiles, {
    key: ([name]) => name,
    create: ([name]) => {
      const tile = make("div");
      tile.append(make("dt", name), make("dd"));
      return tile;
    },
    fill: (tile, [, value, title]) => {
      show(tile.lastElementChild, value);
      tile.title = title;
    },
  });
}

const MEMORY = { reserved: "address space", mapped: "memory taken", held: "in use" };

export function showMemory(memory) {
  byId("no-memory").hidden = memory !== null;
  const parts = memory ? Object.entries(MEMORY).map(([field, name]) => [name, memory[field]]) : [];
  sync(byId("memory"), parts, {
    key: ([name]) => name,
    create: ([name]) => {
      const part = make("div");
      const [bar, value] = [make("dd"), make("dd")];
      const meter = make("progress");
      meter.setAttribute("aria-label", `${name}, of the reserved address space`);
      bar.append(meter);
      part.append(make("dt", name), bar, value);
      return part;
    },
    fill: (part, [, value]) => {
      const meter = part.querySelector("progress");
      meter.max = memory.reserved || 1;
      meter.value = value;
      show(part.lastElementChild, bytes(value));
    },
  });
}

export function showRequests(requests) {
  byId("no-requests").hidden = requests.length > 0;
  sync(byId("requests"), requests, {
    key: (request) => request.request_id,
    create: () => {
      const row = cells("id", "count", "count", "count", "count", "");
      row.lastElementChild.append(make("progress"));
      return row;
    },
    fill: (row, request) => {
      const { cached_tokens, computed_tokens, total_tokens, max_tokens } = request;
      fillRow(row, [request.request_id, ...[cached_tokens, computed_tokens, total_tokens, max_tokens].map(count)]);
      const meter = row.lastElementChild.firstElementChild;
      meter.max = max_tokens;
      meter.value = computed_tokens;
      meter.setAttribute("aria-label", `${count(computed_tokens)} of at most ${count(max_tokens)} tokens`);
    },
  });
}

function makePrefix(prefix) {
  const item = make("li");
  const node = make("details");
  node.open = prefix.depth < 1;
  const summary = make("summary");
  summary.append(make("span", "", "counts"), make("q"));
  node.append(summary, make("ul"));
  item.append(node);
  return item;
}

function fillPrefix(item, prefix) {
  const [summary, children] = item.firstElementChild.children;
  const [counts, text] = summary.children;
  const scope = prefix.salted && !prefix.depth ? ", under a salt" : "";
  const uses = `hit by ${count(prefix.hits)} of ${count(prefix.requests)} requests, last ${ago(prefix.last_use)}`;
  show(counts, `${count(prefix.tokens)} tokens, ${uses}${scope}`);
  show(text, prefix.text?.trim() ?? "");
  item.firstElementChild.classList.toggle("leaf", !prefix.children.length);
  showTree(children, prefix.children);
}

function showTree(list, prefixes) {
  sync(list, prefixes, { key: (prefix) => prefix.id, create: makePrefix, fill: fillPrefix });
}

export function showPrefixes(prefixes) {
  byId("no-prefixes").hidden = prefixes.length > 0;
  showTree(byId("prefixes"), prefixes);
}

const PRESSURES = {
  capacity: "by new content",
  cached_limit: "by the limit on cached blocks",
  shrunk_cache: "since the cache shrank",
};

function reason(miss) {
  const words = [miss.reason.replaceAll("_", " ")];
  const lost = miss.detail;
  if (lost?.ago_s != null) words.push(`${seconds(lost.ago_s)} earlier`);
  if (lost?.age_s != null) words.push(`at an age of ${seconds(lost.age_s)}`);
  if (lost?.pressure in PRESSURES) words.push(PRESSURES[lost.pressure]);
  return words.join(", ");
}

export function showMisses(misses) {
  byId("no-misses").hidden = misses.length > 0;
  const newestFirst = [...misses].sort((one, other) => other.time - one.time);
  sync(byId("misses"), newestFirst, {
    key: (miss) => `${miss.time} ${miss.request_id}`,
    create: () => {
      const row = cells("word", "id", "word", "count", "count", "");
      row.lastElementChild.append(make("div"), make("div", "", "note"));
      return row;
    },
    fill: (row, miss) => {
      const tokens = [miss.hit_tokens, miss.prompt_tokens].map(count);
      fillRow(row, [clock(miss.time), miss.request_id, miss.api, ...tokens]);
      const [why, advice] = row.lastElementChild.children;
      show(why, reason(miss));
      show(advice, miss.advice);
    },
  });
}

// The page: a stream that keeps its parts up to date, and the form for the key.

import { Charts } from "./charts.js";
import { showMemory, showMisses, showPrefixes, showRequests, showTiles } from "./lists.js";
import { BlockMap } from "./map.js";
import { Stream } from "./stream.js";
import { byId, show } from "./text.js";

const KEY = "prefixcache-admin-key";
const charts = new Charts();
const map = new BlockMap();
let started = 0;

function showView(isShown) {
  byId("view").hidden = !isShown;
  byId("login").hidden = isShown;
}

const tellers = {
  hello(event) {
    showView(true);
    show(byId("model"), event.model);
    show(byId("version"), event.version);
    started = event.started;
    map.setAges(event.ages);
    charts.reset(event.points, event.most_points);
  },
  snapshot(event) {
    charts.add(event.point);
    showTiles(event, charts.latest, event.point.time - started);
    map.update(event.map);
    showMemory(event.memory);
    showRequests(event.requests);
  },
  prefixes(event) {
    showPrefixes(event.prefixes);
    showMisses(event.misses);
  },
};

export function tell(event) {
  tellers[event.type]?.(event);
}

function setStatus(problem) {
  const status = byId("status");
  status.classList.toggle("bad", Boolean(problem));
  show(status, problem ? `Not connected: ${problem} Trying again.` : "Connected");
}

function askForKey(message) {
  sessionStorage.removeItem(KEY);
  byId("forget").hidden = true;
  show(byId("status"), "Not allowed yet");
  show(byId("refusal"), message);
  showView(false);
  byId("key").focus();
}

const stream = new Stream("dashboard/events", { onEvent: tell, onState: setStatus, onRefused: askForKey });

function start(key) {
  byId("forget").hidden = !key;
  byId("metrics").hidden = Boolean(key); // a link sends no key
  stream.start(key);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  byId("key").value = "";
  sessionStorage.setItem(KEY, key);
  start(key);
});
byId("forget").addEventListener("click", () => {
  stream.stop();
  askForKey("The key is forgotten.");
});
document.querySelector(".window").addEventListener("change", (event) => charts.show(Number(event.target.value)));
function redraw() {
  map.draw();
  charts.draw();
}
new ResizeObserver(redraw).observe(byId("main"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

start(sessionStorage.getItem(KEY) ?? "");

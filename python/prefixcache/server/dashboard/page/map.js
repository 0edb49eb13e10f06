// The map: a square for each cell, split by the states of its blocks, fainter with age.

import { colours, fit } from "./canvas.js";
import { byId, count, make, seconds, show, sync } from "./text.js";

const STATES = ["held", "pinned", "cached", "free"];
const NAMES = { held: "in use", pinned: "pinned", cached: "cached", free: "free" };
const FAINTEST = 0.3;

export class BlockMap {
  constructor() {
    this.canvas = byId("map");
    this.cell = null;
    this.canvas.addEventListener("keydown", (event) => this.#step(event));
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#choose(null));
    this.canvas.addEventListener("blur", () => this.#choose(null));
  }

  setAges(ages) {
    this.ages = ages;
    const names = ages.map((age) => seconds(age)).join(", ");
    show(byId("ages"), `Cached and pinned blocks fade with the time since their last use: up to ${names}, and more.`);
  }

  update(map) {
    this.map = map;
    if (this.cell !== null && this.cell >= map.free.length) this.cell = null;
    this.draw();
    this.#legend();
  }

  draw() {
    if (!this.map) return;
    const { context, width, height } = fit(this.canvas);
    const cells = this.map.free.length;
    if (!cells || !width) return;
    const columns = (this.columns = Math.max(1, Math.ceil(Math.sqrt((cells * width) / height))));
    const rows = Math.ceil(cells / columns);
    this.size = [width / columns, height / rows];
    const fills = colours(...STATES);
    for (let cell = 0; cell < cells; cell++) this.#square(context, cell, fills);
    if (this.cell !== null) this.#mark(context);
  }

  #place(cell) {
    const [wide, high] = this.size;
    return [(cell % this.columns) * wide, Math.floor(cell / this.columns) * high, wide, high];
  }

  #square(context, cell, fills) {
    let [left, top, wide, high] = this.#place(cell);
    const gap = wide > 5 && high > 5 ? 1 : 0;
    const blocks = this.#blocks(cell);
    STATES.forEach((state, place) => {
      const part = (this.map[state][cell] / blocks) * (wide - gap);
      if (!part) return;
      context.globalAlpha = state === "cached" || state === "pinned" ? this.#strength(cell) : 1;
      context.fillStyle = fills[place];
      context.fillRect(left, top, part, high - gap);
      left += part;
    });
    context.globalAlpha = 1;
  }

  #strength(cell) {
    const age = this.map.age[cell];
    return age < 0 ? 1 : 1 - ((1 - FAINTEST) * age) / this.ages.length;
  }

  #mark(context) {
    const [left, top, wide, high] = this.#place(this.cell);
    [context.strokeStyle] = colours("text");
    context.lineWidth = 2;
    context.strokeRect(left, top, wide, high);
  }

  #blocks(cell) {
    return STATES.reduce((sum, state) => sum + this.map[state][cell], 0);
  }

  #legend() {
    const totals = STATES.map((state) => [state, this.map[state].reduce((sum, blocks) => sum + blocks, 0)]);
    sync(byId("legend"), totals, {
      key: ([state]) => state,
      create: ([state]) => {
        const item = make("li");
        item.append(make("span", "", state), make("b"));
        return item;
      },
      fill: (item, [state, blocks]) => show(item.lastElementChild, `${NAMES[state]} ${count(blocks)}`),
    });
    const text = totals.map(([state, blocks]) => `${count(blocks)} ${NAMES[state]}`).join(", ");
    this.canvas.setAttribute("aria-label", `Map of the cache's blocks: ${text}`);
  }

  #step(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns };
    const last = this.map ? this.map.free.length - 1 : -1;
    if (last < 0 || (!(event.key in steps) && event.key !== "Home" && event.key !== "End")) return;
    event.preventDefault();
    const from = this.cell ?? 0;
    const to = event.key === "Home" ? 0 : event.key === "End" ? last : this.cell === null ? 0 : from + steps[event.key];
    this.#choose(Math.min(last, Math.max(0, to)));
  }

  #point(event) {
    if (!this.size) return;
    const column = Math.min(this.columns - 1, Math.floor(event.offsetX / this.size[0]));
    const cell = Math.floor(event.offsetY / this.size[1]) * this.columns + column;
    this.#choose(cell >= 0 && cell < this.map.free.length ? cell : null);
  }

  #choose(cell) {
    if (cell === this.cell) return;
    this.cell = cell;
    show(byId("cell"), cell === null ? "" : this.#describe(cell));
    this.draw();
  }

  #describe(cell) {
    const states = STATES.filter((state) => this.map[state][cell]);
    const parts = states.map((state) => `${count(this.map[state][cell])} ${NAMES[state]}`);
    const age = this.map.age[cell];
    const bound = this.ages[Math.min(age, this.ages.length - 1)];
    const used = age < 0 ? "" : `, used ${age < this.ages.length ? "up to" : "more than"} ${seconds(bound)} ago`;
    return `Cell ${cell + 1} of ${this.map.free.length}: ${parts.join(", ")}${used}`;
  }
}

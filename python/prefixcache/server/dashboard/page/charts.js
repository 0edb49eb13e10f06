// Curves over time. A curve keeps as many points as the server says, so that a page may stay open for days.

import { colours, fit } from "./canvas.js";
import { byId, make, percent, rate, seconds, show } from "./text.js";

const LONGEST_STEP = 15;
const CHARTS = [
  { title: "Hit ratio of prompt tokens", form: percent, most: 1, lines: [["hit_ratio", "cached"]] },
  { title: "Time to first token", form: seconds, lines: [["ttft_p50", "median"], ["ttft_p90", "90th percentile"]] },
  { title: "Prompt tokens a second", form: rate, lines: [["memory_tokens", "from memory"], ["computed_tokens", "computed"], ["disk_tokens", "from the disk", "if any"]] },
  { title: "Generated tokens a second", form: rate, lines: [["generated_tokens", "generated"]] },
  { title: "Ended requests a second", form: rate, lines: [["answered", "answered"], ["failed", "failed"], ["refused", "refused"]] },
  { title: "Requests", form: (value) => (value == null ? "none" : String(Math.round(10 * value) / 10)), lines: [["running", "running"], ["waiting", "waiting"]] },
  { title: "Evictions a second", form: rate, lines: [["evictions", "evicted"], ["demotions", "unpinned"]] },
];
const CLASSES = ["first", "second", "third"];
const DASHES = [[], [5, 3], [1, 3]];
const back = (time) => (time <= 60 ? `${time} s` : `${time / 60} min`);
const MARGIN = { left: 56, bottom: 18, top: 8 };

export class Charts {
  constructor() {
    this.points = [];
    this.latest = {};
    this.most = 720;
    this.window = 600;
    this.at = null;
    this.charts = CHARTS.map((chart, number) => this.#make(chart, number));
  }

  reset(points, most) {
    this.points = points;
    this.most = most;
    for (const point of points) this.#note(point);
  }

  // The last value of each curve stays, whatever was last measured.
  #note(point) {
    for (const [field, value] of Object.entries(point)) if (value != null) this.latest[field] = value;
  }

  add(point) {
    this.points.push(point);
    this.#note(point);
    if (this.points.length > this.most) this.points.splice(0, this.points.length - this.most);
    this.draw();
  }

  // The seconds that the charts show.
  show(window) {
    this.window = window;
    this.draw();
  }

  draw() {
    for (const chart of this.charts) this.#draw(chart);
  }

  #make(chart, number) {
    const section = make("section");
    const title = make("h2", chart.title);
    title.id = `chart-${number}`;
    section.setAttribute("aria-labelledby", title.id);
    const canvas = make("canvas", "", "chart");
    canvas.setAttribute("role", "img");
    canvas.addEventListener("pointermove", (event) => this.#look(event.offsetX, canvas.clientWidth));
    canvas.addEventListener("pointerleave", () => this.#look(null));
    const figure = make("figure");
    const caption = make("figcaption");
    const values = chart.lines.map((line, place) => make("span", "", CLASSES[place]));
    caption.append(...values);
    figure.append(canvas, caption);
    section.append(title, figure);
    byId("charts").append(section);
    return { ...chart, canvas, values };
  }

  // The point under the pointer, whose values all charts show; without one the last.
  #look(x, width) {
    const end = this.points.at(-1)?.time;
    this.at = null;
    if (x !== null && end !== undefined) {
      const time = end - this.window * (1 - (x - MARGIN.left) / (width - MARGIN.left));
      const near = (one, other) => (Math.abs(other.time - time) < Math.abs(one.time - time) ? other : one);
      this.at = this.points.reduce(near);
    }
    this.draw();
  }

  #draw(chart) {
    const last = this.points.at(-1);
    if (!last) return;
    const word = (point, [field, name, ifAny]) => (ifAny && point[field] == null ? "" : `${name} ${chart.form(point[field])}`);
    const words = (point) => chart.lines.map((line) => word(point, line));
    words(this.at ?? this.latest).forEach((text, place) => show(chart.values[place], place && text ? `, ${text}` : text));
    chart.canvas.setAttribute("aria-label", `${chart.title} of the last minutes; now ${words(this.latest).filter(Boolean).join(", ")}`);
    const { context, width, height } = fit(chart.canvas);
    if (!width) return;
    const span = this.window;
    const visible = this.points.filter((point) => point.time >= last.time - span);
    const top = chart.most ?? this.#highest(chart, visible);
    const x = (time) => MARGIN.left + (1 - (last.time - time) / span) * (width - MARGIN.left - 2);
    const y = (value) => height - MARGIN.bottom - (Math.min(value, top) / top) * (height - MARGIN.bottom - MARGIN.top);
    this.#axes(context, { x, y, width, top, form: chart.form, last: last.time, span });
    context.lineWidth = 2;
    colours(...CLASSES).slice(0, chart.lines.length).forEach((colour, place) => {
      context.strokeStyle = colour;
      context.setLineDash(DASHES[place]);
      this.#curve(context, visible, chart.lines[place][0], x, y);
    });
    context.setLineDash([]);
  }

  #highest(chart, points) {
    let highest = 0;
    for (const point of points) for (const [field] of chart.lines) highest = Math.max(highest, point[field] ?? 0);
    return highest || 1;
  }

  // Lines at nothing, half and the most, the time below, and where the pointer is.
  #axes(context, { x, y, width, top, form, last, span }) {
    const [line, dim] = colours("line", "dim");
    Object.assign(context, { strokeStyle: line, fillStyle: dim, lineWidth: 1, font: "12px system-ui, sans-serif" });
    const stroke = (...ends) => {
      context.beginPath();
      for (const [left, high] of ends) context.lineTo(left, high);
      context.stroke();
    };
    Object.assign(context, { textAlign: "right", textBaseline: "middle" });
    for (const value of [0, top / 2, top]) {
      stroke([MARGIN.left, Math.round(y(value)) + 0.5], [width, Math.round(y(value)) + 0.5]);
      context.fillText(form(value), MARGIN.left - 6, y(value));
    }
    context.textBaseline = "top";
    for (const [share, align] of [[0, "left"], [0.5, "center"], [1, "right"]]) {
      context.textAlign = align;
      context.fillText(share === 1 ? "now" : `−${back(span * (1 - share))}`, x(last - span * (1 - share)), y(0) + 4);
    }
    if (this.at) stroke([x(this.at.time), y(top)], [x(this.at.time), y(0)]);
  }

  // A point each pixel or two is enough; where nothing is known, or nobody looked, the curve is broken.
  #curve(context, points, field, x, y) {
    let before = null;
    context.beginPath();
    for (const point of points) {
      if (point[field] == null) continue;
      const [left, high] = [x(point.time), y(point[field])];
      if (before === null || point.time - before >= LONGEST_STEP) context.moveTo(left - 1, high);
      context.lineTo(left, high);
      before = point.time;
    }
    context.stroke();
  }
}

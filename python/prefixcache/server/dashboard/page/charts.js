// Curves over time. A curve keeps as many points as the server says, so that a page may stay open for days.

import { colours, fit } from "./canvas.js";
import { byId, make, percent, rate, seconds, show } from "./text.js";

const LONGEST_STEP = 15;
const CHARTS = [
  { title: "Hit ratio of prompt tokens", form: percent, most: 1, lines: [["hit_ratio", "cached"]] },
  { title: "Time to first token", form: seconds, lines: [["ttft_p50", "median"], ["ttft_p90", "90th percentile"]] },
  { title: "Prompt tokens a second", form: rate, lines: [["saved_tokens", "saved"], ["computed_tokens", "computed"]] },
  { title: "Blocks lost a second", form: rate, lines: [["evictions", "evicted"], ["demotions", "demoted"]] },
  { title: "Generated tokens a second", form: rate, lines: [["generated_tokens", "generated"]] },
  { title: "Requests", form: (value) => String(value ?? "none"), lines: [["running", "running"], ["waiting", "waiting"]] },
];
const CLASSES = ["first", "second"];

export class Charts {
  constructor() {
    this.points = [];
    this.most = 600;
    this.charts = CHARTS.map((chart, number) => this.#make(chart, number));
  }

  reset(points, most) {
    this.points = points;
    this.most = most;
  }

  add(point) {
    this.points.push(point);
    if (this.points.length > this.most) this.points.splice(0, this.points.length - this.most);
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
    const figure = make("figure");
    const caption = make("figcaption");
    const values = chart.lines.map((line, place) => make("span", "", CLASSES[place]));
    values.forEach((value, place) => caption.append(place ? ", " : "", value));
    figure.append(canvas, caption);
    section.append(title, figure);
    byId("charts").append(section);
    return { ...chart, canvas, values };
  }

  #draw(chart) {
    const last = this.points[this.points.length - 1];
    if (!last) return;
    const words = chart.lines.map(([field, name]) => `${name} ${chart.form(last[field])}`);
    chart.values.forEach((value, place) => show(value, words[place]));
    chart.canvas.setAttribute("aria-label", `${chart.title} of the last minutes; now ${words.join(", ")}`);
    const { context, width, height } = fit(chart.canvas);
    if (!width) return;
    const top = chart.most ?? this.#highest(chart);
    this.#scale(context, width, height, chart.form(top));
    colours(...CLASSES).slice(0, chart.lines.length).forEach((colour, place) => {
      context.strokeStyle = colour;
      context.setLineDash(place ? [5, 3] : []);
      this.#curve(context, chart.lines[place][0], { width, height, top, end: last.time });
    });
    context.setLineDash([]);
  }

  #highest(chart) {
    let highest = 0;
    for (const point of this.points) for (const [field] of chart.lines) highest = Math.max(highest, point[field] ?? 0);
    return highest || 1;
  }

  #scale(context, width, height, text) {
    const [line, dim] = colours("line", "dim");
    context.strokeStyle = line;
    context.lineWidth = 1;
    context.strokeRect(0.5, 0.5, width - 1, height - 1);
    context.fillStyle = dim;
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "top";
    context.fillText(text, 5, 4);
    context.lineWidth = 2;
  }

  // A point each pixel or two is enough; where nothing is known, or nobody looked, the curve is broken.
  #curve(context, field, { width, height, top, end }) {
    const span = Math.max(60, end - this.points[0].time);
    let before = null;
    context.beginPath();
    for (const point of this.points) {
      const value = point[field];
      if (value == null) continue;
      const x = width - ((end - point.time) / span) * width;
      const y = height - 2 - (Math.min(value, top) / top) * (height - 20);
      if (before !== null && point.time - before < LONGEST_STEP) context.lineTo(x, y);
      else {
        context.moveTo(x - 1, y);
        context.lineTo(x, y);
      }
      before = point.time;
    }
    context.stroke();
  }
}

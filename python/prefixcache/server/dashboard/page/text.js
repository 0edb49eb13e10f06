// Elements and numbers as people read them. What the server tells becomes text nodes and nothing else.

export const byId = (id) => document.getElementById(id);

export function make(tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

// Text nodes are replaced only when they change, so that a selection stays.
export function show(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const counts = new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat(undefined, { notation: "compact", maximumSignificantDigits: 3 });

export const count = (value) => counts.format(value);
export const rate = (value) => (value == null ? "none" : `${short.format(value)}/s`);
export const percent = (value) => (value == null ? "none" : `${(100 * value).toFixed(1)} %`);

export function seconds(value) {
  if (value == null) return "none";
  const short = (number) => Number(number.toPrecision(3));
  if (value > 0 && value < 1) return `${short(1000 * value)} ms`;
  if (value < 120) return `${short(value)} s`;
  return value < 3600 ? `${Math.round(value / 60)} min` : `${short(value / 3600)} h`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit++) value /= 1024;
  return `${unit ? value.toPrecision(3) : value} ${units[unit]}`;
}

export const clock = (time) => new Date(1000 * time).toLocaleTimeString();
export const ago = (time) => `${seconds(Math.max(0, Math.round(Date.now() / 1000 - time)))} ago`;

// Brings the children of `parent` in line with `items`: one element for each key, kept as long as the key is there,
// so that focus and what was opened stay.
export function sync(parent, items, { key, create, fill }) {
  const known = new Map(Array.from(parent.children, (child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let element = known.get(name);
    if (element) known.delete(name);
    else (element = create(item)).dataset.key = name;
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
    fill(element, item);
  }
  for (const child of known.values()) child.remove();
}

// An answer as it grows: text, and code between fences. All of it becomes text nodes: no answer is markup.

import { make } from "./text.js";

// The browser lays out a block again whenever it grows: one of this many characters is left, and another begun.
const LONGEST_BLOCK = 4096;
const FENCE = /^\s*(`{3,}(?=[^`]*$)|~{3,})(.*)$/;

export class AnswerView {
  constructor(parent) {
    Object.assign(this, { parent, fence: "", unfinished: "", text: null, tail: document.createTextNode("") });
  }

  add(text) {
    const lines = (this.unfinished + text).split("\n");
    this.unfinished = lines.pop();
    this.tail.data = "";
    for (const line of lines) this.#addLine(line);
    if (this.unfinished.length > LONGEST_BLOCK) this.end();
    else if (this.unfinished) this.tail.data = this.#break() + this.unfinished;
  }

  // The last line is not followed by a line break.
  end() {
    this.tail.data = "";
    this.#addLine(this.unfinished);
    this.unfinished = "";
  }

  #addLine(line) {
    const [, fence = "", info = ""] = FENCE.exec(line) ?? [];
    const ends = this.fence && fence.startsWith(this.fence) && !info.trim();
    if (ends || (fence && !this.fence)) {
      this.fence = ends ? "" : fence;
      this.text = null;
    } else if (this.text || line.trim()) {
      const before = this.#break();
      this.text.appendData(before + line);
      if (this.text.length > LONGEST_BLOCK) this.text = null;
    }
  }

  // What stands between the block and its next line; begins a block where none is open.
  #break() {
    if (!this.text) {
      const block = make(this.fence ? "pre" : "p");
      block.dir = "auto";
      block.append((this.text = document.createTextNode("")), this.tail);
      this.parent.append(block);
    }
    return this.text.length ? "\n" : "";
  }
}

/** Wildcards: `__name__` in a prompt is one line of the list of that name, which the seed chooses. */

import { $, button, h, labelled, mended, notice, options } from "./dom.js";

const KEPT = "diffusax-wildcards";
const WILDCARD = /(?<!\w)__([\w/-]*\w[\w/-]*?)__(?!\w)/;
/** How often lines may hold wildcards themselves. */
const DEEPEST = 50;

/** Returns numbers from 0 to 1 that follow from a seed (mulberry32). */
export function random(seed) {
  let state = (Number(seed) ^ Math.floor(Number(seed) / 2 ** 32)) >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let value = Math.imul(state ^ (state >>> 15), state | 1);
    value ^= value + Math.imul(value ^ (value >>> 7), value | 61);
    return ((value ^ (value >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** Returns a text with lines in the place of wildcards; those without a list stay. `chosen` gets what was taken. */
export function resolve(text, lists, draw, chosen) {
  for (let count = 0, from = 0; count < DEEPEST; count++) {
    const match = WILDCARD.exec(text.slice(from));
    if (!match) break;
    const at = from + match.index;
    const lines = lists[match[1]];
    if (!lines?.length) {
      from = at + match[0].length;
      continue;
    }
    const line = lines[Math.floor(draw() * lines.length)];
    chosen.push([match[1], line]);
    text = text.slice(0, at) + line + text.slice(at + match[0].length);
    from = at;
  }
  return text;
}

const linesOf = (text) => text.split("\n").map((line) => line.trim()).filter((line) => line && !line.startsWith("#"));

/** Says "change" when a list is changed. */
export class Wildcards extends EventTarget {
  #texts = JSON.parse(localStorage.getItem(KEPT) ?? "{}");
  #shown = "";

  constructor() {
    super();
    this.#show(Object.keys(this.#texts)[0] ?? "");
  }

  /** Returns prompts without wildcards, and what was `chosen`: [[name, line]]. */
  applied({ prompt, negative_prompt }, seed) {
    const lists = Object.fromEntries(Object.entries(this.#texts).map(([name, text]) => [name, linesOf(text)]));
    const draw = random(seed);
    const chosen = [];
    return {
      prompt: resolve(prompt ?? "", lists, draw, chosen),
      negative_prompt: resolve(negative_prompt ?? "", lists, draw, chosen),
      chosen,
    };
  }

  #show(name) {
    this.#shown = name;
    const names = Object.keys(this.#texts);
    const lists = h("select", { id: "wildcard", onchange: () => this.#show(lists.value) }, ...options(names));
    lists.value = name;
    const oninput = () => this.#write(name, area.value);
    const area = h("textarea", { id: "wildcard-lines", rows: 4, value: this.#texts[name] ?? "", oninput });
    const word = h("input", { id: "wildcard-name", placeholder: "colour", spellcheck: false });
    word.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      this.#add(word.value);
    });
    const chosen = [
      labelled("List", lists, { className: "field line" }),
      labelled("Its lines", area),
      h(
        "p",
        { className: "actions" },
        button("Into the prompt", () => insert(`__${name}__`)),
        button("Delete the list", () => this.#remove(name), { className: "quiet" }),
      ),
    ];
    $("#wildcards").replaceChildren(
      ...(name ? chosen : []),
      h(
        "div",
        { className: "pair" },
        labelled("New list", word),
        button("Add", () => this.#add(word.value), { "aria-label": "Add the list" }),
      ),
    );
    $("#wildcards-summary").textContent = names.length ? `${names.length}` : "none";
  }

  #write(name, text) {
    this.#texts[name] = text;
    localStorage.setItem(KEPT, JSON.stringify(this.#texts));
    this.dispatchEvent(new Event("change"));
  }

  #add(text) {
    const name = text.trim().replace(/^_+|_+$/g, "");
    if (!/^[\w/-]+$/.test(name)) {
      notice("A list's name has letters, digits, _, - and / only.", { error: true, about: "wildcards" });
      return void $("#wildcard-name").focus();
    }
    mended("wildcards");
    this.#write(name, this.#texts[name] ?? "");
    this.#show(name);
    $("#wildcard-lines").focus();
  }

  #remove(name) {
    const text = this.#texts[name];
    delete this.#texts[name];
    localStorage.setItem(KEPT, JSON.stringify(this.#texts));
    this.#show(Object.keys(this.#texts)[0] ?? "");
    this.dispatchEvent(new Event("change"));
    const undo = () => (this.#write(name, text), this.#show(name));
    notice(`The list ${name} is deleted.`, { actions: { Undo: undo } });
    $("#wildcard-name").focus();
  }
}

/** Writes text where the prompt's cursor is. */
export function insert(text) {
  const prompt = $("#prompt");
  const { selectionStart: start, selectionEnd: end, value } = prompt;
  const before = value.slice(0, start);
  const space = before && !/\s$/.test(before) ? " " : "";
  prompt.setRangeText(space + text, start, end, "end");
  prompt.dispatchEvent(new Event("input", { bubbles: true }));
  prompt.focus();
}

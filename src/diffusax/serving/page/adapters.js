/** LoRAs with their weights and pictures, and embeddings, whose names are words of the prompt. */

import * as api from "./api.js";
import { $, button, h, labelled, options } from "./dom.js";
import { urlOf } from "./pictures.js";
import { addSlider } from "./settings.js";
import { insert } from "./wildcards.js";

/** The pictures beside LoRAs' files by name, which are fetched once. */
const pictures = new Map();

/** Says "change" when a LoRA is added, weighed or taken away. */
export class Loras extends EventTarget {
  weights = {};
  #known = [];

  constructor() {
    super();
    // Pictures are fetched only for who looks at them.
    $("#group-loras").addEventListener("toggle", () => this.#previews());
  }

  capabilities({ loras = [], embeddings = [] }) {
    this.#known = loras;
    $("#group-loras").hidden = !loras.length && !Object.keys(this.weights).length;
    $("#group-embeddings").hidden = !embeddings.length;
    $("#embeddings").replaceChildren(...embeddings.map(({ name }) => button(name, () => addWord(name))));
    this.#show();
  }

  get names() {
    return this.#known.map(({ name }) => name);
  }

  /** Takes {name: weight}; names that the server does not have are left out, and returned. */
  write(weights) {
    const known = this.names;
    const usable = Object.entries(weights ?? {}).filter(([name]) => !known.length || known.includes(name));
    this.weights = Object.fromEntries(usable);
    this.#show();
    this.#changed();
    return Object.keys(weights ?? {}).filter((name) => !(name in this.weights));
  }

  #changed() {
    const count = Object.keys(this.weights).length;
    $("#loras-summary").textContent = count ? `${count} on` : "none";
    this.dispatchEvent(new Event("change"));
  }

  #show() {
    const rows = Object.keys(this.weights).map((name) => this.#row(name));
    const others = this.#known.filter(({ name }) => !(name in this.weights));
    const select = h(
      "select",
      { id: "lora-add", onchange: () => this.#add(select.value) },
      h("option", { value: "" }, "choose one …"),
      ...options(others),
    );
    $("#loras").replaceChildren(
      ...rows,
      labelled("Add a LoRA", select, { hidden: !others.length }),
      h("p", { className: "hint", id: "loras-hint" }, "Or into the prompt:"),
      h("ul", { className: "cards", "aria-labelledby": "loras-hint" }, ...this.#known.map((one) => this.#card(one))),
    );
    this.#previews();
  }

  /** A button that writes <lora:name:1> into the prompt, with the picture beside the file. */
  #card({ name, title, preview }) {
    const picture = h("span", { className: "card-picture", data: preview ? { lora: name } : {} });
    const write = () => insert(`<lora:${name}:1>`);
    const card = button(picture, write, { className: "card", "aria-label": `${title || name} into the prompt` });
    card.append(h("span", {}, title || name));
    return h("li", {}, card);
  }

  async #previews() {
    if (!$("#group-loras").open) return;
    for (const place of document.querySelectorAll("[data-lora]")) {
      const name = place.dataset.lora;
      if (!pictures.has(name)) pictures.set(name, await api.loraPreview(name).catch(() => null));
      const blob = pictures.get(name);
      if (blob && !place.firstChild) place.append(h("img", { src: urlOf(blob), alt: "", loading: "lazy" }));
    }
  }

  #row(name) {
    const title = this.#known.find((one) => one.name === name)?.title || name;
    const id = `lora-${name}`;
    const number = h("input", { id, type: "number", min: -2, max: 2, step: 0.05, value: this.weights[name] });
    number.addEventListener("input", () => {
      this.weights[name] = Number(number.value);
      this.#changed();
    });
    const row = h("div", { className: "field slide removable" }, h("label", { for: id }, title), number);
    addSlider(number);
    row.append(button("×", () => this.#remove(name), { className: "icon", "aria-label": `Take ${title} away` }));
    return row;
  }

  #add(name) {
    if (!name) return;
    this.weights[name] = 1;
    this.#show();
    this.#changed();
    document.getElementById(`lora-${name}`).focus();
  }

  #remove(name) {
    delete this.weights[name];
    this.#show();
    this.#changed();
    $("#lora-add").focus();
  }
}

/** Writes a word at the end of the prompt. */
function addWord(word) {
  const prompt = $("#prompt");
  prompt.value = prompt.value.trim() ? `${prompt.value.trimEnd().replace(/,$/, "")}, ${word}` : word;
  prompt.dispatchEvent(new Event("input", { bubbles: true }));
  prompt.focus();
}

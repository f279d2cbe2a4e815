/** Styles: words that are put around the prompts, of the browser's own and those that lie on the server. */

import * as api from "./api.js";
import { $, button, h, notice } from "./dom.js";

const KEPT = "diffusax-styles";

/** Puts a style's words around a prompt: in the place of "{prompt}", or else behind it, as A1111 does. */
export function around(prompt, words = "") {
  if (!words) return prompt;
  if (words.includes("{prompt}")) return words.replaceAll("{prompt}", prompt);
  return [prompt, words].map((part) => part.trim()).filter(Boolean).join(", ");
}

/** Says "change" when one is switched on or off. */
export class Styles extends EventTarget {
  #own = {};
  #server = {};
  #on = [];

  constructor(settings) {
    super();
    this.settings = settings;
    const { own = {}, on = [] } = JSON.parse(localStorage.getItem(KEPT) ?? "{}");
    [this.#own, this.#on] = [own, on];
    $("#style-save").addEventListener("click", () => this.#save());
    $("#style-name").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      this.#save();
    });
    this.#changed();
  }

  /** Asks for the server's styles, where it has some. */
  async capabilities() {
    const found = await api.styles().catch(() => []);
    this.#server = Object.fromEntries(found.map((one) => [one.name, one]));
    this.#changed();
  }

  get #all() {
    return { ...this.#server, ...this.#own };
  }

  /** Returns the prompts with the styles that are on, and their names. */
  applied({ prompt = "", negative_prompt = "" }) {
    const names = this.#on.filter((name) => name in this.#all);
    for (const name of names) {
      const style = this.#all[name];
      prompt = around(prompt, style.prompt);
      negative_prompt = around(negative_prompt, style.negative_prompt);
    }
    return { prompt, negative_prompt, names };
  }

  /** Switches all off; returns whether some were on. */
  clear() {
    const some = this.#on.length > 0;
    if (some) this.choose([]);
    return some;
  }

  choose(names) {
    this.#on = [...(names ?? [])];
    this.#changed();
  }

  #changed() {
    localStorage.setItem(KEPT, JSON.stringify({ own: this.#own, on: this.#on }));
    const names = Object.keys(this.#all);
    const count = this.applied({}).names.length;
    $("#styles-summary").textContent = count ? `${count} on` : "none";
    const focused = document.activeElement?.dataset?.style;
    $("#styles").replaceChildren(...names.map((name) => this.#chip(name)));
    if (focused) [...$("#styles").querySelectorAll("button")].find((one) => one.dataset.style === focused)?.focus();
    this.dispatchEvent(new Event("change"));
  }

  #chip(name) {
    const on = this.#on.includes(name);
    const toggle = () => this.choose(on ? this.#on.filter((one) => one !== name) : [...this.#on, name]);
    const { prompt, negative_prompt } = this.#all[name];
    const title = [prompt, negative_prompt && `without: ${negative_prompt}`].filter(Boolean).join("\n");
    const data = { style: name };
    const chip = button(name, toggle, { "aria-pressed": String(on), title, data });
    if (!(name in this.#own)) return chip;
    const drop = button("×", () => this.#drop(name), { className: "icon", "aria-label": `Delete the style ${name}` });
    return h("span", { className: "joined" }, chip, drop);
  }

  #save() {
    const name = $("#style-name").value.trim();
    const { prompt, negative_prompt } = this.settings.read();
    if (!name) return void $("#style-name").focus();
    if (!prompt && !negative_prompt) return void notice("Write the style's words into the prompt first.");
    this.#own[name] = { name, prompt, negative_prompt };
    $("#style-name").value = "";
    // Its words are in the prompt still, where they would count twice.
    this.settings.write({ prompt: "", negative_prompt: "" });
    this.choose([...this.#on.filter((one) => one !== name), name]);
    notice(`The style ${name} is saved and on. The prompt is empty for what it is drawn of.`);
  }

  #drop(name) {
    const style = this.#own[name];
    delete this.#own[name];
    this.#changed();
    const undo = () => ((this.#own[name] = style), this.#changed());
    notice(`The style ${name} is deleted.`, { actions: { Undo: undo } });
    $("#style-name").focus();
  }
}

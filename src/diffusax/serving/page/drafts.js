/**
 * Keeps what is written in the form for the next visit: words and numbers in localStorage, which is written at once
 * even while the page closes, and pictures in the browser's store.
 */

import { $ } from "./dom.js";
import * as store from "./store.js";

const FORM = "diffusax-form";
const groups = () => [...document.querySelectorAll("details[id]")];

export class Drafts {
  #ready = false;
  #saving = null;

  /** The page's parts: settings, source, slots, references, loras, controls, grid. */
  constructor(parts) {
    Object.assign(this, parts);
    for (const part of [this.source, ...Object.values(this.slots), this.references, this.controls]) part.addEventListener("change", () => this.#pictures());
    addEventListener("pagehide", () => this.#form());
    document.addEventListener("visibilitychange", () => this.#form());
  }

  /** Keeps the form a little later, once for many changes. */
  changed() {
    clearTimeout(this.#saving);
    this.#saving = setTimeout(() => this.#form(), 300);
  }

  #form() {
    clearTimeout(this.#saving);
    if (!this.#ready) return;
    const open = groups().filter((group) => group.open).map(({ id }) => id);
    const form = { settings: this.settings.read(), loras: this.loras.weights, grid: this.grid.draft, whole: $("#whole").checked, open };
    localStorage.setItem(FORM, JSON.stringify(form));
  }

  async #pictures() {
    if (!this.#ready) return;
    const { source, references, controls } = this;
    const slots = Object.fromEntries(Object.entries(this.slots).map(([name, { file }]) => [name, file]));
    const draft = { id: "pictures", source: source.draft, slots, references: references.entries, controls: controls.entries };
    await store.put("drafts", draft).catch((error) => console.warn(error));
  }

  /** Writes what was kept into the form, once, when the form knows the server's models. */
  async restore(narrow) {
    if (this.#ready) return;
    const form = JSON.parse(localStorage.getItem(FORM) ?? "null");
    const pictures = await store.get("drafts", "pictures");
    if (form) {
      this.settings.write(form.settings);
      this.loras.write(form.loras);
      this.grid.write(form.grid);
      $("#whole").checked = form.whole ?? true;
    }
    if (pictures) {
      this.controls.write(pictures.controls);
      this.references.write(pictures.references);
      for (const [name, file] of Object.entries(pictures.slots ?? {})) this.slots[name]?.write(file);
      const { source } = pictures;
      // A browser may have let a picture go.
      if (source) await this.source.restore(source).catch(() => {});
    }
    if (form) for (const group of groups()) group.open = form.open.includes(group.id);
    else if (narrow) for (const group of groups()) group.open = false;
    this.#ready = true;
  }
}

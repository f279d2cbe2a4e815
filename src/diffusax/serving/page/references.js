/** Further pictures that a model looks at besides the first, in an order that counts. */

import { $, button, h, notice, say } from "./dom.js";
import { dropped, multiplePicker } from "./picker.js";
import { bounded, urlOf } from "./pictures.js";

/** Says "change" when one comes, goes or moves. */
export class References extends EventTarget {
  /** {blob, name, id}, in their order behind the first picture. */
  entries = [];
  #most = 1;
  #count = 0;

  constructor(source) {
    super();
    this.source = source;
    // Several that are dropped where the first one goes are the first and those behind it.
    dropped.addEventListener("more", ({ detail }) => this.#most > 1 && this.#addAll(detail));
  }

  /** Shows them for a model that looks at `most` pictures together. */
  show(most) {
    this.#most = most;
    const place = $("#references");
    place.hidden = most < 2 || !this.source.picture;
    if (place.hidden) return;
    const key = JSON.stringify([most, this.entries.map(({ id }) => id)]);
    if (place.shown === key) return;
    place.shown = key;
    const shown = this.entries.slice(0, most - 1);
    const over = this.entries.length - shown.length;
    const room = shown.length < most - 1;
    const parts = [
      h("p", { className: "hint" }, `The model looks at up to ${most} pictures; the one above is the first.`),
      h("ol", { className: "references", start: 2 }, ...shown.map((entry, at) => this.#item(entry, at))),
      over > 0 && h("p", { className: "hint bad" }, `${over} more are left out: the model looks at ${most}.`),
      room && multiplePicker("Add further pictures", (files) => this.#addAll(files)),
    ];
    place.replaceChildren(...parts.filter(Boolean));
  }

  /** The blobs of a drawing. */
  drawing() {
    return this.entries.slice(0, this.#most - 1).map(({ blob }) => blob);
  }

  /** Takes back entries that the browser kept. */
  write(entries) {
    this.entries = (entries ?? []).map((one) => ({ ...one, id: ++this.#count }));
    this.#changed();
  }

  async #addAll(files) {
    for (const file of files) {
      try {
        this.entries.push({ blob: (await bounded(file))[0], name: file.name, id: ++this.#count });
      } catch (error) {
        notice(error.message, { error: true, about: "source" });
      }
    }
    this.#changed();
    say(`${this.entries.length + 1} pictures.`);
  }

  #item(entry, at) {
    const name = entry.name || `picture ${at + 2}`;
    const mover = (text, by, label) =>
      button(text, () => this.#move(entry, by), {
        className: "icon",
        "aria-label": `${label}: ${name}`,
        disabled: at + by >= this.entries.length,
        data: { move: `${entry.id} ${by}` },
      });
    const image = h("img", { src: urlOf(entry.blob), alt: "" });
    const buttons = [
      mover("↑", -1, at ? "Before the one above" : "As the first"),
      mover("↓", 1, "Behind the one below"),
      button("×", () => this.#remove(entry), { className: "icon", "aria-label": `Take away: ${name}` }),
    ];
    return h("li", {}, h("div", { className: "reference" }, image, h("span", {}, name), ...buttons));
  }

  async #move(entry, by) {
    const at = this.entries.indexOf(entry);
    if (at + by < 0) await this.#first(entry);
    else {
      [this.entries[at], this.entries[at + by]] = [this.entries[at + by], entry];
      this.#changed();
      const same = [...$("#references").querySelectorAll("[data-move]")];
      const again = same.find((one) => one.dataset.move === `${entry.id} ${by}` && !one.disabled);
      (again ?? same.find((one) => one.dataset.move.startsWith(`${entry.id} `)))?.focus();
    }
    say(`${entry.name || "It"} is number ${this.entries.indexOf(entry) + 2}.`);
  }

  /** Changes places with the first picture, which a mask may lie on. */
  async #first(entry) {
    const { blob, name } = this.source.picture;
    this.entries[this.entries.indexOf(entry)] = { blob, name, id: ++this.#count };
    await this.source.set(entry.blob, entry.name);
    this.#changed();
    $("#references button").focus();
  }

  #remove(entry) {
    const before = [...this.entries];
    this.entries = this.entries.filter((one) => one !== entry);
    this.#changed();
    notice("The picture is taken away.", { actions: { Undo: () => this.write(before) } });
    ($("#references .picker input") ?? $("#no-picture")).focus();
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

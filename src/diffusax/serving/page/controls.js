/** ControlNets: each with its picture, its weight and the part of the steps in which it counts. */

import { $, button, h, labelled, options } from "./dom.js";
import { canvasOf, fitted, open, toBlob, urlOf } from "./pictures.js";
import { picker } from "./picker.js";
import { addSlider } from "./settings.js";

/** Says "change" when one is added, changed or taken away. */
export class Controls extends EventTarget {
  /** {id, model, blob, scale, start, end}, in the order in which they are shown. */
  entries = [];
  #known = [];
  #count = 0;

  capabilities({ controlnets = [] }) {
    this.#known = controlnets;
    $("#group-controls").hidden = !controlnets.length;
    this.#show();
  }

  /** Takes entries that the browser kept. */
  write(entries) {
    this.entries = (entries ?? []).map((one) => ({ ...one, id: ++this.#count }));
    this.#show();
    this.#changed();
  }

  add(blob) {
    this.entries.push({ id: ++this.#count, model: this.#known[0]?.name, blob, scale: 1, start: 0, end: 1 });
    $("#group-controls").open = true;
    this.#show();
    this.#changed();
    $(`#control-${this.#count}-scale`).focus();
  }

  /** The controls of a drawing of this size; those whose ControlNet the server does not have are left out. */
  async drawing(width, height) {
    const names = this.#known.map(({ name }) => name);
    const found = this.entries.filter(({ model }) => names.includes(model));
    return Promise.all(
      found.map(async ({ model, blob, scale, start, end }) => {
        const image = await toBlob(fitted(await open(blob), width, height, "#000"));
        return { model, image, scale, start, end };
      }),
    );
  }

  #changed() {
    const count = this.entries.length;
    $("#controls-summary").textContent = count ? `${count} on` : "none";
    this.dispatchEvent(new Event("change"));
  }

  #show() {
    const label = `Choose or drop ${this.entries.length ? "another" : "a"} picture that steers, such as edges`;
    const place = picker(label, (blob) => this.add(blob));
    $("#controls").replaceChildren(...this.entries.map((entry) => this.#entry(entry)), place);
  }

  #entry(entry) {
    const id = (name) => `control-${entry.id}-${name}`;
    const select = h("select", { id: id("model") }, ...options(this.#known));
    select.value = entry.model;
    select.addEventListener("change", () => {
      entry.model = select.value;
      this.#changed();
    });
    return h(
      "fieldset",
      { className: "control" },
      h("legend", { className: "unseen" }, "ControlNet"),
      h("img", { src: urlOf(entry.blob), alt: "The picture that steers" }),
      labelled("ControlNet", select),
      this.#number(entry, "scale", "Weight", 2, id),
      this.#number(entry, "start", "From", 1, id),
      this.#number(entry, "end", "Until", 1, id),
      h(
        "p",
        { className: "actions" },
        button("Find its edges", () => this.#edges(entry)),
        button("Take it away", () => this.#remove(entry), { className: "quiet" }),
      ),
    );
  }

  #number(entry, name, label, max, id) {
    const number = h("input", { id: id(name), type: "number", min: 0, max, step: 0.05, value: entry[name] });
    number.addEventListener("input", () => {
      entry[name] = Number(number.value);
      this.#changed();
    });
    const row = labelled(label, number, { className: "field slide" });
    addSlider(number);
    return row;
  }

  async #edges(entry) {
    entry.blob = await edges(entry.blob);
    this.#show();
    this.#changed();
  }

  #remove(entry) {
    this.entries = this.entries.filter((one) => one !== entry);
    this.#show();
    this.#changed();
    $("#controls .picker input").focus();
  }
}

/** White lines where the brightness changes by more than 40 of 255, on black. */
async function edges(blob) {
  const image = await open(blob);
  const { width, height } = image;
  const from = fitted(image, width, height).getContext("2d").getImageData(0, 0, width, height).data;
  const grey = (x, y) => {
    const at = 4 * (y * width + x);
    return 0.299 * from[at] + 0.587 * from[at + 1] + 0.114 * from[at + 2];
  };
  const canvas = canvasOf(width, height);
  const context = canvas.getContext("2d");
  const to = context.createImageData(width, height);
  for (let y = 0; y < height; y++)
    for (let x = 0; x < width; x++) {
      let change = 0;
      if (x && y && x < width - 1 && y < height - 1) {
        for (const dy of [-1, 0, 1]) for (const dx of [-1, 0, 1]) change -= grey(x + dx, y + dy);
        change += 9 * grey(x, y);
      }
      to.data.set([0, 0, 0, 255].map((value) => (change > 40 ? 255 : value)), 4 * (y * width + x));
    }
  context.putImageData(to, 0, 0);
  return toBlob(canvas);
}

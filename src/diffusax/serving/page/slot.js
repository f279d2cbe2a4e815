/** A place of the form for one picture or video besides the first picture. */

import { $, button, h, notice } from "./dom.js";
import { filePicker } from "./picker.js";
import { bounded, isClip, measured, urlOf } from "./pictures.js";

/** Says "change" when another one is there, and "brought" when the user brought it. */
export class Slot extends EventTarget {
  /** {blob, name, width, height, seconds}. */
  file = null;
  /** The most bytes that the server takes. */
  #most = Infinity;

  /** `kinds` are those of `picker.js`; `choose` asks for one, `label` says what it is, and `none` takes it away. */
  constructor(id, words) {
    super();
    Object.assign(this, words, { id, root: $(`#${id}`) });
    this.#show();
  }

  /** Takes in what the server can do. */
  capabilities({ limits }) {
    // Base64 has four characters for three bytes.
    this.#most = ((limits?.body ?? Infinity) * 3) / 4;
  }

  /** Takes a file or blob; raises an Error with one sentence where it is none of its kinds. */
  async set(given, name = "") {
    const blob = isClip(given) ? given : (await bounded(given))[0];
    if (blob.size > this.#most) {
      const most = Math.floor(this.#most / 2 ** 20);
      throw new Error(`${name || "The file"} is too large for the server, which takes ${most} MB; use a shorter or smaller one.`);
    }
    this.write({ blob, name, ...(await measured(blob)) });
    this.dispatchEvent(new Event("brought"));
  }

  /** Takes back what the browser kept. */
  write(file) {
    this.file = file ?? null;
    this.#show();
    this.dispatchEvent(new Event("change"));
  }

  #show() {
    if (!this.file) {
      this.root.replaceChildren(filePicker(this.choose, (file) => this.set(file, file.name), this.kinds));
      return;
    }
    const { name, width, height, seconds } = this.file;
    const length = Number.isFinite(seconds) && `${Number(seconds.toPrecision(2))} s`;
    this.root.replaceChildren(
      this.#player(),
      h("p", { className: "hint" }, [name, `${width} × ${height}`, length].filter(Boolean).join(", ")),
      h("p", { className: "actions" }, button(this.none, () => this.#remove(), { className: "quiet" })),
    );
  }

  #player() {
    const { blob } = this.file;
    const src = urlOf(blob);
    if (!blob.type.startsWith("video/")) return h("img", { className: "source", src, alt: this.label });
    const playing = { controls: true, loop: true, muted: true, playsInline: true, preload: "metadata" };
    return h("video", { className: "source", src, "aria-label": this.label, ...playing });
  }

  #remove() {
    const { file } = this;
    this.write(null);
    $("input", this.root).focus();
    notice("It is taken away.", { actions: { Undo: () => this.write(file) } });
  }
}

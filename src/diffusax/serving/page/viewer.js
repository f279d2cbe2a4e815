/** One picture, large, with its settings and what can be done with it. */

import { compare } from "./compare.js";
import { $, button, h, labelled, notice, options, short } from "./dom.js";
import { facts } from "./facts.js";
import { favourite, removePictures } from "./gallery.js";
import { download, fileName, isVideo, urlOf } from "./pictures.js";
import { upscalers } from "./upscale.js";

const dialog = $("#viewer");
const still = matchMedia("(prefers-reduced-motion: reduce)");

/** What goes on from a picture in the form, and closes the window. */
const ACTIONS = {
  settings: "Use these settings",
  written: "Use what was written",
  seed: "Use its seed",
  source: "Begin with this picture",
  inpaint: "Draw a part anew",
  control: "Steer by this picture",
};
/** What draws at once. */
const DRAWING = {
  more: ["Four more", "The same settings with four other seeds"],
  variations: ["Four variations", "From this picture, with half of its steps and other seeds"],
};

/**
 * `actions` are functions of a picture for the names in ACTIONS and DRAWING, `enlarge(picture, upscaler)`,
 * `possible(picture)` with the names of those that can be done now, and `sampler(name)` with a sampler's title.
 */
export class Viewer {
  constructor(actions) {
    this.actions = actions;
    dialog.addEventListener("keydown", (event) => this.#key(event));
    dialog.addEventListener("close", () => $("video", dialog)?.pause());
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  }

  show(picture, list) {
    Object.assign(this, { picture, list: [...list] });
    this.#render();
    if (!dialog.open) dialog.showModal();
    this.#upscalers();
  }

  get #at() {
    return this.list.findIndex(({ id }) => id === this.picture.id);
  }

  #step(by) {
    const next = this.list[this.#at + by];
    if (!next) return;
    this.picture = next;
    this.#render();
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select, video")) return;
    const act = {
      ArrowLeft: () => this.#step(-1),
      ArrowRight: () => this.#step(1),
      Delete: () => this.#remove(),
      s: () => this.#favour(),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  #render() {
    const { width, height, settings } = this.picture;
    const focused = document.activeElement?.dataset?.step;
    const image = this.#large();
    image.classList.toggle("pixels", Math.max(width, height) <= 256);
    image.style.aspectRatio = `${width} / ${height}`;
    dialog.replaceChildren(
      h(
        "div",
        { className: "large" },
        this.#stepper("‹", -1, "The newer picture"),
        h("div", { className: "frame" }, image),
        this.#stepper("›", 1, "The older picture"),
      ),
      h(
        "div",
        { className: "about" },
        button("×", () => dialog.close(), { className: "icon close", "aria-label": "Close" }),
        h("p", { className: "prompt" }, settings.prompt || "(no prompt)"),
        settings.negative_prompt && h("p", { className: "negative" }, "Without: ", settings.negative_prompt),
        facts(this.picture, this.actions.sampler),
        this.#deeds(),
      ),
      ...dialog.querySelectorAll(".notice"),
    );
    const next = focused && $(`[data-step="${focused}"]`, dialog);
    if (next && !next.disabled) next.focus();
    else if (focused) $(".close", dialog).focus();
  }

  /** The picture itself, or what plays the video. */
  #large() {
    const { blob, poster, settings } = this.picture;
    const name = short(settings.prompt, 200);
    if (!blob.type.startsWith("video/")) return h("img", { src: urlOf(blob), alt: name || "A picture" });
    const playing = { controls: true, loop: true, muted: true, playsInline: true, autoplay: !still.matches };
    return h("video", { src: urlOf(blob), poster: urlOf(poster), "aria-label": name || "A video", ...playing });
  }

  #stepper(text, by, name) {
    const disabled = !this.list[this.#at + by];
    return button(text, () => this.#step(by), { className: "icon", "aria-label": name, disabled, data: { step: by } });
  }

  #deeds() {
    const { picture, actions } = this;
    const possible = actions.possible(picture);
    const form = Object.entries(ACTIONS).filter(([name]) => possible.includes(name));
    const drawing = Object.entries(DRAWING).filter(([name]) => possible.includes(name));
    const called = (text) => (isVideo(picture) ? text.replace("picture", "video") : text);
    const act = (name) => () => (dialog.close(), actions[name](picture));
    const star = button("★ Favourite", () => this.#favour(), { "aria-pressed": String(Boolean(picture.favourite)) });
    star.classList.add("star");
    const other = this.list[this.#at + 1] ?? this.list[this.#at - 1];
    return h(
      "div",
      { className: "deeds" },
      ...drawing.map(([name, [text, title]]) => button(text, act(name), { title })),
      ...form.map(([name, text], at) => button(called(text), act(name), { className: at ? "" : "primary" })),
      possible.includes("enlarge") && this.#enlarger(),
      other && button("Compare", () => (dialog.close(), compare(picture, other)), { title: "With the one beside it" }),
      star,
      button("Download", () => download(picture.blob, fileName(picture))),
      button("Copy", () => this.#copy(), { hidden: isVideo(picture) || !navigator.clipboard?.write }),
      button("Delete", () => this.#remove(), { className: "quiet danger", "aria-keyshortcuts": "Delete" }),
    );
  }

  #enlarger() {
    if (!this.upscalers?.length) return null;
    const name = h("select", { id: "upscaler" }, ...options(this.upscalers));
    name.value = this.upscaler ?? this.upscalers[0];
    name.addEventListener("change", () => (this.upscaler = name.value));
    const start = button("Enlarge twice", () => this.#enlarge(name.value, start));
    return h("div", { className: "enlarger" }, labelled("Upscaler", name), start);
  }

  async #upscalers() {
    if (this.upscalers || !this.actions.possible(this.picture).includes("enlarge")) return;
    this.upscalers = await upscalers();
    if (dialog.open) this.#render();
  }

  async #enlarge(name, start) {
    const { picture } = this;
    Object.assign(start, { disabled: true, textContent: "Enlarging …" });
    const larger = await this.actions.enlarge(picture, name);
    if (!larger) return void Object.assign(start, { disabled: false, textContent: "Enlarge twice" });
    this.list.unshift(larger);
    if (this.picture === picture) this.picture = larger;
    if (dialog.open) this.#render();
    $(".close", dialog)?.focus();
  }

  async #favour() {
    const changed = await favourite(this.picture);
    if (changed) Object.assign(this.picture, { favourite: changed.favourite });
    $(".star", dialog).setAttribute("aria-pressed", String(Boolean(this.picture.favourite)));
  }

  async #copy() {
    try {
      await navigator.clipboard.write([new ClipboardItem({ "image/png": this.picture.blob })]);
      notice("The picture is copied.");
    } catch {
      notice("The browser did not let the picture be copied; download it.", { error: true, about: "copy" });
    }
  }

  async #remove() {
    const { picture } = this;
    const at = this.#at;
    // The key was pressed twice, and the next picture is not shown yet.
    if (at < 0) return;
    this.list.splice(at, 1);
    await removePictures([picture]);
    const next = this.list[at] ?? this.list[at - 1];
    if (!next) return dialog.close();
    this.picture = next;
    this.#render();
    $(".close", dialog).focus();
  }
}

/** One picture, large, with its settings and what can be done with it. */

import { $, button, duration, h, notice, short } from "./dom.js";
import { removePicture } from "./gallery.js";
import { download, urlOf } from "./pictures.js";

const dialog = $("#viewer");

const NAMES = {
  model: "Model",
  sampler: "Sampler",
  num_inference_steps: "Steps",
  guidance_scale: "Guidance",
  image_guidance_scale: "Guidance by the picture",
  guidance_rescale: "Rescale",
  seed: "Seed",
  strength: "Strength",
  clip_skip: "CLIP skip",
};

const ACTIONS = {
  settings: "Use these settings",
  seed: "Use its seed",
  source: "Begin with this picture",
  inpaint: "Draw a part anew",
  control: "Steer by this picture",
};

/**
 * `actions`: {settings, seed, source, inpaint, control}, each called with the picture; an action that
 * is not possible now is left out of `possible()`.
 */
export class Viewer {
  constructor(actions, possible) {
    Object.assign(this, { actions, possible });
    dialog.addEventListener("keydown", (event) => this.#key(event));
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  }

  show(picture, list) {
    Object.assign(this, { picture, list: [...list] });
    this.#render();
    if (!dialog.open) dialog.showModal();
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
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = {
      ArrowLeft: () => this.#step(-1),
      ArrowRight: () => this.#step(1),
      Delete: () => this.#remove(),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  #render() {
    const { blob, width, height, settings } = this.picture;
    const focused = document.activeElement?.dataset?.step;
    const image = h("img", { src: urlOf(blob), alt: short(settings.prompt, 200) || "A picture" });
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
        this.#facts(),
        this.#buttons(),
      ),
      ...dialog.querySelectorAll(".notice"),
    );
    const next = focused && $(`[data-step="${focused}"]`, dialog);
    if (next && !next.disabled) next.focus();
    else if (focused) $(".close", dialog).focus();
  }

  #stepper(text, by, name) {
    const disabled = !this.list[this.#at + by];
    return button(text, () => this.#step(by), { className: "icon", "aria-label": name, disabled, data: { step: by } });
  }

  #facts() {
    const { settings, width, height, seconds, created } = this.picture;
    const facts = [["Size", `${width} × ${height}`]];
    for (const [field, name] of Object.entries(NAMES))
      if (settings[field] || field === "seed") facts.push([name, `${settings[field]}`]);
    for (const [name, weight] of Object.entries(settings.adapters ?? {})) facts.push(["LoRA", `${name} ${weight}`]);
    if (seconds) facts.push(["Took", duration(seconds)]);
    facts.push(["Drawn", new Date(created).toLocaleString()]);
    return h("dl", { className: "facts" }, facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  }

  #buttons() {
    const { picture } = this;
    const act = (name) => () => {
      dialog.close();
      this.actions[name](picture);
    };
    const possible = this.possible();
    const shown = Object.entries(ACTIONS).filter(([name]) => possible.includes(name));
    return h(
      "p",
      { className: "actions" },
      ...shown.map(([name, text], at) => button(text, act(name), { className: at ? "" : "primary" })),
      button("Download", () => download(picture.blob, fileName(picture))),
      button("Copy", () => this.#copy(), { hidden: !navigator.clipboard?.write }),
      button("Delete", () => this.#remove(), { className: "quiet danger", "aria-keyshortcuts": "Delete" }),
    );
  }

  async #copy() {
    try {
      await navigator.clipboard.write([new ClipboardItem({ "image/png": this.picture.blob })]);
      notice("The picture is copied.");
    } catch {
      notice("The browser did not let the picture be copied; download it.", { error: true });
    }
  }

  async #remove() {
    const { picture } = this;
    const at = this.#at;
    // The key was pressed twice, and the next picture is not shown yet.
    if (at < 0) return;
    this.list.splice(at, 1);
    await removePicture(picture);
    const next = this.list[at] ?? this.list[at - 1];
    if (!next) return dialog.close();
    this.picture = next;
    this.#render();
    $(".close", dialog).focus();
  }
}

function fileName({ settings }) {
  const words = (settings.prompt ?? "").toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  return `${settings.seed}-${words.slice(0, 60) || "picture"}.png`;
}

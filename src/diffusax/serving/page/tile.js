/** One place for a picture: while it is drawn, its preview and progress; then the picture; or why there is none. */

import { button, duration, h, short } from "./dom.js";
import { Reel } from "./reel.js";
import { isVideo, lengthOf, stillOf, urlOf } from "./pictures.js";

/** Fills an element (of a list or a table) and keeps it up to date. */
export class Tile {
  #shown = null;

  constructor(element, actions) {
    Object.assign(this, { element, actions });
  }

  /** Shows a picture, or else the record of a job with its status, or nothing. */
  show({ picture, record, status, index = 0, selecting = false, chosen = false }) {
    const kind = picture ? "picture" : !record ? "none" : record.state === "failed" ? "failed" : "job";
    const shown = `${kind} ${picture?.id ?? record?.id ?? ""}`;
    if (shown !== this.#shown) {
      const focused = this.element.contains(document.activeElement);
      this.#shown = shown;
      this.element.dataset.kind = kind;
      this.element.replaceChildren(...this[kind]({ picture, record, index }));
      if (focused) this.element.querySelector("button")?.focus();
    }
    if (kind === "job") this.#progress(record, status ?? {}, index);
    if (kind === "picture") this.#mark(picture, selecting, chosen);
  }

  none() {
    return [];
  }

  picture({ picture }) {
    const { prompt, seed } = picture.settings;
    const moves = isVideo(picture);
    const alt = `${moves ? "Video: " : ""}${short(prompt) || "A picture"}`;
    const image = h("img", { alt, loading: "lazy", decoding: "async" });
    image.src = urlOf(picture.thumb ?? stillOf(picture));
    if (picture.width <= 128) image.classList.add("pixels");
    const open = (event) => this.actions.open(picture, event);
    const title = `${prompt}\nseed ${seed}`;
    this.open = button(image, open, { className: "open", title, data: { picture: picture.id } });
    this.star = button("★", () => this.actions.favourite(picture), { className: "icon star" });
    this.star.setAttribute("aria-label", `Favourite: ${short(prompt, 40) || "picture"}, seed ${seed}`);
    const length = moves && h("span", { className: "length", "aria-hidden": "true" }, `▶ ${lengthOf(picture.settings)}`);
    return [this.open, this.star, length].filter(Boolean);
  }

  #mark(picture, selecting, chosen) {
    if (selecting) this.open.setAttribute("aria-pressed", String(chosen));
    else this.open.removeAttribute("aria-pressed");
    this.star.setAttribute("aria-pressed", String(Boolean(picture.favourite)));
    this.element.classList.toggle("picked", selecting && chosen);
  }

  failed({ record }) {
    const { again, mend, dismiss } = this.actions;
    const others = record.others?.length;
    return [
      h(
        "p",
        { className: "why" },
        h("strong", {}, short(record.drawing.prompt, 40)),
        record.error,
        others ? ` (${others} more were not handed in.)` : "",
      ),
      h(
        "p",
        { className: "actions" },
        button("Draw again", () => again(record.id)),
        mend && button("Change it", () => mend(record), { title: "Its settings come into the form" }),
        button("Dismiss", () => dismiss(record.id), { className: "quiet" }),
      ),
    ];
  }

  job({ record }) {
    const { width, height, prompt } = record.drawing;
    this.preview = h("img", { alt: "", hidden: true });
    this.reel = new Reel(record.drawing);
    this.words = h("span", { className: "words" });
    this.bar = h("progress", { max: 1, "aria-label": `Progress of ${short(prompt, 40)}` });
    this.beginning = record.begun || record.set ? record.drawing.image && urlOf(record.drawing.image) : null;
    const cancel = button("×", () => this.actions.cancel(record.id), {
      className: "icon cancel",
      "aria-label": `Cancel ${short(prompt, 40)}`,
      title: "Cancel",
    });
    const state = h("div", { className: "state" }, this.words, this.bar);
    const box = h("div", { className: "drawing" }, this.preview, this.reel.element, state, cancel);
    box.style.setProperty("--shape", `${width} / ${height}`);
    return [box];
  }

  #progress(record, status, index) {
    const { still, frames } = status.previews?.[index] ?? {};
    const preview = still ?? this.beginning;
    this.reel.show(frames);
    this.preview.hidden = !preview || !this.reel.element.hidden;
    if (preview && this.preview.src !== preview) this.preview.src = preview;
    this.words.textContent = words(record, status);
    const known = ["running", "done"].includes(status.state);
    if (known) this.bar.value = status.progress ?? 0;
    else this.bar.removeAttribute("value");
    this.element.dataset.state = status.state ?? "unsent";
  }
}

/** Says in a few words how far a job is. */
export function words(record, { state, position, steps_done: done, steps, eta }) {
  if (record.state === "unsent") return state === "waiting" ? "The server is full; trying again" : "Handing it in …";
  if (state === "queued") return position > 0 ? `${position} before it` : "Next";
  if (state === "loading") return "The model loads …";
  if (state === "compiling") return "Compiling, once for this size and kind …";
  if (state === "cancelling") return "Cancelling …";
  if (state === "running") return `${done} of ${steps}${eta > 0.5 ? ` · ${duration(eta)} left` : ""}`;
  return state === "done" ? "Fetching it …" : "Waiting …";
}

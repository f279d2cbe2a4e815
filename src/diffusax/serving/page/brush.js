/** The large window in which a mask is painted: brush, eraser, undo, zoom and pan, by mouse, touch, pen or keys. */

import { View } from "./brush_view.js";
import { $, button, h, say } from "./dom.js";
import { canvasOf } from "./pictures.js";

const dialog = $("#brush");
const HELP = "The picture to paint on. Arrows move the brush, Enter paints, Shift and arrows paint on the way.";
/** The brush's width in pixels of the picture as a share of its longer side, kept between pictures. */
let share = 0.12;

/** Opens the window for a picture (an ImageBitmap) and its mask, which is changed; resolves when it is closed. */
export function paint(image, mask) {
  return new Promise((resolve) => new Editor(image, mask, resolve));
}

class Editor {
  kind = "paint";
  pointers = new Map();
  stroke = null;
  space = false;

  constructor(image, mask, done) {
    Object.assign(this, { image, mask });
    this.size = Math.max(2, Math.round(Math.max(image.width, image.height) * share));
    this.cursor = [image.width / 2, image.height / 2];
    this.#build();
    this.listeners = new AbortController();
    const { signal } = this.listeners;
    dialog.addEventListener("keydown", (event) => this.#key(event), { signal });
    dialog.addEventListener("keyup", (event) => event.key === " " && this.#held(false), { signal });
    window.addEventListener("resize", () => this.view.fit(), { signal });
    dialog.addEventListener("close", () => (this.listeners.abort(), done()), { signal });
    dialog.showModal();
    this.view.fit();
    this.#render();
    this.stage.focus();
  }

  #build() {
    const { image } = this;
    const layer = (className) => Object.assign(canvasOf(image.width, image.height), { className });
    const [picture, shade, stripes] = ["picture", "shade", "stripes"].map(layer);
    picture.getContext("2d").drawImage(image, 0, 0);
    // The mask lies on the picture twice, dark and in white stripes, which together show on every colour.
    this.contexts = [shade, stripes].map((canvas) => canvas.getContext("2d"));
    this.sheet = h("div", { className: "sheet" }, picture, shade, stripes);
    this.ring = h("div", { className: "ring", hidden: true });
    this.stage = h(
      "div",
      { className: "stage", tabIndex: 0, role: "application", "aria-label": HELP },
      this.sheet,
      this.ring,
    );
    for (const kind of ["pointerdown", "pointermove", "pointerup", "pointercancel"])
      this.stage.addEventListener(kind, (event) => this[kind](event));
    this.stage.addEventListener("pointerleave", () => (this.ring.hidden = true));
    this.stage.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    dialog.replaceChildren(this.#tools(), this.stage);
    this.view = new View(image, this, () => this.#ring());
  }

  #tools() {
    const tool = (text, kind) => button(text, () => this.#choose(kind), { data: { kind } });
    const max = Math.round(Math.max(this.image.width, this.image.height) / 2);
    const oninput = () => this.#sized(Number(this.slider.value));
    this.slider = h("input", { id: "brush-size", type: "range", min: 1, max, value: this.size, oninput });
    this.undo = button("Undo", () => this.#undo(), { "aria-keyshortcuts": "Control+Z" });
    this.redo = button("Redo", () => this.#redo(), { "aria-keyshortcuts": "Control+Shift+Z" });
    this.scale = h("output", { className: "scale", "aria-label": "Zoom" });
    return h(
      "div",
      { className: "tools", role: "toolbar", "aria-label": "Painting" },
      h("div", { className: "set" }, (this.brushes = [tool("Brush", "paint"), tool("Eraser", "erase")])),
      h("div", { className: "set" }, h("label", { for: "brush-size" }, "Size"), this.slider),
      h("div", { className: "set" }, this.undo, this.redo),
      h(
        "div",
        { className: "set" },
        button("Invert", () => this.#whole("invert")),
        button("Clear", () => this.#whole("clear")),
      ),
      h(
        "div",
        { className: "set" },
        button("−", () => this.view.zoomed(1 / 1.4), { "aria-label": "Zoom out" }),
        this.scale,
        button("+", () => this.view.zoomed(1.4), { "aria-label": "Zoom in" }),
        button("All of it", () => this.view.fit()),
      ),
      button("Done", () => dialog.close(), { className: "primary" }),
    );
  }

  #render() {
    for (const context of this.contexts) this.mask.render(context);
    this.#choose(this.kind);
  }

  #choose(kind) {
    this.kind = kind;
    for (const one of this.brushes) one.setAttribute("aria-pressed", String(one.dataset.kind === kind));
    this.undo.disabled = !this.mask.undoable;
    this.redo.disabled = !this.mask.redoable;
  }

  #whole(kind) {
    this.mask.add({ kind });
    this.#render();
  }

  #undo() {
    this.mask.undo();
    this.#render();
  }

  #redo() {
    this.mask.redo();
    this.#render();
  }

  #sized(size) {
    this.size = Math.min(Math.max(1, Math.round(size)), Number(this.slider.max));
    this.slider.value = this.size;
    share = this.size / Math.max(this.image.width, this.image.height);
    this.#ring();
  }

  /** Shows how large the brush is, where it is. */
  #ring() {
    const side = this.size * this.view.zoom;
    const [left, top] = this.view.place(this.cursor).map((at) => at - side / 2);
    Object.assign(this.ring.style, { width: `${side}px`, height: `${side}px` });
    this.ring.style.transform = `translate(${left}px, ${top}px)`;
  }

  // Pointers

  pointerdown(event) {
    this.stage.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, this.view.at(event));
    if (this.pointers.size === 2) this.#drop();
    if (this.pointers.size > 1) return;
    event.preventDefault();
    this.stage.focus();
    if (event.button !== 0 || this.space) return;
    this.#begin(this.view.point(this.view.at(event)));
  }

  pointermove(event) {
    const at = this.view.at(event);
    const before = this.pointers.get(event.pointerId);
    if (before) this.#dragged(event.pointerId, before, at);
    this.cursor = this.view.point(at);
    this.ring.hidden = event.pointerType === "touch" || this.space;
    this.#ring();
    if (!this.stroke) return;
    const events = event.getCoalescedEvents?.() ?? [];
    for (const one of events.length ? events : [event]) this.#go(this.view.point(this.view.at(one)));
  }

  #dragged(id, before, at) {
    const others = [...this.pointers].filter(([other]) => other !== id);
    this.pointers.set(id, at);
    if (others.length) {
      const [, other] = others[0];
      const distance = (a, b) => Math.hypot(a[0] - b[0], a[1] - b[1]);
      this.view.moved((at[0] - before[0]) / 2, (at[1] - before[1]) / 2);
      this.view.zoomed(distance(at, other) / Math.max(distance(before, other), 1), other);
    } else if (!this.stroke) this.view.moved(at[0] - before[0], at[1] - before[1]);
  }

  pointerup(event) {
    this.pointers.delete(event.pointerId);
    this.#end();
  }

  pointercancel(event) {
    this.pointers.delete(event.pointerId);
    this.#drop();
  }

  #wheel(event) {
    event.preventDefault();
    if (event.shiftKey) this.view.moved(-event.deltaY, 0);
    else this.view.zoomed(Math.exp(-event.deltaY / 500), this.view.at(event));
  }

  // Strokes

  #begin(point) {
    this.stroke = { kind: this.kind, size: this.size, points: [] };
    this.#go(point);
  }

  #go(point) {
    const { points } = this.stroke;
    points.push(point.map((value) => Math.round(value * 10) / 10));
    for (const context of this.contexts) this.mask.stroke(context, this.stroke, points.length - 1);
  }

  #end() {
    if (!this.stroke) return;
    this.mask.add(this.stroke);
    this.stroke = null;
    this.#choose(this.kind);
  }

  /** Takes a stroke back that turned out to be the first of two fingers. */
  #drop() {
    this.stroke = null;
    this.#render();
  }

  // Keys

  #held(space) {
    this.space = space;
    this.stage.classList.toggle("moving", space);
  }

  #key(event) {
    const control = event.ctrlKey || event.metaKey;
    const key = event.key.toLowerCase();
    const act = {
      "[": () => this.#sized(this.size * 0.85 - 0.5),
      "]": () => this.#sized(this.size * 1.15 + 0.5),
      b: () => this.#choose("paint"),
      e: () => this.#choose("erase"),
      "+": () => this.view.zoomed(1.4),
      "=": () => this.view.zoomed(1.4),
      "-": () => this.view.zoomed(1 / 1.4),
      0: () => this.view.fit(),
    }[key];
    if (control && key === "z") event.shiftKey ? this.#redo() : this.#undo();
    else if (control && key === "y") this.#redo();
    else if (!control && act) act();
    else if (event.target !== this.stage || !this.#onStage(event)) return;
    event.preventDefault();
  }

  #onStage(event) {
    if (event.key === " ") return this.#held(true), true;
    const step = Math.max(1, Math.round(this.size / 4));
    const ways = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] };
    const [dx, dy] = ways[event.key] ?? [];
    if (event.key !== "Enter" && dx === undefined) return false;
    const from = this.cursor;
    const clamp = (value, most) => Math.min(Math.max(value, 0), most);
    if (dx !== undefined) this.cursor = [clamp(from[0] + dx, this.image.width), clamp(from[1] + dy, this.image.height)];
    this.ring.hidden = false;
    this.#ring();
    if (event.key === "Enter" || event.shiftKey) {
      this.#begin(from);
      this.#go(this.cursor);
      this.#end();
      say(this.kind === "paint" ? "Painted." : "Erased.");
    }
    return true;
  }
}

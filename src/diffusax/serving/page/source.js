/** The picture that a drawing begins with, and the mask painted on it. */

import { paint } from "./brush.js";
import { $, button, h, notice } from "./dom.js";
import { Mask } from "./mask.js";
import { bounded, canvasOf, cover, fitted, toBlob } from "./pictures.js";
import { picker } from "./picker.js";

/** Says "change" when there is another picture or mask, and "picture" when the user brought a picture. */
export class Source extends EventTarget {
  picture = null;
  mask = null;
  #image = null;

  constructor() {
    super();
    this.root = $("#source");
    this.#show();
  }

  /** Takes a picture (or null for none); a mask on one of the same size stays. */
  async set(blob, name = "", strokes = null) {
    if (!blob) [this.picture, this.mask, this.#image] = [null, null, null];
    else {
      const [kept, image] = await bounded(blob);
      const same = this.mask?.width === image.width && this.mask?.height === image.height;
      this.#image = image;
      this.picture = { blob: kept, name, width: image.width, height: image.height };
      this.mask = same && !strokes ? this.mask : new Mask(image.width, image.height, strokes ?? []);
    }
    this.#changed();
    if (blob && !strokes) this.dispatchEvent(new Event("picture"));
  }

  /** Takes back what `draft` gave. */
  restore({ blob, name, strokes }) {
    return this.set(blob, name, strokes);
  }

  #changed() {
    this.painted = Boolean(this.mask?.canvas());
    this.#show();
    this.dispatchEvent(new Event("change"));
  }

  async paint() {
    await paint(this.#image, this.mask);
    this.#changed();
  }

  /** The pictures of a drawing of this size: cut to its shape; whole where the mask is zoomed in on. */
  async drawing(width, height, { masks, whole }) {
    if (!this.picture) return {};
    const size = whole ? [this.#image.width, this.#image.height] : [width, height];
    const image = await toBlob(fitted(this.#image, ...size));
    const mask = masks && this.mask.canvas();
    return mask ? { image, mask_image: await toBlob(fitted(mask, ...size, "#000")) } : { image };
  }

  /** What the browser keeps of it for the next visit. */
  get draft() {
    return this.picture && { ...this.picture, strokes: this.mask.strokes };
  }

  /** Says whether a drawing of this size cuts a visible part of the picture off. */
  cuts(width, height) {
    if (!this.picture) return false;
    const [, , w, h] = cover(this.picture.width, this.picture.height, width, height);
    return w * h < 0.97 * this.picture.width * this.picture.height;
  }

  #show() {
    if (!this.picture) {
      const place = picker("Choose a picture, or drop or paste one here", (blob, name) => this.set(blob, name));
      this.root.replaceChildren(place);
      return;
    }
    const { name, width, height } = this.picture;
    const scale = 480 / Math.max(width, height);
    const canvas = canvasOf(Math.round(width * scale), Math.round(height * scale));
    canvas.className = "source";
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `The picture to begin with${this.painted ? ", with its mask" : ""}`);
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = scale < 2;
    context.drawImage(this.#image, 0, 0, canvas.width, canvas.height);
    if (this.painted) context.drawImage(hatched(this.mask, canvas.width, canvas.height), 0, 0);
    this.root.replaceChildren(
      canvas,
      h("p", { className: "hint" }, `${name ? `${name}, ` : ""}${width} × ${height}`),
      h(
        "p",
        { className: "actions" },
        button(this.painted ? "Edit the mask" : "Paint what to draw anew", () => this.paint(), { id: "paint" }),
        this.painted && button("No mask", () => this.#unpaint(), { className: "quiet" }),
        button("No picture", () => this.#remove(), { className: "quiet", id: "no-picture" }),
      ),
    );
  }

  #unpaint() {
    this.mask = new Mask(this.picture.width, this.picture.height);
    this.#changed();
    $("#paint")?.focus();
  }

  #remove() {
    const { draft } = this;
    this.set(null);
    $("input", this.root).focus();
    notice("The picture is taken away.", { actions: { Undo: () => this.restore(draft) } });
  }
}

/** Returns a canvas of this size with the mask dark and striped, so that it shows on every colour. */
function hatched(mask, width, height) {
  const painted = canvasOf(mask.width, mask.height);
  mask.render(painted.getContext("2d"));
  const canvas = canvasOf(width, height);
  const context = canvas.getContext("2d");
  context.drawImage(painted, 0, 0, width, height);
  context.globalCompositeOperation = "source-in";
  context.fillStyle = "rgb(0 0 0 / 50%)";
  context.fillRect(0, 0, width, height);
  context.globalCompositeOperation = "source-atop";
  Object.assign(context, { strokeStyle: "rgb(255 255 255 / 85%)", lineWidth: 4 });
  for (let x = -height; x < width; x += 16) {
    context.beginPath();
    context.moveTo(x, height);
    context.lineTo(x + height, 0);
    context.stroke();
  }
  return canvas;
}

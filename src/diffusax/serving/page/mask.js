/** A mask as the list of strokes that painted it, in pixels of the picture; what is painted is drawn anew. */

import { canvasOf } from "./pictures.js";

export class Mask {
  #undone = [];

  /** A stroke: {kind: "paint" | "erase", size, points: [[x, y], ...]}, or {kind: "clear" | "invert"}. */
  constructor(width, height, strokes = []) {
    Object.assign(this, { width, height, strokes: [...strokes] });
  }

  add(stroke) {
    this.strokes.push(stroke);
    this.#undone = [];
  }

  undo() {
    if (this.strokes.length) this.#undone.push(this.strokes.pop());
  }

  redo() {
    if (this.#undone.length) this.strokes.push(this.#undone.pop());
  }

  get undoable() {
    return this.strokes.length > 0;
  }

  get redoable() {
    return this.#undone.length > 0;
  }

  /** Paints the mask in white on a context of its size, transparent elsewhere. */
  render(context) {
    context.clearRect(0, 0, this.width, this.height);
    for (const stroke of this.strokes) this.stroke(context, stroke);
  }

  /** Paints one stroke, or its points from `first` on. */
  stroke(context, { kind, size, points }, first = 0) {
    context.save();
    context.fillStyle = context.strokeStyle = "#fff";
    if (kind === "clear") context.clearRect(0, 0, this.width, this.height);
    else if (kind === "invert") {
      context.globalCompositeOperation = "source-out";
      context.fillRect(0, 0, this.width, this.height);
    } else {
      if (kind === "erase") context.globalCompositeOperation = "destination-out";
      Object.assign(context, { lineWidth: size, lineCap: "round", lineJoin: "round" });
      const [start, ...rest] = points.slice(Math.max(first - 1, 0));
      // A line to where it began is no line to a canvas, so that a dab is a disc.
      context.beginPath();
      context.arc(...start, size / 2, 0, 2 * Math.PI);
      context.fill();
      context.beginPath();
      context.moveTo(...start);
      for (const point of rest) context.lineTo(...point);
      context.stroke();
    }
    context.restore();
  }

  /** Returns a canvas with white where the picture is drawn anew, black elsewhere; or null if nothing is painted. */
  canvas() {
    const painted = canvasOf(this.width, this.height);
    const context = painted.getContext("2d", { willReadFrequently: true });
    this.render(context);
    const { data } = context.getImageData(0, 0, this.width, this.height);
    let any = false;
    for (let at = 3; at < data.length && !any; at += 4) any = data[at] > 127;
    if (!any) return null;
    context.globalCompositeOperation = "destination-over";
    context.fillStyle = "#000";
    context.fillRect(0, 0, this.width, this.height);
    return painted;
  }
}

/** What of a picture the brush's window shows: a point p of it lies at p * zoom + (x, y) of the stage. */

const LEAST = 0.05;
const MOST = 40;

export class View {
  zoom = 1;
  x = 0;
  y = 0;

  /** `parts` are the window's stage, sheet and scale; `changed()` is called whenever another part is shown. */
  constructor(image, { stage, sheet, scale }, changed) {
    Object.assign(this, { image, stage, sheet, scale, changed });
  }

  /** Shows all of the picture. */
  fit() {
    const { clientWidth: w, clientHeight: h } = this.stage;
    this.zoom = Math.min(w / this.image.width, h / this.image.height) * 0.94;
    this.x = (w - this.image.width * this.zoom) / 2;
    this.y = (h - this.image.height * this.zoom) / 2;
    this.#show();
  }

  /** Shows it larger by a factor, around a place of the stage. */
  zoomed(factor, at = [this.stage.clientWidth / 2, this.stage.clientHeight / 2]) {
    const zoom = Math.min(Math.max(this.zoom * factor, LEAST), MOST);
    this.x = at[0] - ((at[0] - this.x) * zoom) / this.zoom;
    this.y = at[1] - ((at[1] - this.y) * zoom) / this.zoom;
    this.zoom = zoom;
    this.#show();
  }

  moved(dx, dy) {
    this.x += dx;
    this.y += dy;
    this.#show();
  }

  /** The place of an event on the stage. */
  at(event) {
    const box = this.stage.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  /** The point of the picture at a place of the stage. */
  point([x, y]) {
    return [(x - this.x) / this.zoom, (y - this.y) / this.zoom];
  }

  /** The place of the stage at which a point of the picture lies. */
  place([x, y]) {
    return [x * this.zoom + this.x, y * this.zoom + this.y];
  }

  #show() {
    this.sheet.style.transform = `translate(${this.x}px, ${this.y}px) scale(${this.zoom})`;
    this.sheet.style.setProperty("--stripe", `${4 / this.zoom}px`);
    this.sheet.classList.toggle("pixels", this.zoom > 3);
    this.scale.textContent = `${Math.round(this.zoom * 100)} %`;
    this.changed();
  }
}

/** The preview of a video while it is drawn: some of its frames, one after the other. */

import { canvasOf } from "./pictures.js";

const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Reel {
  #frames = [];
  #given = null;
  #timer = null;
  #at = -1;

  /** A video of `num_frames` at `fps`. */
  constructor({ num_frames: count, fps }) {
    this.element = canvasOf(1, 1);
    this.element.hidden = true;
    this.element.setAttribute("aria-hidden", "true");
    this.milliseconds = (1000 * (count ?? 1)) / (fps || 1);
  }

  /** Shows frames, data URIs, from now on; the clip goes on where it is. Who wants no motion has the still preview. */
  async show(given) {
    if (!given?.length || given === this.#given || still.matches) return;
    this.#given = given;
    const frames = await Promise.all(given.map(decoded)).catch(() => []);
    // A newer preview came meanwhile.
    if (!frames.length || given !== this.#given) return;
    this.#frames = frames;
    Object.assign(this.element, { width: frames[0].width, height: frames[0].height, hidden: false });
    this.#at = -1;
    this.#turn();
    this.#timer ??= setInterval(() => this.#turn(), 50);
  }

  #turn() {
    if (!this.element.isConnected && this.#timer) {
      clearInterval(this.#timer);
      this.#timer = null;
      return;
    }
    const at = Math.floor(((Date.now() % this.milliseconds) / this.milliseconds) * this.#frames.length);
    if (at === this.#at) return;
    this.#at = at;
    this.element.getContext("2d").drawImage(this.#frames[at], 0, 0);
  }
}

/** Returns an image element of a data URI, which can be drawn at once. */
async function decoded(uri) {
  const image = new Image();
  image.src = uri;
  await image.decode();
  return image;
}

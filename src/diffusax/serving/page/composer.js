/** Makes drawings of what the form says, or of a picture's settings, and hands them in. */

import { $, mended, newId, newSeed, notice, say } from "./dom.js";
import { fold } from "./shell.js";
import * as store from "./store.js";

/** How many pictures "Four more" and "Four variations" are. */
const FOUR = 4;
/** The strength of a variation: half of the steps, which keeps the composition and draws the details anew. */
export const VARIED = 0.5;

export class Composer {
  can = null;
  lastSeed = null;

  /** The page's parts: settings, source, slots, references, loras, controls, grid, styles, wildcards, work. */
  constructor(parts) {
    Object.assign(this, parts);
    this.source.addEventListener("picture", () => mended("source"));
  }

  offers(task, model = this.settings.model) {
    return model?.tasks?.includes(task) ?? false;
  }

  /** Whether a model draws a picture anew by a strength; others look at it. */
  redraws(model = this.settings.model) {
    return this.offers("image-to-image", model) && model.strength !== false;
  }

  /** Whether the model takes a video. */
  get takesVideo() {
    return this.offers("video-to-video");
  }

  /** Whether a picture counts beside a video. */
  get together() {
    return (this.settings.model?.images ?? 1) > 1;
  }

  /** The video that counts in what the model draws, or null. */
  get video() {
    return this.takesVideo ? this.slots.clip.file : null;
  }

  /** The picture that counts, or null. */
  get picture() {
    return this.takesPicture && (this.together || !this.video) ? this.source.picture : null;
  }

  /** Whether the model looks at a picture that says nothing of the shape of what it draws, as VACE does. */
  get looks() {
    return this.settings.moves && this.together;
  }

  /** Whether a video is drawn with as many frames as another one has, and as fast. */
  get whole() {
    return Boolean(this.video) && $("#whole").checked;
  }

  get edits() {
    return this.settings.model?.kind === "edit";
  }

  /** Whether the model draws nothing without a picture. */
  get needsPicture() {
    return this.edits || this.settings.model?.kind === "image-to-video";
  }

  /** Whether a picture counts in what the model draws. */
  get takesPicture() {
    return this.edits || ["inpainting", "image-to-image", "image-to-video"].some((task) => this.offers(task));
  }

  /** Hands in what the form says. */
  async draw() {
    if (!this.can) return notice("The server does not answer yet.", { error: true, about: "server" });
    if (!this.settings.check() || !this.#hasPicture()) return;
    const { larger_on, larger_scale, larger_strength, num_images: count, ...values } = this.settings.read();
    this.lastSeed = values.seed ?? newSeed();
    const { multiple = 8 } = this.settings.model;
    const larger = { scale: larger_scale, strength: larger_strength, multiple };
    const then = larger_on && this.redraws() ? larger : null;
    const handed = await this.#hand(async () => {
      const drawing = await this.#compose({ ...values, seed: this.lastSeed });
      if (!this.grid.on) return this.#set(drawing, count, then);
      const made = this.grid.drawings(drawing, then);
      await store.put("grids", made.grid);
      return made.cells.map((cell) => this.#resolved(cell));
    });
    if (handed) await this.work.mend();
  }

  /** Draws a picture's settings again with four other seeds. */
  more({ settings }) {
    return this.#hand(() => this.#set({ ...again(settings), seed: newSeed() }, FOUR));
  }

  /** Draws four pictures near one: from it, with half of the steps and other seeds. */
  variations({ settings, blob }) {
    const drawing = { ...again(settings), image: blob, strength: VARIED, seed: newSeed() };
    return this.#hand(() => this.#set(drawing, FOUR));
  }

  /** Says whether a picture's settings are all that it was drawn from. */
  repeats({ began, settings: { strength, image_guidance_scale: scale, controls } }) {
    return !began && (strength ?? null) === null && (scale ?? null) === null && !controls?.length;
  }

  /** Says whether its model draws from pictures. */
  varies({ settings }) {
    const model = this.settings.models.find(({ name }) => name === settings.model);
    return model?.kind !== "edit" && this.redraws(model);
  }

  #hasPicture() {
    const { title, model } = this.settings;
    const ask = (place, does) => {
      fold(false);
      $("#group-source").open = true;
      $(`${place} input`).focus();
      notice(`${title} ${does} first.`, { error: true, about: "source" });
      return false;
    };
    if (this.needsPicture && !this.source.picture)
      return ask("#source", this.edits ? "changes pictures; choose one" : "begins with a picture; choose one");
    if (model.needs_last_image && !this.slots.last.file) return ask("#last", "ends with a picture, too; choose it");
    return true;
  }

  async #hand(make) {
    try {
      const made = await make();
      await this.work.add(made);
      mended("draw");
      say(made.length > 1 ? `${made.length} pictures are handed in.` : "Handed in.");
      navigator.storage?.persist?.();
      return true;
    } catch (error) {
      notice(error.message, { error: true, about: "draw" });
      return false;
    }
  }

  /** One drawing for each picture, so that each has its progress and can be cancelled by itself. */
  #set(drawing, count, then = null) {
    const set = newId();
    const one = (at) => ({ ...drawing, seed: drawing.seed + at, num_images: 1 });
    return Array.from({ length: count }, (_, at) => this.#resolved({ drawing: one(at), then, grid: null, set }));
  }

  /** Puts styles and wildcards into a drawing's prompts, and keeps what was written. */
  #resolved({ drawing, ...rest }) {
    const styled = this.styles.applied(drawing);
    const { chosen, ...prompts } = this.wildcards.applied(styled, drawing.seed);
    const { prompt, negative_prompt } = drawing;
    const same = prompts.prompt === prompt && prompts.negative_prompt === negative_prompt;
    const written = same ? null : { prompt, negative_prompt, styles: styled.names, wildcards: chosen };
    return { ...rest, drawing: { ...drawing, ...prompts }, written };
  }

  /** Returns what POST /jobs takes, with blobs for pictures. */
  async #compose({ strength, mask_blur, padding_mask_crop, image_guidance_scale, ...values }) {
    const { width, height } = values;
    const masks = this.offers("inpainting");
    const whole = this.looks || (masks && padding_mask_crop !== null);
    const pictures = this.picture ? await this.source.drawing(width, height, { masks, whole }) : {};
    const drawing = { ...values, ...pictures };
    const more = pictures.image && !pictures.mask_image ? this.references.drawing() : [];
    if (more.length) drawing.more_images = more;
    if (Object.keys(this.loras.weights).length) drawing.adapters = { ...this.loras.weights };
    if (this.edits) drawing.image_guidance_scale = image_guidance_scale;
    else if (drawing.mask_image || (drawing.image && this.redraws())) drawing.strength = strength;
    if (drawing.mask_image) Object.assign(drawing, { mask_blur, padding_mask_crop });
    Object.assign(drawing, this.#moving(drawing, strength));
    const steering = this.edits || this.settings.moves ? [] : await this.controls.drawing(width, height);
    if (steering.length) drawing.controls = steering;
    return drawing;
  }

  /** Returns what only a drawing of a video has: a video, its mask, a last picture. */
  #moving({ image }, strength) {
    const { video, settings, slots } = this;
    const { model } = settings;
    if (image && model.last_image && slots.last.file) return { last_image: slots.last.file.blob };
    if (!video) return {};
    return {
      video: video.blob,
      ...(model.strength !== false && { strength }),
      ...(model.mask_video && slots.mask.file && { mask_video: slots.mask.file.blob }),
      ...(this.whole && { num_frames: null, fps: null }),
      ...(!this.together && { guidance_scale_2: null }),
    };
  }
}

/** The settings of a picture as a drawing without the pictures that it began with. */
function again({ controls, strength, strength_rule, mask_blur, padding_mask_crop, image_guidance_scale, ...rest }) {
  return rest;
}

/** What can be done with a picture in the form: its settings, its seed, beginning with it. */

import { $, notice, say } from "./dom.js";
import { isClip, isVideo } from "./pictures.js";
import { inWords } from "./restore.js";
import { fold } from "./shell.js";

export class Uses {
  /** The page's parts, and `composer`. */
  constructor(parts) {
    Object.assign(this, parts);
  }

  /** Writes an image's settings into the form; returns in words what of them it has no place for. */
  write({ settings: written, left_out = [] }) {
    const { settings, loras, source, slots, controls, grid, styles } = this;
    const { left, missing } = settings.restore(written);
    // The prompt has them in it already.
    const off = styles.clear();
    const tags = [...(written.prompt ?? "").matchAll(/<lora:([^:<>]+)/g)].map(([, name]) => name);
    const unknown = [...loras.write(written.adapters ?? {}), ...tags.filter((name) => !loras.names.includes(name))];
    if (written.eta) left.push(`Eta DDIM: ${written.eta}`);
    if (Number.isFinite(written.variation_seed)) left.push(`Variation seed: ${written.variation_seed}`);
    if ((written.strength_rule ?? "diffusers") !== "diffusers") left.push(`Strength rule: ${written.strength_rule}`);
    left.push(...unknown.map((name) => `LoRA: ${name}`), ...left_out);
    const kept = [];
    if (source.picture) kept.push("the picture to begin with");
    if (slots.clip.file) kept.push("the video to begin with");
    if (controls.entries.length) kept.push("the ControlNets");
    if (grid.on) kept.push("the grid");
    say("The settings are taken over.");
    return { left: [...new Set(left)], missing, kept, off };
  }

  /** Takes over the settings of a picture in the gallery. */
  settingsOf({ began: withPicture, poster, settings: written }) {
    const left_out = (written.controls ?? []).map(({ model }) => `ControlNet: ${model}`);
    const began = withPicture || (written.strength !== null && written.strength !== undefined);
    if (began || written.image_guidance_scale) left_out.push(poster ? "what it began with" : "the image that it began with");
    const told = inWords(this.write({ settings: written, left_out }), false);
    if (told) notice(`The settings are taken over${told}`, { seconds: 20 });
    $("#prompt").focus();
  }

  /** Takes over what was written, before styles and wildcards were put in. */
  writtenOf({ settings, written }) {
    this.settingsOf({ settings });
    this.settings.write({ prompt: written.prompt, negative_prompt: written.negative_prompt });
    this.styles.choose(written.styles);
  }

  /** Takes over what failed to be mended: it goes when the next drawing is handed in. */
  mend({ id, drawing, written }) {
    this.settings.write({ ...drawing, ...written });
    if (written) this.styles.choose(written.styles);
    this.loras.write(drawing.adapters ?? {});
    this.work.mending = id;
    $("#prompt").focus();
  }

  seedOf({ settings: { seed } }) {
    this.settings.write({ seed });
    notice(`The next picture has the seed ${seed}.`);
  }

  /** Whether a drawing can begin with a file. */
  begins(file) {
    return file.type.startsWith("image/") || (isClip(file) && this.composer.takesVideo);
  }

  async begin(picture) {
    const blob = picture.blob ?? picture;
    const moves = this.composer.takesVideo && (isClip(blob) || isVideo(picture));
    try {
      fold(false);
      await (moves ? this.slots.clip : this.source).set(blob, picture.name ?? "");
      $("#group-source").scrollIntoView({ block: "nearest" });
      say(`The next drawing begins with this ${moves ? "video" : "picture"}.`);
    } catch (error) {
      notice(error.message, { error: true, about: "source" });
    }
  }

  async inpaint(picture) {
    await this.begin(picture);
    await this.source.paint();
    // What is drawn there is mostly something else.
    $("#prompt").focus();
    $("#prompt").select();
  }

  control({ blob }) {
    fold(false);
    this.controls.add(blob);
  }

  /** The names of what is possible now with a picture. */
  possible(picture) {
    const { composer, settings } = this;
    const { can, edits } = composer;
    const found = ["settings", "seed"];
    if (picture.written) found.push("written");
    if (composer.repeats(picture)) found.push("more");
    if (isVideo(picture)) return composer.takesVideo ? [...found, "source"] : found;
    if (composer.varies(picture)) found.push("variations");
    if (edits || composer.offers("image-to-image") || composer.offers("image-to-video")) found.push("source");
    if (composer.offers("inpainting")) found.push("inpaint");
    if (can?.controlnets?.length && !edits && !settings.moves) found.push("control");
    if (can?.upscales) found.push("enlarge");
    return found;
  }
}

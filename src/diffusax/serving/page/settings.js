/** The form: its numbers and choices follow the chosen model, are read as a drawing and written from one. */

import { $, h, options } from "./dom.js";
import { sizeLike } from "./pictures.js";
import { fold } from "./shell.js";

const form = $("#settings");
const field = (name) => form.elements.namedItem(name);

const SIZES = ["width", "height"];
/** What only models of videos have. */
const LENGTH = ["num_frames", "fps"];
const SCALES = ["guidance_scale", "image_guidance_scale", "guidance_rescale"];
const NUMBERS = [...SIZES, "num_inference_steps", ...SCALES, ...LENGTH];
const MORE = ["seed", "num_images", "guidance_scale_2", "strength", "mask_blur", "padding_mask_crop", "clip_skip"];
const LARGER = ["larger_scale", "larger_strength"];
const TEXTS = ["prompt", "negative_prompt", "model", "sampler"];
const SWITCHES = ["prompt_weighting", "long_prompt"];
/** What a model does not set. */
const PLAIN = {
  ...{ guidance_rescale: 0, guidance_scale_2: "", seed: "", num_images: 1, clip_skip: "" },
  ...{ strength: 0.7, mask_blur: 4, padding_mask_crop: "" },
  ...{ larger_scale: 2, larger_strength: 0.5, larger_on: false },
  ...{ prompt_weighting: true, long_prompt: true },
};
/** What an image cannot be generated again without, and how it is called. */
const ASKED = {
  ...{ seed: "seed", num_inference_steps: "steps", guidance_scale: "guidance", sampler: "sampler" },
  ...{ width: "width", height: "height" },
};
const SHAPES = ["1:1", "3:2", "2:3", "4:3", "3:4", "16:9", "9:16"];

/** Says "change" whenever a setting changed. */
export class Settings extends EventTarget {
  models = [];
  #titles = {};

  constructor() {
    super();
    for (const slide of document.querySelectorAll(".slide")) addSlider($("input", slide));
    for (const [name, value] of Object.entries(PLAIN)) set(name, value);
    $("#shape").append(...options([{ name: "", title: "free" }, ...SHAPES]));
    $("#shape").addEventListener("change", () => this.#shape());
    $("#swap").addEventListener("click", () => this.#swap());
    $("#seed-random").addEventListener("click", () => this.write({ seed: "" }));
    $("#size-own").addEventListener("click", () => {
      this.fit(this.read());
      $("#width").focus();
    });
    $("#reset").addEventListener("click", () => this.write({ ...PLAIN, ...this.#defaults(this.model) }));
    field("model").addEventListener("change", () => this.#chosen());
    form.addEventListener("input", () => this.#changed());
    this.#replaceNumbers();
  }

  /** Lets a click into a number mark all of it, as the key Tab does, so that another one can be typed. */
  #replaceNumbers() {
    let fresh = null;
    form.addEventListener("focusin", ({ target }) => (fresh = target.type === "number" ? target : null));
    form.addEventListener("click", ({ target }) => {
      if (target === fresh) target.select();
      fresh = null;
    });
  }

  /** Takes in what the server can do. */
  capabilities({ models, limits = {}, sampler_titles: titles = {} }) {
    const before = this.model;
    this.#titles = titles;
    this.models = models;
    const chosen = field("model").value || models[0]?.name;
    const listed = models.map(({ name, title, fps }) => ({ name, title: `${title || name}${fps ? " · video" : ""}` }));
    field("model").replaceChildren(...options(listed));
    set("model", models.some((one) => one.name === chosen) ? chosen : models[0]?.name);
    limit("num_inference_steps", limits.steps);
    limit("num_images", limits.images);
    limit("num_frames", limits.frames);
    for (const name of ["prompt", "negative_prompt"]) if (limits.prompt) field(name).maxLength = limits.prompt;
    this.#chosen(before);
  }

  get model() {
    return this.models.find((one) => one.name === field("model").value);
  }

  /** Whether the model generates videos. */
  get moves() {
    return Boolean(this.model?.fps);
  }

  /** What people call the model. */
  get title() {
    return this.model?.title || this.model?.name;
  }

  /** What A1111's users call a sampler. */
  samplerTitle(name) {
    return this.#titles[name] ?? name;
  }

  /** The model's samplers with their titles, the most usual ones first. */
  get samplers() {
    const order = Object.keys(this.#titles);
    const place = (name) => (order.includes(name) ? order.indexOf(name) : order.length);
    const names = [...(this.model?.samplers ?? [])].sort((a, b) => place(a) - place(b));
    return names.map((name) => ({ name, title: this.samplerTitle(name) }));
  }

  #defaults(model) {
    if (!model) return {};
    const { width, height, steps, guidance_scale, image_guidance_scale, num_frames, fps } = model;
    const guidance = { guidance_scale, image_guidance_scale: image_guidance_scale ?? 1.5 };
    const length = { num_frames: num_frames ?? null, fps: fps ?? null };
    return { width, height, num_inference_steps: steps, ...guidance, ...length, sampler: "" };
  }

  /** Another model: what was as the old model has it becomes as the new one has it. */
  #chosen(before = this.before) {
    const { model } = this;
    if (!model) return;
    const old = this.#defaults(before);
    const next = this.#defaults(model);
    const sampler = field("sampler").value;
    field("sampler").replaceChildren(
      h("option", { value: "" }, model.sampler ? `${this.samplerTitle(model.sampler)} (its own)` : "the model's own"),
      ...options(this.samplers),
    );
    set("sampler", (model.samplers ?? []).includes(sampler) ? sampler : "");
    for (const name of NUMBERS) {
      const { value } = field(name);
      if (name in next && (value === "" || Number(value) === old[name])) set(name, next[name]);
    }
    for (const name of SIZES) field(name).step = field(name).min = model.multiple ?? 8;
    // Its least value is 1, so that the others are one more than multiples.
    const slider = $(".twin", field("num_frames").parentElement);
    field("num_frames").step = slider.step = model.frames_multiple ?? 1;
    for (const name of LENGTH) $(".twin", field(name).parentElement).follow();
    this.before = model;
    this.#changed();
  }

  #swap() {
    const { width, height } = this.read();
    this.write({ width: height, height: width });
  }

  #shape() {
    const [width, height] = $("#shape").value.split(":").map(Number);
    if (height) this.fit({ width, height });
  }

  /** Gives the drawing the shape of `width` to `height`, in about as many pixels as the model draws by itself. */
  fit({ width, height }) {
    if (!this.model) return;
    const [w, h] = sizeLike(width, height, this.model.width * this.model.height, this.model.multiple ?? 8);
    this.write({ width: w, height: h });
  }

  /** Returns the form's values: numbers, or null where a field is empty. */
  read() {
    const values = {};
    for (const name of TEXTS) values[name] = field(name).value;
    for (const name of [...NUMBERS, ...MORE, ...LARGER]) {
      const { value } = field(name);
      values[name] = value === "" ? null : Number(value);
    }
    values.sampler ||= null;
    if (!this.moves) for (const name of LENGTH) values[name] = null;
    if (!this.model?.guidance_scale_2) values.guidance_scale_2 = null;
    for (const name of [...SWITCHES, "larger_on"]) values[name] = field(name).checked;
    return values;
  }

  /** Writes those of the form's values that are there; a model first, since others follow from it. */
  write(values) {
    if (values.model && this.models.some((one) => one.name === values.model)) {
      set("model", values.model);
      this.#chosen();
    }
    const own = { ...PLAIN, ...this.#defaults(this.model) };
    for (const name of [...TEXTS, ...NUMBERS, ...MORE, ...LARGER, ...SWITCHES, "larger_on"])
      if (name in values && name !== "model") set(name, values[name] ?? own[name]);
    this.#changed();
  }

  /**
   * Writes an image's settings: what they lack becomes what the model has by itself, so that nothing of an earlier
   * drawing stays. Returns what could not be written (`left`), and what of an image they lack (`missing`), in words.
   */
  restore(given) {
    const values = Object.fromEntries(Object.entries(given).filter(([, value]) => value !== null && value !== undefined));
    const left = [];
    const model = values.model && this.#named(values.model);
    if (model) this.write({ model: model.name });
    else if (values.model) left.push(`Model: ${values.model}`);
    const { samplers = [], sampler } = this.model ?? {};
    if (values.sampler && !samplers.includes(values.sampler)) {
      if (values.sampler !== sampler) left.push(`Sampler: ${values.sampler}`);
      delete values.sampler;
    }
    if (values.num_frames && !this.moves) left.push(`Frames: ${values.num_frames}`);
    const { guidance_scale_2: late } = values;
    if (late !== undefined && !this.model?.guidance_scale_2) left.push(`CFG scale 2: ${late}`);
    const missing = Object.entries(ASKED).filter(([name]) => !(name in given) || given[name] === null);
    const own = { ...PLAIN, ...this.#defaults(this.model), prompt: "", negative_prompt: "" };
    this.write({ ...own, ...values, model: null });
    return { left, missing: missing.map(([, title]) => title) };
  }

  /** Returns the model of a name, a title or a file's name. */
  #named(name) {
    const plain = (text) => (text ?? "").toLowerCase().replace(/\.(safetensors|ckpt)$/, "");
    const titles = ({ name, title, path }) => [name, title, path?.split("/").at(-1)].map(plain);
    const exact = this.models.find((one) => one.name === name);
    return exact ?? this.models.find((one) => titles(one).includes(plain(name)));
  }

  /** Shows the first field whose value is not possible; returns whether all are. */
  check() {
    const wrong = [...form.elements].find((one) => one.willValidate && !fine(one) && !one.closest("[hidden]"));
    if (!wrong) return true;
    fold(false);
    const group = wrong.closest("details");
    if (group) group.open = true;
    wrong.reportValidity();
    return false;
  }

  /** Says where the size is so far from the model's own that its images are poor. */
  #hint() {
    const { width, height, pixels } = this.model ?? {};
    const area = Number(field("width").value) * Number(field("height").value);
    const poor = pixels && area > 0 && (area < pixels[0] || area > pixels[1]);
    $("#size-hint").textContent = poor ? `The model was trained at ${width} × ${height}; this size may look poor.` : "";
    $("#size-own").hidden = !poor;
  }

  #changed() {
    this.#hint();
    for (const range of form.querySelectorAll("input[type=range].twin")) range.follow();
    this.dispatchEvent(new Event("change"));
  }
}

function set(name, value) {
  const element = field(name);
  if (!element) return;
  if (element.type === "checkbox") element.checked = Boolean(value);
  else element.value = value ?? "";
  // A select has no value that is none of its options.
  if (element.tagName === "SELECT" && element.selectedIndex < 0) element.selectedIndex = 0;
}

/** The steps of fractions are for the arrows; other values between are as good. */
function fine({ validity, step }) {
  const between = validity.stepMismatch && !validity.rangeOverflow && !validity.rangeUnderflow;
  return validity.valid || (between && Number(step) < 1);
}

function limit(name, most) {
  if (!most) return;
  field(name).max = most;
  const twin = $(".twin", field(name).parentElement);
  if (twin) twin.max = Math.min(most, name === "num_inference_steps" ? 100 : most);
}

/** Puts a slider beside a number: the mouse's way to it, while keyboards and screen readers have the number. */
export function addSlider(number) {
  const { min, max, step } = number;
  const range = h("input", { type: "range", className: "twin", tabIndex: -1, "aria-hidden": "true", min, max, step });
  range.follow = () => {
    range.value = number.value === "" ? range.min : number.value;
    const part = (range.value - range.min) / (range.max - range.min || 1);
    range.style.setProperty("--part", `${100 * part}%`);
  };
  range.addEventListener("input", () => {
    number.value = range.value;
    number.dispatchEvent(new Event("input", { bubbles: true }));
  });
  number.addEventListener("input", range.follow);
  number.after(range);
  range.follow();
  return range;
}

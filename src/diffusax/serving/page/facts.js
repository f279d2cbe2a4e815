/** What is told of a picture: its settings, and what was written. */

import { duration, h } from "./dom.js";

const NAMES = {
  model: "Model",
  sampler: "Sampler",
  num_inference_steps: "Steps",
  guidance_scale: "Guidance (CFG)",
  guidance_scale_2: "Guidance (CFG) of the late steps",
  image_guidance_scale: "Guidance by the picture",
  guidance_rescale: "Rescale",
  num_frames: "Frames",
  fps: "Frames per second",
  seed: "Seed",
  strength: "Strength",
  clip_skip: "CLIP skip",
};

/** Returns a list of a picture's settings; `sampler(name)` is what people call a sampler. */
export function facts({ settings, width, height, seconds, created, enlarged, written }, sampler) {
  const found = [["Size", `${width} × ${height}`]];
  for (const [field, name] of Object.entries(NAMES))
    if (settings[field] || field === "seed")
      found.push([name, field === "sampler" ? sampler(settings[field]) : `${settings[field]}`]);
  for (const [name, weight] of Object.entries(settings.adapters ?? {})) found.push(["LoRA", `${name} ${weight}`]);
  if (enlarged) found.push(["Enlarged", `by ${enlarged}`]);
  if (written) found.push(["Written", written.prompt || "(nothing)"]);
  if (written?.styles.length) found.push(["Styles", written.styles.join(", ")]);
  for (const [name, line] of written?.wildcards ?? []) found.push([`__${name}__`, line]);
  if (seconds) found.push(["Took", duration(seconds)]);
  found.push(["Drawn", new Date(created).toLocaleString()]);
  return h("dl", { className: "facts" }, found.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

/** Reads the text "parameters" of A1111's pictures as settings of a drawing. */

const NUMBERS = {
  Steps: "num_inference_steps",
  "CFG scale": "guidance_scale",
  "Image CFG scale": "image_guidance_scale",
  "CFG rescale": "guidance_rescale",
  Seed: "seed",
  "Denoising strength": "strength",
  "Mask blur": "mask_blur",
  "Masked area padding": "padding_mask_crop",
};

/**
 * Returns the settings in a text, or null where there are none. `sampler` is one of `samplers`; where the text does
 * not say which of them it means, `unknown` is the name that it has for it.
 */
export function parse(text, samplers = []) {
  const lines = text.replaceAll("\r\n", "\n").trim().split("\n");
  const last = /^Steps: \d/.test(lines.at(-1)) ? pairs(lines.pop()) : null;
  if (!last) return null;
  const split = lines.findIndex((line) => line.startsWith("Negative prompt:"));
  const settings = {
    prompt: lines.slice(0, split < 0 ? undefined : split).join("\n"),
    negative_prompt: split < 0 ? "" : lines.slice(split).join("\n").slice("Negative prompt:".length).trim(),
  };
  for (const [name, field] of Object.entries(NUMBERS))
    if (name in last && Number.isFinite(Number(last[name]))) settings[field] = Number(last[name]);
  const size = /^(\d+)x(\d+)$/.exec(last.Size ?? "");
  if (size) [settings.width, settings.height] = [Number(size[1]), Number(size[2])];
  if (last.Model) settings.model = last.Model;
  if (Number(last["Clip skip"]) > 1) settings.clip_skip = Number(last["Clip skip"]) - 1;
  Object.assign(settings, samplerNamed(last.Sampler, last["Schedule type"], samplers));
  return settings;
}

/** Splits `Steps: 20, Sampler: Euler a, Note: "a, b"` at its commas, outside of quotes. */
function pairs(line) {
  const found = {};
  for (const [, name, value] of line.matchAll(/\s*([^:,]+):\s*("(?:\\.|[^\\"])*"|[^,]*)(?:,|$)/g)) {
    let text = value.trim();
    try {
      if (text.startsWith('"')) text = JSON.parse(text);
    } catch {
      // It stays as it was written.
    }
    found[name.trim()] = text;
  }
  return found;
}

/** The schedule types whose levels are those of evenly spaced timesteps. */
const UNIFORM = ["uniform", "normal", "simple", "ddim"];

/**
 * "DPM++ 2M" with schedule "Karras" is "dpm++2m_karras", "Euler a" is "euler_a". Without a schedule it is for the
 * server to say which of two A1111 means: {sampler, unknown} has the plain one.
 */
function samplerNamed(name, schedule, samplers) {
  if (!name) return {};
  if (samplers.includes(name)) return { sampler: name };
  // A1111's DPM2 is k-diffusion's name for what diffusers calls KDPM2.
  const plain = (text) => text.toLowerCase().replace(/[^a-z0-9+]/g, "").replace(/^dpm2/, "kdpm2");
  const find = (wanted) => samplers.find((one) => plain(one) === wanted);
  const wanted = plain(name.replace(/ karras$/i, ""));
  const [uniform, karras] = [find(wanted), find(`${wanted}karras`)];
  if (/karras/i.test(`${name} ${schedule}`)) return karras ? { sampler: karras } : { unknown: name };
  if (uniform && (!karras || UNIFORM.includes(schedule?.toLowerCase()))) return { sampler: uniform };
  return { sampler: uniform, unknown: name };
}

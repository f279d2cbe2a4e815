/** Reads the text "parameters" of A1111's pictures as settings of a drawing. */

const NUMBERS = {
  Steps: "num_inference_steps",
  "CFG scale": "guidance_scale",
  "Image CFG scale": "image_guidance_scale",
  Seed: "seed",
  "Denoising strength": "strength",
  "Mask blur": "mask_blur",
};

/**
 * Returns the settings in a text, or null where there are none. `sampler` is one of `samplers`; where the
 * text names one that is not among them, `unknown` says its name.
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
  const sampler = samplerNamed(last.Sampler, last["Schedule type"], samplers);
  if (sampler) settings.sampler = sampler;
  else if (last.Sampler) settings.unknown = last.Sampler;
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

/** "DPM++ 2M" with schedule "Karras" is "dpm++2m_karras", "Euler a" is "euler_a". */
function samplerNamed(name, schedule, samplers) {
  if (!name) return undefined;
  // A1111's DPM2 is k-diffusion's name for what diffusers calls KDPM2.
  const plain = (text) => text.toLowerCase().replace(/[^a-z0-9+]/g, "").replace(/^dpm2/, "kdpm2");
  const wanted = plain(name);
  const karras = /karras/i.test(schedule ?? "") ? "karras" : "";
  return samplers.find((one) => plain(one) === wanted + karras) ?? samplers.find((one) => plain(one) === wanted);
}

/** What the two axes of a grid may go through, how their values are written, and what they change. */

/** The most pictures of a grid. */
export const MOST = 100;

/** The settings that an axis may go through, by name. */
export const AXES = {
  prompt: "Prompts",
  words: "Words of the prompt (S/R)",
  model: "Model",
  sampler: "Sampler",
  num_inference_steps: "Steps",
  guidance_scale: "Guidance",
  seed: "Seed",
  lora: "Weight of a LoRA",
  image_guidance_scale: "Guidance by the picture",
  strength: "Strength",
};
/** Axes whose values are chosen from a list. */
export const LISTED = ["model", "sampler"];
const WHOLE = ["num_inference_steps", "seed"];
const split = (text) => text.split(",").map((word) => word.trim());
/** The names that are chosen from a list; models' may have commas in them. */
export const namesIn = ({ axis, text }) => text.split(axis === "model" ? "\n" : /\n|,\s*/);

const NUMBER = "(-?\\d*\\.?\\d+)";
const RANGE = new RegExp(`^\\s*${NUMBER}\\s*-\\s*${NUMBER}\\s*(?:\\(\\+?${NUMBER}\\)|\\[(\\d+)\\])?\\s*$`);

/**
 * Returns the numbers in "10, 20, 30", "1-5", "10-30 (+10)" or "0-1 [5]" (five numbers from 0 to 1), which A1111's
 * grids know, too; raises an Error with one sentence.
 */
export function numbers(text, whole = false) {
  const found = text.split(",").flatMap((part) => {
    const range = RANGE.exec(part);
    if (!range) return part.trim() ? [Number(part)] : [];
    const [from, to] = [Number(range[1]), Number(range[2])];
    const count = range[4] ? Number(range[4]) : Math.floor((to - from) / (Number(range[3]) || 1) + 1e-9) + 1;
    if (!(count > 0 && count <= MOST)) throw new Error(`"${part.trim()}" is no range; write it like 10-30 (+10).`);
    const step = range[4] ? (to - from) / Math.max(count - 1, 1) : Number(range[3]) || 1;
    return Array.from({ length: count }, (_, at) => Number((from + at * step).toPrecision(12)));
  });
  if (!found.length || !found.every(Number.isFinite))
    throw new Error(`"${text}" are no numbers; write them like 10, 20, 30.`);
  return [...new Set(whole ? found.map(Math.round) : found)];
}

/** Returns a cell's drawing: the grid's with one value in the place of a setting. */
export function changed(drawing, { axis, lora, values }, value) {
  if (!axis) return drawing;
  if (axis === "words") return { ...drawing, prompt: drawing.prompt.replaceAll(values[0], value) };
  if (axis === "lora") return { ...drawing, adapters: { ...drawing.adapters, [lora]: value } };
  return { ...drawing, [axis]: value };
}

/** How a value of an axis is called at the grid's edge. */
export function label({ axis, lora, titles }, value) {
  if (["prompt", "words", ...LISTED].includes(axis)) return titles?.[value] ?? value;
  return `${axis === "lora" ? lora : AXES[axis]} ${value}`;
}

/** Returns the values of an axis as they are written; `names` are those of a list. Raises an Error with one sentence. */
export function valuesOf(state, names) {
  const { axis, text } = state;
  if (LISTED.includes(axis)) return namesIn(state).filter((name) => names.includes(name));
  if (axis === "prompt") return text.split("\n").map((line) => line.trim()).filter(Boolean);
  if (axis === "words") return split(text).filter(Boolean);
  return numbers(text, WHOLE.includes(axis));
}

/** Raises an Error with one sentence where an axis means nothing to a drawing. */
export function check({ axis, values }, drawing) {
  if (axis === "strength" && !drawing.image)
    throw new Error("Strength counts only where a drawing begins with a picture; choose one.");
  if (axis === "image_guidance_scale" && !("image_guidance_scale" in drawing))
    throw new Error("Guidance by the picture is for models that edit pictures; choose one.");
  if (axis === "words" && !drawing.prompt.includes(values[0]))
    throw new Error(`The prompt has no "${values[0]}", which the grid's other words replace; write it there.`);
}

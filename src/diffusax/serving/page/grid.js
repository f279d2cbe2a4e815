/** X/Y grids: two settings with several values each, drawn as one set of jobs with the same seed. */

import { $, h, labelled, newId, options } from "./dom.js";

export const MOST = 100;

/** The settings that an axis may go through, by name. */
const AXES = {
  sampler: "Sampler",
  num_inference_steps: "Steps",
  guidance_scale: "Guidance",
  seed: "Seed",
  lora: "Weight of a LoRA",
  image_guidance_scale: "Guidance by the picture",
  strength: "Strength",
};
const words = (text) => text.split(",").map((word) => word.trim());
const WHOLE = ["num_inference_steps", "seed"];

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
function changed(drawing, { axis, lora }, value) {
  if (!axis) return drawing;
  if (axis === "lora") return { ...drawing, adapters: { ...drawing.adapters, [lora]: value } };
  return { ...drawing, [axis]: value };
}

/** How a value of an axis is called at the grid's edge. */
export function label({ axis, lora }, value) {
  if (axis === "sampler") return value;
  return `${axis === "lora" ? lora : AXES[axis]} ${value}`;
}

/** The two axes in the form. Says "change". */
export class Grid extends EventTarget {
  #state = {
    on: false,
    x: { axis: "num_inference_steps", text: "4, 8, 16" },
    y: { axis: "guidance_scale", text: "1, 2, 4" },
  };
  #samplers = [];
  #loras = [];

  constructor() {
    super();
    $("#grid").addEventListener("change", () => this.#set({ on: $("#grid").checked }));
  }

  capabilities({ loras = [] }, model) {
    this.#samplers = model?.samplers ?? [];
    this.#loras = loras.map(({ name }) => name);
    this.#show();
  }

  get on() {
    return this.#state.on;
  }

  get draft() {
    return this.#state;
  }

  write(state) {
    if (state) this.#set(state);
    this.#show();
  }

  #set(change) {
    Object.assign(this.#state, change);
    $("#grid").checked = this.on;
    $("#grid-summary").textContent = this.on ? "on" : "off";
    $("#grid-axes").hidden = !this.on;
    this.dispatchEvent(new Event("change"));
  }

  #show() {
    $("#grid-axes").replaceChildren(this.#axis("x", "Columns"), this.#axis("y", "Rows"));
    this.#set({});
  }

  #axis(side, title) {
    const state = this.#state[side];
    const set = (change) => this.#set({ [side]: Object.assign(state, change) });
    const axes = Object.entries(AXES).filter(([axis]) => axis !== "lora" || this.#loras.length);
    const entries = axes.map(([name, title]) => ({ name, title }));
    const axis = h("select", { id: `grid-${side}` }, ...options([{ name: "", title: "nothing" }, ...entries]));
    axis.value = state.axis ?? "";
    axis.addEventListener("change", () => {
      set({ axis: axis.value, text: "", lora: this.#loras[0] });
      this.#show();
      $(`#grid-${side}`).focus();
    });
    const part = [labelled(title, axis)];
    if (state.axis === "lora") {
      const onchange = () => set({ lora: lora.value });
      const lora = h("select", { id: `grid-${side}-lora`, onchange }, ...options(this.#loras));
      lora.value = state.lora ?? this.#loras[0];
      part.push(labelled("LoRA", lora));
    }
    if (state.axis === "sampler") part.push(this.#samplerList(side, state, set));
    else if (state.axis) {
      const id = `grid-${side}-values`;
      const text = h("input", { id, value: state.text, placeholder: "10, 20 or 10-30 (+10)", spellcheck: false });
      text.addEventListener("input", () => set({ text: text.value }));
      part.push(labelled(`Values of the ${title.toLowerCase()}`, text));
    }
    return h("fieldset", { className: "axis" }, h("legend", { className: "unseen" }, title), ...part);
  }

  #samplerList(side, state, set) {
    const chosen = words(state.text);
    const box = (value) => h("input", { type: "checkbox", value, checked: chosen.includes(value) });
    const boxes = this.#samplers.map(box);
    const read = () => set({ text: boxes.filter((one) => one.checked).map((one) => one.value).join(", ") });
    const label = `Samplers of the ${side === "x" ? "columns" : "rows"}`;
    return h(
      "div",
      { className: "list", role: "group", "aria-label": label, onchange: read },
      ...boxes.map((one) => h("label", { className: "check" }, one, one.value)),
    );
  }

  /** The axes with their values; raises an Error with one sentence. */
  axes() {
    const read = ({ axis, lora, text }, title) => {
      if (!axis) return { axis: "", values: [null] };
      const samplers = () => words(text).filter((name) => this.#samplers.includes(name));
      const values = axis === "sampler" ? samplers() : numbers(text, WHOLE.includes(axis));
      if (!values.length) throw new Error(`The grid's ${title} have no values; choose some.`);
      return { axis, lora, values };
    };
    const [x, y] = [read(this.#state.x, "columns"), read(this.#state.y, "rows")];
    const cells = x.values.length * y.values.length;
    if (cells > MOST) throw new Error(`A grid has at most ${MOST} pictures (got ${cells}); write fewer values.`);
    return { x, y };
  }

  /** How many pictures it has, or 0 where its values cannot be read. */
  get count() {
    try {
      const { x, y } = this.axes();
      return x.values.length * y.values.length;
    } catch {
      return 0;
    }
  }

  /** Returns the grid's record and those of its cells' jobs. */
  drawings(drawing, then) {
    const { x, y } = this.axes();
    const axes = [x.axis, y.axis];
    if (axes.includes("strength") && !drawing.image)
      throw new Error("Strength counts only where a drawing begins with a picture; choose one.");
    if (axes.includes("image_guidance_scale") && !("image_guidance_scale" in drawing))
      throw new Error("Guidance by the picture is for models that edit pictures; choose one.");
    const grid = { id: newId(), created: Date.now(), x, y, prompt: drawing.prompt };
    const cells = y.values.flatMap((row, j) =>
      x.values.map((column, i) => ({
        id: `${grid.id}:${i}:${j}`,
        drawing: { ...changed(changed(drawing, x, column), y, row), num_images: 1 },
        then,
        grid: { id: grid.id },
      })),
    );
    return { grid, cells };
  }
}

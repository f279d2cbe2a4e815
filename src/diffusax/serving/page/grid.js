/** X/Y grids: two settings with several values each, drawn as one set of jobs with the same seed. */

import { AXES, LISTED, MOST, changed, check, namesIn, valuesOf } from "./axes.js";
import { $, h, labelled, newId, options } from "./dom.js";

/** The two axes in the form. Says "change". */
export class Grid extends EventTarget {
  #state = {
    on: false,
    x: { axis: "num_inference_steps", text: "4, 8, 16" },
    y: { axis: "guidance_scale", text: "1, 2, 4" },
  };
  /** The names to choose from by axis, with their titles. */
  #listed = { model: [], sampler: [] };
  #loras = [];

  constructor() {
    super();
    $("#grid").addEventListener("change", () => this.#set({ on: $("#grid").checked }));
  }

  capabilities(can, model) {
    const { models = [], sampler_titles: titles = {} } = can;
    const samplers = Object.keys(titles).filter((name) => model?.samplers?.includes(name));
    const others = (model?.samplers ?? []).filter((name) => !samplers.includes(name));
    const named = (names) => names.map((name) => ({ name, title: titles[name] ?? name }));
    // Those that edit draw from other things than those that do not, and videos are other pictures.
    const kind = (one) => `${one?.kind === "edit"} ${Boolean(one?.fps)}`;
    const alike = models.filter((one) => kind(one) === kind(model));
    this.#listed = { sampler: named([...samplers, ...others]), model: alike };
    this.#loras = (can.loras ?? []).map(({ name }) => name);
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
    if (LISTED.includes(state.axis)) part.push(this.#list(side, state, set));
    else if (state.axis) part.push(this.#values(side, title, state, set));
    return h("fieldset", { className: "axis" }, h("legend", { className: "unseen" }, title), ...part);
  }

  #values(side, title, { axis, text }, set) {
    const shared = { id: `grid-${side}-values`, value: text };
    const hints = { prompt: "one a line", words: "apple, pear, plum: the first is replaced by the others" };
    const placeholder = hints[axis] ?? "10, 20 or 10-30 (+10)";
    const area = axis === "prompt" && h("textarea", { ...shared, placeholder, rows: 3 });
    const field = area || h("input", { ...shared, placeholder, spellcheck: axis === "words" });
    field.addEventListener("input", () => set({ text: field.value }));
    return labelled(`Values of the ${title.toLowerCase()}`, field);
  }

  #list(side, state, set) {
    const chosen = namesIn(state);
    const box = ({ name }) => h("input", { type: "checkbox", value: name, checked: chosen.includes(name) });
    const entries = this.#listed[state.axis];
    const boxes = entries.map(box);
    const read = () => set({ text: boxes.filter((one) => one.checked).map((one) => one.value).join("\n") });
    const label = `${AXES[state.axis]}s of the ${side === "x" ? "columns" : "rows"}`;
    return h(
      "div",
      { className: "list", role: "group", "aria-label": label, onchange: read },
      ...boxes.map((one, at) => h("label", { className: "check" }, one, entries[at].title || entries[at].name)),
    );
  }

  /** The axes with their values; raises an Error with one sentence. */
  axes() {
    const read = (state, title) => {
      const { axis, lora } = state;
      if (!axis) return { axis: "", values: [null] };
      const listed = this.#listed[axis] ?? [];
      const values = valuesOf(state, listed.map(({ name }) => name));
      if (!values.length) throw new Error(`The grid's ${title} have no values; choose some.`);
      const titles = Object.fromEntries(listed.map(({ name, title }) => [name, title || name]));
      return { axis, lora, values, titles };
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
    for (const axis of [x, y]) check(axis, drawing);
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

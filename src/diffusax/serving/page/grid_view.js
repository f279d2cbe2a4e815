/** A grid as a table: the values of its two settings at its edges, pictures and jobs in its cells. */

import { label } from "./axes.js";
import { button, h, notice, short } from "./dom.js";
import { canvasOf, download, open, stillOf, toBlob } from "./pictures.js";
import { Tile } from "./tile.js";

export class GridView {
  #tiles = [];

  constructor(grid, work, actions) {
    Object.assign(this, { grid, work });
    const { x, y } = grid;
    const cells = (row, j) =>
      x.values.map((_, i) => {
        const cell = h("td", { className: "tile" });
        this.#tiles.push({ tile: new Tile(cell, actions), id: `${grid.id}:${i}:${j}` });
        return cell;
      });
    const head = (axis, value, scope) => h("th", { scope }, axis.axis ? short(label(axis, value), 60) : "");
    const name = short(grid.prompt, 40);
    this.save = button("Save as one picture", () => this.#save());
    this.element = h(
      "li",
      { className: "grid" },
      h(
        "div",
        { className: "bar" },
        h("h3", {}, short(grid.prompt) || "Grid"),
        this.save,
        button("Delete", actions.remove, { className: "quiet", "aria-label": `Delete the grid ${name}` }),
      ),
      h(
        "div",
        { className: "scroll", tabIndex: 0, role: "region", "aria-label": `Grid: ${name}` },
        h(
          "table",
          {},
          x.axis ? h("thead", {}, h("tr", {}, h("td"), x.values.map((value) => head(x, value, "col")))) : null,
          h("tbody", {}, y.values.map((value, j) => h("tr", {}, head(y, value, "row"), cells(value, j)))),
        ),
      ),
    );
  }

  show({ pictures }) {
    this.pictures = this.#tiles.map(({ tile, id }) => {
      const picture = pictures.get(`${id}/0`) ?? pictures.get(`${id}+/0`);
      const record = this.work.records.get(id) ?? this.work.records.get(`${id}+`);
      tile.show({ picture, record, status: record && this.work.status.get(record.id) });
      return picture;
    });
    this.save.disabled = !this.pictures.some(Boolean);
  }

  /** Draws the table with its values onto one picture. */
  async #save() {
    const { x, y, prompt } = this.grid;
    const images = await Promise.all(this.pictures.map((picture) => picture && open(stillOf(picture))));
    const [w, h] = ["width", "height"].map((side) => Math.max(...images.map((image) => image?.[side] ?? 0)));
    const size = Math.max(10, Math.round(w / 14));
    const [left, top] = [y.axis ? Math.round(size * 8) : 0, x.axis ? size * 2 : 0];
    const canvas = canvasOf(left + x.values.length * (w + 4), top + y.values.length * (h + 4));
    const context = canvas.getContext("2d");
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    Object.assign(context, { fillStyle: "#222", font: `${size}px system-ui, sans-serif`, textBaseline: "middle" });
    const [column, row] = [(i) => left + i * (w + 4), (j) => top + j * (h + 4)];
    if (y.axis) y.values.forEach((value, j) => context.fillText(label(y, value), 4, row(j) + h / 2, left - 8));
    context.textAlign = "center";
    if (x.axis) x.values.forEach((value, i) => context.fillText(label(x, value), column(i) + w / 2, top / 2, w));
    images.forEach((image, at) => {
      const count = x.values.length;
      if (image) context.drawImage(image, column(at % count), row(Math.floor(at / count)));
    });
    try {
      download(await toBlob(canvas), `grid ${short(prompt, 40)}.png`);
    } catch (error) {
      notice(error.message, { error: true });
    }
  }
}

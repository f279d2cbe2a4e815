/** The list of pictures, newest first: jobs at work, grids, and pictures that the browser keeps. */

import { $, button, duration, h, notice } from "./dom.js";
import { GridView } from "./grid_view.js";
import { forget } from "./pictures.js";
import * as store from "./store.js";
import { Tile } from "./tile.js";

const PAGE = 60;
const newestFirst = (entries) => [...entries].sort((a, b) => b.created - a.created);

export class Gallery {
  #pictures = new Map();
  #grids = new Map();
  #shown = new Map();
  #last = Infinity;

  /** `actions.open(picture, list)` shows a picture large. */
  constructor(work, actions) {
    Object.assign(this, { work, actions });
    this.root = $("#gallery");
    work.addEventListener("change", () => this.#soon());
    store.changes.addEventListener("change", ({ detail }) => this.#read(detail));
    $("#show-more").addEventListener("click", () => this.more());
    $("#cancel-all").addEventListener("click", () => [...work.records.keys()].forEach((id) => work.cancel(id)));
    this.tileActions = {
      open: (picture) => actions.open(picture, this.list),
      cancel: (id) => work.cancel(id),
      again: (id) => work.again(id),
      dismiss: (id) => store.remove("jobs", id),
    };
  }

  /** The pictures shown one by one, newest first. */
  get list() {
    return newestFirst(this.#pictures.values());
  }

  async start() {
    for (const grid of await store.all("grids")) this.#grids.set(grid.id, await this.#grid(grid));
    await this.more();
    this.ready = true;
    this.render();
  }

  /** Shows the next older pictures. */
  async more() {
    for (let wanted = PAGE; wanted > 0; ) {
      const found = await store.newest("pictures", PAGE, this.#last);
      for (const picture of found) if (!picture.grid) this.#pictures.set(picture.id, picture), wanted--;
      this.#last = found.at(-1)?.created ?? -Infinity;
      if (found.length < PAGE) {
        $("#show-more").hidden = true;
        break;
      }
      $("#show-more").hidden = false;
    }
    this.render();
  }

  async #grid(grid) {
    const pictures = new Map((await store.ofGrid(grid.id)).map((picture) => [picture.id, picture]));
    return { grid, pictures };
  }

  async #read({ store: name, id }) {
    if (name === "pictures") await this.#readPicture(id);
    if (name === "grids") {
      const grid = await store.get("grids", id);
      if (grid) this.#grids.set(id, await this.#grid(grid));
      else this.#grids.delete(id);
    }
    if (name !== "jobs") this.#soon();
  }

  async #readPicture(id) {
    const picture = await store.get("pictures", id);
    const grid = this.#grids.get(id.split(":")[0]);
    const places = grid ? grid.pictures : this.#pictures;
    if (picture && (grid || !picture.grid)) return void places.set(id, picture);
    const gone = places.get(id);
    places.delete(id);
    // It may be wanted again for a while: deleting can be undone.
    if (gone) setTimeout(() => [gone.blob, gone.thumb].forEach(forget), 60_000);
  }

  #soon() {
    this.pending ??= requestAnimationFrame(() => this.render());
    // A hidden tab has no animation frames.
    if (document.hidden) this.render();
  }

  render() {
    cancelAnimationFrame(this.pending);
    this.pending = null;
    if (!this.ready) return;
    const entries = this.#entries();
    const keys = new Set(entries.map(({ key }) => key));
    for (const [key, { element }] of this.#shown)
      if (!keys.has(key)) {
        element.remove();
        this.#shown.delete(key);
      }
    entries.forEach((entry, at) => this.#place(entry, at));
    $("#empty").hidden = entries.length > 0;
    this.#queue();
  }

  #entries() {
    const entries = this.list.map((picture) => ({ key: picture.id, created: picture.created, picture }));
    for (const record of this.work.records.values()) {
      if (record.grid) continue;
      const status = this.work.status.get(record.id);
      const { created } = record;
      if (record.state === "failed") entries.push({ key: `${record.id}/failed`, created, record });
      else
        for (let index = 0; index < (record.drawing.num_images ?? 1); index++) {
          const key = `${record.id}/${index}`;
          if (this.#pictures.has(key) || record.kept?.includes(index)) continue;
          entries.push({ key, created: created - index / 1000, record, status, index });
        }
    }
    for (const { grid, pictures } of this.#grids.values())
      entries.push({ key: grid.id, created: grid.created, grid, pictures });
    return newestFirst(entries);
  }

  #place(entry, at) {
    let shown = this.#shown.get(entry.key);
    if (!shown) {
      shown = entry.grid ? this.#gridView(entry.grid) : this.#tile();
      this.#shown.set(entry.key, shown);
    }
    if (this.root.children[at] !== shown.element) this.root.insertBefore(shown.element, this.root.children[at] ?? null);
    shown.show(entry);
  }

  #tile() {
    return new Tile(h("li", { className: "tile" }), this.tileActions);
  }

  #gridView(grid) {
    return new GridView(grid, this.work, {
      ...this.tileActions,
      open: (picture) => this.actions.open(picture, newestFirst(this.#grids.get(grid.id).pictures.values())),
      remove: () => this.#removeGrid(grid.id),
    });
  }

  async #removeGrid(id) {
    const { grid, pictures } = this.#grids.get(id);
    for (const record of this.work.records.values()) if (record.grid?.id === id) await this.work.cancel(record.id);
    const kept = [...pictures.values()];
    await store.remove("grids", id);
    for (const picture of kept) await store.remove("pictures", picture.id);
    const undo = async () => {
      await store.put("grids", grid);
      for (const picture of kept) await store.put("pictures", picture);
    };
    notice("The grid is deleted.", { actions: { Undo: undo } });
  }

  #queue() {
    const records = [...this.work.records.values()].filter(({ state }) => state !== "failed");
    const statuses = records.map(({ id }) => this.work.status.get(id) ?? {});
    const running = statuses.filter(({ state }) => ["running", "done"].includes(state));
    const waiting = records.length - running.length;
    const left = Math.max(0, ...statuses.map(({ eta }) => eta ?? 0));
    const parts = [
      running.length && `${running.length} drawing`,
      waiting && `${waiting} waiting`,
      left > 1 && `about ${duration(left)} left`,
    ];
    $("#queue").textContent = parts.filter(Boolean).join(" · ");
    $("#cancel-all").hidden = records.length < 2;
    document.title = records.length ? `(${records.length}) diffusax` : "diffusax";
  }
}

/** Deletes a picture, which can be undone for a while. */
export async function removePicture(picture) {
  await store.remove("pictures", picture.id);
  notice("The picture is deleted.", { actions: { Undo: () => store.put("pictures", picture) } });
}

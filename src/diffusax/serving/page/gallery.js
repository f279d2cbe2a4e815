/** The list of pictures: jobs at work, then grids and pictures that the browser keeps, the newest first. */

import { $, duration, h, notice } from "./dom.js";
import { GridView } from "./grid_view.js";
import { History } from "./history.js";
import { forget } from "./pictures.js";
import { Selection } from "./selection.js";
import * as store from "./store.js";
import { Tile } from "./tile.js";
import { inOrder } from "./work.js";

const PAGE = 60;
const newestFirst = (entries) => [...entries].sort((a, b) => b.created - a.created);
/** What is drawn stands first, then what waits, in the order in which it will be drawn. */
const rank = ({ record, status }) =>
  !record || record.state === "failed" ? 2 : ["running", "done"].includes(status?.state) ? 0 : 1;

export class Gallery {
  #pictures = new Map();
  #grids = new Map();
  #shown = new Map();
  #last = Infinity;
  #reading = 0;

  /** `actions.open(picture, list)` shows a picture large; `actions.mend(record)` takes a failed job into the form. */
  constructor(work, actions) {
    Object.assign(this, { work, actions });
    this.root = $("#gallery");
    this.history = new History(() => this.#restart());
    this.selection = new Selection(this);
    work.addEventListener("change", () => this.#soon());
    this.selection.addEventListener("change", () => this.#soon());
    store.changes.addEventListener("change", ({ detail }) => this.#read(detail));
    $("#show-more").addEventListener("click", () => this.more());
    $("#cancel-all").addEventListener("click", () => [...work.records.keys()].forEach((id) => work.cancel(id)));
    this.tileActions = {
      open: (picture, event) => this.selection.click(picture, event) || actions.open(picture, this.list),
      favourite,
      cancel: (id) => work.cancel(id),
      again: (id) => work.again(id),
      mend: actions.mend,
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
    const mine = ++this.#reading;
    for (let wanted = PAGE; wanted > 0; ) {
      const found = await store.newest("pictures", PAGE, this.#last, (picture) => this.#fits(picture));
      if (mine !== this.#reading) return;
      for (const picture of found) this.#pictures.set(picture.id, picture), wanted--;
      this.#last = found.at(-1)?.created ?? -Infinity;
      $("#show-more").hidden = found.length < PAGE;
      if (found.length < PAGE) break;
    }
    this.render();
  }

  /** Pictures of a grid stand in it, unless some are searched for. */
  #fits(picture) {
    return this.history.active ? this.history.fits(picture) : !picture.grid;
  }

  #restart() {
    this.#pictures.clear();
    this.#last = Infinity;
    return this.more();
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
    const gone = this.#pictures.get(id) ?? grid?.pictures.get(id);
    if (picture && grid) grid.pictures.set(id, picture);
    if (picture && this.#fits(picture)) return void this.#pictures.set(id, picture);
    this.#pictures.delete(id);
    if (picture) return;
    grid?.pictures.delete(id);
    this.selection.forget(id);
    // It may be wanted again for a while: deleting can be undone.
    if (gone) setTimeout(() => [gone.blob, gone.thumb, gone.poster].forEach(forget), 60_000);
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
    const { active } = this.history;
    $("#empty").hidden = entries.length > 0 || active;
    $("#none-found").hidden = !active || this.#pictures.size > 0;
    $("#history").hidden = entries.length === 0 && !active;
    this.#queue();
  }

  #entries() {
    const entries = this.list.map((picture) => ({ key: picture.id, created: picture.created, picture }));
    for (const record of this.work.records.values()) if (!record.grid) entries.push(...this.#atWork(record));
    if (!this.history.active)
      for (const { grid, pictures } of this.#grids.values())
        entries.push({ key: grid.id, created: grid.created, grid, pictures });
    const order = (a, b) => (rank(a) === 1 ? inOrder(a, b) : b.created - a.created);
    return entries.sort((a, b) => rank(a) - rank(b) || order(a, b));
  }

  /** The places of a job's pictures that are not there yet. */
  #atWork(record) {
    const { created } = record;
    if (record.state === "failed") return [{ key: `${record.id}/failed`, created, record }];
    const status = this.work.status.get(record.id);
    const places = [];
    for (let index = 0; index < (record.drawing.num_images ?? 1); index++) {
      const key = `${record.id}/${index}`;
      if (this.#pictures.has(key) || record.kept?.includes(index)) continue;
      places.push({ key, created: created - index / 1000, record, status, index });
    }
    return places;
  }

  #place(entry, at) {
    let shown = this.#shown.get(entry.key);
    if (!shown) {
      shown = entry.grid ? this.#gridView(entry.grid) : this.#tile();
      this.#shown.set(entry.key, shown);
    }
    const before = this.root.children[at] ?? null;
    if (before !== shown.element) move(this.root, shown.element, before);
    const { on, ids } = this.selection;
    shown.show({ ...entry, selecting: on, chosen: ids.has(entry.key) });
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

/** Puts an element before another one, and the focus back into it, which moving takes away. */
function move(root, element, before) {
  const focused = element.contains(document.activeElement) ? document.activeElement : null;
  root.insertBefore(element, before);
  focused?.focus({ preventScroll: true });
}

/** Makes a picture one of the favourites, or none. */
export const favourite = ({ id }) => store.update("pictures", id, (one) => void (one.favourite = !one.favourite));

/** Deletes pictures, which can be undone for a while. */
export async function removePictures(pictures) {
  for (const { id } of pictures) await store.remove("pictures", id);
  const undo = async () => {
    for (const picture of pictures) await store.put("pictures", picture);
  };
  const text = pictures.length > 1 ? `${pictures.length} pictures are deleted.` : "The picture is deleted.";
  notice(text, { actions: { Undo: undo } });
}

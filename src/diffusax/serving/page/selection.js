/** Pictures that are chosen together: by clicks, ranges and keys; and what is done with them. */

import { compare } from "./compare.js";
import { $, say } from "./dom.js";
import { removePictures } from "./gallery.js";
import { save } from "./history.js";
import * as store from "./store.js";

const opens = () => [...document.querySelectorAll("#gallery > .tile .open")];

/** Says "change" when others are chosen. */
export class Selection extends EventTarget {
  on = false;
  ids = new Set();
  #anchor = null;

  /** `gallery.list` are the pictures in their order. */
  constructor(gallery) {
    super();
    this.gallery = gallery;
    $("#select").addEventListener("click", () => this.#switch(!this.on));
    $("#gallery").addEventListener("keydown", (event) => this.#key(event));
    document.addEventListener("keydown", (event) => this.#pageKey(event));
    const acts = {
      "choose-all": () => this.#choose(this.#list.map(({ id }) => id)),
      "chosen-favourite": () => this.#favour(),
      "chosen-compare": () => compare(...this.#chosen),
      "chosen-download": () => save(this.#chosen, `diffusax-${this.ids.size}`),
      "chosen-delete": () => this.#delete(),
      "chosen-done": () => this.#switch(false),
    };
    for (const [id, act] of Object.entries(acts)) $(`#${id}`).addEventListener("click", act);
  }

  get #list() {
    return this.gallery.list;
  }

  get #chosen() {
    return this.#list.filter(({ id }) => this.ids.has(id));
  }

  /** Chooses by a click; returns false where the click means to open the picture. */
  click({ id }, event) {
    if (!this.on && !event.ctrlKey && !event.metaKey && !event.shiftKey) return false;
    if (event.shiftKey) this.#range(id);
    else this.#toggle(id);
    return true;
  }

  /** Takes in that a picture is gone. */
  forget(id) {
    if (this.ids.delete(id)) this.#changed();
  }

  #switch(on) {
    this.on = on;
    this.ids.clear();
    this.#anchor = null;
    this.#changed();
    $("#select").setAttribute("aria-pressed", String(on));
    if (on) say("Choose pictures.");
  }

  #choose(ids) {
    if (!this.on) this.#switch(true);
    this.ids = new Set(ids);
    this.#changed();
  }

  #toggle(id) {
    this.#anchor = id;
    const ids = new Set(this.ids);
    if (!ids.delete(id)) ids.add(id);
    this.#choose(ids);
  }

  /** Chooses all from the picture that was chosen last to this one. */
  #range(id) {
    const order = this.#list.map((picture) => picture.id);
    this.#anchor ??= id;
    const [from, to] = [order.indexOf(this.#anchor), order.indexOf(id)].sort((a, b) => a - b);
    this.#choose([...this.ids, ...order.slice(Math.max(from, 0), to + 1)]);
  }

  #changed() {
    const count = this.ids.size;
    $("#chosen").hidden = !this.on;
    $("#chosen-count").textContent = count ? `${count} chosen` : "Choose pictures";
    $("#chosen-compare").disabled = count !== 2;
    for (const name of ["favourite", "download", "delete"]) $(`#chosen-${name}`).disabled = !count;
    this.dispatchEvent(new Event("change"));
  }

  async #favour() {
    const chosen = this.#chosen;
    const all = chosen.every(({ favourite }) => favourite);
    for (const { id } of chosen) await store.update("pictures", id, (one) => void (one.favourite = !all));
    say(all ? "They are no favourites any more." : "They are favourites.");
  }

  async #delete() {
    const chosen = this.#chosen;
    if (!chosen.length) return;
    this.#switch(false);
    await removePictures(chosen);
    $("#select").focus();
  }

  // Keys

  /** Arrows go from picture to picture, with Shift choosing on the way; X chooses, S makes a favourite. */
  #key(event) {
    const at = opens().indexOf(event.target);
    if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns(), ArrowUp: -columns() }[event.key];
    const id = opens()[at].dataset.picture;
    if (by) this.#go(id, opens()[at + by], event.shiftKey);
    else if (event.key === "x") this.#toggle(id);
    else if (event.key === "s") this.gallery.tileActions.favourite({ id });
    else if (event.key === "Enter" && event.shiftKey) this.#range(id);
    else return;
    event.preventDefault();
  }

  #go(id, next, choosing) {
    if (!next) return;
    next.focus();
    if (!choosing) return;
    this.#anchor ??= id;
    this.#range(next.dataset.picture);
  }

  #pageKey(event) {
    if (!this.on || $("dialog[open]") || event.target.closest("input, textarea, select")) return;
    const all = (event.ctrlKey || event.metaKey) && event.key === "a";
    const act = {
      Escape: () => (this.#switch(false), $("#select").focus()),
      Delete: () => this.#delete(),
      a: all && (() => this.#choose(this.#list.map(({ id }) => id))),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }
}

/** How many pictures stand side by side. */
function columns() {
  const style = getComputedStyle($("#gallery")).gridTemplateColumns;
  return Math.max(1, style.split(" ").length);
}

/** Finds pictures among those that the browser keeps, and saves them all. */

import { $, notice, say } from "./dom.js";
import { download, fileName } from "./pictures.js";
import * as store from "./store.js";
import { zip } from "./zip.js";

/** The most bytes and files of one zip, well below what the format can hold. */
const MOST = { bytes: 2e9, files: 10_000 };
/** Milliseconds of rest after which words are searched for. */
const REST = 200;

export class History {
  #words = [];
  #favourites = false;

  /** `changed()` reads the pictures again. */
  constructor(changed) {
    let waiting = null;
    $("#find").addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => this.#search(changed), REST);
    });
    $("#favourites").addEventListener("click", () => {
      this.#favourites = !this.#favourites;
      $("#favourites").setAttribute("aria-pressed", String(this.#favourites));
      changed();
    });
    $("#export").addEventListener("click", async () => {
      await save(await store.newest("pictures", Infinity), "diffusax");
    });
    $("#show-all").addEventListener("click", () => this.#showAll(changed));
  }

  /** Whether only some of the pictures are shown. */
  get active() {
    return this.#favourites || this.#words.length > 0;
  }

  /** Says whether a picture is one of those that are searched for. */
  fits(picture) {
    if (this.#favourites && !picture.favourite) return false;
    const text = this.#words.length ? told(picture) : "";
    return this.#words.every((word) => text.includes(word));
  }

  async #search(changed) {
    this.#words = $("#find").value.toLowerCase().split(/\s+/).filter(Boolean);
    await changed();
    if (!this.active) return;
    const count = document.querySelectorAll('#gallery .tile[data-kind="picture"]').length;
    say(count === 1 ? "One picture is found." : `${count} pictures are found.`);
  }

  #showAll(changed) {
    $("#find").value = "";
    this.#favourites = false;
    $("#favourites").setAttribute("aria-pressed", "false");
    this.#search(changed);
    $("#find").focus();
  }
}

/** All of a picture's words, in small letters. */
function told({ settings, width, height, written }) {
  const { prompt, negative_prompt, model, sampler, seed, adapters } = settings;
  const own = [prompt, negative_prompt, model, sampler, seed, `${width}x${height}`, ...Object.keys(adapters ?? {})];
  const also = written ? [written.prompt, ...written.styles] : [];
  return [...own, ...also].join(" ").toLowerCase();
}

/** Saves pictures as zips, each with no more than a zip can hold. */
export async function save(pictures, name) {
  if (!pictures.length) return void notice("There are no pictures yet.");
  const close = notice(`0 of ${pictures.length} pictures are packed …`, { seconds: Infinity, about: "zip" });
  const text = $('[data-about="zip"] p');
  try {
    const zips = shares(pictures);
    let before = 0;
    for (const [at, share] of zips.entries()) {
      const packed = await zip(named(share), (done) => {
        text.textContent = `${before + done} of ${pictures.length} pictures are packed …`;
      });
      before += share.length;
      download(packed, zips.length > 1 ? `${name}-${at + 1}.zip` : `${name}.zip`);
    }
    say(`${pictures.length} pictures are saved.`);
  } catch (error) {
    notice(error.message, { error: true, about: "zip-failed" });
  } finally {
    close();
  }
}

function shares(pictures) {
  const found = [];
  let bytes = Infinity;
  for (const picture of pictures) {
    bytes += picture.blob.size;
    if (bytes > MOST.bytes || found.at(-1).length === MOST.files) {
      found.push([]);
      bytes = picture.blob.size;
    }
    found.at(-1).push(picture);
  }
  return found;
}

/** Gives each picture a name of its own. */
function named(pictures) {
  const taken = new Map();
  return pictures.map((picture) => {
    const name = fileName(picture);
    const count = taken.get(name) ?? 0;
    taken.set(name, count + 1);
    const own = count ? name.replace(/\.\w+$/, (end) => `-${count + 1}${end}`) : name;
    return { name: own, blob: picture.blob, date: new Date(picture.created) };
  });
}

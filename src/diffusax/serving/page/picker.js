/** A place that takes pictures: by a click, by dropping them, or from the clipboard. */

import { h, notice } from "./dom.js";
import { open } from "./pictures.js";

const KINDS = "image/png,image/jpeg,image/webp";

/** Says "more" with those pictures that were dropped together with one. */
export const dropped = new EventTarget();

const picturesOf = (transfer) => [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));

/** Returns the first picture or video among what is dropped, or undefined. */
export const fileOf = (transfer) => [...(transfer?.files ?? [])].find(({ type }) => /^(image|video)\//.test(type));

/** Returns the first picture among what is dropped or pasted, or undefined. */
export const pictureOf = (transfer) => picturesOf(transfer)[0];

/** Makes a place that calls `take(blob, name, image)` with the picture that it gets. */
export function picker(label, take) {
  return place(label, KINDS, false, async ([file, ...more]) => {
    await take(file, file.name, await open(file));
    if (more.length) dropped.dispatchEvent(new CustomEvent("more", { detail: more }));
  });
}

/** Makes a place that calls `take(file)` with the picture's file that it gets. */
export const filePicker = (label, take, accept = KINDS) => place(label, accept, false, ([file]) => take(file));

/** Makes a place that calls `take(files)` with all that it gets. */
export const multiplePicker = (label, take) => place(label, KINDS, true, take);

function place(label, accept, multiple, take) {
  const input = h("input", { type: "file", accept, multiple, className: "unseen" });
  const element = h("label", { className: "picker" }, input, h("span", {}, label));
  const got = async (files) => {
    if (!files.length) return;
    try {
      await take(files);
    } catch (error) {
      notice(error.message, { error: true, about: "source" });
    }
  };
  input.addEventListener("change", () => (got([...input.files]), (input.value = "")));
  acceptDrops(element, got);
  return element;
}

/** Lets an element take dropped pictures for itself, before the page takes their settings. */
function acceptDrops(element, got) {
  element.addEventListener("dragover", (event) => {
    event.preventDefault();
    event.stopPropagation();
    element.classList.add("over");
  });
  element.addEventListener("dragleave", () => element.classList.remove("over"));
  element.addEventListener("drop", (event) => {
    event.preventDefault();
    event.stopPropagation();
    element.classList.remove("over");
    document.dispatchEvent(new Event("drop-taken"));
    const files = picturesOf(event.dataTransfer);
    if (files.length) got(files);
    else notice("That was no picture; drop a PNG, JPEG or WebP.", { error: true, about: "source" });
  });
}

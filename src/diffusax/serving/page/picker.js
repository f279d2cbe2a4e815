/** A place that takes a picture: by a click, by dropping one, or from the clipboard. */

import { h, notice } from "./dom.js";
import { open } from "./pictures.js";

/** Returns the first picture among what is dropped or pasted, or undefined. */
export const pictureOf = (transfer) => [...(transfer?.files ?? [])].find((file) => file.type.startsWith("image/"));

/** Makes a place that calls `take(blob, name, image)` with the pictures that it gets. */
export function picker(label, take) {
  return filePicker(label, async (file) => take(file, file.name, await open(file)));
}

/** Makes a place that calls `take(file)` with the picture files that it gets. */
export function filePicker(label, take, accept = "image/png,image/jpeg,image/webp") {
  const input = h("input", { type: "file", accept, className: "unseen" });
  const place = h("label", { className: "picker" }, input, h("span", {}, label));
  const got = async (file) => {
    if (!file) return;
    try {
      await take(file);
    } catch (error) {
      notice(error.message, { error: true });
    }
  };
  input.addEventListener("change", () => (got(input.files[0]), (input.value = "")));
  acceptDrops(place, got);
  return place;
}

/** Lets an element take dropped pictures for itself, before the page takes their settings. */
export function acceptDrops(place, got) {
  place.addEventListener("dragover", (event) => {
    event.preventDefault();
    event.stopPropagation();
    place.classList.add("over");
  });
  place.addEventListener("dragleave", () => place.classList.remove("over"));
  place.addEventListener("drop", (event) => {
    event.preventDefault();
    event.stopPropagation();
    place.classList.remove("over");
    document.dispatchEvent(new Event("drop-taken"));
    const file = pictureOf(event.dataTransfer);
    if (file) got(file);
    else notice("That was no picture; drop a PNG, JPEG or WebP.", { error: true });
  });
}

/** A place that takes pictures or videos: by a click, by dropping them, or from the clipboard. */

import { h, notice } from "./dom.js";
import { isClip, open } from "./pictures.js";

const isPicture = ({ type }) => type.startsWith("image/");

/** What a place takes: `accept` of files that are chosen, those of dropped ones that fit, and how they are called. */
export const PICTURES = { accept: "image/png,image/jpeg,image/webp", fits: isPicture, called: "picture; drop a PNG, JPEG or WebP" };
export const VIDEOS = { accept: "video/mp4,video/webm,image/gif", fits: isClip, called: "video; drop an MP4, WebM or GIF" };
export const EITHER = {
  accept: `${PICTURES.accept},${VIDEOS.accept}`,
  fits: (file) => isPicture(file) || isClip(file),
  called: "picture or video; drop a PNG, JPEG, WebP, MP4, WebM or GIF",
};

/**
 * Says "more" with those pictures that were dropped together with one, and "video" with one that was dropped where a
 * picture goes; who takes this prevents the default.
 */
export const dropped = new EventTarget();

const filesOf = (transfer) => [...(transfer?.files ?? [])];

/** Returns the first picture or video among what is dropped, or undefined. */
export const fileOf = (transfer) => filesOf(transfer).find(EITHER.fits);

/** Returns the first picture among what is dropped or pasted, or undefined. */
export const pictureOf = (transfer) => filesOf(transfer).find(isPicture);

/** Makes a place that calls `take(blob, name, image)` with the picture that it gets. */
export function picker(label, take) {
  return place(label, PICTURES, false, async ([file, ...more]) => {
    if (isClip(file) && !dropped.dispatchEvent(new CustomEvent("video", { detail: file, cancelable: true }))) return;
    await take(file, file.name, await open(file));
    if (more.length) dropped.dispatchEvent(new CustomEvent("more", { detail: more }));
  });
}

/** Makes a place that calls `take(file)` with the file that it gets. */
export const filePicker = (label, take, kinds = PICTURES) => place(label, kinds, false, ([file]) => take(file));

/** Makes a place that calls `take(files)` with all that it gets. */
export const multiplePicker = (label, take) => place(label, PICTURES, true, take);

function place(label, kinds, multiple, take) {
  const { accept } = kinds;
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
  acceptDrops(element, got, kinds);
  return element;
}

/** Lets an element take dropped files for itself, before the page takes their settings. */
function acceptDrops(element, got, { fits, called }) {
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
    const every = filesOf(event.dataTransfer);
    const files = every.filter(fits);
    const video = !files.length && every.find(isClip);
    if (files.length) got(files);
    else if (video && !dropped.dispatchEvent(new CustomEvent("video", { detail: video, cancelable: true }))) return;
    else notice(`That was no ${called}.`, { error: true, about: "source" });
  });
}

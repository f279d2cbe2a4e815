/** Brings the settings of a dropped or pasted image back. */

import * as api from "./api.js";
import { $, mended, notice } from "./dom.js";
import { EITHER, filePicker, fileOf, pictureOf } from "./picker.js";

/** The most things that a message names. */
const MOST = 8;

/** Returns the settings in a picture, which the server reads, or null where it finds none. */
async function settingsOf(file) {
  try {
    return await api.pngInfo(file);
  } catch (error) {
    if (error.status === 422) return null;
    throw error;
  }
}

/** Says what of an image's settings is not in the form, or "" where all of it is. */
export function inWords({ left, missing, kept, off }, whole = true) {
  const named = left.length > MOST ? [...left.slice(0, MOST), `${left.length - MOST} more`] : left;
  const parts = [named.length ? `, but for: ${named.join("; ")}.` : ""];
  if (whole && missing.length) parts.push(` It does not tell ${missing.join(", ")}: as the model has it now.`);
  if (kept.length) parts.push(` Still in the form: ${kept.join(", ")}.`);
  if (off) parts.push(" The styles are off.");
  const text = parts.join("");
  return text && !named.length ? `.${text}` : text;
}

/**
 * Takes what is dropped on the page, pasted or chosen: `use(found)`, or `begin(file)` where it has none and a drawing
 * can begin with it, which `begins(file)` says.
 */
export function listen(use, begin, begins) {
  const veil = $("#drop");
  let depth = 0;
  const over = (by) => (veil.hidden = (depth = Math.max(0, depth + by)) === 0);
  const files = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragenter", (event) => files(event) && over(1));
  document.addEventListener("dragleave", (event) => files(event) && over(-1));
  document.addEventListener("dragover", (event) => files(event) && event.preventDefault());
  document.addEventListener("drop-taken", () => over(-depth));
  document.addEventListener("drop", (event) => {
    if (!files(event)) return;
    event.preventDefault();
    over(-depth);
    const file = fileOf(event.dataTransfer);
    if (file) restore(file);
    else notice("That was no picture; drop one.", { error: true });
  });
  document.addEventListener("paste", (event) => {
    const file = pictureOf(event.clipboardData);
    const text = event.clipboardData?.types.includes("text/plain");
    if (!file || text) return;
    event.preventDefault();
    begin(file);
  });

  $("#restore").append(filePicker("Settings from an image or a video", restore, { ...EITHER, accept: "image/*,video/mp4" }));

  async function restore(file) {
    const beginning = begins(file) ? { "Begin with it": () => begin(file) } : {};
    mended("restore");
    let found;
    try {
      found = await settingsOf(file);
    } catch (error) {
      return notice(error.message, { error: true, actions: beginning, about: "restore" });
    }
    if (!found) return notice(`${file.name} has no settings in it.`, { actions: beginning, seconds: 20 });
    const told = inWords(use(found));
    return notice(`The settings of ${file.name} are back${told || "."}`, { actions: beginning, seconds: told ? Infinity : 8, about: "restore" });
  }
}

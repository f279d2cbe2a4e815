/** Brings the settings of a dropped or pasted PNG back. */

import * as api from "./api.js";
import { $, notice } from "./dom.js";
import { filePicker, pictureOf } from "./picker.js";

/** Returns the settings in a picture, which the server reads, or null where it finds none. */
async function settingsOf(file) {
  try {
    return (await api.pngInfo(file)).settings;
  } catch (error) {
    if (error.status === 422) return null;
    throw error;
  }
}

/** Takes what is dropped on the page, pasted or chosen: `use(settings)`, or `begin(file)` where it has none. */
export function listen(use, begin) {
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
    const file = pictureOf(event.dataTransfer);
    if (file) restore(file);
    else notice("That was no picture; drop a PNG.", { error: true });
  });
  document.addEventListener("paste", (event) => {
    const file = pictureOf(event.clipboardData);
    const text = event.clipboardData?.types.includes("text/plain");
    if (!file || text) return;
    event.preventDefault();
    begin(file);
  });

  $("#restore").append(filePicker("Settings from a PNG", restore));

  async function restore(file) {
    const beginning = { "Begin with it": () => begin(file) };
    let settings;
    try {
      settings = await settingsOf(file);
    } catch (error) {
      return notice(error.message, { error: true, actions: beginning });
    }
    if (!settings) return notice(`${file.name} has no settings in it.`, { actions: beginning, seconds: 20 });
    use(settings);
    return notice(`The settings of ${file.name} are back.`, { actions: beginning });
  }
}

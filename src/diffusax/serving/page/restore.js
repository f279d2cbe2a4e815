/** Brings the settings of a dropped or pasted PNG back. */

import * as api from "./api.js";
import { $, notice } from "./dom.js";
import { parse } from "./infotext.js";
import { filePicker, pictureOf } from "./picker.js";
import { texts } from "./png.js";

/** Returns the settings in a picture, or null: read here, or by the server where that is not enough. */
export async function settingsOf(file, samplers) {
  const { parameters } = await texts(file);
  const found = parameters ? parse(parameters, samplers) : null;
  if (found && !found.unknown) return found;
  try {
    const { settings, ...fields } = await api.pngInfo(file);
    const told = settings ?? fields;
    if (told && Object.keys(told).length) return told;
  } catch {
    // What was read here will do.
  }
  return found;
}

/** Takes what is dropped on the page, pasted or chosen: `use(settings)`, or `begin(file)` where it has none. */
export function listen(samplers, use, begin) {
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
    const settings = await settingsOf(file, samplers());
    const beginning = { "Begin with it": () => begin(file) };
    if (!settings) return notice(`${file.name} has no settings in it.`, { actions: beginning, seconds: 20 });
    use(settings);
    const doubt = settings.unknown ? `; its sampler ${settings.unknown} is not known here` : "";
    return notice(`The settings of ${file.name} are back${doubt}.`, { actions: beginning });
  }
}

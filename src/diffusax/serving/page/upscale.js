/** Makes a picture larger without a prompt, by an upscaler of the server. */

import * as api from "./api.js";
import { mended, newId, notice, say } from "./dom.js";
import { pictureOf } from "./keeping.js";
import { dataUri } from "./pictures.js";
import * as store from "./store.js";

/** Filters of every image program, after what makes pictures sharper. */
const PLAIN = ["Lanczos", "Nearest"];
const TIMES = 2;

/** Returns the names of the server's upscalers, the best first. */
export async function upscalers() {
  const names = (await api.upscalers().catch(() => [])).filter((name) => name !== "None");
  return [...names.filter((name) => !PLAIN.includes(name)), ...PLAIN.filter((name) => names.includes(name))];
}

/** Makes a picture twice as large, by the upscaler of a name; keeps and returns it, or null where it failed. */
export async function enlarge(picture, name) {
  say("Enlarging …");
  try {
    const data = await api.upscale(await dataUri(picture.blob), name, TIMES);
    const bytes = Uint8Array.from(atob(data.split(",").at(-1)), (letter) => letter.charCodeAt(0));
    const blob = new Blob([bytes], { type: "image/png" });
    const made = await pictureOf(blob, picture.settings);
    const larger = { ...picture, ...made, id: newId(), created: Date.now(), enlarged: name, grid: null, seconds: null };
    await store.put("pictures", larger);
    mended("enlarge");
    say(`Enlarged to ${made.width} × ${made.height}.`);
    return larger;
  } catch (error) {
    notice(error.message, { error: true, about: "enlarge" });
    return null;
  }
}

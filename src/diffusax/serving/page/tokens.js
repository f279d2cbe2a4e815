/** Says beside the prompts how many tokens they have, and how many the model reads. */

import * as api from "./api.js";
import { $ } from "./dom.js";

const FIELDS = ["prompt", "negative_prompt"];
/** Milliseconds of rest after which a prompt is counted. */
const REST = 350;

let settings = null;
let styles = null;
let waiting = null;
const counted = {};

/** Counts from now on, with the styles that are on. */
export function listen(...parts) {
  [settings, styles] = parts;
}

/** Counts a little later, once for many changes. */
export function changed() {
  clearTimeout(waiting);
  waiting = setTimeout(() => FIELDS.forEach(count), REST);
}

async function count(name) {
  const place = $(`#${name}-tokens`);
  const { model, prompt_weighting, long_prompt, ...written } = settings.read();
  const prompt = styles.applied(written)[name];
  const asked = JSON.stringify([prompt, model, prompt_weighting]);
  if (!prompt.trim()) return show(place, {}, (counted[name] = ""));
  if (counted[name] !== asked) {
    counted[name] = asked;
    // A tag that is half written cannot be counted yet, and other servers do not count.
    const found = await api.tokens({ prompt, model, prompt_weighting }).catch(() => ({}));
    if (counted[name] !== asked) return;
    // Models are loaded by their first drawing, so ask again.
    if (found.tokens === null || found.tokens === undefined) counted[name] = "";
    place.found = found;
  }
  show(place, place.found, long_prompt);
}

function show(place, { tokens, most, window }, long_prompt = true) {
  const known = tokens !== null && tokens !== undefined;
  place.hidden = !known;
  if (!known) return;
  const read = long_prompt ? most : window;
  place.textContent = read ? `${tokens} of ${read} tokens` : `${tokens} tokens`;
  place.classList.toggle("over", Boolean(read) && tokens > read);
}

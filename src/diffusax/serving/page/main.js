/** Puts the page together: settings, what is drawn, and the pictures. */

import { Loras } from "./adapters.js";
import * as api from "./api.js";
import { Controls } from "./controls.js";
import { $, button, newSeed, notice, say } from "./dom.js";
import { Drafts } from "./drafts.js";
import { kindOf } from "./drawing.js";
import { Gallery } from "./gallery.js";
import { Grid } from "./grid.js";
import * as restore from "./restore.js";
import { Settings } from "./settings.js";
import { Source } from "./source.js";
import * as store from "./store.js";
import { Viewer } from "./viewer.js";
import * as weighing from "./weighing.js";
import { Work } from "./work.js";

const settings = new Settings();
const source = new Source();
const loras = new Loras();
const controls = new Controls();
const grid = new Grid();
const drafts = new Drafts({ settings, source, loras, controls, grid });
const work = new Work();
const viewer = new Viewer({ settings: useOf, seed: useSeed, source: begin, inpaint, control }, possible);
const gallery = new Gallery(work, { open: (picture, list) => viewer.show(picture, list) });
let can = null;
let lastSeed = null;

const offers = (task) => settings.model?.tasks?.includes(task) ?? false;
const some = (parts) => parts.filter(Boolean).join(", ");
const narrow = () => matchMedia("(max-width: 56rem)").matches;
const edits = () => settings.model?.kind === "edit";

// Drawing

$("#settings").addEventListener("submit", (event) => (event.preventDefault(), draw()));
$("#settings").noValidate = true;

async function draw() {
  if (!can) return notice("The server does not answer yet.", { error: true });
  if (!settings.check()) return;
  const { larger_on, larger_scale, larger_strength, ...values } = settings.read();
  if (edits() && !source.picture) {
    $("#group-source").open = true;
    $("#source input").focus();
    return notice(`${settings.title} changes pictures; choose one first.`, { error: true });
  }
  lastSeed = values.seed ?? newSeed();
  try {
    const drawing = await compose({ ...values, seed: lastSeed });
    const larger = { scale: larger_scale, strength: larger_strength, multiple: settings.model.multiple ?? 8 };
    const then = larger_on && offers("image-to-image") ? larger : null;
    if (grid.on) {
      const made = grid.drawings(drawing, then);
      await store.put("grids", made.grid);
      await work.add(made.cells);
    } else await work.add([{ drawing, then, grid: null }]);
    say("Handed in.");
    navigator.storage?.persist?.();
    if (narrow()) $("#pictures-title").scrollIntoView({ behavior: "smooth" });
  } catch (error) {
    notice(error.message, { error: true });
  }
}

/** Returns what POST /jobs takes, with blobs for pictures. */
async function compose({ strength, mask_blur, padding_mask_crop, image_guidance_scale, ...values }) {
  const { width, height } = values;
  const masks = offers("inpainting");
  const whole = masks && padding_mask_crop !== null;
  const usable = edits() || masks || offers("image-to-image");
  const pictures = usable ? await source.drawing(width, height, { masks, whole }) : {};
  const drawing = { ...values, ...pictures };
  if (Object.keys(loras.weights).length) drawing.adapters = { ...loras.weights };
  if (edits()) drawing.image_guidance_scale = image_guidance_scale;
  else if (drawing.image) drawing.strength = strength;
  if (drawing.mask_image) Object.assign(drawing, { mask_blur, padding_mask_crop });
  const steering = edits() ? [] : await controls.drawing(width, height);
  if (steering.length) drawing.controls = steering;
  return drawing;
}

/** Shows what "Draw" would do, and only what the model can do with a picture. */
function changed() {
  const values = settings.read();
  const { picture, painted } = source;
  const mask = painted && offers("inpainting");
  $("#source-options").hidden = !picture;
  $("#mask-options").hidden = !mask;
  $("#field-strength").hidden = edits();
  $("#field-image-guidance").hidden = !edits();
  $("#source-summary").textContent = !picture ? (edits() ? "needed" : "none") : mask ? "with a mask" : "on";
  $("#group-controls").hidden = !can?.controlnets?.length || edits();
  $("#group-larger").hidden = !offers("image-to-image");
  const paint = $("#paint");
  if (paint) paint.hidden = !offers("inpainting");
  $("#model-summary").textContent = some([settings.title, values.sampler]);
  const { width, height, seed, num_images: count } = values;
  const size = `${width} × ${height}`;
  $("#size-summary").textContent = some([size, seed !== null && `seed ${seed}`, count > 1 && `${count} pictures`]);
  $("#larger-summary").textContent = values.larger_on ? `${values.larger_scale} times` : "off";
  $("#plan").textContent = plan(values, mask);
  drafts.changed();
}

function plan(values, mask) {
  if (!settings.model) return "";
  const kind = kindOf({ image: source.picture, mask_image: mask }, settings.model);
  const count = grid.on ? grid.count : values.num_images;
  const size = `${values.width} × ${values.height}`;
  const parts = [kind, count > 1 ? `${count} of ${size}` : size, `${values.num_inference_steps} steps`];
  if (source.cuts(values.width, values.height)) parts.push("the picture is cut");
  return parts.join(" · ");
}

for (const part of [settings, source, loras, controls, grid]) part.addEventListener("change", changed);
source.addEventListener("picture", () => {
  $("#group-source").open = true;
  settings.fit(source.picture);
});
$("#model").addEventListener("change", () => can && grid.capabilities(can, settings.model));
$("#seed-last").addEventListener("click", () => {
  const last = lastSeed ?? gallery.list[0]?.settings.seed;
  if (last === undefined || last === null) notice("Nothing was drawn yet.");
  else settings.write({ seed: last });
});

// What can be done with a picture

/** Writes an image's settings into the form; returns in words what of them it has no place for. */
function use({ settings: written, left_out = [] }) {
  const { left, missing } = settings.restore(written);
  const tags = [...(written.prompt ?? "").matchAll(/<lora:([^:<>]+)/g)].map(([, name]) => name);
  const unknown = [...loras.write(written.adapters ?? {}), ...tags.filter((name) => !loras.names.includes(name))];
  if (written.eta) left.push(`Eta DDIM: ${written.eta}`);
  if ((written.strength_rule ?? "diffusers") !== "diffusers") left.push(`Strength rule: ${written.strength_rule}`);
  left.push(...unknown.map((name) => `LoRA: ${name}`), ...left_out);
  const kept = [];
  if (source.picture) kept.push("the picture to begin with");
  if (controls.entries.length) kept.push("the ControlNets");
  if (grid.on) kept.push("the grid");
  say("The settings are taken over.");
  return { left: [...new Set(left)], missing, kept };
}

/** Takes over the settings of a picture in the gallery. */
function useOf({ settings: written }) {
  const left_out = (written.controls ?? []).map(({ model }) => `ControlNet: ${model}`);
  const began = written.strength !== null && written.strength !== undefined;
  if (began || written.image_guidance_scale) left_out.push("the image that it began with");
  const told = restore.inWords(use({ settings: written, left_out }), false);
  if (told) notice(`The settings are taken over${told}`, { seconds: 20 });
  $("#prompt").focus();
}

function useSeed({ settings: { seed } }) {
  settings.write({ seed });
  notice(`The next picture has the seed ${seed}.`);
}

async function begin(picture) {
  try {
    await source.set(picture.blob ?? picture, picture.name ?? "");
    $("#group-source").scrollIntoView({ block: "nearest" });
    say("The next drawing begins with this picture.");
  } catch (error) {
    notice(error.message, { error: true });
  }
}

async function inpaint(picture) {
  await begin(picture);
  await source.paint();
}

function control({ blob }) {
  controls.add(blob);
}

function possible() {
  const found = ["settings", "seed"];
  if (edits() || offers("image-to-image")) found.push("source");
  if (offers("inpainting")) found.push("inpaint");
  if (can?.controlnets?.length && !edits()) found.push("control");
  return found;
}

// The server

const EXAMPLES = [
  "a red apple on a blue background",
  "a cat face, 3d style",
  "a rocket on a black background",
  "a frog, flat style",
];
const STATES = {
  wait: "Looking for the server …",
  here: "Connected",
  away: "The server does not answer; trying again …",
  key: "The server asks for a key",
};

async function learn() {
  try {
    can = await api.capabilities();
  } catch (error) {
    if (error.status === 401) askKey();
    else if (!(error instanceof api.Away)) notice(error.message, { error: true });
    return;
  }
  settings.capabilities(can);
  loras.capabilities(can);
  controls.capabilities(can);
  await drafts.restore(narrow());
  grid.capabilities(can, settings.model);
  $("#ask-key").hidden = !can.api_key_needed;
  if (can.api_key_needed && !api.key.get()) askKey();
  changed();
}

function connected() {
  const { state } = api.connection;
  const place = $("#connection");
  place.dataset.state = state;
  place.textContent = STATES[state];
  say(STATES[state]);
  if (state === "key") askKey();
  if (state === "here" && place.dataset.before === "away") learn();
  place.dataset.before = state;
}

api.connection.addEventListener("change", connected);
// Models and LoRAs may have come while nobody looked.
document.addEventListener("visibilitychange", () => document.hidden || learn());

function askKey() {
  const dialog = $("#key");
  if (dialog.open) return;
  $("#key-value").value = api.key.get();
  dialog.returnValue = "";
  dialog.showModal();
}

$("#key").addEventListener("close", () => {
  if ($("#key").returnValue !== "use") return;
  api.key.set($("#key-value").value.trim());
  learn();
});
$("#ask-key").addEventListener("click", askKey);
$("#ask-help").addEventListener("click", () => $("#help").showModal());

// Keys and theme

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if ((event.ctrlKey || event.metaKey) && event.key === "Enter") {
    event.preventDefault();
    $("#settings").requestSubmit();
  }
  if (event.target.closest("input, textarea, select")) return;
  if (event.key === "/") event.preventDefault(), $("#prompt").focus();
  if (event.key === "?") $("#help").showModal();
});

const THEMES = { auto: "", dark: "dark", light: "light" };

function theme(next) {
  const root = document.documentElement;
  const names = Object.keys(THEMES);
  const now = names.find((name) => THEMES[name] === (root.dataset.theme ?? ""));
  const chosen = next ? names[(names.indexOf(now) + 1) % names.length] : now;
  root.dataset.theme = THEMES[chosen];
  localStorage.setItem("diffusax-theme", THEMES[chosen]);
  $("#theme").textContent = `Theme: ${chosen}`;
}

$("#theme").addEventListener("click", () => theme(true));
theme(false);

// Beginning

for (const area of [$("#prompt"), $("#negative_prompt")]) weighing.listen(area);
restore.listen(use, begin);
for (const prompt of EXAMPLES)
  $("#examples").append(button(prompt, () => (settings.write({ prompt }), $("#settings").requestSubmit())));
await learn();
await gallery.start();
work.start();

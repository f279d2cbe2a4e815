/** Puts the page together: settings, what is drawn, and the pictures. */

import { Loras } from "./adapters.js";
import { Composer } from "./composer.js";
import { connect } from "./connecting.js";
import { Controls } from "./controls.js";
import { $, button, mended, notice } from "./dom.js";
import { Drafts } from "./drafts.js";
import { kindOf } from "./drawing.js";
import { Gallery } from "./gallery.js";
import { Grid } from "./grid.js";
import { EITHER, PICTURES, VIDEOS, dropped } from "./picker.js";
import { lengthOf } from "./pictures.js";
import { References } from "./references.js";
import * as restore from "./restore.js";
import { Settings } from "./settings.js";
import { fold, listen, narrow } from "./shell.js";
import { Slot } from "./slot.js";
import { Source } from "./source.js";
import { Styles } from "./styles.js";
import * as tokens from "./tokens.js";
import { enlarge } from "./upscale.js";
import { Uses } from "./uses.js";
import { Viewer } from "./viewer.js";
import * as weighing from "./weighing.js";
import { Wildcards } from "./wildcards.js";
import { Work } from "./work.js";

const settings = new Settings();
const source = new Source();
const slots = {
  last: new Slot("last", {
    kinds: PICTURES,
    choose: "Choose the picture that it ends with, or drop one here",
    label: "The picture to end with",
    none: "No last picture",
  }),
  clip: new Slot("clip", {
    kinds: VIDEOS,
    choose: "Choose a video, or drop one here",
    label: "The video to begin with",
    none: "No video",
  }),
  mask: new Slot("clip-mask", {
    kinds: EITHER,
    choose: "Choose a mask, white where the video is new: a video or a picture",
    label: "The mask of the video",
    none: "No mask",
  }),
};
const references = new References(source);
const loras = new Loras();
const controls = new Controls();
const grid = new Grid();
const styles = new Styles(settings);
const wildcards = new Wildcards();
const work = new Work();
const parts = { settings, source, slots, references, loras, controls, grid, styles, wildcards, work };
const drafts = new Drafts(parts);
const composer = new Composer(parts);
const uses = new Uses({ ...parts, composer });
const viewer = new Viewer({
  settings: (picture) => uses.settingsOf(picture),
  written: (picture) => uses.writtenOf(picture),
  seed: (picture) => uses.seedOf(picture),
  source: (picture) => uses.begin(picture),
  inpaint: (picture) => uses.inpaint(picture),
  control: (picture) => uses.control(picture),
  more: (picture) => composer.more(picture),
  variations: (picture) => composer.variations(picture),
  enlarge,
  possible: (picture) => uses.possible(picture),
  sampler: (name) => settings.samplerTitle(name),
});
const gallery = new Gallery(work, {
  open: (picture, list) => viewer.show(picture, list),
  mend: (record) => uses.mend(record),
});

const some = (parts) => parts.filter(Boolean).join(", ");

$("#settings").noValidate = true;
$("#settings").addEventListener("submit", (event) => {
  event.preventDefault();
  if (narrow()) fold(true);
  composer.draw();
});

/** Shows what "Draw" would do, and only what the model can do with a picture. */
function changed() {
  const values = settings.read();
  const { edits, can, video, picture, needsPicture, takesPicture, takesVideo } = composer;
  const { moves, model } = settings;
  const mask = picture && source.painted && composer.offers("inpainting");
  const missing = (needsPicture && !picture) || (model?.needs_last_image && !slots.last.file);
  if (!missing) mended("source");
  $("#source").hidden = Boolean(can) && (!takesPicture || Boolean(video && !composer.together));
  $("#clip").hidden = !takesVideo;
  $("#clip-mask").hidden = !video || !model.mask_video;
  $("#last").hidden = !picture || !model?.last_image;
  $("#source-options").hidden = !picture && !video;
  $("#mask-options").hidden = !mask;
  $("#field-strength").hidden = edits || !(mask || (video ? model.strength !== false : composer.redraws()));
  $("#strength-of").textContent = video ? "the video" : "the picture";
  $("#field-whole").hidden = !video;
  $("#field-image-guidance").hidden = !edits;
  $("#field-guidance-2").hidden = !model?.guidance_scale_2 || Boolean(video && !composer.together);
  $("#group-source").hidden = Boolean(can) && !takesPicture && !takesVideo;
  $("#source-also").hidden = moves;
  $("#source-title").textContent = !takesVideo ? "Picture" : takesPicture ? "Picture or video" : "Video";
  const none = needsPicture ? "needed" : "none";
  $("#source-summary").textContent = video ? "a video" : !picture ? none : mask ? "with a mask" : "on";
  $("#group-controls").hidden = !can?.controlnets?.length || edits || moves;
  $("#group-video").hidden = !moves || composer.whole;
  $("#group-larger").hidden = !composer.redraws();
  references.show(mask ? 1 : (model?.images ?? 1));
  const paint = $("#paint");
  if (paint) paint.hidden = !composer.offers("inpainting");
  $("#model-summary").textContent = some([settings.title, values.sampler && settings.samplerTitle(values.sampler)]);
  const { width, height, seed, num_images: count } = values;
  const size = `${width} × ${height}`;
  $("#size-summary").textContent = some([size, seed !== null && `seed ${seed}`, count > 1 && `${count} pictures`]);
  $("#video-summary").textContent = moves && values.num_frames && values.fps ? lengthOf(values) : "";
  $("#larger-summary").textContent = values.larger_on ? `${values.larger_scale} times` : "off";
  $("#plan").textContent = plan(values, mask);
  drafts.changed();
  tokens.changed();
}

function plan(values, mask) {
  if (!settings.model) return "";
  const { picture, video } = composer;
  const kind = kindOf({ image: picture, video, mask_image: mask }, settings.model);
  const count = grid.on ? grid.count : values.num_images;
  const size = `${values.width} × ${values.height}`;
  const parts = [kind, count > 1 ? `${count} of ${size}` : size, `${values.num_inference_steps} steps`];
  if (composer.whole) parts.splice(2, 0, "the video's frames");
  else if (values.num_frames) parts.splice(2, 0, `${values.num_frames} frames`);
  if (picture && !composer.looks && source.cuts(values.width, values.height)) parts.push("the picture is cut");
  return parts.join(" · ");
}

for (const part of [settings, source, ...Object.values(slots), references, loras, controls, grid, styles, wildcards])
  part.addEventListener("change", changed);
source.addEventListener("picture", () => {
  $("#group-source").open = true;
  if (!composer.looks) settings.fit(source.picture);
});
slots.clip.addEventListener("brought", () => {
  $("#group-source").open = true;
  mended("source");
  settings.fit(slots.clip.file);
});
dropped.addEventListener("video", (event) => {
  if (!composer.takesVideo) return;
  event.preventDefault();
  uses.begin(event.detail);
});
$("#model").addEventListener("change", () => composer.can && grid.capabilities(composer.can, settings.model));
$("#seed-last").addEventListener("click", () => {
  const last = composer.lastSeed ?? gallery.list[0]?.settings.seed;
  if (last === undefined || last === null) notice("Nothing was drawn yet.");
  else settings.write({ seed: last });
});

const EXAMPLES = [
  "a red apple on a blue background",
  "a cat face, 3d style",
  "a rocket on a black background",
  "a frog, flat style",
];

listen();
for (const area of [$("#prompt"), $("#negative_prompt")]) weighing.listen(area);
tokens.listen(settings, styles);
restore.listen(
  (found) => uses.write(found),
  (file) => uses.begin(file),
  (file) => uses.begins(file),
);
for (const prompt of EXAMPLES)
  $("#examples").append(button(prompt, () => (settings.write({ prompt }), $("#settings").requestSubmit())));
await connect(async (can) => {
  composer.can = can;
  for (const part of [settings, ...Object.values(slots), loras, controls, styles]) part.capabilities(can);
  await drafts.restore(narrow());
  grid.capabilities(can, settings.model);
  changed();
});
// Who opens the page may write at once; on a phone that would cover it with the keyboard.
if (!narrow() && document.activeElement === document.body) $("#prompt").focus();
await gallery.start();
work.start();

/** Drawings: what POST /jobs takes, with blobs in the place of pictures until they are sent. */

import { newId } from "./dom.js";
import { dataUri, resized } from "./pictures.js";

/** The fields of one file each. */
const FILES = ["image", "mask_image", "video", "mask_video", "last_image"];

/** Returns a drawing's JSON, its pictures as data URIs; what is null or empty is left to the server. */
export async function body(drawing) {
  const { more_images, controls, ...fields } = drawing;
  const found = Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== null && value !== undefined));
  for (const name of FILES) if (found[name]) found[name] = await dataUri(found[name]);
  if (more_images?.length) found.more_images = await Promise.all(more_images.map(dataUri));
  if (controls?.length) {
    found.controls = [];
    for (const control of controls) found.controls.push({ ...control, image: await dataUri(control.image) });
  }
  return found;
}

/** Returns what of a drawing a person reads as its settings. */
export function withoutPictures({ more_images, controls, ...fields }) {
  return Object.fromEntries(Object.entries(fields).filter(([name]) => !FILES.includes(name)));
}

/** Returns the records that draw the pictures of a finished job once more, larger. */
export async function largerRecords(record, seeds, images) {
  const { scale, strength, multiple } = record.then;
  const side = (length) => Math.round((length * scale) / multiple) * multiple;
  const { width, height } = record.drawing;
  const [w, h] = [side(width), side(height)];
  const records = [];
  for (const [index, blob] of images.entries()) {
    if (!blob) continue;
    const image = await resized(blob, w, h);
    const { more_images, mask_image, padding_mask_crop, mask_blur, ...rest } = record.drawing;
    const controls = await Promise.all(
      (rest.controls ?? []).map(async (control) => ({ ...control, image: await resized(control.image, w, h) })),
    );
    const seed = seeds?.[index] ?? record.drawing.seed;
    const drawing = { ...rest, controls, image, width: w, height: h, strength, seed, num_images: 1 };
    // A cell of a grid keeps its name, by which the grid finds its picture.
    const id = record.grid ? `${record.id}+` : newId();
    const created = record.created - index / 1000;
    records.push({ id, created, drawing, then: null, grid: record.grid ?? null, written: record.written, begun: true });
  }
  return records;
}

/** Says in a few words what kind of drawing it is. */
export function kindOf(drawing, model) {
  if (model?.kind === "edit") return "Edit";
  if (model?.fps && drawing.video) return "Video to video";
  if (model?.fps) return drawing.image ? "Image to video" : "Text to video";
  if (drawing.mask_image) return "Inpainting";
  return drawing.image ? "Image to image" : "Text to image";
}

/** Keeps what the server has drawn, in the browser's store. */

import { withoutPictures } from "./drawing.js";
import { open, thumbnail } from "./pictures.js";
import * as store from "./store.js";

/** The previews of a job's pictures by index, {still, frames}: those known `before`, and the one that came. */
export const previews = (before, { preview, frames, index = 0 }) =>
  preview ? { ...before?.previews, [index]: { still: preview, frames } } : before?.previews;

/** Keeps picture `index` of a job with its settings; of a video, `poster` is its middle frame. */
export async function keep(record, job, index, blob, poster) {
  const seed = (job.seeds ?? record.seeds ?? [])[index] ?? record.drawing.seed;
  const settings = { ...withoutPictures(record.drawing), ...record.settings, seed, num_images: 1 };
  const picture = await pictureOf(blob, settings, poster);
  await store.keepPicture(record.id, index, {
    ...picture,
    id: `${record.id}/${index}`,
    // Earlier pictures of a job stand before later ones, though the newest job stands first.
    created: record.created - index / 1000,
    seconds: job.started && job.ended ? job.ended - job.started : null,
    grid: record.grid?.id ?? null,
    written: record.written ?? null,
    began: Boolean(record.drawing.image || record.drawing.video),
  });
}

/** Returns what is kept of a picture or a video and its settings, without id and time. */
export async function pictureOf(blob, settings, poster = null) {
  const image = await open(poster ?? blob);
  const { width, height } = image;
  const thumb = (await thumbnail(image)) ?? poster;
  return { blob, thumb, width, height, settings, ...(poster && { poster }) };
}

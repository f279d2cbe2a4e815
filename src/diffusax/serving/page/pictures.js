/** Reads, cuts, scales and writes pictures, on canvases of the browser. */

/** Returns an ImageBitmap of a file or blob, upright; raises an Error with one sentence for people. */
export async function open(blob) {
  try {
    return await createImageBitmap(blob);
  } catch {
    throw new Error(`${blob.name ?? "The file"} is not a picture that this browser reads; use a PNG, JPEG or WebP.`);
  }
}

/** The most pixels of a side that are kept of a picture that a drawing begins with, or looks at. */
const MOST = 2048;

/** Returns a picture and its ImageBitmap, scaled down where it is larger than any drawing needs. */
export async function bounded(blob) {
  const image = await open(blob);
  const scale = MOST / Math.max(image.width, image.height);
  if (scale >= 1) return [blob, image];
  const small = await resized(blob, Math.round(image.width * scale), Math.round(image.height * scale));
  return [small, await open(small)];
}

/** Returns the width and height of a picture or a video, and the seconds that a video takes. */
export async function measured(blob) {
  if (!blob.type.startsWith("video/")) {
    const { width, height } = await open(blob);
    return { width, height };
  }
  const video = document.createElement("video");
  await new Promise((resolve, reject) => {
    const failed = `${blob.name ?? "The file"} is no video that this browser plays; use an MP4 with H.264, a WebM or a GIF.`;
    video.onloadedmetadata = () => (video.videoWidth ? resolve() : reject(new Error(failed)));
    video.onerror = () => reject(new Error(failed));
    Object.assign(video, { muted: true, preload: "metadata", src: urlOf(blob) });
  });
  const { videoWidth: width, videoHeight: height, duration: seconds } = video;
  return { width, height, seconds };
}

export function canvasOf(width, height) {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  return canvas;
}

export const toBlob = (canvas, type = "image/png", quality) =>
  new Promise((resolve, reject) => {
    const made = (blob) => (blob ? resolve(blob) : reject(new Error("The picture is too large for this browser.")));
    canvas.toBlob(made, type, quality);
  });

/** The part (x, y, width, height) of a picture that has the shape of `width` to `height`, from its middle. */
export function cover(sourceWidth, sourceHeight, width, height) {
  const scale = Math.min(sourceWidth / width, sourceHeight / height);
  const w = width * scale;
  const h = height * scale;
  return [(sourceWidth - w) / 2, (sourceHeight - h) / 2, w, h];
}

/** Returns a canvas of this size with the middle of a picture, on `background`. */
export function fitted(image, width, height, background = "#fff") {
  const canvas = canvasOf(width, height);
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.fillStyle = background;
  context.fillRect(0, 0, width, height);
  context.drawImage(image, ...cover(image.width, image.height, width, height), 0, 0, width, height);
  return canvas;
}

/** Returns a picture in this size as a PNG. */
export const resized = async (blob, width, height) => toBlob(fitted(await open(blob), width, height));

/** Returns a small WebP of a large picture, or null for one that is small already. */
export async function thumbnail(image, side = 512) {
  const scale = side / Math.min(image.width, image.height);
  if (scale >= 0.75) return null;
  return toBlob(fitted(image, Math.round(image.width * scale), Math.round(image.height * scale)), "image/webp", 0.85);
}

/** Returns a file as a data URI. */
export const dataUri = (blob) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });

/** The size in multiples of `multiple` with about `area` pixels and the shape of `width` to `height`. */
export function sizeLike(width, height, area, multiple) {
  const scale = Math.sqrt(area / (width * height));
  const round = (side) => Math.max(multiple, Math.round((side * scale) / multiple) * multiple);
  return [round(width), round(height)];
}

const urls = new WeakMap();

/** Returns the address of a blob for `src`; the same blob has the same address. */
export function urlOf(blob) {
  if (!urls.has(blob)) urls.set(blob, URL.createObjectURL(blob));
  return urls.get(blob);
}

/** Lets the memory behind a blob's address go. */
export function forget(blob) {
  if (blob && urls.has(blob)) URL.revokeObjectURL(urls.get(blob));
  urls.delete(blob);
}

/** Says whether a file is a video, or a GIF, which mostly moves. */
export const isClip = ({ type }) => type.startsWith("video/") || type === "image/gif";

/** Says whether a picture of the gallery is a video. */
export const isVideo = ({ poster }) => Boolean(poster);

/** Returns the blob of a picture, or of a video's middle frame. */
export const stillOf = ({ blob, poster }) => poster ?? blob;

/** How long a video is, in words. */
export const lengthOf = ({ num_frames: frames, fps }) => `${Number((frames / fps).toPrecision(2))} s`;

/** Returns the ending of a blob's file. */
const ending = ({ type }) => ({ "video/mp4": "mp4", "image/webp": "webp" })[type] ?? "png";

/** Returns the name of a picture's file: its seed and its prompt's words. */
export function fileName({ blob, settings, enlarged }) {
  const words = (settings.prompt ?? "").toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "");
  return `${settings.seed}-${words.slice(0, 60) || "picture"}${enlarged ? "-large" : ""}.${ending(blob)}`;
}

/** Lets the user save a file. */
export function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

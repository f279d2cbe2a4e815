/** Reads the texts that tools write into PNG files (PNG specification, 11.3.4: tEXt, zTXt, iTXt). */

const SIGNATURE = [137, 80, 78, 71, 13, 10, 26, 10];

/** Returns the texts of a PNG by keyword; none for what is no PNG or breaks off. */
export async function texts(blob) {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  const found = {};
  if (SIGNATURE.some((byte, at) => bytes[at] !== byte)) return found;
  const view = new DataView(bytes.buffer);
  for (let at = 8; at + 12 <= bytes.length; ) {
    const length = view.getUint32(at);
    const kind = latin(bytes.subarray(at + 4, at + 8));
    const data = bytes.subarray(at + 8, at + 8 + length);
    if (data.length < length || kind === "IEND") break;
    const read = { tEXt: plain, zTXt: compressed, iTXt: international }[kind];
    if (read) {
      const end = data.indexOf(0);
      // A broken text is no reason to refuse the others.
      if (end > 0) found[latin(data.subarray(0, end))] ??= await read(data.subarray(end + 1)).catch(() => undefined);
    }
    at += length + 12;
  }
  return found;
}

const latin = (bytes) => new TextDecoder("latin1").decode(bytes);
const utf8 = (bytes) => new TextDecoder().decode(bytes);

/** Latin-1 by the specification; a text that is valid UTF-8 was meant as such. */
async function plain(data) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(data);
  } catch {
    return latin(data);
  }
}

const compressed = async (data) => plain(await inflate(data.subarray(1)));

async function international(data) {
  const packed = data[0] === 1;
  const language = data.indexOf(0, 2);
  const translated = data.indexOf(0, language + 1);
  const text = data.subarray(translated + 1);
  return utf8(packed ? await inflate(text) : text);
}

async function inflate(data) {
  const stream = new Blob([data]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

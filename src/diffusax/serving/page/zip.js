/** Writes zip archives whose files are stored as they are: pictures are packed already (PKWARE's APPNOTE.TXT). */

const VERSION = 20;
/** Names are in UTF-8. */
const UTF8 = 0x0800;

const TABLE = Uint32Array.from({ length: 256 }, (_, at) => {
  let value = at;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? 0xedb88320 ^ (value >>> 1) : value >>> 1;
  return value;
});

/** Returns the CRC-32 of bytes. */
export function crc32(bytes) {
  let value = 0xffffffff;
  for (const byte of bytes) value = TABLE[(value ^ byte) & 0xff] ^ (value >>> 8);
  return (value ^ 0xffffffff) >>> 0;
}

/** Returns the bytes of numbers, [[bytes, value]], little-endian. */
function bytesOf(numbers) {
  const view = new DataView(new ArrayBuffer(numbers.reduce((sum, [size]) => sum + size, 0)));
  let at = 0;
  for (const [size, value] of numbers) {
    if (size === 2) view.setUint16(at, value, true);
    else view.setUint32(at, value, true);
    at += size;
  }
  return view.buffer;
}

/** Returns the time and the date of MS-DOS, in steps of two seconds. */
function dosTime(date) {
  const time = (date.getHours() << 11) | (date.getMinutes() << 5) | (date.getSeconds() >> 1);
  const year = Math.min(Math.max(date.getFullYear(), 1980), 2107);
  return [time, ((year - 1980) << 9) | ((date.getMonth() + 1) << 5) | date.getDate()];
}

/**
 * Returns a zip of files [{name, blob, date}] as a Blob, which refers to theirs: one file at a time is in memory.
 * It must have less than 4 GB and 65,536 files. `told(done)` hears how many are read.
 */
export async function zip(files, told = () => {}) {
  const [parts, directory] = [[], []];
  let offset = 0;
  for (const [at, { name, blob, date = new Date() }] of files.entries()) {
    const path = new TextEncoder().encode(name);
    const crc = crc32(new Uint8Array(await blob.arrayBuffer()));
    const [time, day] = dosTime(date);
    const shared = [[2, VERSION], [2, UTF8], [2, 0], [2, time], [2, day], [4, crc], [4, blob.size], [4, blob.size]];
    const head = bytesOf([[4, 0x04034b50], ...shared, [2, path.length], [2, 0]]);
    const rest = [[2, path.length], [2, 0], [2, 0], [2, 0], [2, 0], [4, 0], [4, offset]];
    parts.push(head, path, blob);
    directory.push(bytesOf([[4, 0x02014b50], [2, VERSION], ...shared, ...rest]), path);
    offset += head.byteLength + path.length + blob.size;
    told(at + 1);
  }
  const size = directory.reduce((sum, { byteLength }) => sum + byteLength, 0);
  const count = files.length;
  const end = bytesOf([[4, 0x06054b50], [2, 0], [2, 0], [2, count], [2, count], [4, size], [4, offset], [2, 0]]);
  return new Blob([...parts, ...directory, end], { type: "application/zip" });
}

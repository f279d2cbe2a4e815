/** Ctrl and an arrow weigh the chosen words of a prompt: (words:1.1), as in A1111. */

const WEIGHED = /^\((.*):(\d*\.?\d+)\)$/s;

/** Returns [text, start, end] with the words between `start` and `end`, or those around, weighed by `by` more. */
export function weigh(text, start, end, by) {
  if (start === end) [start, end] = around(text, start);
  while (start < end && /\s/.test(text[start])) start++;
  while (end > start && /\s/.test(text[end - 1])) end--;
  if (start === end) return null;
  const before = text.slice(0, start);
  const after = text.slice(end);
  const open = /\($/.test(before);
  const close = /^:(\d*\.?\d+)\)/.exec(after);
  const words = text.slice(start, end);
  if (open && close) return join(before.slice(0, -1), words, Number(close[1]) + by, after.slice(close[0].length));
  const inside = WEIGHED.exec(words);
  if (inside) return join(before, inside[1], Number(inside[2]) + by, after);
  return join(before, words, 1 + by, after);
}

function join(before, words, weight, after) {
  const value = Math.max(0, Math.round(weight * 100) / 100);
  const middle = value === 1 ? words : `(${words}:${value})`;
  const start = before.length + (value === 1 ? 0 : 1);
  return [before + middle + after, start, start + words.length];
}

/** The word, or what stands in brackets with a weight, around a place. */
function around(text, at) {
  for (const match of text.matchAll(/\([^()]*:\d*\.?\d+\)|[^\s,()]+/g))
    if (match.index <= at && at <= match.index + match[0].length) return [match.index, match.index + match[0].length];
  return [at, at];
}

/** Lets a text field weigh words by keys. */
export function listen(area) {
  area.addEventListener("keydown", (event) => {
    const by = { ArrowUp: 0.1, ArrowDown: -0.1 }[event.key];
    if (!by || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    const weighed = weigh(area.value, area.selectionStart, area.selectionEnd, by);
    if (!weighed) return;
    const [text, start, end] = weighed;
    area.value = text;
    area.setSelectionRange(start, end);
    area.dispatchEvent(new Event("input", { bubbles: true }));
  });
}

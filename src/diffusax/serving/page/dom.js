/** Small things for the page's elements, messages and numbers. */

/** Returns the first element of a selector. */
export const $ = (selector, root = document) => root.querySelector(selector);

/**
 * Makes an element. Properties are set as properties; those with a dash and `role`, `for` and `list`
 * as attributes; `onclick` and the like add listeners; children are elements or texts, and empty ones are left out.
 */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name.includes("-") || ["role", "for", "list", "form"].includes(name)) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Makes a button that is no submit button. */
export const button = (text, onclick, properties = {}) => h("button", { type: "button", onclick, ...properties }, text);

/** Makes the options of a select from [{name, title}] or names. */
export const options = (entries) =>
  entries.map((one) => h("option", { value: one.name ?? one }, one.title || (one.name ?? one)));

/** Puts a label before a control, which has an id. */
export const labelled = (label, control, properties = {}) =>
  h("div", { className: "field", ...properties }, h("label", { for: control.id }, label), control);

/** Tells screen readers something, without a change on the screen. */
export function say(text) {
  const place = $("#say");
  // The same words twice are only read twice if the element was empty between.
  place.textContent = "";
  setTimeout(() => (place.textContent = text), 30);
}

/**
 * Shows a message for a while, with buttons `{text: function}`. Errors stay until they are closed, or until what they
 * are `about` is mended; so do other messages with `seconds` of Infinity.
 */
export function notice(text, { actions = {}, error = false, seconds = 8, about = "" } = {}) {
  const close = () => note.remove();
  const buttons = Object.entries(actions).map(([name, act]) => button(name, () => (close(), act())));
  const note = h(
    "div",
    { className: error ? "notice error" : "notice", role: error ? "alert" : "status", data: { about } },
    h("p", {}, text),
    ...buttons,
    button("×", close, { "aria-label": "Close this message", className: "icon" }),
  );
  // Outside of an open dialog nothing can be clicked.
  const dialog = $("dialog[open]");
  const place = dialog ?? $("#notices");
  dialog?.addEventListener("close", () => note.isConnected && $("#notices").append(note), { once: true });
  for (const other of document.querySelectorAll(".notice")) if ($("p", other).textContent === text) other.remove();
  place.append(note);
  if (!error && seconds < Infinity) setTimeout(close, seconds * 1000);
  return close;
}

/** Takes the messages away about something that is well again. */
export function mended(about) {
  for (const note of document.querySelectorAll(".notice")) if (note.dataset.about === about) note.remove();
}

/** Writes seconds as people say them: "3 s", "2 min", "1 h 5 min". */
export function duration(seconds) {
  if (seconds < 10) return `${Math.max(seconds, 0.1).toFixed(1)} s`;
  if (seconds < 99) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** Returns a name that nobody else has; `crypto.randomUUID` is missing on plain http. */
export const newId = () =>
  [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

/** Returns a random seed of 32 bits. */
export const newSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

/** Returns text that is short enough for a label. */
export const short = (text, most = 80) => (text.length <= most ? text : `${text.slice(0, most - 1)}…`);

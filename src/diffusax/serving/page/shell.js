/** Keys of the whole page, the theme, and the settings that a phone folds away. */

import { $ } from "./dom.js";

const THEMES = { auto: "", dark: "dark", light: "light" };
export const narrow = () => matchMedia("(max-width: 56rem)").matches;

/** Lets the page listen to its keys and buttons. */
export function listen() {
  document.addEventListener("keydown", key);
  $("#ask-help").addEventListener("click", () => $("#help").showModal());
  $("#theme").addEventListener("click", () => theme(true));
  $("#fold").addEventListener("click", () => fold($("#fold").getAttribute("aria-expanded") === "true"));
  theme(false);
  fold(true);
}

/** Folds the settings away, or shows them; a wide window shows them always. */
export function fold(away) {
  $("#fold").setAttribute("aria-expanded", String(!away));
  $("#settings").classList.toggle("folded", away);
}

function key(event) {
  if (document.querySelector("dialog[open]")) return;
  const control = event.ctrlKey || event.metaKey;
  if (control && event.key === "Enter") {
    event.preventDefault();
    $("#settings").requestSubmit();
  }
  if (control || event.altKey || event.target.closest("input, textarea, select")) return;
  const place = { "/": "#prompt", f: "#find" }[event.key];
  if (place) event.preventDefault(), $(place).focus();
  if (event.key === "?") $("#help").showModal();
}

function theme(next) {
  const root = document.documentElement;
  const names = Object.keys(THEMES);
  const now = names.find((name) => THEMES[name] === (root.dataset.theme ?? ""));
  const chosen = next ? names[(names.indexOf(now) + 1) % names.length] : now;
  root.dataset.theme = THEMES[chosen];
  localStorage.setItem("diffusax-theme", THEMES[chosen]);
  $("#theme").textContent = `Theme: ${chosen}`;
}

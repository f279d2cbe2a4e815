/** Two pictures on each other, with a slider between them. */

import { $, button, h, short } from "./dom.js";
import { stillOf, urlOf } from "./pictures.js";

const dialog = $("#compare");

const differing = (one, other) =>
  ["prompt", "negative_prompt", "model", "sampler", "num_inference_steps", "guidance_scale", "strength", "seed"].filter(
    (name) => (one.settings[name] ?? "") !== (other.settings[name] ?? ""),
  );

/** Shows two pictures, of which the older one stands at the left. */
export function compare(one, other) {
  const [left, right] = one.created < other.created ? [one, other] : [other, one];
  show(left, right, 50);
  if (!dialog.open) dialog.showModal();
}

function show(left, right, part) {
  const images = [left, right].map((picture, at) => {
    const alt = `${at ? "Right" : "Left"}: ${short(picture.settings.prompt, 120) || "a picture"}`;
    return h("img", { src: urlOf(stillOf(picture)), alt });
  });
  const small = Math.max(left.width, right.width) <= 256;
  for (const image of images) image.classList.toggle("pixels", small);
  const line = h("div", { className: "line-between" });
  const both = h("div", { className: "both" }, images[1], images[0], line);
  both.style.aspectRatio = `${left.width} / ${left.height}`;
  both.style.setProperty("--shape", left.width / left.height);
  const follow = () => {
    images[0].style.clipPath = `inset(0 ${100 - range.value}% 0 0)`;
    line.style.left = `${range.value}%`;
    range.setAttribute("aria-valuetext", `${range.value} % of the left picture`);
  };
  const range = h("input", { type: "range", min: 0, max: 100, value: part, oninput: follow });
  range.setAttribute("aria-label", "How much of the left picture is shown");
  const facts = differing(left, right).map((name) =>
    h("tr", {}, h("th", { scope: "row" }, NAMES[name]), ...[left, right].map((one) => h("td", {}, value(one, name)))),
  );
  const swap = button("Swap", () => {
    show(right, left, 100 - range.value);
    $(".swap", dialog).focus();
  });
  swap.classList.add("swap");
  dialog.replaceChildren(
    h("div", { className: "bar" }, h("h2", { id: "compare-title" }, "Compare"), swap, closer()),
    h("div", { className: "stand" }, h("div", { className: "over" }, both, range)),
    facts.length
      ? h("table", { className: "differences" }, h("caption", {}, "What differs: left, right"), h("tbody", {}, facts))
      : h("p", { className: "hint" }, "Their settings are the same."),
  );
  follow();
}

const NAMES = {
  ...{ prompt: "Prompt", negative_prompt: "Negative prompt", model: "Model", sampler: "Sampler", seed: "Seed" },
  ...{ num_inference_steps: "Steps", guidance_scale: "Guidance", strength: "Strength" },
};
const value = ({ settings }, name) => short(`${settings[name] ?? "none"}`, 300);

const closer = () => button("×", () => dialog.close(), { className: "icon", "aria-label": "Close" });

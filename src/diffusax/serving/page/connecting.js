/** Whether the server answers, what it can do, and the key that it asks for. */

import * as api from "./api.js";
import { $, mended, notice, say } from "./dom.js";

const STATES = {
  wait: "Looking for the server …",
  here: "Connected",
  away: "The server does not answer; trying again …",
  key: "The server asks for a key",
};

/** Learns what the server can do, now and whenever that may have changed: calls `use(capabilities)`. */
export async function connect(use) {
  async function learn() {
    let can;
    try {
      can = await api.capabilities();
    } catch (error) {
      if (error.status === 401) askKey();
      else if (!(error instanceof api.Away)) notice(error.message, { error: true, about: "server" });
      return;
    }
    mended("server");
    await use(can);
    $("#ask-key").hidden = !can.api_key_needed;
    if (can.api_key_needed && !api.key.get()) askKey();
  }

  function connected() {
    const { state } = api.connection;
    const place = $("#connection");
    place.dataset.state = state;
    place.textContent = STATES[state];
    say(STATES[state]);
    if (state === "key") askKey();
    if (state === "here" && place.dataset.before === "away") learn();
    place.dataset.before = state;
  }

  api.connection.addEventListener("change", connected);
  // Models and LoRAs may have come while nobody looked.
  document.addEventListener("visibilitychange", () => document.hidden || learn());
  $("#key").addEventListener("close", () => {
    if ($("#key").returnValue !== "use") return;
    api.key.set($("#key-value").value.trim());
    learn();
  });
  $("#ask-key").addEventListener("click", askKey);
  await learn();
}

function askKey() {
  const dialog = $("#key");
  if (dialog.open) return;
  $("#key-value").value = api.key.get();
  dialog.returnValue = "";
  dialog.showModal();
}

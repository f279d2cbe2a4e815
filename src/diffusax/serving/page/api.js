/** Speaks with the server: requests with the API key, jobs, events, and whether it answers at all. */

const ROOT = new URL("..", import.meta.url);
const KEY = "diffusax-key";

/** What the server refused, in its own sentence. */
export class Refused extends Error {
  constructor(status, { message, param, code } = {}, retryAfter = null) {
    super(message ?? `The server answered with status ${status}.`);
    Object.assign(this, { status, param, code, retryAfter });
  }

  /** Whether the same request may succeed a little later: the queue is full, or the server restarts. */
  get passing() {
    return [429, 502, 503, 504].includes(this.status);
  }
}

/** The server does not answer. */
export class Away extends Error {}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** Says "here", "away" or "key" (a key is missing or wrong) whenever that changes. */
export const connection = new EventTarget();
connection.state = "wait";

let probing = null;

function tell(state) {
  if (state === "away") probing ??= probe();
  if (connection.state === state) return;
  connection.state = state;
  connection.dispatchEvent(new Event("change"));
}

/** Asks every few seconds until the server answers again. */
async function probe() {
  for (let wait = 500; ; wait = Math.min(wait * 1.6, 8000)) {
    await new Promise((resolve) => setTimeout(resolve, wait));
    try {
      const answer = await fetch(new URL("health", ROOT), { cache: "no-store" });
      if (answer.status < 500) break;
    } catch {
      // It is still away.
    }
  }
  probing = null;
  tell("here");
}

/** Resolves when the server answers and has a key that it takes. */
export function here() {
  if (connection.state === "here" || connection.state === "wait") return Promise.resolve();
  return new Promise((resolve) => {
    connection.addEventListener("change", function listener() {
      if (connection.state !== "here") return;
      connection.removeEventListener("change", listener);
      resolve();
    });
  });
}

async function request(path, { signal, ...options } = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let answer;
  try {
    answer = await fetch(new URL(path, ROOT), { cache: "no-store", ...options, headers, signal });
  } catch (error) {
    if (signal?.aborted) throw error;
    tell("away");
    throw new Away("The server does not answer.");
  }
  if (answer.ok) {
    tell("here");
    return answer;
  }
  const body = await answer.json().catch(() => ({}));
  if (answer.status === 401) tell("key");
  else if ([502, 504].includes(answer.status)) tell("away");
  else tell("here");
  const told = typeof body.error === "string" ? { message: body.detail || body.error } : body.error;
  throw new Refused(answer.status, told, Number(answer.headers.get("Retry-After")) || null);
}

const json = async (path, options) => (await request(path, options)).json();

export const capabilities = () => json("capabilities");
export const job = (id) => json(`jobs/${encodeURIComponent(id)}`);
export const jobs = async () => (await json("jobs")).jobs;
export const cancel = (id) => request(`jobs/${encodeURIComponent(id)}`, { method: "DELETE" });
const result = async (id, kind, rest) => (await request(`jobs/${encodeURIComponent(id)}/${kind}/${rest}`)).blob();
export const image = (id, index) => result(id, "images", index);
export const video = (id, index) => result(id, "videos", index);
/** Returns the middle frame of a video. */
export const poster = (id, index) => result(id, "videos", `${index}?variant=thumbnail`);

const posted = (path, value) =>
  json(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(value) });

/** Hands a drawing in, whose pictures are data URIs; returns the job. */
export const submit = (drawing) => posted("jobs", drawing);

/** Returns {tokens, most} of {prompt, model, prompt_weighting}; null where the model is not loaded. */
export const tokens = (fields) => posted("tokens", fields);

/** Returns the picture beside a LoRA's file. */
export const loraPreview = async (name) =>
  (await request(`loras/${name.split("/").map(encodeURIComponent).join("/")}/preview`)).blob();

/** Returns the styles that lie on the server: [{name, prompt, negative_prompt}]. */
export const styles = () => json("sdapi/v1/prompt-styles");

/** Returns the names of what makes pictures larger. */
export const upscalers = async () => (await json("sdapi/v1/upscalers")).map(({ name }) => name);

/** Makes a picture, a data URI, larger without a prompt; returns base64. */
export const upscale = async (image, upscaler_1, upscaling_resize) =>
  (await posted("sdapi/v1/extra-single-image", { image, upscaler_1, upscaling_resize })).image;

/** Lets the server read the settings of an image or a video. */
export function pngInfo(file) {
  const body = new FormData();
  body.append("image", file, "picture");
  return json("png-info", { method: "POST", body });
}

/** Milliseconds without a sign of life, which the server gives every 15 seconds, after which a stream is dead. */
const SILENCE = 45_000;

/**
 * Follows a job: calls `onEvent(kind, data)` for each event until the server closes the stream, or `stream` (an
 * AbortController) is aborted. EventSource would be shorter, but it cannot send a key.
 */
export async function events(id, onEvent, stream) {
  const { signal } = stream;
  let silence = null;
  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(() => stream.abort(), SILENCE);
  };
  heard();
  try {
    await read(id, onEvent, signal, heard);
  } finally {
    clearTimeout(silence);
  }
}

async function read(id, onEvent, signal, heard) {
  const answer = await request(`jobs/${encodeURIComponent(id)}/events`, {
    signal,
    headers: { Accept: "text/event-stream" },
  });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (!signal.aborted) tell("away");
      throw error;
    }
    if (part.done) return;
    heard();
    const blocks = (rest + part.value).split(/\r?\n\r?\n/);
    rest = blocks.pop();
    for (const block of blocks) emit(block, onEvent);
  }
}

function emit(block, onEvent) {
  let kind = "message";
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith("event:")) kind = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  if (data.length) onEvent(kind, JSON.parse(data.join("\n")));
}

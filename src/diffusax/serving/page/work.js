/**
 * Hands drawings to the server and follows them until their pictures are kept.
 *
 * A drawing is first written into the browser's store as a job record, and leaves it when its pictures lie there:
 * so it survives a reload, a full queue and a server that restarts. All tabs follow all records.
 *
 * A record: {id, created, drawing, state: "unsent" | "sent" | "failed", remote, settings, seeds, error, kept, then,
 * grid}, where `kept` are the indices of its pictures that were kept.
 * `then` makes the records that follow a finished job ({scale, strength, num_inference_steps}: draw it larger).
 */

import * as api from "./api.js";
import { duration, newId, notice, say, short } from "./dom.js";
import { body, largerRecords, withoutPictures } from "./drawing.js";
import { open, thumbnail } from "./pictures.js";
import * as store from "./store.js";

const TAB = newId();
/** Milliseconds after which another tab may hand in what this tab was about to. */
const CLAIM = 10_000;
/** Event streams at once: browsers open six connections to a server, for all tabs together. */
const STREAMS = 2;
/** Milliseconds for which a drawing that the server has forgotten is handed in once more by itself. */
const FRESH = 3_600_000;
const ENDS = ["done", "failed", "cancelled"];

export class Work extends EventTarget {
  /** Records by id, oldest first. */
  records = new Map();
  /** What the server last said of each, by id: {state, position, progress, eta, previews, ...}. */
  status = new Map();
  #streams = new Map();
  /** Records whose pictures are being fetched, and what was said of them meanwhile. */
  #busy = new Set();
  #missed = new Map();
  #sending = false;
  #reading = false;
  #stale = false;
  #wait = 0;
  #polled = 0;

  async start() {
    await this.#read();
    store.changes.addEventListener("change", ({ detail }) => detail.store === "jobs" && this.#read());
    api.connection.addEventListener("change", () => this.#changed());
    for (;;) {
      await this.#tick().catch((error) => this.#complain(error));
      await new Promise((resolve) => setTimeout(resolve, document.hidden ? 2000 : 600));
    }
  }

  /** Hands in drawings: [{drawing, then, grid, id}]. */
  async add(drawings) {
    let created = Date.now();
    for (const one of drawings) {
      const record = { id: newId(), ...one, created: created++, state: "unsent", claim: { tab: TAB, at: Date.now() } };
      await store.put("jobs", record);
      this.records.set(record.id, record);
    }
    this.#changed();
    this.#send();
  }

  async cancel(id) {
    const record = this.records.get(id);
    if (!record) return;
    if (record.state !== "sent") return void (await store.remove("jobs", id));
    this.status.set(id, { ...this.status.get(id), state: "cancelling" });
    this.#changed();
    try {
      await this.#cancelSent(record.remote);
    } catch (error) {
      if (error.status === 404) await store.remove("jobs", id);
      else notice(error.message, { error: true });
    }
  }

  /** Cancels a job, as soon as the server answers. */
  async #cancelSent(remote) {
    for (;;) {
      await api.here();
      try {
        return await api.cancel(remote);
      } catch (error) {
        if (!(error instanceof api.Away)) throw error;
      }
    }
  }

  /** Hands a drawing in that has failed. */
  async again(id) {
    await store.update("jobs", id, (record) => this.#unsent(record));
    this.#send();
  }

  #unsent(record) {
    const claim = { tab: TAB, at: Date.now() };
    Object.assign(record, { state: "unsent", remote: null, error: null, kept: [], claim });
    this.status.delete(record.id);
  }

  #changed(id) {
    this.dispatchEvent(new CustomEvent("change", { detail: id }));
  }

  #complain(error) {
    if (error instanceof api.Away || error.name === "AbortError") return;
    if (error instanceof api.Refused && (error.passing || error.status === 401)) return;
    console.warn(error);
    const full = error.name === "QuotaExceededError";
    notice(full ? "The browser's store is full; delete pictures." : error.message, { error: true });
  }

  /** Reads the records anew: once more where something changed meanwhile. */
  async #read() {
    this.#stale = true;
    if (this.#reading) return;
    this.#reading = true;
    try {
      while (this.#stale) {
        this.#stale = false;
        await this.#readOnce();
      }
    } finally {
      this.#reading = false;
    }
  }

  async #readOnce() {
    const records = await store.all("jobs");
    this.records = new Map(records.map((record) => [record.id, record]));
    for (const id of this.status.keys()) if (!this.records.has(id)) this.status.delete(id);
    for (const [id, stream] of this.#streams) if (!this.records.has(id)) stream.abort();
    this.#changed();
    this.#send();
  }

  // Handing in

  async #send() {
    if (this.#sending || Date.now() < this.#wait) return;
    this.#sending = true;
    try {
      for (;;) {
        await api.here();
        const next = [...this.records.values()].find((record) => record.state === "unsent");
        if (!next || !(await this.#claim(next.id)) || !(await this.#submit(next))) return;
      }
    } catch (error) {
      this.#complain(error);
    } finally {
      this.#sending = false;
    }
  }

  #claim(id) {
    return store.update("jobs", id, (record) => {
      const free = !record.claim || record.claim.tab === TAB || Date.now() - record.claim.at > CLAIM;
      if (record.state !== "unsent" || !free) return false;
      record.claim = { tab: TAB, at: Date.now() };
    });
  }

  /** Hands in one record; returns whether to go on with the next. */
  async #submit(record) {
    let answer;
    try {
      answer = await api.submit(await body(record.drawing));
    } catch (error) {
      if (!(error instanceof api.Refused)) throw error;
      if (error.status === 401) return true;
      if (error.passing) {
        this.#wait = Date.now() + 1000 * Math.min(error.retryAfter ?? 2, 30);
        this.status.set(record.id, { state: "waiting" });
        this.#changed(record.id);
        return false;
      }
      await this.#failed(record, error.message);
      return true;
    }
    const { settings, seeds, warnings } = answer;
    if (warnings?.length) notice(warnings.join("; "), { seconds: 20 });
    const sent = { state: "sent", remote: answer.id, settings, seeds, claim: null };
    const written = await store.update("jobs", record.id, (one) => void Object.assign(one, sent));
    if (!written) await api.cancel(answer.id);
    else {
      this.records.set(record.id, written);
      this.#apply(written, answer);
    }
    return true;
  }

  async #failed(record, error) {
    await store.update("jobs", record.id, (one) => void Object.assign(one, { state: "failed", error }));
    say(`Failed: ${error}`);
  }

  // Following

  async #tick() {
    this.#send();
    const sent = [...this.records.values()].filter((one) => one.state === "sent" && !this.#busy.has(one.id));
    if (!sent.length || api.connection.state === "away" || api.connection.state === "key") return;
    const rank = (one) => (this.status.get(one.id)?.state === "running" ? 0 : 1);
    const first = document.hidden ? [] : sent.toSorted((a, b) => rank(a) - rank(b)).slice(0, STREAMS);
    for (const [id, stream] of this.#streams) if (!first.some((one) => one.id === id)) stream.abort();
    for (const one of first) if (!this.#streams.has(one.id)) this.#stream(one);
    const others = sent.filter((one) => !this.#streams.has(one.id));
    // The list of many jobs is long, so it is asked for less often.
    if (!others.length || Date.now() - this.#polled < 20 * others.length) return;
    this.#polled = Date.now();
    await this.#poll(others);
  }

  async #poll(records) {
    const known = new Map((await api.jobs()).map((job) => [job.id, job]));
    for (const record of records) {
      const job = known.get(record.remote);
      if (job) await this.#apply(record, job);
      else await this.#look(record);
    }
  }

  /** Asks for one job, which the server may have forgotten. */
  async #look(record) {
    try {
      await this.#apply(record, await api.job(record.remote));
    } catch (error) {
      if (error.status !== 404) throw error;
      await this.#lost(record);
    }
  }

  async #lost(record) {
    const again = !record.resent && Date.now() - record.created < FRESH;
    await store.update("jobs", record.id, (one) => {
      if (one.remote !== record.remote || one.state !== "sent") return false;
      if (again) this.#unsent(one), (one.resent = true);
      else Object.assign(one, { state: "failed", error: "The server has forgotten this drawing; draw it again." });
    });
  }

  async #stream(record) {
    const stream = new AbortController();
    this.#streams.set(record.id, stream);
    try {
      await api.events(
        record.remote,
        (kind, data) => this.#apply(record, data).catch((error) => this.#complain(error)),
        stream,
      );
    } catch (error) {
      if (error.status === 404) await this.#lost(record);
      else this.#complain(error);
    } finally {
      this.#streams.delete(record.id);
    }
  }

  /** Takes in what the server says of a job. */
  async #apply(record, job) {
    if (this.#busy.has(record.id)) return void this.#missed.set(record.id, job);
    const before = this.status.get(record.id);
    const state = before?.state === "cancelling" && !ENDS.includes(job.state) ? "cancelling" : job.state;
    this.status.set(record.id, { ...before, ...job, state, previews: previews(before, job) });
    if (before?.state !== state && state === "running" && !record.grid) say(`Drawing: ${short(record.drawing.prompt)}`);
    this.#changed(record.id);
    const ended = ENDS.includes(job.state);
    if (!ended && !(job.images?.some(Boolean) && !record.then)) return;
    this.#busy.add(record.id);
    try {
      const images = await this.#fetch(record, job);
      if (ended) await this.#end(record, job, images);
    } catch (error) {
      if (error.status !== 404) throw error;
      await this.#lost(record);
    } finally {
      this.#busy.delete(record.id);
    }
    const missed = this.#missed.get(record.id);
    this.#missed.delete(record.id);
    if (missed && !ended) await this.#apply(record, missed);
  }

  /** Fetches and keeps the job's pictures that are there; returns those of a job that is drawn larger afterwards. */
  async #fetch(record, job) {
    const images = [];
    for (const [index, there] of (job.images ?? []).entries()) {
      if (!there || this.records.get(record.id)?.kept?.includes(index)) continue;
      const blob = await api.image(record.remote, index);
      if (record.then) images[index] = blob;
      else await keep(record, job, index, blob);
    }
    return images;
  }

  async #end(record, job, images) {
    if (job.state === "failed") return this.#failed(record, job.error?.message ?? "The drawing failed.");
    const successors = job.state === "done" && record.then ? await largerRecords(record, job.seeds, images) : [];
    for (const one of successors) Object.assign(one, { state: "unsent", claim: { tab: TAB, at: Date.now() } });
    const mine = await store.replaceJob(record.id, successors);
    if (!mine) return;
    if (job.state === "cancelled") say("Cancelled.");
    else if (!successors.length && !record.grid) say(`Drawn${took(job)}: ${short(record.drawing.prompt)}`);
  }
}

const took = (job) => (job.started && job.ended ? ` in ${duration(job.ended - job.started)}` : "");

const previews = (before, { preview, index = 0 }) =>
  preview ? { ...before?.previews, [index]: preview } : before?.previews;

async function keep(record, job, index, blob) {
  const image = await open(blob);
  const seed = (job.seeds ?? record.seeds ?? [])[index] ?? record.drawing.seed;
  const settings = { ...withoutPictures(record.drawing), ...record.settings, seed, num_images: 1 };
  await store.keepPicture(record.id, index, {
    id: `${record.id}/${index}`,
    // Earlier pictures of a job stand before later ones, though the newest job stands first.
    created: record.created - index / 1000,
    blob,
    thumb: await thumbnail(image),
    width: image.width,
    height: image.height,
    settings,
    seconds: job.started && job.ended ? job.ended - job.started : null,
    grid: record.grid?.id ?? null,
  });
}

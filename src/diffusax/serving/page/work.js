/**
 * Hands drawings to the server and follows them until their pictures are kept.
 *
 * A drawing is first written into the browser's store as a job record, and leaves it when its pictures lie there:
 * so it survives a reload, a full queue and a server that restarts. All tabs follow all records.
 *
 * A record: {id, created, drawing, state: "unsent" | "sent" | "failed", remote, settings, seeds, error, kept, then,
 * grid, set, written}, where `kept` are the indices of its pictures that were kept, `set` names those that were asked
 * for together, and `written` is what people wrote where the drawing has what was made of it. A failed record has the
 * `others` of its set that were not handed in for the same fault.
 * `then` makes the records that follow a finished job ({scale, strength, num_inference_steps}: draw it larger).
 */

import * as api from "./api.js";
import { duration, newId, notice, say, short } from "./dom.js";
import { body, largerRecords } from "./drawing.js";
import { Following } from "./following.js";
import { keep, previews } from "./keeping.js";
import * as store from "./store.js";

const TAB = newId();
/** Milliseconds after which another tab may hand in what this tab was about to. */
const CLAIM = 10_000;
/** Milliseconds for which a drawing that the server has forgotten is handed in once more by itself. */
const FRESH = 3_600_000;
const ENDS = ["done", "failed", "cancelled"];

/** Sorts records by when they were asked for; those of one set go down by thousandths, see `add`. */
export const inOrder = (a, b) => Math.ceil(a.created) - Math.ceil(b.created) || b.created - a.created;

export class Work extends EventTarget {
  /** Records by id, oldest first. */
  records = new Map();
  /** What the server last said of each, by id: {state, position, progress, eta, previews, ...}. */
  status = new Map();
  /** The id of the failed record whose drawing the form has, to be mended. */
  mending = null;
  /** Records whose pictures are being fetched, and what was said of them meanwhile. */
  busy = new Set();
  #missed = new Map();
  #sending = false;
  #reading = false;
  #stale = false;
  #wait = 0;
  #last = 0;
  #following = new Following(this);

  async start() {
    await this.#read();
    store.changes.addEventListener("change", ({ detail }) => detail.store === "jobs" && this.#read());
    api.connection.addEventListener("change", () => this.#changed());
    for (;;) {
      this.#send();
      await this.#following.tick().catch((error) => this.complain(error));
      await new Promise((resolve) => setTimeout(resolve, document.hidden ? 2000 : 600));
    }
  }

  /** Drops the failed record whose drawing was handed in again from the form. */
  async mend() {
    if (this.mending) await store.remove("jobs", this.mending);
    this.mending = null;
  }

  /** Hands in drawings, [{drawing, then, grid, id, written}], the first of which shall stand first. */
  async add(drawings) {
    const now = Math.max(Date.now(), this.#last + 1);
    this.#last = now;
    const claim = { tab: TAB, at: Date.now() };
    const made = drawings.map((one, at) => ({ id: newId(), ...one, created: now - at / 1000, state: "unsent", claim }));
    await store.putAll("jobs", made);
    for (const record of made) this.records.set(record.id, record);
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
    let others = [];
    await store.update("jobs", id, (record) => {
      others = record.others ?? [];
      this.#unsent(record);
    });
    await store.putAll("jobs", others);
    this.#send();
  }

  #unsent(record) {
    const claim = { tab: TAB, at: Date.now() };
    Object.assign(record, { state: "unsent", remote: null, error: null, kept: [], others: null, claim });
    this.status.delete(record.id);
  }

  #changed(id) {
    this.dispatchEvent(new CustomEvent("change", { detail: id }));
  }

  complain(error) {
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
    this.#following.forget();
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
        const [next] = [...this.records.values()].filter(({ state }) => state === "unsent").sort(inOrder);
        if (!next || !(await this.#claim(next.id)) || !(await this.#submit(next))) return;
      }
    } catch (error) {
      this.complain(error);
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
      await this.#failed(record, error.message, await this.#withdraw(record));
      return true;
    }
    const { settings, seeds, warnings } = answer;
    if (warnings?.length) notice(warnings.join("; "), { seconds: 20 });
    const sent = { state: "sent", remote: answer.id, settings, seeds, claim: null };
    const written = await store.update("jobs", record.id, (one) => void Object.assign(one, sent));
    if (!written) await api.cancel(answer.id);
    else {
      this.records.set(record.id, written);
      this.apply(written, answer);
    }
    return true;
  }

  /** Takes back what would be refused for the same fault; returns it. */
  async #withdraw({ id, set }) {
    const others = [];
    for (const other of [...this.records.values()].sort(inOrder)) {
      if (!set || other.set !== set || other.id === id || other.state !== "unsent") continue;
      if (await store.remove("jobs", other.id)) others.push(other);
      this.records.delete(other.id);
    }
    return others;
  }

  async #failed(record, error, others = null) {
    await store.update("jobs", record.id, (one) => void Object.assign(one, { state: "failed", error, others }));
    say(`Failed: ${error}`);
  }

  // Following

  async lost(record) {
    const again = !record.resent && Date.now() - record.created < FRESH;
    await store.update("jobs", record.id, (one) => {
      if (one.remote !== record.remote || one.state !== "sent") return false;
      if (again) this.#unsent(one), (one.resent = true);
      else Object.assign(one, { state: "failed", error: "The server has forgotten this drawing; draw it again." });
    });
  }

  /** Takes in what the server says of a job. */
  async apply(record, job) {
    if (this.busy.has(record.id)) return void this.#missed.set(record.id, job);
    const before = this.status.get(record.id);
    const state = before?.state === "cancelling" && !ENDS.includes(job.state) ? "cancelling" : job.state;
    this.status.set(record.id, { ...before, ...job, state, previews: previews(before, job) });
    if (before?.state !== state && state === "running" && !record.grid) say(`Drawing: ${short(record.drawing.prompt)}`);
    this.#changed(record.id);
    const ended = ENDS.includes(job.state);
    if (!ended && !(results(job).some(Boolean) && !record.then)) return;
    this.busy.add(record.id);
    try {
      const images = await this.#fetch(record, job);
      if (ended) await this.#end(record, job, images);
    } catch (error) {
      if (error.status !== 404) throw error;
      await this.lost(record);
    } finally {
      this.busy.delete(record.id);
    }
    const missed = this.#missed.get(record.id);
    this.#missed.delete(record.id);
    if (missed && !ended) await this.apply(record, missed);
  }

  /** Fetches and keeps the job's pictures that are there; returns those of a job that is drawn larger afterwards. */
  async #fetch(record, job) {
    const images = [];
    for (const [index, there] of results(job).entries()) {
      if (!there || this.records.get(record.id)?.kept?.includes(index)) continue;
      const moves = job.videos?.length;
      const blob = await (moves ? api.video : api.image)(record.remote, index);
      if (moves) await keep(record, job, index, blob, await api.poster(record.remote, index));
      else if (record.then) images[index] = blob;
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

/** The addresses of a job's pictures, or videos, that are there; null for the others. */
const results = ({ images, videos }) => (videos?.length ? videos : (images ?? []));

const took = (job) => (job.started && job.ended ? ` in ${duration(job.ended - job.started)}` : "");

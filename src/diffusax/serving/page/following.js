/** Follows what was handed in: some of it by event streams, which have previews, the rest by asking for the list. */

import * as api from "./api.js";

/** Event streams at once: browsers open six connections to a server, and hidden tabs have no streams. */
const STREAMS = 4;

export class Following {
  #streams = new Map();
  #polled = 0;

  /** `work` has records, status, busy, apply(record, job), lost(record) and complain(error). */
  constructor(work) {
    this.work = work;
  }

  /** Ends the streams of records that are gone. */
  forget() {
    for (const [id, stream] of this.#streams) if (!this.work.records.has(id)) stream.abort();
  }

  async tick() {
    const { records, status, busy } = this.work;
    const sent = [...records.values()].filter((one) => one.state === "sent" && !busy.has(one.id));
    if (!sent.length || api.connection.state === "away" || api.connection.state === "key") return;
    const rank = (one) => (status.get(one.id)?.state === "running" ? 0 : 1);
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
      if (job) await this.work.apply(record, job);
      else await this.#look(record);
    }
  }

  /** Asks for one job, which the server may have forgotten. */
  async #look(record) {
    try {
      await this.work.apply(record, await api.job(record.remote));
    } catch (error) {
      if (error.status !== 404) throw error;
      await this.work.lost(record);
    }
  }

  async #stream(record) {
    const stream = new AbortController();
    const { work } = this;
    this.#streams.set(record.id, stream);
    try {
      await api.events(
        record.remote,
        (kind, data) => work.apply(record, data).catch((error) => work.complain(error)),
        stream,
      );
    } catch (error) {
      if (error.status === 404) await work.lost(record);
      else work.complain(error);
    } finally {
      this.#streams.delete(record.id);
    }
  }
}

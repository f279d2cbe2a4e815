/**
 * What the browser keeps: pictures, grids, jobs that are not finished, and the settings last written.
 * All tabs share it; each hears of what another changes.
 */

const channel = "BroadcastChannel" in window ? new BroadcastChannel("diffusax") : null;

/** Says "change" with `detail` {store, id} whenever this or another tab changed something. */
export const changes = new EventTarget();

channel?.addEventListener("message", ({ data }) => changes.dispatchEvent(new CustomEvent("change", { detail: data })));

function changed(store, id) {
  const detail = { store, id };
  changes.dispatchEvent(new CustomEvent("change", { detail }));
  channel?.postMessage(detail);
}

const opened = new Promise((resolve, reject) => {
  const opening = indexedDB.open("diffusax", 1);
  opening.onupgradeneeded = () => {
    const db = opening.result;
    for (const name of ["jobs", "pictures", "grids"])
      db.createObjectStore(name, { keyPath: "id" }).createIndex("created", "created");
    db.createObjectStore("drafts", { keyPath: "id" });
  };
  opening.onsuccess = () => resolve(opening.result);
  opening.onerror = () => reject(opening.error);
});

/** Runs `work(stores...)` in one transaction and returns what it returns when all of it is written. */
async function transaction(names, mode, work) {
  const tx = (await opened).transaction(names, mode);
  const done = new Promise((resolve, reject) => {
    tx.oncomplete = resolve;
    tx.onabort = () => reject(tx.error);
  });
  const result = work(...names.map((name) => tx.objectStore(name)));
  const value = await result;
  await done;
  return value;
}

const asked = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

export const get = (name, id) => transaction([name], "readonly", (store) => asked(store.get(id)));
export const all = (name) => transaction([name], "readonly", (store) => asked(store.index("created").getAll()));

/** Writes a record, in the place of the one with its id. */
export async function put(name, record) {
  await transaction([name], "readwrite", (store) => asked(store.put(record)));
  if (name !== "drafts") changed(name, record.id);
}

/** Writes several new records together: who reads sees all of them or none. */
export async function putAll(name, records) {
  await transaction([name], "readwrite", async (store) => {
    for (const record of records) store.put(record);
  });
  for (const { id } of records) changed(name, id);
}

/** Deletes a record; returns whether it was there, which is true for one tab only. */
export async function remove(name, id) {
  const was = await transaction([name], "readwrite", async (store) => {
    const there = (await asked(store.getKey(id))) !== undefined;
    if (there) store.delete(id);
    return there;
  });
  if (was) changed(name, id);
  return was;
}

/** Changes a record by `change(record)` and returns it; null where it is gone or `change` returns false. */
export async function update(name, id, change) {
  const record = await transaction([name], "readwrite", async (store) => {
    const found = await asked(store.get(id));
    if (!found || change(found) === false) return null;
    store.put(found);
    return found;
  });
  if (record) changed(name, id);
  return record;
}

/** Puts a job's successors in its place; does nothing where another tab has done it. */
export async function replaceJob(id, successors) {
  const was = await transaction(["jobs"], "readwrite", async (store) => {
    const there = (await asked(store.getKey(id))) !== undefined;
    if (there) {
      store.delete(id);
      for (const job of successors) store.put(job);
    }
    return there;
  });
  if (was) changed("jobs", id);
  return was;
}

/** Returns up to `count` records that fit, the newest first, of those made before `before`. */
export const newest = (name, count, before = Infinity, fits = () => true) =>
  transaction([name], "readonly", (store) => {
    const found = [];
    const range = before === Infinity ? null : IDBKeyRange.upperBound(before, true);
    const cursor = store.index("created").openCursor(range, "prev");
    return new Promise((resolve, reject) => {
      cursor.onerror = () => reject(cursor.error);
      cursor.onsuccess = () => {
        if (cursor.result && fits(cursor.result.value)) found.push(cursor.result.value);
        if (!cursor.result || found.length === count) resolve(found);
        else cursor.result.continue();
      };
    });
  });

/**
 * Keeps picture `index` of a job, once: neither where another tab has ended the job already, nor again where the
 * user has deleted it since.
 */
export async function keepPicture(job, index, picture) {
  const kept = await transaction(["jobs", "pictures"], "readwrite", async (jobs, pictures) => {
    const record = await asked(jobs.get(job));
    if (!record || record.kept?.includes(index)) return false;
    jobs.put({ ...record, kept: [...(record.kept ?? []), index] });
    pictures.put(picture);
    return true;
  });
  if (!kept) return;
  // In this order, so that the picture is known before the job says that it is kept.
  changed("pictures", picture.id);
  changed("jobs", job);
}

/** Returns the pictures of a grid. */
export const ofGrid = (id) =>
  transaction(["pictures"], "readonly", (store) => asked(store.getAll(IDBKeyRange.bound(`${id}:`, `${id};`))));

// Requests to the gateway, and their answers.

const TIMEOUT_MS = 8000;
const KEY = /^[\w-]+$/;
const PINNED = 1;
const ARRIVING = 2;

/** Failure of a request, with a message for the user. `locked`: the key is refused, so do not retry. */
export class NoAnswer extends Error {
  constructor(message, locked = false) {
    super(message);
    this.locked = locked;
  }
}

/** Fetch the fleet's current state. Throws NoAnswer. */
export async function askFleet(key) {
  if (!KEY.test(key)) throw new NoAnswer("This is no key: a key has only letters, digits, - and _.", true);
  let answer;
  let body = null;
  try {
    answer = await fetch("admin/v1/fleet", {
      headers: { authorization: `Bearer ${key}` },
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    body = await answer.json();
  } catch {
    if (answer?.ok !== false) throw new NoAnswer("The gateway does not answer.");
  }
  if (answer.ok) return decoded(body);
  const why = body?.error?.message ?? "";
  if (answer.status === 401) throw new NoAnswer(`The gateway refuses this key: ${why || "it is not known"}.`, true);
  if (answer.status === 403) throw new NoAnswer("This is a tenant’s key. This page needs an admin’s: lorikeet keys create --admin --read-only makes one that may only read.", true);
  throw new NoAnswer(`The gateway answers ${answer.status}${why ? `: ${why}` : "."}`);
}

/** Replace indexes in the answer by the tenants and adapters that they stand for. */
function decoded(fleet) {
  const adapters = fleet.adapters.map(([tenant, name, version, rank, digest]) => ({
    tenant: fleet.tenants[tenant],
    name: `${fleet.tenants[tenant]}/${name}@${version}`,
    short: `${name}@${version}`,
    rank,
    digest,
  }));
  const replicas = fleet.replicas.map((replica) => ({
    ...replica,
    blocks: replica.blocks.map(([adapter, leases, marks, ...places]) => block(adapters[adapter], leases, marks, places)),
  }));
  return { ...fleet, replicas };
}

function block(adapter, leases, marks, places) {
  const pieces = [];
  let size = 0;
  for (let at = 0; at < places.length; at += 2) {
    pieces.push({ offset: places[at], size: places[at + 1] });
    size += places[at + 1];
  }
  return { ...adapter, leases, pinned: Boolean(marks & PINNED), arriving: Boolean(marks & ARRIVING), pieces, size };
}

// Requests to the gateway.

const TIMEOUT_MS = 8000;
const KEY = /^[\w.-]+$/;

/**
 * Failure of a request, with a message for the user. `status`: the answer's, 0 without one.
 * `locked`: the key is refused, so do not retry.
 */
export class NoAnswer extends Error {
  constructor(message, status = 0, locked = false) {
    super(message);
    this.status = status;
    this.locked = locked;
  }
}

/** Fetch the JSON at a path, with a key. Throws NoAnswer. */
export async function get(key, path) {
  if (!KEY.test(key)) throw new NoAnswer("This is no key: a key has only letters, digits, -, _ and dots.", 0, true);
  let answer;
  let body = null;
  try {
    answer = await fetch(path, {
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
  if (answer.ok) return body;
  const why = body?.error?.message ?? "";
  if (answer.status === 401) throw new NoAnswer(`The gateway refuses this key: ${why || "it is not known"}.`, 401, true);
  throw new NoAnswer(`The gateway answers ${answer.status}${why ? `: ${why}` : "."}`, answer.status, answer.status === 403);
}

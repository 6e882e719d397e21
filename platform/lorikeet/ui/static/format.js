// Numbers for people.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const NOTHING = "–";

export function bytes(count) {
  let unit = 0;
  for (; count >= 1024 && unit < UNITS.length - 1; unit += 1) count /= 1024;
  return `${unit === 0 || count >= 100 ? count.toFixed(0) : count.toFixed(1)} ${UNITS[unit]}`;
}

/** "5.1 of 8.0 GiB": both in the larger one's unit. */
export function bytesOf(used, total) {
  const unit = Math.max(0, Math.min(4, Math.floor(Math.log2(Math.max(1, total)) / 10)));
  const [few, all] = [used, total].map((count) => count / 1024 ** unit);
  const digits = all >= 100 || unit === 0 ? 0 : 1;
  return `${few.toFixed(digits)} of ${all.toFixed(digits)} ${UNITS[unit]}`;
}

export function milliseconds(ms) {
  if (ms === null || ms === undefined) return NOTHING;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
}

export function seconds(s) {
  if (s < 10 && !Number.isInteger(s)) return `${s.toFixed(1)} s`;
  return s < 120 ? `${s.toFixed(0)} s` : `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
}

export function percent(share) {
  return share === null || share === undefined ? NOTHING : `${(100 * share).toFixed(share > 0.995 || share < 0.1 ? 1 : 0)}%`;
}

export function rate(perSecond) {
  return perSecond === null || perSecond === undefined ? NOTHING : perSecond.toFixed(perSecond < 10 ? 1 : 0);
}

export const count = (number) => number.toLocaleString("en");

export const counted = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

export const clockTime = (unixS) => new Date(1000 * unixS).toLocaleTimeString("en-GB");

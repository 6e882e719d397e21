// Formats of numbers.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const NOTHING = "–";

export function bytes(count) {
  let unit = 0;
  for (; count >= 1024 && unit < UNITS.length - 1; unit += 1) count /= 1024;
  return `${unit === 0 || count >= 100 ? count.toFixed(0) : count.toFixed(1)} ${UNITS[unit]}`;
}

/** Format "5.1 of 8.0 GiB", both in the larger number's unit unless the smaller one is below 1. */
export function bytesOf(used, total) {
  const unit = Math.max(0, Math.min(4, Math.floor(Math.log2(Math.max(1, total)) / 10)));
  const [few, all] = [used, total].map((count) => count / 1024 ** unit);
  if (used && few < 1) return `${bytes(used)} of ${bytes(total)}`;
  const digits = all >= 100 || unit === 0 ? 0 : 1;
  return `${few.toFixed(digits)} of ${all.toFixed(digits)} ${UNITS[unit]}`;
}

export function milliseconds(ms) {
  if (ms === null || ms === undefined) return NOTHING;
  if (ms < 1000) return `${ms.toFixed(ms < 10 && !Number.isInteger(ms) ? 1 : 0)} ms`;
  return `${(ms / 1000).toFixed(ms >= 10000 || ms % 1000 === 0 ? 0 : 2)} s`;
}

export function seconds(s) {
  if (s < 10 && !Number.isInteger(s)) return `${s.toFixed(1)} s`;
  return s < 120 ? `${s.toFixed(0)} s` : `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
}

export function percent(share) {
  if (share === null || share === undefined) return NOTHING;
  const digits = (share > 0 && share < 0.1) || (share > 0.99 && share < 1) ? 1 : 0;
  return `${(100 * share).toFixed(digits)}%`;
}

export function rate(perSecond) {
  if (perSecond === null || perSecond === undefined) return NOTHING;
  return Number.isInteger(perSecond) || perSecond >= 10 ? perSecond.toFixed(0) : perSecond.toFixed(1);
}

export const count = (number) => number.toLocaleString("en");

export const counted = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

export const clockTime = (unixS) => new Date(1000 * unixS).toLocaleTimeString("en-GB");

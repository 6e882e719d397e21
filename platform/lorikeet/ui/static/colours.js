// A colour for each tenant: the same everywhere on the page, and usually on every visit.

// Hues far apart under common colour blindness; three tones of each differ in lightness as well.
const HUES = [252, 60, 168, 352, 105, 305, 215, 28];
const TONES = { light: [[0.58, 0.14], [0.44, 0.11], [0.73, 0.12]], dark: [[0.72, 0.13], [0.56, 0.12], [0.86, 0.09]] };
const COLOURS = HUES.length * TONES.light.length;

export const darkness = matchMedia("(prefers-color-scheme: dark)");

const numbers = new Map();
const taken = new Set();

/**
 * Give each new tenant a colour: the hue of its name's hash, or the next free one. A second and
 * third tone are used once all hues are taken.
 */
export function introduce(tenants) {
  for (const tenant of tenants) {
    if (numbers.has(tenant)) continue;
    const tone = Math.floor(numbers.size / HUES.length) % TONES.light.length;
    let hue = hash(tenant) % HUES.length;
    while (numbers.size < COLOURS && taken.has(tone * HUES.length + hue)) hue = (hue + 1) % HUES.length;
    taken.add(tone * HUES.length + hue);
    numbers.set(tenant, tone * HUES.length + hue);
  }
}

export function colourOf(tenant) {
  const number = numbers.get(tenant) ?? 0;
  const [lightness, chroma] = TONES[darkness.matches ? "dark" : "light"][Math.floor(number / HUES.length)];
  return `oklch(${lightness} ${chroma} ${HUES[number % HUES.length]})`;
}

/** FNV-1a. */
function hash(text) {
  let value = 0x811c9dc5;
  for (const byte of new TextEncoder().encode(text)) value = Math.imul(value ^ byte, 0x01000193) >>> 0;
  return (value ^ (value >>> 15)) >>> 0;
}

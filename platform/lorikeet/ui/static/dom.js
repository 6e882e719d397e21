// Helpers for the document. They insert text only as text: names are never markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Make an element. String properties become attributes, functions become event listeners. */
export function make(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

/** Make an SVG element, as `make` does. */
export function makeSvg(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

/** Set the text if it changes: screen readers announce unchanged text again otherwise. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const shown = new WeakMap();

/** Replace an element's children if its data changes: unchanged text stays selected. */
export function fill(home, data, children) {
  const text = JSON.stringify(data);
  if (shown.get(home) === text) return;
  shown.set(home, text);
  home.replaceChildren(...children());
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

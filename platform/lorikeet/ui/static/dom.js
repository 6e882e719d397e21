// The few things this page does with the document. Text is always text: names are never markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element: properties that are strings become attributes, functions listeners. */
export function make(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

/** The same in SVG. */
export function makeSvg(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

/** Set the text if it is another: what has not changed is not announced again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const shown = new WeakMap();

/** Fill a place anew if it has to show something else: what stays can be read and selected. */
export function fill(home, what, children) {
  const text = JSON.stringify(what);
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

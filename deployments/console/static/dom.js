// Small helpers to build elements: text goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

export function byId(id) {
  return document.getElementById(id);
}

export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

export function count(number, one, many = `${one}s`) {
  return `${number} ${number === 1 ? one : many}`;
}

// Three digits at most, which is what these figures are good for.
export function figure(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (value >= 100) return String(Math.round(value));
  return value.toFixed(value >= 10 ? 1 : 2).replace(/\.?0+$/, "");
}

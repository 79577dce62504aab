// Rounds as columns of marks. A column is one block of one row, read upwards: accepted drafts, the target's own token,
// then what was drafted for nothing. Each kind has a shape of its own, so that colour is never the only sign.

import { svg } from "./dom.js";

const GAP = 1;

export const MARKS = {
  accepted: (x, y, w, h) => `M${x} ${y}h${w}v${h - GAP}h${-w}z`,
  walked: (x, y, w, h) => `M${x + 0.5} ${y + 0.5}h${w - 1}v${h - GAP - 1}h${1 - w}z`,
  dropped: (x, y, w, h) => `M${x + w / 4} ${y + h / 2 - GAP}h${w / 2}`,
  bonus: diamond,
  classic: circle,
};

function diamond(x, y, w, h) {
  const r = Math.min(w / 2, Math.max(h, 5) * 0.72);
  const [cx, cy] = [x + w / 2, y + (h - GAP) / 2];
  return `M${cx} ${cy - r}L${cx + r} ${cy}L${cx} ${cy + r}L${cx - r} ${cy}z`;
}

function circle(x, y, w, h) {
  const r = Math.min(w / 2, Math.max(h, 5) * 0.5);
  const [cx, cy] = [x + w / 2, y + (h - GAP) / 2];
  return `M${cx - r} ${cy}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`;
}

// The marks of one row-round from the bottom up.
export function stack({ drafted, walked, accepted, own }) {
  const marks = Array(accepted).fill("accepted");
  if (drafted === 0) return [...marks, ...Array(own).fill("classic")];
  if (own > 0) marks.push("bonus");
  while (marks.length < walked) marks.push("walked");
  while (marks.length < drafted) marks.push("dropped");
  return marks;
}

// Draws columns at [x, y of the bottom, row-round]; one path for each kind of mark, however many there are.
export function paths(columns, cell) {
  const found = new Map();
  for (const [x, bottom, round] of columns) {
    stack(round).forEach((mark, i) => {
      const path = MARKS[mark](x, bottom - (i + 1) * cell.height, cell.width, cell.height);
      found.set(mark, (found.get(mark) ?? "") + path);
    });
  }
  // The bonus lies over its neighbours.
  const order = ["dropped", "walked", "accepted", "classic", "bonus"];
  return order.filter((m) => found.has(m)).map((m) => svg("path", { class: `mark-${m}`, d: found.get(m) }));
}

export function resize(node, width, height) {
  node.setAttribute("viewBox", `0 0 ${width} ${height}`);
  node.setAttribute("width", width);
  node.setAttribute("height", height);
}

// The rounds of one answer side by side.
export function strip(node, rounds, cell = { width: 12, height: 5 }) {
  const step = cell.width + 4;
  const height = Math.max(2, ...rounds.map((round) => stack(round).length)) * cell.height + 4;
  resize(node, Math.max(1, rounds.length) * step, height + 2);
  const columns = rounds.map((round, i) => [i * step + 2, height, round]);
  node.replaceChildren(...paths(columns, cell));
}

export function swatch(node) {
  const [size, mark] = [14, node.dataset.mark];
  resize(node, size, size);
  const path = MARKS[mark](1, 2, 12, 11);
  node.replaceChildren(svg("path", { class: `mark-${mark}`, d: path }));
}

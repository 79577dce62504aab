// The live windows, by router: a line for each row, a column for each round.

import { paths, resize } from "./blocks.js";
import { byId, count, element, svg } from "./dom.js";

const NAME_WIDTH = 62;
const GAP = 3;
const NARROWEST = 11; // of a column
const MOST_ROWS = 16;
const RECENT = 10; // rounds that a row stays after its end

// [label, drafted, walked, accepted, own, finish] as the server sends it.
function played([label, drafted, walked, accepted, own, finish]) {
  return { label, drafted, walked, accepted, own, finish };
}

export class Windows {
  constructor(labels) {
    this.labels = labels; // rows of this page's own answers
    this.frame = byId("routers");
    this.cards = new Map();
  }

  show(state) {
    const missing = byId("missing");
    missing.hidden = state.missing === 0;
    const notice = `${count(state.missing, "router")} did not answer and ${state.missing === 1 ? "is" : "are"} left out.`;
    if (!missing.hidden && missing.textContent !== notice) missing.textContent = notice;
    const shown = new Map();
    const sections = state.routers.map((router) => this.#router(router, state.routers.length > 1, shown));
    byId("no-windows").hidden = shown.size > 0;
    for (const [id, card] of this.cards) if (!shown.has(id)) card.node.remove();
    this.cards = shown;
    const wanted = sections.filter((section) => section !== null);
    if (!same(wanted, [...this.frame.children])) this.frame.replaceChildren(...wanted);
  }

  #router(router, hasSiblings, shown) {
    if (!router.windows.length && !hasSiblings) return null;
    const id = `router-${router.engine}`;
    const section = byId(id) ?? element("section", { id, class: "router" }, element("h3"), element("div"));
    const [title, list] = section.children;
    title.hidden = !hasSiblings;
    const facts = [count(router.windows.length, "window"), `${router.running} playing`, `${router.waiting} waiting`];
    title.textContent = `Router ${router.engine} · ${facts.join(" · ")}`;
    for (const window of router.windows) {
      const card = this.cards.get(window.id) ?? new WindowCard(window.id);
      shown.set(window.id, card);
      card.show(window, this.labels);
      if (card.node.parentNode !== list) list.append(card.node);
    }
    return section;
  }
}

function same(one, other) {
  return one.length === other.length && one.every((node, i) => node === other[i]);
}

class WindowCard {
  constructor(id) {
    this.title = element("h4", {}, `Window ${id}`);
    this.facts = element("p", { class: "quiet" });
    this.picture = svg("svg", { class: "blocks", role: "img" });
    this.frame = element("div", { class: "picture" }, this.picture);
    this.rest = element("p", { class: "quiet", hidden: "" });
    this.node = element("article", { class: "window", "data-window": id });
    this.node.append(this.title, this.facts, this.frame, this.rest);
  }

  show(window, labels) {
    const last = window.rounds.at(-1);
    this.node.dataset.round = last?.number ?? 0;
    this.facts.textContent = factsOf(window, last);
    if (last) this.#draw(window.rounds, labels);
  }

  #draw(rounds, labels) {
    const width = Math.max(220, this.frame.clientWidth);
    const step = Math.max(NARROWEST + GAP, Math.min(24, Math.floor((width - NAME_WIDTH) / rounds.length)));
    const seen = rounds.slice(-Math.max(1, Math.floor((width - NAME_WIDTH) / step)));
    const names = rowNames(seen, labels);
    const lines = names.slice(0, MOST_ROWS);
    const cell = { width: step - GAP, height: lines.length > 8 ? 3 : lines.length > 4 ? 4 : 5 };
    const line = Math.max(...seen.map((round) => round.width), 3) * cell.height + 12;
    const columns = [];
    const texts = lines.map((name, i) => nameOf(name, (i + 0.5) * line + 4, labels.has(name)));
    const rules = lines.map((_, i) => svg("path", { class: "rule", d: `M0 ${(i + 1) * line + 4.5}h${width}` }));
    seen.forEach((round, i) => {
      const x = NAME_WIDTH + i * step;
      for (const row of round.rows.map(played)) {
        const at = lines.indexOf(row.label);
        if (at >= 0) columns.push([x, (at + 1) * line, row]);
      }
    });
    resize(this.picture, width, lines.length * line + 8);
    this.picture.setAttribute("aria-label", spoken(seen));
    this.picture.replaceChildren(...rules, ...texts, ...paths(columns, cell));
    this.rest.hidden = names.length <= MOST_ROWS;
    this.rest.textContent = `${count(names.length - MOST_ROWS, "more row")} in these rounds.`;
  }
}

function factsOf(window, last) {
  const facts = [count(window.rows, "row")];
  if (last) facts.push(`round ${last.number}`, `width ${last.width}`, `${last.ms} ms`);
  facts.push(window.takes_rows ? "takes new rows" : "takes no new rows");
  if (window.lane) facts.push(`lane ${window.lane}`);
  return facts.join(" · ");
}

// This page's own rows first. Others that ended a while ago make room.
function rowNames(rounds, labels) {
  const recent = rounds.slice(-RECENT).flatMap((round) => round.rows.map(([label]) => label));
  const own = rounds.flatMap((round) => round.rows.map(([label]) => label)).filter((label) => labels.has(label));
  const names = new Set([...own, ...recent]);
  return [...names].sort((a, b) => labels.has(b) - labels.has(a) || (a < b ? -1 : 1));
}

function nameOf(name, y, isOwn) {
  const text = svg("text", { class: isOwn ? "name own" : "name", x: 0, y });
  text.textContent = isOwn ? "▸ you" : name;
  return text;
}

function spoken(rounds) {
  const rows = rounds.at(-1).rows.map(played);
  const sum = (key) => rows.reduce((total, row) => total + row[key], 0);
  return `Last round: ${count(rows.length, "row")}, ${sum("drafted")} drafted, ${sum("walked")} walked, ${sum("accepted")} accepted`;
}

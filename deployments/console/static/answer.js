// One answer as it grows: every token in the colour of its source, its rounds, and what they came to.

import { strip } from "./blocks.js";
import { count, element, figure, svg } from "./dom.js";

const SOURCES = {
  accepted: "accepted draft",
  bonus: "bonus, the target’s own",
  classic: "classic, the target’s own without drafts",
};

export class Answer {
  constructor() {
    this.text = "";
    this.label = null; // of its row, in the live windows
    this.rounds = [];
    this.tokens = [];
    this.startedAt = performance.now();
    this.firstAt = null;
    this.endedAt = null;
    this.said = element("p", { class: "said" });
    this.strip = svg("svg", { class: "blocks", role: "img" });
    this.frame = element("div", { class: "strip", tabindex: "0", role: "group", "aria-label": "Rounds of this answer" });
    this.frame.append(this.strip);
    this.frame.hidden = true;
    this.summary = element("p", { class: "quiet summary" });
    this.rows = element("tbody");
    this.table = roundTable(this.rows);
    this.table.hidden = true;
    this.node = element("div", { class: "answer" }, this.said, this.frame, this.summary, this.table);
  }

  // Takes a chunk of the stream.
  take(chunk) {
    const [choice] = chunk.choices;
    if (!choice) return;
    const round = choice.dflash;
    if (round?.tokens) this.#takeRound(round);
    else if (choice.delta?.content) this.#append({ source: "unknown", text: "" }, choice.delta.content);
    this.text += choice.delta?.content ?? "";
  }

  #takeRound({ row, round, tokens, text }) {
    this.label = row;
    this.firstAt ??= performance.now();
    if (round) this.rounds.push({ ...round, own: tokens.length - round.accepted });
    const number = this.rounds.length;
    for (const { id, source } of tokens) this.tokens.push({ id, source, number, text: "" });
    // Text that was held back belongs to an earlier token: its number says to which.
    for (const [index, piece] of text) this.#append(this.tokens[index], piece);
    if (!round) return;
    this.#addRow(round, this.tokens.slice(-tokens.length));
    strip(this.strip, this.rounds);
    this.strip.setAttribute("aria-label", `${count(number, "round")}; the last one kept ${round.accepted} of ${round.drafted} drafts`);
    this.frame.hidden = false;
    this.frame.scrollLeft = this.frame.scrollWidth;
  }

  #append(token, text) {
    if (!token.node) {
      token.node = element("span", { class: "token", "data-source": token.source });
      if (token.number) token.node.title = `${SOURCES[token.source]} · round ${token.number} · token ${token.id}`;
      this.said.append(token.node);
    }
    token.text += text;
    token.node.textContent = token.text;
  }

  #addRow(round, tokens) {
    const kept = tokens.map((token) => token.source).join(", ");
    const numbers = [this.rounds.length, round.width, round.drafted, round.walked, round.accepted, tokens.length];
    const cells = numbers.map((number) => element("td", {}, String(number)));
    this.rows.append(element("tr", { title: kept }, ...cells));
  }

  // The stream is over; `note` says why, if it did not end by itself.
  end(note = "") {
    this.endedAt = performance.now();
    this.summary.replaceChildren(note ? element("strong", {}, `${note} `) : "", this.#figures());
    this.table.hidden = this.rounds.length === 0;
  }

  #figures() {
    if (!this.tokens.length) return "";
    const accepted = this.tokens.filter((token) => token.source === "accepted").length;
    const [rounds, own] = [this.rounds.length, this.tokens.length - accepted];
    const seconds = (this.endedAt - this.firstAt) / 1000;
    const parts = [
      `${count(this.tokens.length, "token")} in ${count(rounds, "round")}: ${count(accepted, "accepted draft")} and ` +
        `${own} of the target’s own.`,
    ];
    if (rounds) parts.push(`${figure(accepted / rounds)} drafts kept a round.`);
    if (seconds > 0.05) parts.push(`${figure(this.tokens.length / seconds)} tokens a second.`);
    return parts.join(" ");
  }
}

function roundTable(rows) {
  const heads = ["Round", "Width", "Drafted", "Walked", "Accepted", "Tokens"];
  const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)));
  const table = element("table", {}, element("thead", {}, head), rows);
  const frame = element("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Rounds, in numbers" }, table);
  return element("details", { class: "rounds" }, element("summary", {}, "Round by round"), frame);
}

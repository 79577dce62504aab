// The last minute in four small charts, made of the differences between the counters that came in.

import { byId, element, figure, svg } from "./dom.js";

const SPAN_S = 60;
const RATE_S = 2; // rates are over so long, or single rounds would make them jump
const [WIDTH, HEIGHT] = [240, 56];

const CHARTS = [
  { key: "rate", title: "Tokens a second", unit: "tok/s" },
  { key: "kept", title: "Drafts accepted", unit: "a row-round" },
  { key: "width", title: "Block width", unit: "tokens, mean" },
  { key: "waiting", title: "Queue", unit: "waiting" },
];

export class Charts {
  constructor() {
    this.samples = []; // what the server counted, when it came
    this.points = [];
    this.views = CHARTS.map((chart) => new ChartView(chart));
    byId("charts").replaceChildren(...this.views.map((view) => view.node));
  }

  take(state, now = performance.now() / 1000) {
    const sample = { now, routers: new Map(state.routers.map((router) => [router.engine, router])) };
    const before = this.samples.findLast((old) => old.now <= now - RATE_S) ?? this.samples[0];
    this.samples.push(sample);
    while (this.samples[0].now < now - 2 * RATE_S - 1) this.samples.shift();
    this.points.push({ now, ...figures(state, before) });
    while (this.points[0].now < now - SPAN_S) this.points.shift();
    for (const view of this.views) view.show(this.points, now, state);
  }
}

// Differences of each router's own counters by its own clock; a router that was not there before has none.
function figures(state, before) {
  const sum = { tokens: 0, row_rounds: 0, drafted: 0, accepted: 0 };
  let rate = null;
  let waiting = 0;
  for (const router of state.routers) {
    waiting += router.waiting;
    const old = before?.routers.get(router.engine);
    if (!old || router.at <= old.at) continue;
    for (const key of Object.keys(sum)) sum[key] += router[key] - old[key];
    rate = (rate ?? 0) + (router.tokens - old.tokens) / (router.at - old.at);
  }
  const perRowRound = (number) => (sum.row_rounds > 0 ? number / sum.row_rounds : null);
  return { rate, waiting, kept: perRowRound(sum.accepted), width: perRowRound(sum.drafted + sum.row_rounds) };
}

class ChartView {
  constructor({ key, title, unit }) {
    this.key = key;
    this.title = title;
    this.unit = unit;
    this.value = element("strong", {}, "–");
    this.note = element("span", { class: "quiet" }, ` ${unit}`);
    this.top = element("span", { class: "axis top-end" });
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line" });
    this.picture = svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.picture.append(this.area, this.line);
    const frame = element("div", { class: "plot" }, this.picture, this.top);
    const axis = element("p", { class: "axis" }, element("span", {}, "60 s ago"), element("span", {}, "now"));
    this.node = element("div", { class: "figure", "data-chart": key }, element("h3", {}, title));
    this.node.append(element("p", {}, this.value, this.note), frame, axis);
  }

  show(points, now, state) {
    const values = points.map((point) => point[this.key]).filter((value) => value !== null);
    const latest = points.at(-1)[this.key];
    const most = nice(Math.max(0, ...values));
    const running = state.routers.reduce((total, router) => total + router.running, 0);
    this.value.textContent = figure(latest);
    this.note.textContent = this.key === "waiting" ? ` ${this.unit}, ${running} playing` : ` ${this.unit}`;
    this.top.textContent = figure(most);
    const peak = values.length ? `, at most ${figure(Math.max(...values))}` : "";
    this.picture.setAttribute("aria-label", `${this.title} in the last minute: now ${figure(latest)}${peak}`);
    const runs = runsOf(points, this.key, now, most);
    this.line.setAttribute("d", runs.map(lineOf).join(""));
    this.area.setAttribute("d", runs.map(areaOf).join(""));
  }
}

// The next of 1, 2, 4, 5, 8, 10, 16, 20, ... so that the axis seldom changes.
function nice(value) {
  if (value <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.6, 2, 4, 5, 8, 10].map((step) => step * power).find((top) => top >= value);
}

// Stretches without a gap, as [x, y].
function runsOf(points, key, now, most) {
  const runs = [[]];
  for (const point of points) {
    if (point[key] === null) {
      if (runs.at(-1).length) runs.push([]);
      continue;
    }
    const x = WIDTH * (1 - (now - point.now) / SPAN_S);
    runs.at(-1).push([x.toFixed(1), (HEIGHT - 2 - (HEIGHT - 6) * (point[key] / most)).toFixed(1)]);
  }
  return runs.filter((run) => run.length);
}

function lineOf(run) {
  const [[x, y], ...rest] = run;
  // A single point is a short stroke, or it could not be seen.
  return `M${x} ${y}` + (rest.length ? rest.map((point) => `L${point.join(" ")}`).join("") : "h1");
}

function areaOf(run) {
  return `${lineOf(run)}V${HEIGHT}H${run[0][0]}z`;
}

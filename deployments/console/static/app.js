// The console: asks for the state twice a second, and hands it to those who show it.

import { KeyNeeded, hasKey, state, useKey } from "./api.js";
import { strip, swatch } from "./blocks.js";
import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { byId } from "./dom.js";
import { Windows } from "./windows.js";

const PERIOD_MS = matchMedia("(prefers-reduced-motion: reduce)").matches ? 2000 : 500;
const PERIOD_AFTER_FAILURE_MS = 2000;
const SAMPLE = { drafted: 7, walked: 4, accepted: 4, own: 1 };

class Console {
  constructor() {
    this.model = "";
    this.isPaused = false;
    this.timer = 0;
    this.status = byId("status");
    this.dialog = byId("key-dialog");
    this.pause = byId("pause");
    this.charts = new Charts();
    this.chat = new Chat(() => this.model, () => this.askForKey());
    this.windows = new Windows(this.chat.labels);
    this.pause.addEventListener("click", () => this.#togglePause());
    byId("give-key").addEventListener("click", () => this.askForKey());
    byId("key-cancel").addEventListener("click", () => this.dialog.close());
    byId("key-form").addEventListener("submit", (event) => this.#takeKey(event));
    document.addEventListener("visibilitychange", () => document.hidden || this.look());
  }

  // One look, and the next one half a second after it.
  async look() {
    clearTimeout(this.timer);
    if (this.isPaused || document.hidden) return;
    let period = PERIOD_MS;
    try {
      this.#show(await state());
    } catch (error) {
      if (error instanceof KeyNeeded) {
        this.askForKey();
        return;
      }
      this.#say("lost", "No connection, trying again");
      period = PERIOD_AFTER_FAILURE_MS;
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.look(), period);
  }

  askForKey() {
    this.#say("locked", "Key needed");
    byId("give-key").hidden = false;
    byId("key-error").textContent = hasKey() ? "That key is not one of this server’s." : "";
    if (!this.dialog.open) this.dialog.showModal();
    byId("key").select();
  }

  #takeKey(event) {
    event.preventDefault();
    useKey(byId("key").value.trim());
    this.dialog.close();
    this.look();
  }

  #show(state) {
    if (this.isPaused) return;
    this.model = state.model;
    const drafter = state.drafter ? `drafter ${state.drafter}, blocks of ${state.block_size}` : "no drafter: every round is classic";
    byId("facts").textContent = `${state.model} · ${drafter}`;
    if (hasKey()) byId("key").value = "";
    byId("give-key").hidden = true;
    this.#say("live", "Live");
    this.charts.take(state);
    this.windows.show(state);
  }

  // Only what changes is said, or it would be read out twice a second.
  #say(kind, text) {
    if (this.status.textContent !== text) this.status.textContent = text;
    this.status.dataset.state = kind;
  }

  #togglePause() {
    this.isPaused = !this.isPaused;
    this.pause.setAttribute("aria-pressed", String(this.isPaused));
    if (this.isPaused) this.#say("paused", "Paused");
    this.look();
  }
}

strip(byId("sample"), [SAMPLE], { width: 22, height: 13 });
document.querySelectorAll("svg[data-mark]").forEach(swatch);
new Console().look();

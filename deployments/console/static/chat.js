// The chat box: one conversation, one answer at a time.

import { Answer } from "./answer.js";
import { KeyNeeded, chat } from "./api.js";
import { byId, element } from "./dom.js";

const NEAR_END = 60; // pixels: who has scrolled further up is reading

export class Chat {
  constructor(model, onKeyNeeded) {
    this.model = model; // a function: the model's name is known once the state is
    this.onKeyNeeded = onKeyNeeded;
    this.messages = [];
    this.current = null;
    this.labels = new Set(); // rows of this page's own answers
    this.log = byId("log");
    this.prompt = byId("prompt");
    this.send = byId("send");
    this.announcer = byId("announce");
    byId("ask").addEventListener("submit", (event) => this.#onSubmit(event));
    byId("fresh").addEventListener("click", () => this.#clear());
    this.prompt.addEventListener("keydown", (event) => this.#onKey(event));
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
  }

  stop() {
    this.current?.abort();
  }

  #onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this.current) byId("ask").requestSubmit();
  }

  #onSubmit(event) {
    event.preventDefault();
    if (this.current) {
      this.stop();
      return;
    }
    const content = this.prompt.value.trim() || this.prompt.placeholder;
    this.prompt.value = "";
    this.#ask(content);
  }

  #clear() {
    this.stop();
    this.messages = [];
    this.log.replaceChildren(element("p", { class: "empty quiet" }, "A new chat: nothing of the last one is sent."));
    this.prompt.focus();
  }

  async #ask(content) {
    const answer = new Answer();
    const question = element("p", { class: "question" }, content);
    this.log.querySelector(".empty")?.remove();
    this.log.append(question, answer.node);
    this.log.scrollTop = this.log.scrollHeight;
    const messages = [...this.messages, { role: "user", content }];
    const controller = (this.current = new AbortController());
    this.#show(true);
    this.announcer.textContent = "Answering.";
    try {
      for await (const chunk of chat(this.#body(messages), controller.signal)) {
        this.#follow(() => answer.take(chunk));
        if (answer.label) this.labels.add(answer.label);
      }
      this.#follow(() => answer.end());
      // A chat that was cleared meanwhile has begun anew.
      if (!controller.signal.aborted) this.messages = [...messages, { role: "assistant", content: answer.text }];
      this.announcer.textContent = `${answer.text} ${answer.summary.textContent}`;
    } catch (error) {
      this.#fail(answer, error, content);
    } finally {
      this.current = null;
      this.#show(false);
    }
  }

  #fail(answer, error, content) {
    const note = error.name === "AbortError" ? "Stopped." : error.message;
    this.#follow(() => answer.end(note));
    this.announcer.textContent = note;
    if (error instanceof KeyNeeded) {
      this.prompt.value ||= content; // nothing is lost: it goes out once the key is there
      this.onKeyNeeded();
    }
  }

  #body(messages) {
    const body = { model: this.model(), messages };
    const [longest, temperature] = [byId("longest"), byId("temperature")];
    if (longest.value) body.max_tokens = longest.valueAsNumber;
    if (temperature.value) body.temperature = temperature.valueAsNumber;
    return body;
  }

  #show(isBusy) {
    this.send.textContent = isBusy ? "Stop" : "Send";
    this.log.setAttribute("aria-busy", String(isBusy));
  }

  // Keeps the end in view for those who are there.
  #follow(change) {
    const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_END;
    change();
    if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
  }
}

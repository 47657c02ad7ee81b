// What an image attends to: choose, draw or upload one, move the levers, and see the spotlights move.
import { change, el, getJSON, number, parameters, Refused, tell } from "/static/state.js";
import { fromText, Pad, toText } from "/static/draw.js";
import { Levers } from "/static/levers.js";
import { Picker } from "/static/picker.js";
import * as charts from "/static/charts.js";

export async function open(main, about) {
  const view = new ImagesView(about.images);
  main.replaceChildren(view.element);
  await view.restore();
  return view;
}

class ImagesView {
  constructor(setting) {
    this.setting = setting;
    this.groups = setting.tasks.flatMap((task, at) =>
      task.class_names.map((name, label) => ({ name, label, task: at, title: setting.tasks.length > 1 ? `${task.title} ${name}` : name })));
    this.layers = new Map();
    this.asking = null;
    this.canvas = el("canvas", { tabindex: "0", "aria-label": "The image. To draw with the keyboard: arrows move, Shift and arrows draw, Escape clears." });
    this.pad = new Pad(this.canvas, setting.height, setting.width, () => this.#drawing(), () => this.#drawn());
    this.title = el("p", { class: "soft title" });
    this.prediction = el("div", { class: "prediction", "aria-live": "polite" });
    this.spotlights = el("section", { class: "layers", "aria-label": "Spotlights" });
    this.magnified = el("img", { class: "magnified", alt: "", hidden: true });
    this.picker = new Picker(setting, this.pad, (changes) => this.#ask(changes));
    this.levers = new Levers(setting, (changes) => this.#ask(changes));
    this.json = el("a", { class: "soft", href: "?format=json" }, "These numbers as JSON");
    this.copy = el("button", { type: "button", onclick: () => this.#copy() }, "Copy link");
    this.element = el("div", { class: "images" },
      el("section", { class: "ask", "aria-label": "The question" },
        el("div", { class: "card" }, this.picker.tabs, this.canvas, this.title, this.picker.element),
        el("div", { class: "card" }, el("h2", {}, "Answer"), this.prediction),
        el("div", { class: "card" }, el("h2", {}, "Levers"), this.levers.element),
        el("p", { class: "links" }, this.copy, this.json)),
      this.spotlights, this.magnified);
  }

  // Put everything as the address says, and ask.
  async restore() {
    const now = parameters();
    this.element.setAttribute("aria-busy", "true");
    this.levers.show(now);
    this.pad.clear(); // what the address says is put there
    await this.picker.show(now);
    await this.#update();
  }

  redraw() {
    if (this.answer) this.#show(this.answer);
    this.#more();
  }

  async #ask(changes) {
    change(changes);
    await this.#update();
  }

  // While a stroke is drawn: one question at a time, and always the last drawing.
  #drawing() {
    this.dirty = true;
    if (this.drawing) return;
    this.drawing = (async () => {
      while (this.dirty) {
        this.dirty = false;
        const asked = this.#question({ pixels: toText(this.pad.pixels()), test: null });
        await this.#fetch(asked).catch((problem) => this.#refused(problem));
      }
      this.drawing = null;
    })();
  }

  #drawn() {
    this.dirty = false; // what follows asks about the finished stroke
    this.#ask({ pixels: toText(this.pad.pixels()), test: null });
  }

  #question(changes = {}) {
    const asked = parameters();
    asked.delete("format");
    asked.delete("mode");
    for (const [name, value] of Object.entries(changes)) value === null ? asked.delete(name) : asked.set(name, value);
    return asked;
  }

  async #update() {
    const asked = this.#question();
    const link = parameters();
    link.set("format", "json");
    link.delete("mode");
    this.json.href = `/images?${link}`;
    this.element.setAttribute("aria-busy", "true");
    const patience = setTimeout(() => tell("Working … The first mask and the first earlier step sum all events once."), 3000);
    try {
      await this.#fetch(asked);
      clearTimeout(patience);
      await this.#more();
    } catch (problem) {
      this.#refused(problem);
    } finally {
      clearTimeout(patience);
      this.element.setAttribute("aria-busy", "false");
    }
  }

  async #fetch(asked) {
    this.asking?.abort();
    this.asking = new AbortController();
    const answer = await getJSON("/images", asked, { signal: this.asking.signal });
    tell("");
    this.answer = answer;
    this.#show(answer);
    return answer;
  }

  #refused(problem) {
    if (problem.name === "AbortError") return;
    tell(problem instanceof Refused ? problem.message : `The server does not answer: ${problem.message}`);
  }

  #show(answer) {
    if (!this.drawing && this.pad.last === null && !(this.pad.enabled && this.pad.marked)) this.pad.show(fromText(answer.input.pixels));
    this.title.textContent = answer.input.title;
    this.levers.answered(answer);
    this.#showPrediction(answer.prediction);
    const task = this.setting.tasks.findIndex((one) => one.name === answer.input.task);
    const { label, answer: best } = answer.prediction;
    this.colours = this.groups.map((group) => charts.classColour(group, label, best, task));
    for (const [name, card] of this.layers) {
      if (!answer.layers.some((one) => one.layer === name)) {
        card.element.remove();
        this.layers.delete(name);
      }
    }
    if (answer.layers.length === 0) {
      this.spotlights.replaceChildren(el("p", { class: "soft nothing" }, "Before the first step there is nothing to attend to: these are the initial weights."));
      return;
    }
    this.spotlights.querySelector(".nothing")?.remove();
    for (const layer of answer.layers) {
      if (!this.layers.has(layer.layer)) {
        this.layers.set(layer.layer, new LayerCard(layer.layer, (example, event) => this.#magnify(example, event)));
        this.spotlights.append(this.layers.get(layer.layer).element);
      }
      this.layers.get(layer.layer).show(layer, this.groups, this.colours);
    }
  }

  #showPrediction(found) {
    const right = found.label === null ? "" : found.label === found.answer ? ", which is right" : `, but it is ${found.label_name}`;
    const share = found.probabilities[found.answer];
    const sentence = el("p", { class: "sentence" }, "The model answers ",
      el("strong", { id: "answer" }, found.class_name), ` (${share < 0.995 ? share.toFixed(2) : "over 0.99"})${right}.`);
    const bars = el("ol", { class: "bars" }, ...found.class_names.map((name, at) => {
      const kind = at === found.answer ? "answer" : at === found.label ? "label" : "";
      const bar = el("span", { class: `bar ${kind}` });
      bar.style.width = `${100 * found.probabilities[at]}%`;
      return el("li", { title: `probability ${number(found.probabilities[at], 3)}, logit ${number(found.logits[at])}` },
        el("span", { class: "name" }, name), el("span", { class: "track" }, bar),
        el("span", { class: "value" }, found.probabilities[at].toFixed(2)));
    }));
    this.prediction.replaceChildren(sentence, bars);
  }

  // The charts that take longer: the best events of every class, and the timeline.
  async #more() {
    const asked = this.#question();
    if (!this.answer || this.answer.layers.length === 0) return;
    const signal = this.asking?.signal;
    for (const part of ["scores", "timeline"]) {
      asked.set("part", part);
      const found = await getJSON("/images", asked, { signal });
      for (const layer of found.layers) this.layers.get(layer.layer)?.more(part, layer, this.groups, this.colours);
    }
  }

  #magnify(example, event) {
    this.magnified.hidden = example === null;
    if (example === null) return;
    this.magnified.src = `/images/train/${example}.png`;
    this.magnified.alt = `training example ${example}`;
    this.magnified.style.left = `${Math.min(event.clientX + 16, innerWidth - 110)}px`;
    this.magnified.style.top = `${Math.max(8, event.clientY - 110)}px`;
  }

  async #copy() {
    await navigator.clipboard.writeText(location.href);
    this.copy.textContent = "Copied";
    setTimeout(() => (this.copy.textContent = "Copy link"), 1500);
  }
}

class LayerCard {
  constructor(name, hover) {
    this.hover = hover;
    this.title = el("h2", {}, name);
    this.how = el("p", { class: "soft how" });
    this.matches = el("div", { class: "matches" });
    this.places = Object.fromEntries(["totals", "scores", "timeline"].map((part) => [part, el("div", { class: "chart" })]));
    this.element = el("article", { class: "card layer", "data-layer": name },
      this.title, this.matches,
      el("div", { class: "charts" },
        el("figure", {}, el("figcaption", {}, "Total of every class"), this.places.totals),
        el("figure", {}, el("figcaption", {}, "The 500 best events of every class"), this.places.scores),
        el("figure", {}, el("figcaption", {}, "Over training time"), this.places.timeline)),
      this.how);
  }

  show(layer, groups, colours) {
    this.measure = layer.measure;
    this.matches.replaceChildren(...layer.matches.map((one) => el("figure", { class: "match" },
      el("img", { src: one.image, alt: `training example ${one.example}, ${one.task} ${one.class_name}`, width: 56, height: 56 }),
      el("figcaption", {}, el("b", {}, one.class_name), el("br"), number(one.score), el("br"), el("span", { class: "soft" }, `step ${one.step.toLocaleString("en")}`)))));
    charts.totals(this.places.totals, groups, layer.totals, colours, layer.measure === "score" ? "Σ |score|" : "Σ");
    this.how.textContent = `Ranked by ${layer.measure === "score" ? "score" : `what each event ${layer.measure}`}; ${layer.explain}.`;
  }

  more(part, layer, groups, colours) {
    if (part === "scores") charts.scores(this.places.scores, groups, layer.classes, colours, this.hover);
    else charts.timeline(this.places.timeline, layer.edges, layer.values);
  }
}

// Where the image comes from: a test image, the drawing pad, or a file.
import { el, getJSON, tell } from "/static/state.js";
import { toText } from "/static/draw.js";

const MODES = { test: "Test image", draw: "Draw", upload: "Upload" };

export class Picker {
  constructor(setting, pad, onchange) {
    this.setting = setting;
    this.pad = pad;
    this.onchange = onchange;
    this.mode = "test";
    this.tabs = el("div", { class: "tabs", role: "radiogroup", "aria-label": "Where the image comes from" },
      ...Object.entries(MODES).map(([mode, title]) => el("label", { class: "tab" },
        el("input", { type: "radio", name: "mode", value: mode, onchange: () => this.#turn(mode) }), el("span", {}, title))));
    this.task = select("task", "task", setting.tasks.map((task) => [task.name, task.title]), () => this.#filter());
    this.label = select("label", "class", [], () => this.#filter());
    this.right = select("right", "answer", [["", "right or wrong"], ["yes", "right"], ["no", "wrong"]], () => this.#filter());
    this.list = el("div", { class: "thumbnails", role: "listbox", "aria-label": "Test images", tabindex: "0" });
    this.list.addEventListener("keydown", (event) => this.#key(event));
    this.count = el("span", { class: "soft" });
    this.page = 0;
    this.test = el("div", { class: "picker" },
      el("div", { class: "filters" }, ...(setting.tasks.length > 1 ? [this.task.element] : []), this.label.element, this.right.element),
      this.list,
      el("div", { class: "pages" },
        el("button", { type: "button", onclick: () => this.#turnPage(-1), "aria-label": "Earlier test images" }, "‹"), this.count,
        el("button", { type: "button", onclick: () => this.#turnPage(1), "aria-label": "Later test images" }, "›")),
      el("p", { class: "soft key" }, "answered wrongly"));
    this.draw = el("div", { class: "picker" },
      el("button", { type: "button", id: "clear", onclick: () => this.#clear() }, "Clear"),
      el("span", { class: "soft" }, " Draw with the mouse or a finger. It is fitted as the training images were."),
      ...(setting.tasks.length > 1 ? [el("p", {}, (this.drawTask = select("draw-task", "normalise as", setting.tasks.map((task) => [task.name, task.title]), () =>
        this.onchange({ task: this.drawTask.input.value }))).element)] : []));
    this.invert = el("input", { type: "checkbox", id: "invert" });
    this.file = el("input", { type: "file", id: "file", accept: "image/*", "aria-label": "An image file", onchange: () => this.#upload() });
    this.notes = el("p", { class: "soft" });
    this.upload = el("div", { class: "picker" }, this.file,
      el("label", { class: "line" }, this.invert, " dark ink on light paper (invert)"), this.notes);
    this.invert.addEventListener("change", () => this.#upload());
    this.element = el("div", {}, this.test, this.draw, this.upload);
  }

  async show(now) {
    this.mode = now.get("mode") ?? (now.has("pixels") ? "draw" : "test");
    if (!(this.mode in MODES)) this.mode = "test";
    const task = now.get("task") ?? this.setting.tasks[0].name;
    this.task.input.value = task;
    if (this.drawTask) this.drawTask.input.value = task;
    this.#labels();
    this.index = now.has("pixels") ? null : now.get("test");
    this.#modes();
    if (this.mode === "test") await this.#fill();
  }

  #modes() {
    for (const input of this.tabs.querySelectorAll("input")) input.checked = input.value === this.mode;
    this.test.hidden = this.mode !== "test";
    this.draw.hidden = this.mode !== "draw";
    this.upload.hidden = this.mode !== "upload";
    this.pad.enabled = this.mode === "draw";
    this.pad.canvas.classList.toggle("drawable", this.pad.enabled);
  }

  async #turn(mode) {
    this.mode = mode;
    this.#modes();
    if (mode === "draw") this.#clear();
    if (mode === "test") {
      await this.#fill();
      this.onchange({ mode: null, pixels: null });
    }
  }

  // An empty drawing is a question like any other.
  #clear() {
    this.pad.clear();
    this.pad.canvas.focus();
    this.index = null;
    this.onchange({ pixels: toText(this.pad.pixels()), test: null, mode: null });
  }

  #labels() {
    const task = this.setting.tasks.find((one) => one.name === this.task.input.value) ?? this.setting.tasks[0];
    const now = this.label.input.value;
    this.label.input.replaceChildren(option("", "any class"), ...task.class_names.map((name, at) => option(at, name)));
    this.label.input.value = now;
  }

  async #filter() {
    this.page = 0;
    this.#labels();
    await this.#fill();
  }

  async #turnPage(by) {
    this.page = Math.min(Math.max(0, this.page + by), Math.max(0, this.pages - 1));
    await this.#fill();
  }

  async #fill() {
    const query = new URLSearchParams({ task: this.task.input.value, label: this.label.input.value, right: this.right.input.value, page: this.page });
    const found = await getJSON("/images/examples.json", query);
    this.pages = found.pages;
    this.count.textContent = `${found.count.toLocaleString("en")} images, page ${found.pages ? found.page + 1 : 0} of ${found.pages}`;
    this.list.replaceChildren(...found.examples.map((one) => el("button", {
      type: "button", role: "option", tabindex: "-1", "data-index": one.index, "aria-selected": String(String(one.index) === this.index),
      class: one.label === one.answer ? "" : "wrong", title: `test image ${one.index}${one.label === one.answer ? "" : ", answered wrongly"}`,
      onclick: () => this.#choose(one.index),
    }, el("img", { src: one.image, alt: `test image ${one.index}`, width: 28, height: 28 }))));
  }

  #choose(index) {
    this.index = String(index);
    for (const button of this.list.children) button.setAttribute("aria-selected", button.dataset.index === this.index);
    const task = this.task.input.value;
    this.onchange({ test: index, task: task === this.setting.tasks[0].name ? null : task, pixels: null, mode: null });
  }

  // Arrows go through the images of the list.
  #key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -8, ArrowDown: 8 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const all = [...this.list.children];
    const now = all.findIndex((button) => button.getAttribute("aria-selected") === "true");
    const next = all[Math.min(all.length - 1, Math.max(0, now + moves[event.key]))];
    if (next) this.#choose(Number(next.dataset.index));
  }

  async #upload() {
    const file = this.file.files[0];
    if (!file) return;
    try {
      const invert = this.invert.checked ? "?invert=yes" : "";
      const found = await getJSON(`/images/upload${invert}`, null, { method: "POST", body: file });
      this.notes.textContent = found.notes.join(" ");
      this.onchange({ pixels: found.pixels, test: null, mode: "upload" });
    } catch (problem) {
      tell(problem.message);
    }
  }
}

function select(name, title, options, onchange) {
  const input = el("select", { id: name, onchange }, ...options.map(([value, text]) => option(value, text)));
  return { input, element: el("label", { class: "filter" }, el("span", {}, title), input) };
}

function option(value, text) {
  return el("option", { value }, text);
}

// Levers: a slider over training time, switches for tasks and classes, and what is ranked in the last layer.
import { el } from "/static/state.js";

export class Levers {
  constructor(setting, onchange) {
    this.setting = setting;
    this.onchange = onchange;
    const most = setting.steps;
    this.slider = el("input", { type: "range", id: "until", min: 0, max: most, step: 1, value: most, disabled: !setting.masks });
    this.step = el("output", { for: "until", class: "value" });
    this.slider.addEventListener("input", () => this.#say());
    this.slider.addEventListener("change", () => onchange({ until: Number(this.slider.value) === most ? null : this.slider.value }));
    this.switches = [];
    this.measure = el("select", { id: "measure", onchange: () => this.#measured() },
      el("option", { value: "scores" }, "scores"), el("option", { value: "contributions", disabled: !setting.masks }, "contributions to a logit"));
    this.unit = el("select", { id: "unit", onchange: () => this.#measured() });
    this.against = el("select", { id: "against", onchange: () => this.#measured() });
    this.element = el("div", { class: "levers" },
      el("label", { for: "until" }, "The model after step ", this.step), this.slider,
      ...setting.tasks.map((task, at) => this.#task(task, at)),
      el("label", { for: "measure" }, "In the last layer, rank by"), this.measure,
      (this.logits = el("div", { class: "logits", hidden: true },
        el("label", { for: "unit" }, "explain"), this.unit,
        el("label", { for: "against" }, "rather than"), this.against)));
    this.#say();
  }

  #say() {
    this.step.textContent = `${Number(this.slider.value).toLocaleString("en")} of ${this.setting.steps.toLocaleString("en")}`;
  }

  #task(task, at) {
    const boxes = task.class_names.map((name, label) => {
      const box = el("input", { type: "checkbox", checked: true, "data-group": `${task.name}:${label}`, onchange: () => this.#masked(), disabled: !this.setting.masks });
      this.switches.push(box);
      return el("label", { class: "chip" }, box, el("span", {}, name));
    });
    const all = el("input", { type: "checkbox", checked: true, role: "switch", "data-task": task.name, disabled: !this.setting.masks });
    all.addEventListener("change", () => {
      for (const box of this.#of(task.name)) box.checked = all.checked;
      this.#masked();
    });
    return el("fieldset", { "data-number": at }, el("legend", {}, el("label", {}, all, ` events of ${task.title}`)), el("div", { class: "chips" }, ...boxes));
  }

  #of(name) {
    return this.switches.filter((box) => box.dataset.group.startsWith(`${name}:`));
  }

  #masked() {
    const without = [];
    for (const task of this.setting.tasks) {
      const off = this.#of(task.name).filter((box) => !box.checked);
      if (off.length === task.class_names.length) without.push(task.name);
      else without.push(...off.map((box) => box.dataset.group));
    }
    this.#both();
    this.onchange({ without: without.join(",") });
  }

  #both() {
    for (const task of this.setting.tasks) {
      const all = this.element.querySelector(`[data-task="${task.name}"]`);
      const on = this.#of(task.name).filter((box) => box.checked).length;
      all.checked = on > 0;
      all.indeterminate = on > 0 && on < task.class_names.length;
    }
  }

  #measured() {
    const contributions = this.measure.value === "contributions";
    this.logits.hidden = !contributions;
    this.onchange({
      measure: contributions ? "contributions" : null,
      unit: contributions ? this.unit.value : null,
      against: contributions && this.against.value !== this.unit.value ? this.against.value : null,
    });
  }

  // Stand as the address says.
  show(now) {
    this.slider.value = now.get("until") ?? this.setting.steps;
    this.#say();
    const without = (now.get("without") ?? "").split(",");
    const first = this.setting.tasks[0].name;
    for (const box of this.switches) {
      const [task, label] = box.dataset.group.split(":");
      box.checked = !(without.includes(task) || without.includes(box.dataset.group) || (task === first && without.includes(label)));
    }
    this.#both();
    this.measure.value = now.get("measure") ?? "scores";
    this.logits.hidden = this.measure.value === "scores";
    this.wanted = { unit: now.get("unit") ?? "", against: now.get("against") ?? "" };
    this.#options(this.setting.tasks.find((task) => task.name === now.get("task")) ?? this.setting.tasks[0]);
  }

  // The outputs are called after the classes of the image's task.
  answered(answer) {
    this.wanted = { unit: this.unit.value, against: this.against.value };
    this.#options(this.setting.tasks.find((task) => task.name === answer.input.task), answer.prediction.class_name);
  }

  #options(task, best = null) {
    const classes = task.class_names.map((name, at) => ({ name, at }));
    const fill = (select, first, wanted) => {
      select.replaceChildren(el("option", { value: "" }, first), ...classes.map(({ name, at }) => el("option", { value: at }, name)));
      select.value = wanted;
    };
    fill(this.unit, best === null ? "the answer" : `the answer (${best})`, this.wanted.unit);
    fill(this.against, "–", this.wanted.against);
  }
}

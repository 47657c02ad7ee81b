// What the memory holds, how exact it is, and how the model learned.
import { el, getJSON, number, tell } from "/static/state.js";
import * as charts from "/static/charts.js";

export async function open(main) {
  const view = { facts: null };
  const chart = el("div", { class: "chart", role: "img", "aria-label": "Test accuracy over training" });

  function draw() {
    const facts = view.facts;
    main.replaceChildren(
      el("div", { class: "overview" },
        el("section", { class: "card", "aria-labelledby": "holds" },
          el("h2", { id: "holds" }, "What it holds"),
          list({
            "Training": `${number(facts.steps, 9)} steps of ${facts.optimizers.join(", ")}`,
            "Examples": `${number(facts.examples, 9)}, with the columns ${facts.columns.join(", ") || "(none)"}`,
            "Kept": facts.keep === "all" ? "keys and gradients of every event" : `keep="${facts.keep}"`,
            "Size": `${number(facts.bytes / 1e9, 3)} GB on disk`,
            "Recipe": facts.recipe ?? "none",
            "State": facts.closed ? "finished" : "not closed: training goes on, or was interrupted",
          }),
          el("table", {},
            el("thead", {}, row("th", ["weight", "outputs × inputs", "events"])),
            el("tbody", {}, ...facts.weights.map((one) =>
              row("td", [one.name, `${number(one.dim_out, 9)} × ${number(one.dim_in, 9)}`, number(one.events, 9)])))),
          ...facts.notes.map((note) => el("p", { class: "soft" }, note))),
        el("section", { class: "card", "aria-labelledby": "exact" },
          el("h2", { id: "exact" }, "Certificate"),
          ...certificate(facts)),
        facts.accuracy.steps.length || facts.measuring
          ? el("section", { class: "card wide", "aria-labelledby": "learned" },
              el("h2", { id: "learned" }, "How it learned"),
              el("p", { class: "soft" }, facts.accuracy.steps.length
                ? "Test accuracy of the model as it was, rebuilt from its events at each of these steps."
                : "Rebuilding the model at steps of its past …"),
              chart)
          : null));
    if (facts.accuracy.steps.length) {
      const { steps, ...series } = facts.accuracy;
      charts.lines(chart, steps, series);
    }
  }

  async function update() {
    try {
      view.facts = await getJSON("/overview");
      draw();
      if (view.facts.measuring) setTimeout(update, 1500);
    } catch (problem) {
      tell(problem.message);
    }
  }

  await update();
  return { redraw: draw };
}

function certificate(facts) {
  if (facts.problem) return [el("p", {}, facts.problem)];
  if (facts.certificate === null) {
    return [el("p", { class: "soft" }, "Measuring: every weight is rebuilt from all its events, which reads the whole memory …")];
  }
  const exact = facts.certificate.every((one) => one.exact);
  return [
    el("p", { class: exact ? "verdict good" : "verdict bad" }, exact ? "Exact up to rounding." : "Not exact; the reason is below."),
    el("ul", {}, ...facts.sentences.map((sentence) => el("li", {}, sentence))),
    el("p", { class: "soft" }, "The number is the distance between the trained weight and its initial value plus its events, relative to what was learned."),
  ];
}

function list(facts) {
  return el("dl", {}, ...Object.entries(facts).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function row(kind, cells) {
  return el("tr", {}, ...cells.map((cell) => el(kind, {}, cell)));
}

// Charts by plotly, in the colours of the page.

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function layout(extra) {
  const ink = colour("--soft"), rule = colour("--rule");
  const axis = { gridcolor: rule, zerolinecolor: rule, linecolor: rule, tickfont: { size: 11 }, automargin: true, fixedrange: true };
  return {
    height: 190,
    margin: { l: 44, r: 8, t: 8, b: 24 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, family: "system-ui, sans-serif", size: 12 },
    showlegend: false,
    hovermode: "closest",
    ...extra,
    xaxis: { ...axis, ...extra.xaxis },
    yaxis: { ...axis, nticks: 4, ...extra.yaxis },
  };
}

const OPTIONS = { displayModeBar: false, responsive: true };

// Classes are { name, task, label }; label and answer decide about their colours.
export function classColour(group, label, answer, task) {
  if (group.label === answer && (group.task === task || label !== answer)) return colour("--answer");
  if (group.label === label && group.task === task) return colour("--label");
  return colour(group.task === 0 ? "--grey" : "--grey2");
}

export function totals(place, groups, values, colours, measure) {
  const data = [{
    type: "bar", x: groups.map((_, at) => at), y: values, marker: { color: colours },
    text: groups.map((group) => group.title), hovertemplate: "%{text}<br>%{y:,.4~g}<extra></extra>", textposition: "none",
  }];
  return Plotly.react(place, data, layout({ xaxis: ticks(groups), yaxis: { title: { text: measure, font: { size: 11 } } }, bargap: 0.2 }), OPTIONS);
}

// The best events of every class in descending order; `hover` is told which training example is under the pointer.
export async function scores(place, groups, classes, colours, hover) {
  const data = classes.map((found, at) => ({
    type: "scatter", mode: "lines", fill: "tozeroy", line: { width: 0.5, color: colours[at] }, fillcolor: colours[at],
    x: found.scores.map((_, rank) => at - 0.46 + (0.92 * rank) / Math.max(1, found.scores.length - 1)),
    y: found.scores, customdata: found.examples.map((example, rank) => [example, found.steps[rank], groups[at].title]),
    hovertemplate: "%{customdata[2]}<br>%{y:,.4~g}, step %{customdata[1]:,}<extra></extra>", hoveron: "points",
  }));
  await Plotly.react(place, data, layout({ xaxis: { ...ticks(groups), range: [-0.6, groups.length - 0.4] } }), OPTIONS);
  place.removeAllListeners?.("plotly_hover");
  place.removeAllListeners?.("plotly_unhover");
  place.on("plotly_hover", (event) => hover(event.points[0].customdata[0], event.event));
  place.on("plotly_unhover", () => hover(null));
}

export function timeline(place, edges, values) {
  const data = [{
    type: "bar", x: values.map((_, at) => (edges[at] + edges[at + 1] - 1) / 2), y: values,
    width: values.map((_, at) => 0.92 * (edges[at + 1] - edges[at])), marker: { color: colour("--answer") },
    hovertemplate: "step %{x:,.0f}<br>%{y:,.4~g}<extra></extra>",
  }];
  return Plotly.react(place, data, layout({ xaxis: { title: { text: "training step", font: { size: 11 } }, showgrid: false, tickformat: ",d" }, margin: { l: 44, r: 8, t: 8, b: 36 } }), OPTIONS);
}

export function lines(place, steps, series) {
  const colours = [colour("--answer"), colour("--label")];
  const data = Object.entries(series).map(([name, values], at) => ({
    type: "scatter", mode: "lines+markers", name, x: steps, y: values, line: { color: colours[at % 2], width: 2 },
    marker: { size: 6 }, hovertemplate: `${name}<br>step %{x:,}: %{y:.1f} %<extra></extra>`,
  }));
  const shown = { showlegend: data.length > 1, legend: { orientation: "h", y: 1.12 }, height: 280, margin: { l: 48, r: 8, t: 8, b: 40 } };
  return Plotly.react(place, data, layout({ ...shown, xaxis: { title: { text: "training step" }, tickformat: ",d" }, yaxis: { title: { text: "test accuracy, %" }, range: [0, 101] } }), OPTIONS);
}

function ticks(groups) {
  const long = groups.some((group) => group.name.length > 2);
  return { showgrid: false, zeroline: false, tickvals: groups.map((_, at) => at), ticktext: groups.map((group) => group.name), tickangle: long ? -90 : 0, tickfont: { size: long ? 10 : 11 } };
}

"use strict";
// What models wrote reaches the document through `textContent` alone; see `element`.

const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const STROKES = ["", "7 4", "2 3", "7 3 2 3", "11 4", "11 3 2 3"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "x", "cross"];
const PHASES = ["sample", "verify", "update", "evaluate", "save", "other"];
const PHASE_COLOURS = new Map([
  ["sample", "--agent-0"], ["verify", "--agent-2"], ["update", "--agent-1"], ["evaluate", "--agent-3"], ["save", "--agent-4"],
  ["load", "--agent-5"], ["take weights", "--mean"], ["export", "--above"],
]);
const AXIS_TITLES = {
  steps: "training steps", rollouts: "rollouts sampled", tokens: "tokens sampled", seconds: "seconds of training",
};
const PAGE_OF_ROLLOUTS = 20, MOST_MARKERS = 15;

const state = { axis: "steps", hidden: new Set(), shown: PAGE_OF_ROLLOUTS };
let report, groups, plots = [];

function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(options)) {
    if (key === "class") made.className = value;
    else if (key === "colour") made.style.setProperty("--colour", value);
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== undefined && value !== null) made.setAttribute(key, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) made.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return made;
}

// Characters that are invisible, reorder a line or are half a character are shown by name, so that a text cannot pass for another one.
function visible(text) {
  return String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\p{Cs}]/gu,
    character => {
      const code = character.codePointAt(0);
      return code < 0x20 ? String.fromCharCode(0x2400 + code) : `‹U+${code.toString(16).toUpperCase().padStart(4, "0")}›`;
    });
}

// Plotly reads a few tags in labels; names are never markup.
function plain(text) {
  return visible(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), character => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
}

const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const agentVariable = agent => {
  const place = report.agents.indexOf(agent);
  return place < 0 ? "--mean" : `--agent-${place % 6}`;
};
const agentStyle = agent => `var(${agentVariable(agent)})`;
const phaseVariable = phase => PHASE_COLOURS.get(phase) ?? "--soft";
const methodPlace = name => report.methods.findIndex(method => method.name === name);

// ---------------------------------------------------------------- charts

function alongAxis(method, agent, steps) {
  const costs = report.costs[method] || {};
  const along = (costs[agent ?? ""] || costs[""] || {})[state.axis] || {};
  return steps.map(step => along[step] ?? null);
}

function faded(hex, alpha) {
  const [r, g, b] = [1, 3, 5].map(place => parseInt(hex.slice(place, place + 2), 16));
  return `rgba(${r},${g},${b},${alpha})`;
}

// An interval of t knows no limits: what cannot be below 0 or above 1 is not drawn there.
function bandOf({ curve }, unit) {
  const least = unit === "share" || curve.mean.every(value => value >= 0) ? 0 : -Infinity;
  const most = unit === "share" ? 1 : Infinity;
  const clamp = value => value === null ? null : Math.min(most, Math.max(least, value));
  return { low: curve.low.map(clamp), high: curve.high.map(clamp) };
}

// Panels of shares have one scale, so that agents can be compared by eye.
function commonRange(chart) {
  const values = chart.panels.flatMap(panel => panel.series).flatMap(series => {
    const { low, high } = bandOf(series, chart.unit);
    return [...series.curve.mean, ...low, ...high];
  }).filter(value => value !== null);
  const low = Math.min(...values), high = Math.max(...values), margin = 0.05 * (high - low || 0.2);
  return [low - margin < 0.1 ? -0.01 : low - margin, Math.min(1.01, high + margin)];
}

// Names of a chart's lines where these are neither methods nor agents.
function ownLabels(chart) {
  const labels = chart.panels.flatMap(panel => panel.series.map(series => series.label)).filter(Boolean);
  return [...new Set(labels)].filter(label => !report.agents.includes(label));
}

function lineTraces(panel, chart) {
  const traces = [], { unit } = chart, labels = ownLabels(chart);
  for (const series of panel.series.filter(series => !state.hidden.has(series.method))) {
    const place = labels.length ? labels.indexOf(series.label) : methodPlace(series.method);
    const shade = colour(agentVariable(series.agent));
    const x = alongAxis(series.method, series.agent, series.curve.steps);
    const shares = report.methods[methodPlace(series.method)].shares;
    const { mean, runs, steps } = series.curve;
    const { low, high } = bandOf(series, unit);
    const known = mean.map((_, index) => index).filter(index => x[index] !== null && low[index] !== null);
    if (known.length && !labels.length) {
      traces.push({
        x: [...known.map(index => x[index]), ...known.map(index => x[index]).reverse()],
        y: [...known.map(index => high[index]), ...known.map(index => low[index]).reverse()],
        fill: "toself", fillcolor: faded(shade, shares ? 0.17 : 0.09), line: { width: 0 }, mode: "lines",
        hoverinfo: "skip", type: "scatter", name: "band",
      });
    }
    const name = plain(series.label || series.method);
    const format = unit === "share" ? ".1%" : ".4~g";
    traces.push({
      x, y: mean, type: "scatter", name,
      mode: mean.length <= MOST_MARKERS ? "lines+markers" : "lines", opacity: shares ? 1 : 0.85,
      line: { color: shade, width: shares ? 2.6 : 1.9, dash: DASHES[place % 6] },
      marker: { color: shade, size: shares ? 6 : 5, symbol: SYMBOLS[place % 6] },
      customdata: mean.map((_, index) => [steps[index], runs[index]]),
      hovertemplate: `${name}: %{y:${format}}<br>step %{customdata[0]}, %{customdata[1]} run(s)<extra></extra>`,
    });
  }
  return traces;
}

function areaTraces(panel) {
  return panel.series.map(series => ({
    x: alongAxis(series.method, null, series.curve.steps), y: series.curve.mean, type: "scatter", mode: "lines",
    stackgroup: "all", name: series.label, line: { width: 0.6, color: colour(`--${series.label}`) },
    fillcolor: faded(colour(`--${series.label}`), 0.75),
    hovertemplate: `${series.label}: %{y:.0%}<extra></extra>`,
  }));
}

function histogramTraces(panel) {
  const heights = panel.bars[0];
  return [{
    x: heights.map((_, place) => (place + 0.5) * panel.bins), y: heights, type: "bar", width: panel.bins,
    marker: { color: colour(agentVariable(panel.agent)), line: { width: 0 } },
    customdata: heights.map((_, place) => place === heights.length - 1 ? `${(place * panel.bins).toFixed(2)} and more`
      : `${(place * panel.bins).toFixed(2)} to ${((place + 1) * panel.bins).toFixed(2)}`),
    hovertemplate: "s %{customdata}: %{y:.1%} of rows<extra></extra>",
  }];
}

function barTraces(panel) {
  return PHASES.map((phase, place) => ({
    y: panel.labels.map(plain), x: panel.bars.map(row => row[place]), type: "bar", orientation: "h", name: phase,
    marker: { color: colour(phaseVariable(phase)) }, hovertemplate: `${phase}: %{x:.4~g} s<extra></extra>`,
  }));
}

// Phases of a chart's bars, known ones first and in one order.
function phasesOf(chart) {
  const found = new Set(chart.panels.flatMap(panel => panel.work.bars.map(bar => bar.phase)));
  return [...[...PHASE_COLOURS.keys()].filter(phase => found.has(phase)), ...[...found].filter(phase => !PHASE_COLOURS.has(phase))];
}

function workTraces(panel, chart) {
  const { bars, lanes } = panel.work;
  return phasesOf(chart).map(phase => {
    const own = bars.filter(bar => bar.phase === phase), shade = colour(phaseVariable(phase));
    return {
      type: "bar", orientation: "h", name: plain(phase), width: 0.7,
      y: own.map(bar => bar.lane), base: own.map(bar => bar.begin), x: own.map(bar => bar.seconds),
      // An edge makes the shortest work visible.
      marker: { color: shade, line: { color: shade, width: 0.6 } },
      customdata: own.map(bar => [plain(lanes[bar.lane]), bar.step, bar.seconds]),
      hovertemplate: `%{customdata[0]}: ${plain(phase)}<br>step %{customdata[1]}, %{customdata[2]:.4~g} s<extra></extra>`,
    };
  });
}

// Long names often differ at their ends alone, so they are cut in the middle.
function shortened(text, most) {
  const characters = [...visible(text)], end = Math.floor(most / 2);
  return characters.length <= most ? characters.join("") : [...characters.slice(0, most - 1 - end), "…", ...characters.slice(-end)].join("");
}

const LANE_PX = 26, TICK_PX = 7;

function workLayout(layout, panel, place) {
  const { labels, groups, marks, seconds } = panel.work;
  const width = place.clientWidth, most = Math.max(10, Math.floor(0.34 * width / TICK_PX));
  const names = labels.map(label => shortened(label, most));
  const drawn = width - TICK_PX * Math.max(...names.map(name => name.length)) - 20;
  layout.barmode = "overlay";
  layout.margin.t = 24;
  Object.assign(layout.yaxis, {
    tickvals: labels.map((_, lane) => lane), ticktext: names.map(plain), range: [labels.length - 0.5, -0.5], fixedrange: true,
    showgrid: false, zeroline: false, ticks: "", ticklabelstandoff: 6,
  });
  Object.assign(layout.xaxis, { range: [0, seconds], title: { ...layout.xaxis.title, text: "seconds" }, zeroline: false });
  const across = { xref: "paper", x0: 0, x1: 1, yref: "y", layer: "below" };
  layout.shapes = [
    ...labels.map((_, lane) => ({ ...across, type: "rect", y0: lane - 0.35, y1: lane + 0.35, line: { width: 0 }, fillcolor: colour("--card") })),
    ...groups.slice(1).map(lane => ({ ...across, type: "line", y0: lane - 0.5, y1: lane - 0.5, line: { color: colour("--line"), width: 1 } })),
    ...marks.map(mark => ({ type: "line", xref: "x", x0: mark.begin, x1: mark.begin, yref: "paper", y0: 0, y1: 1, line: { color: colour("--soft"), width: 1, dash: "dot" } })),
  ];
  let free = -Infinity;
  layout.annotations = marks.flatMap(mark => {
    const text = `step ${mark.step}`, at = mark.begin / seconds * drawn, end = at + TICK_PX * text.length;
    if (at < free || end > drawn + 10) return [];
    free = end;
    return [{ x: mark.begin, xref: "x", y: 1, yref: "paper", xanchor: "left", yanchor: "bottom", showarrow: false, text, font: { size: 12 }, borderpad: 0, xshift: -3 }];
  });
}

function layoutOf(chart, panel, place) {
  const axis = {
    gridcolor: colour("--grid"), zerolinecolor: colour("--line"), linecolor: colour("--line"), automargin: true,
    tickfont: { size: 12 }, title: { font: { size: 12 }, standoff: 6 }, fixedrange: matchMedia("(pointer: coarse)").matches,
  };
  const layout = {
    margin: { l: 44, r: 10, t: 8, b: 38 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, color: colour("--soft"), size: 12 },
    showlegend: false, hovermode: "closest", dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--text"), size: 13 } },
    xaxis: { ...axis }, yaxis: { ...axis },
  };
  if (chart.unit === "share") layout.yaxis.tickformat = ".0%";
  if (panel.kind === "histogram") {
    layout.xaxis.title = { ...axis.title, text: "ratio s" };
    layout.xaxis.range = [0, Math.max(1.2, panel.bins * (panel.bars[0].findLastIndex(height => height > 0) + 2))];
    layout.yaxis.title = { ...axis.title, text: "share of rows" };
    layout.bargap = 0;
    if (panel.band) {
      const [low, last, high] = panel.band;
      layout.shapes = [
        { type: "rect", xref: "x", yref: "paper", x0: low, x1: high, y0: 0, y1: 1, layer: "below", line: { width: 0 }, fillcolor: faded(colour("--inside"), 0.22) },
        ...[low, high].map(x => ({ type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: { color: colour("--inside"), width: 1.2 } })),
      ];
      if (last > low) layout.shapes.push({ type: "line", xref: "x", yref: "paper", x0: last, x1: last, y0: 0, y1: 1, line: { color: colour("--inside"), width: 1.2, dash: "dash" } });
    }
  } else if (panel.kind === "bars") {
    layout.barmode = "stack";
    layout.yaxis.autorange = "reversed";
    layout.xaxis.title = { ...axis.title, text: "seconds" };
  } else if (panel.kind === "work") {
    workLayout(layout, panel, place);
  } else {
    layout.xaxis.title = { ...axis.title, text: AXIS_TITLES[state.axis] };
    layout.xaxis.rangemode = "tozero";
    if (panel.kind === "areas") layout.yaxis.range = [0, 1];
    else if (chart.unit === "share") layout.yaxis.range = commonRange(chart);
  }
  return layout;
}

const TRACES = { lines: lineTraces, areas: areaTraces, histogram: histogramTraces, bars: barTraces, work: workTraces };

function draw(plot) {
  plot.drawn = true;
  const { chart, panel, place } = plot;
  return Plotly.react(place, TRACES[panel.kind](panel, chart), layoutOf(chart, panel, place),
    { displayModeBar: false, responsive: true, displaylogo: false });
}

function redraw() {
  for (const plot of plots) if (plot.drawn && plot.place.offsetParent) draw(plot);
}

const watcher = new IntersectionObserver(entries => {
  for (const entry of entries) {
    const plot = entry.isIntersecting && plots.find(plot => plot.place === entry.target);
    if (plot && !plot.drawn) draw(plot);
  }
}, { rootMargin: "400px" });

function figure(chart) {
  const panels = element("div", { class: "panels" });
  for (const panel of chart.panels) {
    const place = element("div", { class: "plot", role: "img", "aria-label": `${chart.title}: ${visible(panel.title)}` });
    if (panel.work) place.style.height = `${LANE_PX * panel.work.lanes.length + 70}px`;
    const swatch = panel.agent ? element("span", { class: "swatch", colour: agentStyle(panel.agent) }) : null;
    const box = element("div", { class: "panel" }, element("h4", {}, swatch, visible(panel.title)), place,
      panel.note ? element("p", { class: "note" }, panel.note) : null);
    box.dataset.method = panel.method ?? "";
    panels.append(box);
    plots.push({ chart, panel, place, drawn: false });
    watcher.observe(place);
  }
  return element("figure", { id: `chart-${chart.id}` },
    element("h3", {}, chart.title),
    element("figcaption", {}, chart.caption, " ", chart.keys.map(key => [element("code", {}, key), " "])),
    keysOf(chart), panels);
}

function keysOf(chart) {
  const kind = chart.panels[0].kind;
  const key = (name, variable) => element("span", { class: "agent" }, element("span", { class: "swatch", colour: `var(${variable})` }), name);
  if (kind === "areas") return element("div", { class: "keys" }, ["inside", "below", "above"].map(name => key(name, `--${name}`)));
  if (kind === "bars") return element("div", { class: "keys" }, PHASES.map(phase => key(phase, phaseVariable(phase))));
  if (kind === "work") return element("div", { class: "keys" }, phasesOf(chart).map(phase => key(visible(phase), phaseVariable(phase))));
  const labels = ownLabels(chart);
  if (labels.length) return element("div", { class: "keys" }, labels.map((label, place) => element("span", { class: "agent" }, stroke(place), label)));
  return null;
}

function stroke(place) {
  const space = "http://www.w3.org/2000/svg";
  const picture = document.createElementNS(space, "svg");
  for (const [key, value] of Object.entries({ width: 30, height: 10, "aria-hidden": "true" })) picture.setAttribute(key, value);
  const line = document.createElementNS(space, "line");
  for (const [key, value] of Object.entries({ x1: 0, x2: 30, y1: 5, y2: 5, stroke: "currentColor", "stroke-width": 2.4, "stroke-dasharray": STROKES[place % 6] })) line.setAttribute(key, value);
  picture.append(line);
  return picture;
}

// ---------------------------------------------------------------- the bar that goes with the charts

function axisHasData(axis) {
  return Object.values(report.costs).some(agents => Object.values(agents).some(costs => Object.keys(costs[axis] || {}).length > 1));
}

function bar() {
  const axes = report.axes.map(axis => element("button", {
    "data-axis": axis, "aria-pressed": String(axis === state.axis), disabled: !axisHasData(axis),
    onclick: event => {
      state.axis = axis;
      for (const button of axes) button.setAttribute("aria-pressed", button === event.currentTarget);
      redraw();
    },
  }, axis));
  const methods = report.methods.map((method, place) => element("button", {
    class: "toggle", "data-method": method.name, "aria-pressed": "true", title: "show or hide",
    onclick: event => {
      const hidden = state.hidden.has(method.name);
      state.hidden[hidden ? "delete" : "add"](method.name);
      event.currentTarget.setAttribute("aria-pressed", hidden);
      redraw();
    },
  }, stroke(place), visible(method.name), method.runs > 1 ? ` (${method.runs} seeds)` : ""));
  const agents = report.agents.map(agent => element("span", { class: "agent" },
    element("span", { class: "swatch", colour: agentStyle(agent) }), visible(agent)));
  return element("div", { class: "bar", role: "toolbar", "aria-label": "What the charts show" },
    element("div", { class: "group axes" }, element("span", {}, "Against"), axes),
    element("div", { class: "group" }, element("span", {}, "Methods"), methods),
    element("div", { class: "group" }, element("span", {}, "Agents"), agents));
}

// Of charts with panels for each method, those of one method are shown at a time.
function methodChooser(section, names) {
  const choose = name => {
    for (const box of section.querySelectorAll(".panel")) box.hidden = box.dataset.method !== "" && box.dataset.method !== name;
    for (const button of section.querySelectorAll("[data-choose]")) button.setAttribute("aria-pressed", button.dataset.choose === name);
    // A plot that was hidden when the axis changed or the window did has a wrong size.
    for (const plot of plots) if (plot.drawn && section.contains(plot.place) && plot.place.offsetParent) draw(plot).then(() => Plotly.Plots.resize(plot.place));
  };
  if (names.length > 1) {
    section.querySelector("[data-place]").after(element("div", { class: "group" }, element("span", {}, "Charts of"),
      names.map(name => element("button", { "data-choose": name, onclick: () => choose(name) }, visible(name)))));
  }
  if (names.length) choose(names[0]);
}

// ---------------------------------------------------------------- tables and summary

function table(data) {
  const cell = (tag, text, place) => element(tag, { class: place < data.text_columns ? "text" : "", scope: tag === "th" ? "col" : undefined }, visible(text));
  return element("div", { id: `table-${data.id}` },
    data.title ? element("h3", {}, data.title) : null, element("p", { class: "note" }, data.caption),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": data.title || data.caption }, element("table", {},
      element("thead", {}, element("tr", {}, data.columns.map((text, place) => cell("th", text, place)))),
      element("tbody", {}, data.rows.map((row, number) => element("tr", { class: data.marked.includes(number) ? "marked" : "" },
        row.map((text, place) => cell("td", text, place))))))));
}

function lines(title, found, none) {
  return element("div", {}, element("h3", {}, title),
    found.length ? element("ul", { class: "lines" }, found.map(line => element("li", { class: line.tone === "warn" ? "attention" : "" },
      visible(line.text), " ", line.key ? element("code", {}, visible(line.key)) : null))) : element("p", { class: "note" }, none));
}

function summarySection() {
  const summary = report.summary;
  const cards = [...summary.cards].sort((a, b) => (a.agent !== null) - (b.agent !== null)).map(card =>
    element("div", { class: "card", colour: agentStyle(card.agent) },
      element("p", {}, element("strong", {}, visible(card.agent ?? "mean of agents"))),
      element("div", { class: "value" }, card.value),
      element("span", { class: `verdict ${card.tone}` }, card.verdict),
      element("p", { class: "lead" }, visible(card.detail))));
  return element("section", { id: "summary" },
    element("h1", {}, visible(summary.headline)), element("p", { class: "lead" }, visible(summary.detail)),
    element("div", { class: "cards" }, cards),
    element("div", { class: "columns" },
      report.methods.some(method => method.shares) ? lines("Why", summary.why, "These runs recorded nothing of what passed between the agents.") : null,
      lines("Worth a look", summary.checks, "Nothing unusual was found.")));
}

function section(id, title, lead, ...children) {
  return element("section", { id }, element("h2", {}, title), lead ? element("p", { class: "lead", "data-place": true }, lead) : null, children);
}

// ---------------------------------------------------------------- time

function timeSection() {
  const charts = report.charts.filter(chart => chart.section === "time"), data = report.tables.time;
  if (!charts.length && !data) return [];
  const of = id => charts.filter(chart => chart.id === id).map(figure);
  return [section("time", "Where the time went", "What each agent was doing while the steps were made, and how long it had nothing to do.",
    of("work"), data ? element("div", { class: "below" }, table(data)) : null, of("time"))];
}

// ---------------------------------------------------------------- rollouts

const positive = rollout => rollout.reward !== null && rollout.reward > 0;

function agreement(group) {
  const authors = [...new Set(group.rollouts.map(rollout => rollout.author))];
  const able = authors.filter(author => group.rollouts.some(rollout => rollout.author === author && positive(rollout)));
  if (!able.length) return "no agent";
  if (able.length === authors.length) return authors.length > 1 ? "all agents" : able[0];
  return able.length === 1 ? `only ${able[0]}` : "some agents";
}

const largest = rollout => Math.max(0, ...Object.values(rollout.advantages || {}).map(Math.abs));

function marked(text, search) {
  const shown = visible(text);
  if (!search) return [shown];
  const parts = [], lower = shown.toLowerCase();
  // Lower case may change the length of a text; then nothing is marked rather than the wrong place.
  if (lower.length !== shown.length) return [shown];
  let from = 0;
  for (let at = lower.indexOf(search); at >= 0 && parts.length < 400; at = lower.indexOf(search, from)) {
    parts.push(shown.slice(from, at), element("mark", {}, shown.slice(at, at + search.length)));
    from = at + search.length;
  }
  return [...parts, shown.slice(from)];
}

const signed = value => value === undefined || value === null ? "–" : (value > 0 ? "+" : "") + value.toPrecision(3);

function place(method, learner, author, ratio) {
  if (ratio === undefined) return "";
  const band = report.methods[methodPlace(method)].band;
  if (learner === author || !band) return "";
  return ratio < band[0] ? " (below the band)" : ratio > band[2] ? " (above the band)" : " (inside the band)";
}

function facts(pairs) {
  return pairs.filter(([, value]) => value !== undefined && value !== null)
    .map(([name, value]) => element("span", {}, `${name} `, element("strong", {}, visible(value))));
}

function answer({ group, rollout }, search) {
  const run = report.runs[group.run];
  const learners = [...new Set([...Object.keys(rollout.advantages || {}), ...Object.keys(rollout.ratios || {})])];
  const ended = { length: "cut off by the limit", stop: "by itself" }[rollout.finish] ?? rollout.finish;
  const scores = Object.entries(rollout.scores || {}).map(([name, value]) => `${name} ${value === null ? "no score" : value}`);
  const reasons = Object.entries(rollout.unscored || {}).map(([name, why]) => `${name}: not scored (${why})`);
  const told = [
    scores.length ? `Scores: ${scores.join(", ")}.` : "", rollout.answer === undefined ? "" : `Answer found: ${rollout.answer}`,
    ...reasons, rollout.detail ?? "",
  ].filter(Boolean);
  return element("article", { class: "rollout", colour: agentStyle(rollout.author) },
    element("div", { class: "head" },
      element("span", { class: "agent" }, element("span", { class: "swatch", colour: agentStyle(rollout.author) }), element("strong", {}, visible(rollout.author))),
      element("span", { class: `verdict ${rollout.reward === null ? "warn" : positive(rollout) ? "good" : "bad"}` },
        rollout.reward === null ? "not scored" : `reward ${rollout.reward}`),
      facts([["tokens", rollout.tokens], ["nats/token", rollout.logprob?.toFixed(3)], ["ended", ended]])),
    element("pre", { class: "answer", dir: "auto", tabindex: "0" }, marked(rollout.text, search)),
    rollout.cut ? element("p", { class: "note" }, `${rollout.cut.toLocaleString("en")} characters in the middle are left out.`) : null,
    element("div", { class: "parts" }, told.map(text => element("div", {}, visible(text))),
      learners.length ? element("table", {},
        element("thead", {}, element("tr", {}, ["learner", "advantage", "ratio s"].map((text, at) => element("th", { class: at ? "" : "text", scope: "col" }, text)))),
        element("tbody", {}, learners.map(learner => {
          const ratio = (rollout.ratios || {})[learner];
          return element("tr", {}, element("td", { class: "text" }, visible(learner)), element("td", {}, signed((rollout.advantages || {})[learner])),
            element("td", {}, ratio === undefined ? "not computed" : `${ratio.toPrecision(3)}${place(run.method, learner, rollout.author, ratio)}`));
        }))) : null));
}

// Answers to one task that follow each other in the list stand together under their prompt.
function taskBlocks(entries, search) {
  const blocks = [];
  for (const entry of entries) {
    if (blocks.at(-1)?.[0].group !== entry.group) blocks.push([]);
    blocks.at(-1).push(entry);
  }
  return blocks.map(block => {
    const { group, agreed } = block[0];
    const run = report.runs[group.run];
    return element("section", { class: "task" },
      element("div", { class: "head" }, facts([["step", group.step], ["task", group.task], ["method", run.method], ["run", run.name], ["solved by", agreed]])),
      group.prompt.map(([role, content]) => element("pre", { class: "prompt", dir: "auto", tabindex: "0" }, role ? `${visible(role)}: ` : "", marked(content, search))),
      element("div", { class: "answers" }, block.map(entry => answer(entry, search))));
  });
}

function rolloutSection() {
  const { rule, shown, total } = report.rollouts;
  const made = section("viewer", "Rollouts", `Showing ${shown.toLocaleString("en")} of ${total.toLocaleString("en")} rollouts. ${rule}`);
  const every = groups.flatMap(group => {
    const agreed = agreement(group);
    return group.rollouts.map(rollout => ({ group, rollout, agreed, size: largest(rollout), method: report.runs[group.run].method }));
  });
  if (!every.length) {
    made.append(element("p", { class: "note" }, "These runs hold no rollout files."));
    return made;
  }
  const haystack = new Map(every.map(entry => [entry,
    visible([entry.rollout.text, entry.group.task, ...entry.group.prompt.map(([, content]) => content)].join("\n")).toLowerCase()]));
  const filters = {};
  const refresh = () => { state.shown = PAGE_OF_ROLLOUTS; list(); };
  const choice = (name, label, options) => {
    filters[name] = element("select", { id: `filter-${name}`, onchange: refresh }, options.map(([value, text]) => element("option", { value }, visible(text))));
    return element("label", {}, label, filters[name]);
  };
  const unique = values => [...new Set(values)];
  filters.search = element("input", { id: "filter-search", type: "search", placeholder: "words in prompts and answers", oninput: refresh });
  filters.task = element("input", { id: "filter-task", type: "search", placeholder: "any", list: "tasks", oninput: refresh });
  const tasks = element("datalist", { id: "tasks" }, unique(every.map(entry => entry.group.task)).slice(0, 500).map(task => element("option", { value: visible(task) })));
  const shownMethods = unique(every.map(entry => entry.method));
  made.append(element("div", { class: "filters" },
    element("label", { class: "wide" }, "Search", filters.search),
    element("label", {}, "Task", filters.task), tasks,
    choice("method", "Method", [["", "any"], ...shownMethods.map(name => [name, name])]),
    choice("author", "Author", [["", "any"], ...unique(every.map(entry => entry.rollout.author)).map(name => [name, name])]),
    choice("score", "Score", [["", "any"], ["positive", "above 0"], ["zero", "0 or below"], ["none", "not scored"]]),
    choice("agreement", "Solved by", [["", "any"], ...unique(every.map(entry => entry.agreed)).sort().map(name => [name, name])]),
    choice("order", "Order", [["step", "by step"], ["size", "largest advantage first"], ["long", "longest first"]])));
  const count = element("p", { id: "count", "aria-live": "polite" });
  const results = element("div", { id: "answers" });
  const more = element("button", { id: "more", onclick: () => { state.shown += PAGE_OF_ROLLOUTS; list(); } }, "Show more");
  made.append(count, results, more);

  function list() {
    const search = filters.search.value.toLowerCase(), task = filters.task.value;
    const score = { positive, zero: rollout => rollout.reward !== null && !positive(rollout), none: rollout => rollout.reward === null }[filters.score.value];
    const found = every.filter(entry =>
      (!search || haystack.get(entry).includes(search)) && (!task || visible(entry.group.task).includes(task)) &&
      (!filters.method.value || entry.method === filters.method.value) &&
      (!filters.author.value || entry.rollout.author === filters.author.value) &&
      (!score || score(entry.rollout)) && (!filters.agreement.value || entry.agreed === filters.agreement.value));
    if (filters.order.value === "size") found.sort((a, b) => b.size - a.size);
    if (filters.order.value === "long") found.sort((a, b) => (b.rollout.tokens ?? 0) - (a.rollout.tokens ?? 0));
    count.textContent = `${found.length.toLocaleString("en")} of ${every.length.toLocaleString("en")} match`;
    results.replaceChildren(...taskBlocks(found.slice(0, state.shown), search));
    more.hidden = found.length <= state.shown;
  }
  list();
  return made;
}

// ---------------------------------------------------------------- the page

async function start() {
  const main = document.getElementById("main");
  if (typeof DecompressionStream === "undefined") {
    main.textContent = "This report needs a browser of 2023 or later (Chrome or Edge 80, Firefox 113, Safari 16.4).";
    return;
  }
  report = await (await unpack("data")).json();
  groups = await (await unpack("rollouts")).json();
  document.head.append(element("script", {}, await (await unpack("plotly")).text()));
  const { tables } = report;
  const of = name => report.charts.filter(chart => chart.section === name).map(figure);
  const sections = [
    summarySection(),
    section("results", "Results", null, table(tables.results), Object.values(tables).filter(data => data.id.startsWith("comparison")).map(table)),
    section("learning", "Learning", "Rollouts and tokens are those that the agent sampled itself; seconds are the whole run's, evaluation left out. Bands are 95 % intervals over seeds, where there are several.", bar(), of("learning")),
    ...(tables.pairs ? [section("sharing", "Sharing", "For each learner and the author whose answers it learns from (learner ← author): how they compare, and how much of the author's work gets through.", table(tables.pairs), of("sharing"))] : []),
    section("health", "Training health", "Whether each agent's training itself is in order.", of("health")),
    ...timeSection(),
    rolloutSection(),
    section("sources", "Runs", null, table(tables.runs), element("p", { class: "note" }, `Made by hacrl ${report.version}. All metrics are explained in docs/metrics.md.`)),
  ];
  main.replaceChildren(...sections);
  // The bar belongs to all charts, so it stays while any of them is in sight.
  const charts = element("div", { id: "charts" });
  const first = document.getElementById("learning");
  first.before(charts);
  charts.append(...sections.filter(made => ["learning", "sharing", "health"].includes(made.id)));
  charts.prepend(first.querySelector(".bar"));
  if (tables.pairs) methodChooser(document.getElementById("sharing"), report.methods.filter(method => method.shares).map(method => method.name));
  const worked = report.charts.find(chart => chart.id === "work");
  if (worked) methodChooser(document.getElementById("time"), worked.panels.map(panel => panel.method));
  document.getElementById("contents").append(...sections.map(made =>
    element("a", { href: `#${made.id}` }, made.id === "summary" ? "Summary" : made.querySelector("h2").textContent)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", () => plots.forEach(plot => plot.drawn || draw(plot)));
  document.documentElement.dataset.ready = "true";
}

start().catch(error => {
  document.getElementById("main").textContent = `The report could not be shown: ${error}`;
  throw error;
});

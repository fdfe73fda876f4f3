// The report page at work: draws the figures, follows light and dark, and looks up the explorer's
// numbers in the table that the page carries. It computes none of them.
"use strict";

const figures = JSON.parse(document.getElementById("figures").textContent);
const config = {
  displaylogo: false,
  responsive: true,
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
};
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function theme(layout) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: colour("--line"), linecolor: colour("--line"),
                 zerolinecolor: colour("--line") };
  // The place has the height: Plotly forgets its own when the window changes.
  const { height, ...rest } = layout;
  return {
    ...rest,
    autosize: true,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--text"), family: style.fontFamily, size: 13 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--soft"), activecolor: colour("--accent") },
    hoverlabel: { bgcolor: colour("--card"), font: { color: colour("--text") } },
    xaxis: { ...layout.xaxis, ...axis },
    yaxis: { ...layout.yaxis, ...axis },
  };
}

function draw() {
  for (const [name, figure] of Object.entries(figures)) {
    document.getElementById(name).style.height = figure.layout.height + "px";
    Plotly.react(name, figure.data, theme(figure.layout), config);
  }
}

function percent(share) {
  const text = (share * 100).toFixed(1);
  return (share < 0 ? text : "+" + text) + " %";
}

function explorer() {
  const block = document.getElementById("explorer-table");
  if (block === null) return;
  const table = JSON.parse(block.textContent);
  const input = (name) => document.getElementById("explorer-" + name);
  const names = ["acceptance", "spread", "requests"];
  const values = [table.acceptances, table.spreads, table.num_reqs];
  const formats = [(x) => x.toFixed(2), (x) => x.toFixed(2), (x) => String(x)];

  function place(request, acceptance, spread) {
    return (request * table.acceptances.length + acceptance) * table.spreads.length + spread;
  }

  function show() {
    const at = names.map((name) => Number(input(name).value));
    const [acceptance, spread, request] = at;
    names.forEach((name, index) => {
      const text = formats[index](values[index][at[index]]);
      input(name).setAttribute("aria-valuetext", text);
      document.getElementById("explorer-" + name + "-value").textContent = text;
    });
    const surface = table.surfaces[Number(input("context").value)];
    const here = place(request, acceptance, spread);
    const pair = surface.pairs[surface.pair[here]];
    const texts = {
      pair: "(" + pair[0] + ", " + pair[1] + ")",
      share: (surface.share[here] * 100).toFixed(0) + " % of the steps",
      drafts: surface.drafts[here].toFixed(2),
      tokens: surface.tokens[here].toFixed(2),
      ms: surface.ms[here].toPrecision(4),
      all: percent(surface.over_all[here]),
      none: percent(surface.over_none[here]),
    };
    for (const [name, text] of Object.entries(texts)) {
      document.getElementById("result-" + name).textContent = text;
    }
    const column = (gains) => table.num_reqs.map((_, r) => gains[place(r, acceptance, spread)]);
    const figure = figures["figure-explorer"];
    figure.data[0].y = column(surface.over_all);
    figure.data[1].y = column(surface.over_none);
    for (const trace of figure.data) {
      trace.marker = { size: table.num_reqs.map((_, r) => (r === request ? 12 : 5)) };
    }
    Plotly.react("figure-explorer", figure.data, theme(figure.layout), config);
  }

  for (const name of [...names, "context"]) input(name).addEventListener("input", show);
  show();
}

draw();
explorer();
dark.addEventListener("change", draw);

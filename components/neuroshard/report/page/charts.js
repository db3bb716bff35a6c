// The charts, as Vega-Lite specifications. `draw` takes the colours from the page, so that they are light or dark with it.
"use strict";

const MOST_SVG_MARKS = 1500; // beyond, a canvas is quicker
const views = {};

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); }

function isDark() { return document.documentElement.dataset.theme === "dark"; }

const NARROW = 480; // pixels: a phone, on which legends side by side are cut

function theme(width) {
  const quiet = colour("quiet"), line = colour("line"), text = colour("text");
  return {
    background: null,
    font: "system-ui, -apple-system, Segoe UI, sans-serif",
    view: { stroke: null },
    axis: { labelColor: quiet, titleColor: quiet, gridColor: line, domainColor: line, tickColor: line, titleFontWeight: 500, labelLimit: 260, labelFontSize: 11.5, titleFontSize: 12 },
    legend: { labelColor: text, titleColor: quiet, titleFontWeight: 500, orient: "top", labelLimit: 300, labelFontSize: 12, titleFontSize: 12, ...(width < NARROW ? { columns: 1 } : {}) },
    title: { color: text, anchor: "start", fontSize: 13 },
    text: { color: text, fontSize: 12 },
    rule: { color: text },
  };
}

async function draw(id, spec, options = {}) {
  const place = document.getElementById(id);
  if (!place) return null;
  if (views[id]) views[id].finalize();
  const made = await vegaEmbed(place, {
    $schema: "https://vega.github.io/schema/vega-lite/v6.json",
    width: "container",
    autosize: { type: "fit-x", contains: "padding", resize: true },
    config: theme(place.clientWidth),
    ...spec,
  }, {
    actions: false, renderer: options.renderer || "svg", ast: true, defaultStyle: false,
    tooltip: { disableDefaultStyle: true, theme: "page" },
  });
  views[id] = made.view;
  if (options.click) made.view.addEventListener("click", (_, item) => {
    if (item && item.datum && item.datum.device !== undefined) options.click(item.datum.device);
  });
  return made.view;
}

const byDevice = { field: "device", type: "ordinal", title: "device", axis: { labelAngle: 0, labelOverlap: true } };
const MOST_HOST_NAMES = 8;
const chosenParam = { name: "chosen", value: null };
const dimOthers = { condition: { test: "chosen === null || datum.device === chosen", value: 1 }, value: 0.25 };

function layers(names, titles, colours) { return { domain: names.map((name) => titles[name]), range: names.map((name) => colours[name]) }; }

function boundLayer(bound, axis) {
  if (bound === null || bound === undefined) return [];
  const data = { values: [{ bound, what: `no plan below ${ms(bound)} ms` }] };
  const at = { field: "bound", type: "quantitative" };
  const tooltip = { field: "what", title: "lower bound" };
  return [{ data, mark: { type: "rule", strokeDash: [5, 4], strokeWidth: 1.5 }, encoding: { [axis]: at, tooltip } }];
}

function barsSpec(bars, bound) {
  const most = Math.max(...bars.map((bar) => bar.ms));
  const room = 7 * most.toFixed(3).length + 10; // pixels for the figure next to the longest bar
  const scale = { domain: [0, most || 1], nice: false, rangeMax: { expr: `max(1, width - ${room})` } };
  const x = { field: "ms", type: "quantitative", title: "ms a step, predicted", scale };
  const y = { field: "name", type: "nominal", sort: [...bars].sort((a, b) => a.ms - b.ms).map((bar) => bar.name), title: null };
  const kinds = { plan: colour("compute"), live: colour("forward"), heuristic: colour("other") };
  const tooltip = [{ field: "name", title: "plan" }, { field: "ms", title: "predicted ms", format: ".3f" }];
  return {
    data: { values: bars },
    height: bars.length * 27,
    layer: [
      { mark: { type: "bar", cornerRadiusEnd: 3 }, encoding: { x, y, tooltip, color: { field: "kind", type: "nominal", legend: null, scale: { domain: Object.keys(kinds), range: Object.values(kinds) } } } },
      { mark: { type: "text", align: "left", dx: 5 }, encoding: { x, y, text: { field: "ms", format: ".3f" } } },
      ...boundLayer(bound, "x"),
    ],
  };
}

// Where a host begins, and its name; nothing where there is one host or none is known.
function hostLayers(devices) {
  const values = devices.filter((row, place) => row.host !== undefined && (place === 0 || row.host !== devices[place - 1].host))
    .map((row) => ({ device: row.device, name: `host ${row.host}` }));
  if (values.length < 2) return [];
  const x = { ...byDevice, bandPosition: 0 };
  const names = values.length > MOST_HOST_NAMES ? [] : values; // more would overlap on a phone
  return [
    { data: { values }, mark: { type: "rule", strokeDash: [2, 3], opacity: 0.7 }, encoding: { x } },
    { data: { values: names }, mark: { type: "text", align: "left", baseline: "bottom", dx: 3, dy: -2, fontSize: 11 }, encoding: { x, y: { value: 0 }, text: { field: "name" } } },
  ];
}

function devicesSpec(devices, bound) {
  const averaging = devices.some((row) => row.averaging) ? { averaging: "averaging replicas" } : {};
  const titles = { compute: "compute", forward: "forward all-to-all", backward: "backward all-to-all", ...averaging };
  const names = Object.keys(titles);
  const parts = devices.flatMap((row) => names.map((name, order) => ({ ...row, part: titles[name], order, ms: row[name] })));
  const told = [{ field: "device" }, { field: "part" }, { field: "ms", title: "predicted ms", format: ".3f" },
    { field: "total", title: "of total ms", format: ".3f" }, { field: "shards" }, { field: "memoryText", title: "memory" }];
  return {
    data: { values: parts },
    height: 260,
    params: [chosenParam],
    layer: [
      { mark: { type: "bar", cursor: "pointer" }, encoding: {
        x: byDevice,
        y: { field: "ms", type: "quantitative", title: "ms a step, predicted" },
        order: { field: "order" },
        color: { field: "part", type: "nominal", title: null, scale: layers(names, titles, { compute: colour("compute"), forward: colour("forward"), backward: colour("backward"), averaging: colour("other") }) },
        opacity: dimOthers, tooltip: told } },
      ...boundLayer(bound, "y"),
      ...hostLayers(devices),
    ],
  };
}

// Bytes in one unit for a whole axis.
function unitFor(most) {
  const power = Math.min(Math.max(Math.floor(Math.log2(Math.max(most, 1)) / 10), 0), UNITS.length - 1);
  return { title: UNITS[power], factor: 1024 ** power };
}

function memorySpec(devices) {
  const unit = unitFor(Math.max(...devices.map((row) => row.limit)));
  const titles = { weights: "weights", caches: "caches", optimizer: "optimizer state", maps: "id maps", step: "a step's inputs and outputs" };
  const names = Object.keys(titles).filter((name) => devices.some((row) => row[name]));
  const values = names.flatMap((name, order) => devices.map((row) => ({ ...row, part: titles[name], order, partText: bytes(row[name]), used: row[name] / unit.factor })));
  const limits = devices.map((row) => ({ device: row.device, limit: row.limit / unit.factor, limitText: bytes(row.limit) }));
  const tooltip = [{ field: "device" }, { field: "part" }, { field: "partText", title: "computed" }, { field: "memoryText", title: "all of it" },
    { field: "share", format: ".1%", title: "of the limit" }, { field: "shards" }];
  return {
    data: { values },
    height: 260,
    params: [chosenParam],
    encoding: { x: byDevice },
    layer: [
      { mark: { type: "bar", cursor: "pointer" }, encoding: {
        y: { field: "used", type: "quantitative", title: `${unit.title}, computed` },
        order: { field: "order" },
        color: { field: "part", type: "nominal", title: null, scale: layers(names, titles, { weights: colour("compute"), caches: colour("other"), optimizer: colour("forward"), maps: colour("quiet"), step: colour("backward") }) },
        opacity: dimOthers, tooltip } },
      { data: { values: limits }, mark: { type: "tick", color: colour("alert"), thickness: 2, orient: "horizontal", bandSize: { band: 1 } },
        encoding: { y: { field: "limit", type: "quantitative" }, tooltip: [{ field: "device" }, { field: "limitText", title: "limit" }] } },
      ...hostLayers(devices),
    ],
  };
}

function mapSpec(shards, devices, priced) {
  const unit = unitFor(Math.max(...devices.map((row) => row.memory)));
  const matches = "(find === '' || indexof(lower(datum.name), find) >= 0) && (chosen === null || datum.device === chosen)";
  const cost = priced ? [{ field: "addsText", title: "adds to its device (predicted)" }, { field: "aloneText", title: "alone on a device (predicted)" }] : [];
  return {
    data: { values: shards.map((row) => ({ ...row, size: row.bytes / unit.factor })) },
    height: 320,
    params: [chosenParam, { name: "find", value: "" }],
    mark: { type: "bar", stroke: colour("ground"), strokeWidth: shards.length > MOST_SVG_MARKS ? 0.3 : 0.8, cursor: "pointer" },
    encoding: {
      x: { ...byDevice, scale: { domain: devices.map((row) => row.device) } }, // with those that are empty
      y: { field: "size", type: "quantitative", title: `${unit.title}, computed`, stack: "zero" },
      order: { field: "bytes", sort: "descending" },
      detail: { field: "shard" },
      color: { field: priced ? "adds" : "dim", type: "quantitative", title: priced ? "ms it adds, predicted" : "columns", scale: { scheme: { name: "viridis", extent: isDark() ? [0.2, 1] : [0, 0.95] } }, legend: { gradientLength: 220 } },
      opacity: { condition: { test: matches, value: 1 }, value: 0.12 },
      tooltip: [{ field: "name", title: "table" }, { field: "device" }, { field: "rowsText", title: "rows" }, { field: "columns" }, { field: "pooling", title: "pooling factor" },
        { field: "shardsOfTable", title: "shards of the table" }, { field: "bytesText", title: "memory" },
        ...(DATA.tables.tier ? [{ field: "tierText", title: "tier" }] : []), ...cost],
    },
  };
}

function changeSpec(change) {
  const all = rowsOf(change);
  const unit = unitFor(Math.max(...all.map((row) => Math.max(row.arriving + row.made, row.leaving))));
  const titles = { arriving: "arriving", made: "made anew", leaving: "leaving" };
  const values = all.flatMap((row, device) => Object.keys(titles).map((name) => ({
    device, what: titles[name], size: (name === "leaving" ? -row[name] : row[name]) / unit.factor, text: bytes(row[name]) })));
  return {
    data: { values },
    height: 240,
    mark: { type: "bar" },
    encoding: {
      x: byDevice,
      y: { field: "size", type: "quantitative", title: `${unit.title} (leaving: below 0)` },
      color: { field: "what", type: "nominal", title: null, scale: layers(Object.keys(titles), titles, { arriving: colour("compute"), made: colour("backward"), leaving: colour("forward") }) },
      tooltip: [{ field: "device" }, { field: "what" }, { field: "text", title: "bytes" }],
    },
  };
}

// Two costs of every device, joined by a line. rows: {device, first, second}
function betweenSpec(rows, names, title) {
  const values = rows.flatMap((row) => [{ ...row, what: names[0], ms: row.first }, { ...row, what: names[1], ms: row.second }]).filter((row) => row.ms !== null);
  const tooltip = [{ field: "device" }, { field: "first", title: `${names[0]}, ms`, format: ".3f" }, { field: "second", title: `${names[1]}, ms`, format: ".3f" }];
  const y = { field: "ms", type: "quantitative", title };
  return {
    data: { values },
    height: 240,
    encoding: { x: byDevice, tooltip },
    layer: [
      { mark: { type: "line", color: colour("other") }, encoding: { y, detail: { field: "device" } } },
      { mark: { type: "point", filled: true, size: 60, opacity: 1 }, encoding: { y, shape: { field: "what", type: "nominal", title: null, scale: { domain: names, range: ["square", "circle"] } },
        color: { field: "what", type: "nominal", title: null, scale: { domain: names, range: [colour("forward"), colour("compute")] } } } },
    ],
  };
}

function errorsSpec(errors) {
  const values = errors.map((row) => ({ ...row, what: row.net === "compute" ? `compute, ${row.split}` : row.net }));
  const y = { field: "what", type: "nominal", title: null, sort: null };
  const tooltip = [{ field: "what", title: "of" }, { field: "split", title: "on" }, { field: "error", format: ".1%", title: "error" }, { field: "noise", format: ".1%", title: "noise" },
    { field: "values", title: "values" }, { field: "tau", format: ".3f", title: "Kendall's tau" }];
  const scale = { domain: ["error", "noise"], range: [colour("compute"), colour("alert")] };
  return {
    data: { values },
    height: values.length * 27,
    encoding: { y, tooltip },
    layer: [
      { mark: { type: "bar", cornerRadiusEnd: 3 }, encoding: { x: { field: "error", type: "quantitative", title: "error", axis: { format: ".1%" } }, color: { datum: "error", scale, title: null } } },
      { mark: { type: "tick", thickness: 3 }, encoding: { x: { field: "noise", type: "quantitative" }, color: { datum: "noise" } } },
    ],
  };
}

function pointsSpec(name, columns, noise) {
  const values = rowsOf(columns).filter((row) => row.measured > 0 && row.predicted > 0);
  const all = values.flatMap((row) => [row.measured, row.predicted]);
  const ends = [Math.min(...all), Math.max(...all)].map((v) => ({ v, low: v * (1 - 2 * (noise || 0)), high: v * (1 + 2 * (noise || 0)) }));
  const log = { type: "log", nice: false, padding: 6 };
  const axis = { labelOverlap: true, tickCount: 5, format: "~g" };
  return {
    height: 280,
    title: name,
    layer: [
      { data: { values: ends }, mark: { type: "area", color: colour("other"), opacity: 0.35 }, encoding: { x: { field: "v", type: "quantitative", scale: log }, y: { field: "low", type: "quantitative", scale: log }, y2: { field: "high" } } },
      { data: { values: ends }, mark: { type: "line", color: colour("text"), strokeWidth: 1 }, encoding: { x: { field: "v", type: "quantitative" }, y: { field: "v", type: "quantitative" } } },
      { data: { values }, mark: { type: "point", filled: true, size: 22, opacity: 0.75 }, encoding: {
        x: { field: "measured", type: "quantitative", title: `${DATA.measured} ms`, axis },
        y: { field: "predicted", type: "quantitative", title: "predicted ms", axis },
        color: { field: "split", type: "nominal", title: null, scale: { range: [colour("compute"), colour("forward")] } },
        tooltip: [{ field: "measured", format: ".4g", title: `${DATA.measured} ms` }, { field: "predicted", format: ".4g", title: "predicted ms" },
          { field: "size", title: name === "compute" ? "tables" : "devices" }, { field: "split", title: "of" }] } },
    ],
  };
}

function curvesSpec(curve) {
  const values = curve.train.flatMap((train, i) => [{ epoch: i + 1, of: "in training", error: train }, { epoch: i + 1, of: "held out", error: curve.valid[i] }]);
  const y = { field: "error", type: "quantitative", title: "mean |log error|", scale: { type: "log", nice: false }, axis: { format: "~g", tickCount: 5 } };
  const x = { field: "epoch", type: "quantitative", title: "epoch", axis: { tickMinStep: 1 } };
  return {
    height: 220,
    title: `${curve.net}, epoch ${curve.best} of ${curve.train.length}`,
    layer: [
      { data: { values: values.filter((row) => row.error > 0) }, mark: { type: "line", strokeWidth: 1.6, tooltip: false }, encoding: { x, y, color: { field: "of", type: "nominal", title: null, scale: { domain: ["in training", "held out"], range: [colour("other"), colour("compute")] } } } },
      { data: { values: [{ epoch: curve.best, error: curve.valid[curve.best - 1] }] }, mark: { type: "point", filled: true, size: 70, color: colour("alert"), opacity: 1 }, encoding: { x, y,
        tooltip: [{ field: "epoch", title: "kept: epoch" }, { field: "error", format: ".4f", title: "error held out" }] } },
    ],
  };
}

function searchSpec(steps, costs, bound) {
  const values = steps.map((step, i) => ({ step, ms: costs[i] }));
  return {
    height: 240,
    layer: [
      { data: { values }, mark: { type: "line", interpolate: "step-after", color: colour("compute"), point: { filled: true, size: 26, color: colour("compute") } }, encoding: {
        x: { field: "step", type: "quantitative", title: "changes of the plan at hand" },
        y: { field: "ms", type: "quantitative", title: "ms a step, predicted", scale: { zero: false } },
        tooltip: [{ field: "step", title: "after changes" }, { field: "ms", format: ".3f", title: "best, predicted ms" }] } },
      ...boundLayer(bound, "y"),
    ],
  };
}

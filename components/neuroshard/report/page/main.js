// Reads the data, fills lists and charts, and links them: the search box, the device, and light or dark.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const priced = DATA.shards.adds !== undefined;

const TIERS = ["hbm", "cached", "host"];
const tables = rowsOf(DATA.tables).map((row) => ({ ...row, shards: [], tierText: tierText(row), onDevices: row.devices.reduce((sum, [first, last]) => sum + last - first + 1, 0) }));
const shards = rowsOf(DATA.shards).map((row, shard) => {
  const table = tables[row.table];
  table.shards.push(row);
  return Object.assign(row, { shard, name: table.name, tierText: table.tierText, pooling: upTo2.format(table.pooling), columns: columnsText(row), bytesText: bytes(row.bytes),
    rowsText: rowsText(row, table), addsText: priced ? `${ms(row.adds)} ms` : "", aloneText: priced ? `${ms(row.alone)} ms` : "" });
});
for (const row of shards) row.shardsOfTable = tables[row.table].count;
// Shards too small to draw are one block for each device.
const smaller = (DATA.smaller ? rowsOf(DATA.smaller) : []).map((row, place) => ({ ...row, shard: shards.length + place, name: `${whole.format(row.count)} smaller shards`,
  rowsText: "", columns: "", pooling: "", shardsOfTable: "", bytesText: bytes(row.bytes), addsText: priced ? `${ms(row.adds)} ms each` : "", aloneText: "" }));
const devices = rowsOf(DATA.devices).map((row, device) => ({ ...row, device, ...(DATA.ranksAHost ? { host: Math.floor(device / DATA.ranksAHost) } : {}), share: row.memory / row.limit,
  memoryText: `${bytes(row.memory)} of ${bytes(row.limit)}` }));

const moves = DATA.moves ? rowsOf(DATA.moves) : [];

function columnsText(row) { return `${row.column}–${row.column + row.dim - 1}`; }
function rowsText(row, table) { return row.rows === table.rows ? whole.format(row.rows) : `${whole.format(row.row)}–${whole.format(row.row + row.rows - 1)}`; }

function tierText(row) {
  if (row.tier === "cached") return `cached, ${whole.format(row.cached)} rows (${percent(row.cached / row.rows)})`;
  return row.tier === "host" ? "host memory" : "HBM";
}

function liesOn(table, device) { return table.devices.some(([first, last]) => first <= device && device <= last); }
function someDevices(table) {
  const first = [];
  for (const [begin, end] of table.devices) for (let device = begin; device <= end && first.length < 8; device += 1) first.push(device);
  return first.join(", ") + (table.onDevices > 8 ? `, … (${table.onDevices})` : "");
}

const chosen = { device: null, find: "" };
const findBox = document.getElementById("find");
const deviceBox = document.getElementById("device");
for (const { device } of devices) deviceBox.append(new Option(String(device), String(device)));

function matching() {
  return tables.filter((table) => (chosen.find === "" || table.name.toLowerCase().includes(chosen.find))
    && (chosen.device === null || liesOn(table, chosen.device)));
}

const drawDevices = list("list-devices", [
  { title: "device", of: (row) => row.device, number: true },
  ...(DATA.ranksAHost ? [{ title: "host", of: (row) => row.host, number: true }] : []),
  { title: "shards", of: (row) => row.shards, text: (row) => whole.format(row.shards), number: true, first: "descending" },
  ...(DATA.devices.compute ? [
    { title: "compute ms", of: (row) => row.compute, text: (row) => ms(row.compute), number: true, first: "descending" },
    { title: "forward all-to-all ms", of: (row) => row.forward, text: (row) => ms(row.forward), number: true, first: "descending" },
    { title: "backward all-to-all ms", of: (row) => row.backward, text: (row) => ms(row.backward), number: true, first: "descending" },
  ] : []),
  ...(DATA.devices.averaging ? [{ title: "averaging ms", of: (row) => row.averaging, text: (row) => ms(row.averaging), number: true, first: "descending" }] : []),
  ...(DATA.devices.total ? [{ title: "total ms, predicted", of: (row) => row.total, text: (row) => ms(row.total), number: true, first: "descending" }] : []),
  ...(DATA.devices.live ? [{ title: "live plan ms, predicted", of: (row) => row.live, text: (row) => ms(row.live), number: true, first: "descending" }] : []),
  { title: "memory", of: (row) => row.memory, text: (row) => row.memoryText, number: true, first: "descending" },
  { title: "used", of: (row) => row.share, text: (row) => percent(row.share), number: true, first: "descending" },
], { sort: 0, rows: () => devices, click: (row) => choose(row.device), chosen: (row) => row.device === chosen.device });

const drawTables = list("list-tables", [
  { title: "table", of: (row) => row.name },
  { title: "rows", of: (row) => row.rows, text: (row) => whole.format(row.rows), number: true, first: "descending" },
  { title: "dim", of: (row) => row.dim, number: true, first: "descending" },
  { title: "pooling factor", of: (row) => row.pooling, text: (row) => upTo2.format(row.pooling), number: true, first: "descending" },
  { title: "memory", of: (row) => row.bytes, text: (row) => bytes(row.bytes), number: true, first: "descending" },
  ...(priced ? [{ title: "adds ms, predicted", of: (row) => row.adds, text: (row) => ms(row.adds), number: true, first: "descending" }] : []),
  ...(DATA.tables.tier ? [
    { title: "tier", of: (row) => TIERS.indexOf(row.tier), text: (row) => row.tierText, first: "descending" },
    { title: "host memory", of: (row) => row.host, text: (row) => bytes(row.host), number: true, first: "descending" },
  ] : []),
  { title: "shards", of: (row) => row.count, text: (row) => whole.format(row.count) + (row.rowWise ? " row-wise" : ""), number: true, first: "descending" },
  { title: "devices", of: (row) => row.devices[0][0], text: someDevices },
], { sort: priced ? 5 : 4, rows: matching, hover: tableCard });

if (DATA.moves) list("list-moves", [
  { title: "table", of: (row) => tables[row.table].name },
  { title: "from device", of: (row) => row.from, text: (row) => (row.from < 0 ? "made anew" : row.from), number: true },
  { title: "to device", of: (row) => row.to, number: true },
  { title: "columns", of: (row) => row.column, text: columnsText, number: true },
  { title: "rows", of: (row) => row.rows, text: (row) => rowsText(row, tables[row.table]), number: true, first: "descending" },
  { title: "bytes", of: (row) => row.bytes, text: (row) => bytes(row.bytes), number: true, first: "descending" },
], { sort: 5, rows: () => moves });

function tableCard(table) {
  const card = document.createDocumentFragment();
  card.append(element("b", table.name));
  card.append(element("div", `${whole.format(table.rows)} rows × ${table.dim} columns of ${table.element} bytes, pooling factor ${upTo2.format(table.pooling)}`, "quiet"));
  if (table.tier) card.append(element("div", `${table.tierText}${table.host ? `, ${bytes(table.host)} of host memory` : ""}`, "quiet"));
  if (table.rowWise) card.append(element("div", `row-wise over ${table.onDevices} devices`, "quiet"));
  const rows = element("table");
  const shown = table.shards.slice(0, 12);
  const wide = shown.every((row) => row.dim === table.dim);
  const parts = [
    ["device", (row) => row.device],
    ...(table.rowWise ? [["rows", (row) => row.rowsText]] : []),
    ...(table.rowWise && wide ? [] : [["columns", (row) => row.columns]]),
    ["memory", (row) => row.bytesText],
    ...(priced ? [["adds ms", (row) => ms(row.adds)], ["alone ms", (row) => ms(row.alone)]] : []),
  ];
  const head = rows.insertRow();
  for (const [title] of parts) head.append(element("th", title, "number"));
  for (const row of shown) {
    const line = rows.insertRow();
    for (const [, text] of parts) line.append(element("td", String(text(row)), "number"));
  }
  card.append(rows);
  if (table.count > shown.length) card.append(element("div", `and ${whole.format(table.count - shown.length)} more shards`, "quiet"));
  if (priced) card.append(element("div", "ms of compute, predicted", "quiet"));
  return card;
}

function choose(device) {
  chosen.device = chosen.device === device ? null : device;
  filter();
}

function filter() {
  deviceBox.value = chosen.device === null ? "" : String(chosen.device);
  const found = matching();
  document.getElementById("found").textContent = `${whole.format(found.length)} of ${whole.format(tables.length)} tables`;
  drawTables();
  drawDevices();
  for (const [id, names] of Object.entries({ "chart-devices": ["chosen"], "chart-memory": ["chosen"], "chart-map": ["chosen", "find"] })) {
    if (!views[id]) continue;
    for (const name of names) views[id].signal(name, name === "find" ? chosen.find : chosen.device);
    views[id].runAsync();
  }
}

findBox.addEventListener("input", () => { chosen.find = findBox.value.trim().toLowerCase(); filter(); });
deviceBox.addEventListener("change", () => { chosen.device = deviceBox.value === "" ? null : Number(deviceBox.value); filter(); });

function grid(id, count) {
  const place = document.getElementById(id);
  if (place && !place.children.length) {
    for (let i = 0; i < count; i += 1) { const part = element("div"); part.id = `${id}-${i}`; place.append(part); }
  }
}

async function drawCharts() {
  const pointed = Object.entries(DATA.points);
  grid("chart-points", pointed.length);
  grid("chart-curves", DATA.curves.length);
  const noiseOf = (name) => Math.max(0, ...DATA.errors.filter((row) => row.net.startsWith(name)).map((row) => row.noise || 0));
  if (DATA.bars.length) await draw("chart-bars", barsSpec(DATA.bars, DATA.bound));
  if (DATA.devices.compute) await draw("chart-devices", devicesSpec(devices, DATA.bound), { click: choose });
  await draw("chart-memory", memorySpec(devices), { click: choose });
  await draw("chart-map", mapSpec([...shards, ...smaller], devices, priced), { click: choose, renderer: shards.length > MOST_SVG_MARKS ? "canvas" : "svg" });
  if (DATA.change) await draw("chart-change", changeSpec(DATA.change));
  if (DATA.devices.live) {
    const rows = devices.map((row) => ({ device: row.device, first: row.live, second: row.total }));
    await draw("chart-before", betweenSpec(rows, ["live plan", "this plan"], "ms a step, predicted"));
  }
  if (DATA.evaluated) {
    const rows = rowsOf(DATA.evaluated).map((row, device) => ({ device, first: row.measured, second: row.predicted }));
    await draw("chart-evaluated", betweenSpec(rows, [DATA.evaluated_how, "predicted"], "ms a step"));
  }
  if (DATA.errors.length) await draw("chart-errors", errorsSpec(DATA.errors));
  for (const [i, [name, columns]] of pointed.entries()) await draw(`chart-points-${i}`, pointsSpec(name, columns, noiseOf(name)));
  for (const [i, curve] of DATA.curves.entries()) await draw(`chart-curves-${i}`, curvesSpec(curve));
  if (DATA.steps.length) await draw("chart-search", searchSpec(DATA.steps, DATA.costs, DATA.bound));
  filter();
  document.documentElement.dataset.drawn = document.documentElement.dataset.theme;
}

// Nothing is stored between visits: KFP's sandboxed frame has no storage.
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const themeButton = document.getElementById("theme");
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  themeButton.querySelector("span").textContent = name === "dark" ? "light" : "dark";
  return drawCharts();
}
themeButton.addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
dark.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));

// A link to an anchor on the page would leave the frame that KFP shows it in.
for (const link of document.querySelectorAll("nav a")) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    document.querySelector(link.getAttribute("href")).scrollIntoView({ behavior: "smooth" });
  });
}

setTheme(dark.matches ? "dark" : "light");

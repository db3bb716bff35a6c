// Reads the data, fills lists and charts, and links them: the search box, the device, and light or dark.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const SETS = rowsOfAll(DATA.sets);
const { devices, tables, shards } = SETS;
const rowsText = (row, all) => (row.rows === all ? numbers.format(row.rows) : `${numbers.format(row.row)}–${numbers.format(row.row + row.rows - 1)}`);
const columnsText = (row) => `${row.column}–${row.column + row.dim - 1}`;

for (const row of devices) Object.assign(row, { share: row.memory / row.limit, memoryText: `${bytes(row.memory)} of ${bytes(row.limit)}` });
for (const table of tables) Object.assign(table, { shards: [], onDevices: table.devices.reduce((sum, [first, last]) => sum + last - first + 1, 0),
  countText: numbers.format(table.count) + (table.rowWise ? " row-wise" : "") });
shards.forEach((row, shard) => {
  const table = tables[row.table], { name, tier } = table;
  table.shards.push(row);
  Object.assign(row, { shard, name, tier, pooling: numbers.format(table.pooling), shardsOfTable: table.count, columns: columnsText(row), rowsText: rowsText(row, table.rows),
    addsText: `${SHOW.ms(row.adds || 0)} ms`, aloneText: `${SHOW.ms(row.alone || 0)} ms` });
});
// Shards too small to draw are one block for each device.
const smaller = (SETS.smaller || []).map((row, place) => ({ ...row, shard: shards.length + place, name: `${numbers.format(row.count)} smaller shards`,
  ...Object.fromEntries(["rowsText", "columns", "pooling", "shardsOfTable", "tier", "aloneText"].map((none) => [none, ""])), addsText: `${SHOW.ms(row.adds || 0)} ms each` }));
SETS.map = [...shards, ...smaller];
for (const row of SETS.moves || []) {
  const table = tables[row.table];
  Object.assign(row, { name: table.name, columns: columnsText(row), rowsText: rowsText(row, table.rows), fromText: row.from < 0 ? "made anew" : row.from });
}

const chosen = { device: null, find: "" };
const findBox = document.getElementById("find");
const deviceBox = document.getElementById("device");
for (const { device } of devices) deviceBox.append(new Option(String(device), String(device)));

function matching() {
  return tables.filter((table) => table.name.toLowerCase().includes(chosen.find)
    && (chosen.device === null || table.devices.some(([first, last]) => first <= chosen.device && chosen.device <= last)));
}

const drawDevices = list("list-devices", { rows: () => devices, click: (row) => choose(row.device), chosen: (row) => row.device === chosen.device });
const drawTables = list("list-tables", { rows: matching, hover: tableCard });
list("list-moves", { rows: () => SETS.moves });

function tableCard(table) {
  const card = document.createDocumentFragment(), rows = element("table"), shown = table.shards.slice(0, 12);
  const add = (...lines) => card.append(...lines.map((text) => element("div", text, "quiet")));
  const parts = [["device", "device"], ["rows", "rowsText"], ["columns", "columns"], ["memory", "bytes"], ["adds ms", "adds"], ["alone ms", "alone"]];
  const known = parts.filter(([, of]) => shown.length && shown[0][of] !== undefined);
  card.append(element("b", table.name));
  add(`${numbers.format(table.rows)} rows × ${table.dim} columns of ${table.element} bytes, pooling factor ${numbers.format(table.pooling)}`);
  if (table.tier) add(`${table.tier}${table.host ? `, ${bytes(table.host)} of host memory` : ""}`);
  if (table.rowWise) add(`row-wise over ${table.onDevices} devices`);
  rows.insertRow().append(...known.map(([title]) => element("th", title, "number")));
  for (const row of shown) {
    const show = { bytes, adds: SHOW.ms, alone: SHOW.ms };
    rows.insertRow().append(...known.map(([, of]) => element("td", (show[of] || String)(row[of]), "number")));
  }
  card.append(rows);
  if (table.count > shown.length) add(`and ${numbers.format(table.count - shown.length)} more shards`);
  if (table.adds !== undefined) add("ms of compute, predicted");
  return card;
}

function choose(device) {
  chosen.device = chosen.device === device ? null : device;
  filter();
}

function filter() {
  deviceBox.value = chosen.device === null ? "" : String(chosen.device);
  document.getElementById("found").textContent = `${numbers.format(matching().length)} of ${numbers.format(tables.length)} tables`;
  drawTables();
  drawDevices();
  for (const view of Object.values(views)) view.signal("chosen", chosen.device).signal("find", chosen.find).runAsync();
}

findBox.addEventListener("input", () => { chosen.find = findBox.value.trim().toLowerCase(); filter(); });
deviceBox.addEventListener("change", () => { chosen.device = deviceBox.value === "" ? null : Number(deviceBox.value); filter(); });

// A chart takes its colours from the page, so that it is light or dark with it.
const MOST_SVG_MARKS = 1500; // beyond, a canvas is quicker
const NARROW = 480; // pixels: a phone, on which legends side by side are cut
const views = {};
const coloured = (key, value) => (typeof value === "string" && value.startsWith("--") ? getComputedStyle(document.documentElement).getPropertyValue(value).trim() : value);

async function draw(place) {
  const name = place.id.slice("chart-".length), { common, [name]: { sets = {}, ...chart } } = JSON.parse(JSON.stringify(DATA.charts), coloured);
  if (place.clientWidth < NARROW) common.config.legend.columns = 1;
  if (views[name]) views[name].finalize();
  const { view } = await vegaEmbed(place, { ...common, ...chart, datasets: { ...SETS, ...rowsOfAll(sets) } }, {
    mode: "vega-lite", actions: false, ast: true, defaultStyle: false, expressionFunctions: { bytes },
    renderer: name === "map" && shards.length > MOST_SVG_MARKS ? "canvas" : "svg", tooltip: { disableDefaultStyle: true, theme: "page" },
  });
  views[name] = view;
  view.addEventListener("click", (_, item) => { if (item && item.datum && item.datum.device !== undefined) choose(item.datum.device); });
}

// Nothing is stored between visits: KFP's sandboxed frame has no storage.
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const themeButton = document.getElementById("theme");
async function setTheme(name) {
  document.documentElement.dataset.theme = name;
  themeButton.querySelector("span").textContent = name === "dark" ? "light" : "dark";
  for (const place of document.querySelectorAll(".chart[id]")) await draw(place);
  filter();
  document.documentElement.dataset.drawn = document.documentElement.dataset.theme;
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

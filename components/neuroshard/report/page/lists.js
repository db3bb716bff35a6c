// Tables whose heads are in the page: data-of names a field of the rows, data-show how it is shown (or the field with Text after its
// name is). A click on a heading sorts.
// Only the first rows are on the page; a button adds the rest.
"use strict";

const FIRST_ROWS = 100;
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const numbers = new Intl.NumberFormat("en-US", { maximumFractionDigits: 2 });
const SHOW = { number: numbers.format, ms: (value) => value.toFixed(3), percent: (share) => `${(share * 100).toFixed(1)} %`, bytes, id: String, text: String };

// As neuroshard.core.units.format_bytes writes them, so that page and terminal say the same.
function bytes(count) {
  let size = count, unit = 0;
  while (Math.abs(size) >= 1024 && unit < UNITS.length - 1) { size /= 1024; unit += 1; }
  return unit ? `${size.toFixed(1)} ${UNITS[unit]}` : `${size.toFixed(0)} B`;
}

// {a: [1, 2], b: [3, 4]} -> [{a: 1, b: 3}, {a: 2, b: 4}]
function rowsOf(columns) {
  const [names, lists] = [Object.keys(columns), Object.values(columns)];
  return lists[0].map((_, i) => Object.fromEntries(names.map((name, at) => [name, lists[at][i]])));
}

const rowsOfAll = (sets) => Object.fromEntries(Object.entries(sets).map(([name, columns]) => [name, rowsOf(columns)]));

// An element with text in it, never HTML: names of tables are untrusted.
function element(tag, text, className = "") {
  return Object.assign(document.createElement(tag), { textContent: text, className });
}

// Fills a table, and returns what fills it anew. options: rows() -> the rows to show, click(row), hover(row) -> text, chosen(row)
function list(id, options) {
  const table = document.getElementById(id);
  if (!table) return () => {};
  const heads = [...table.tHead.rows[0].cells], body = table.createTBody(), more = element("button", "", "more");
  const shown = (row, { of, show }) => row[`${of}Text`] ?? SHOW[show](row[of]);
  let all = false;
  for (const head of heads) {
    const button = element("button", head.textContent);
    button.onclick = () => sort(head, head.ariaSort ? head.ariaSort === "ascending" : !["id", "text"].includes(head.dataset.show));
    head.replaceChildren(button);
  }
  more.onclick = () => { all = true; draw(); };
  table.after(more);

  function sort(head, down) {
    for (const other of heads) other.removeAttribute("aria-sort");
    head.ariaSort = down ? "descending" : "ascending";
    draw();
  }

  function draw() {
    const sorted = heads.find((head) => head.ariaSort), { of } = sorted.dataset, turn = sorted.ariaSort === "descending" ? -1 : 1;
    const rows = [...options.rows()].sort((a, b) => turn * (typeof a[of] === "string" ? a[of].localeCompare(b[of], "en", { numeric: true }) : a[of] - b[of]));
    const kept = all ? rows : rows.slice(0, FIRST_ROWS);
    body.replaceChildren(...kept.map(line));
    more.hidden = kept.length === rows.length;
    more.textContent = `Show all ${numbers.format(rows.length)} rows`;
  }

  function line(row) {
    const made = element("tr", "", `${options.click ? "clickable" : ""} ${options.chosen && options.chosen(row) ? "chosen" : ""}`);
    for (const head of heads) made.append(element("td", shown(row, head.dataset), head.className));
    if (options.click) made.onclick = () => options.click(row);
    if (options.hover) {
      made.onmousemove = (event) => hover(event, () => options.hover(row), made);
      made.onmouseleave = () => hover(null);
    }
    return made;
  }

  draw();
  return draw;
}

// A card next to the mouse. `of` is the key of its row, so that it is built once.
let hovered = null;
function hover(event, make, of) {
  const card = document.getElementById("hover");
  card.hidden = !event;
  if (!event) { hovered = null; return; }
  if (hovered !== of) { card.replaceChildren(make()); hovered = of; }
  const right = Math.min(event.clientX + 16, window.innerWidth - card.offsetWidth - 8);
  const below = event.clientY + 18;
  card.style.left = `${Math.max(right, 8)}px`;
  card.style.top = `${below + card.offsetHeight < window.innerHeight ? below : Math.max(event.clientY - card.offsetHeight - 12, 4)}px`;
}

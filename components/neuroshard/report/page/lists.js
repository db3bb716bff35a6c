// Tables that sort by a click on a heading. Only the first rows are on the page; a button adds the rest.
"use strict";

const FIRST_ROWS = 100;

// columns: {title, of: row -> number or text to sort by, text: row -> what is shown (default: `of`), number, first: "descending"}
// options: rows() -> the rows to show, sort: index of the column, click(row), hover(row) -> element, chosen(row)
function list(id, columns, options) {
  const table = document.getElementById(id);
  const state = { column: options.sort, down: columns[options.sort].first === "descending", all: false };
  const head = table.createTHead().insertRow();
  columns.forEach((column, index) => {
    const cell = element("th", undefined, column.number ? "number" : "");
    const button = element("button", column.title);
    button.type = "button";
    button.addEventListener("click", () => {
      state.down = state.column === index ? !state.down : column.first === "descending";
      state.column = index;
      draw();
    });
    cell.append(button);
    head.append(cell);
  });
  const body = table.createTBody();
  const more = element("button", undefined, "more");
  more.type = "button";
  more.addEventListener("click", () => { state.all = true; draw(); });
  table.after(more);

  function draw() {
    const { of } = columns[state.column];
    const rows = [...options.rows()].sort((a, b) => compare(of(a), of(b)) * (state.down ? -1 : 1));
    [...head.cells].forEach((cell, index) => {
      if (index === state.column) cell.ariaSort = state.down ? "descending" : "ascending";
      else cell.removeAttribute("aria-sort");
    });
    const shown = state.all ? rows : rows.slice(0, FIRST_ROWS);
    body.replaceChildren(...shown.map(line));
    more.hidden = shown.length === rows.length;
    more.textContent = `Show all ${whole.format(rows.length)} rows`;
  }

  function line(row) {
    const made = element("tr");
    for (const column of columns) {
      made.append(element("td", String((column.text || column.of)(row)), column.number ? "number" : ""));
    }
    if (options.click) { made.classList.add("clickable"); made.addEventListener("click", () => options.click(row)); }
    if (options.chosen && options.chosen(row)) made.classList.add("chosen");
    if (options.hover) {
      made.addEventListener("mousemove", (event) => hover(event, () => options.hover(row), made));
      made.addEventListener("mouseleave", () => hover(null));
    }
    return made;
  }

  draw();
  return draw;
}

function compare(a, b) {
  return typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
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

// Numbers as text. Bytes as neuroshard.core.units.format_bytes writes them, so that page and terminal say the same.
"use strict";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const upTo2 = new Intl.NumberFormat("en-US", { maximumFractionDigits: 2 });

function bytes(count) {
  let size = count, unit = 0;
  while (Math.abs(size) >= 1024 && unit < UNITS.length - 1) { size /= 1024; unit += 1; }
  return unit ? `${size.toFixed(1)} ${UNITS[unit]}` : `${size.toFixed(0)} B`;
}

function ms(value) { return value === undefined ? "" : value.toFixed(3); }
function percent(share) { return `${(share * 100).toFixed(1)} %`; }

// An element with text in it, never HTML: names of tables are untrusted.
function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// {a: [1, 2], b: [3, 4]} -> [{a: 1, b: 3}, {a: 2, b: 4}]
function rowsOf(columns) {
  const names = Object.keys(columns);
  return columns[names[0]].map((_, i) => Object.fromEntries(names.map((name) => [name, columns[name][i]])));
}

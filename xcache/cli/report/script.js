"use strict";
// The report is whole without this: it only sorts and filters tables, opens what a link leads to, and switches themes.

const value = (row, column) => {
  const cell = row.cells[column];
  return cell.dataset.v === undefined ? cell.textContent.trim().toLowerCase() : Number(cell.dataset.v);
};

for (const table of document.querySelectorAll("table.sortable")) {
  const titles = [...table.tHead.rows[0].cells];
  titles.forEach((title, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = title.textContent;
    title.replaceChildren(button);
    button.addEventListener("click", () => {
      // Numbers begin with the largest, text with A.
      const first = title.classList.contains("n") ? "descending" : "ascending";
      const other = first === "ascending" ? "descending" : "ascending";
      const order = title.getAttribute("aria-sort") === first ? other : first;
      titles.forEach((each) => each.removeAttribute("aria-sort"));
      title.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const rows = [...table.tBodies[0].rows].map((row) => [value(row, column), row]);
      rows.sort(([a], [b]) => sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b))));
      table.tBodies[0].append(...rows.map(([, row]) => row));
    });
  });
}

for (const filter of document.querySelectorAll(".filter")) {
  const rows = [...filter.parentElement.querySelectorAll("tbody tr")];
  const input = filter.querySelector("input");
  const status = filter.querySelector("[role=status]");
  filter.hidden = false;
  input.addEventListener("input", () => {
    const wanted = input.value.trim().toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    status.textContent = wanted ? `${rows.filter((row) => !row.hidden).length} of ${rows.length}` : "";
  });
}

for (const button of document.querySelectorAll("[data-open]")) {
  button.parentElement.hidden = false;
  button.addEventListener("click", () => {
    const all = [...document.querySelectorAll(`#${button.dataset.open} details`)];
    const isOpening = all.some((each) => !each.open);
    for (const each of all) each.open = isOpening;
    button.textContent = isOpening ? "Close all" : "Open all";
  });
}

const openTarget = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)))?.closest("details");
  if (target) {
    target.open = true;
    target.querySelector("summary").focus({ preventScroll: true });
  }
};
addEventListener("hashchange", openTarget);
openTarget();

// "/" goes to the filter of the table in view, as on many pages.
addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target instanceof HTMLInputElement) return;
  const inputs = [...document.querySelectorAll(".filter:not([hidden]) input")];
  const next = inputs.find((input) => input.getBoundingClientRect().top > 0) || inputs[0];
  if (next) {
    event.preventDefault();
    next.focus();
  }
});

const theme = document.getElementById("theme");
const isDark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const label = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
theme.hidden = false;
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  label();
});
label();

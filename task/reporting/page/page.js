"use strict";
// Sorting: a click, Enter or Space on a column's head; numbers by value, cells that say nothing always last.
function order(first, second, sign) {
  const [a, b] = [first, second].map((cell) => cell.dataset.sort);
  if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
  const [x, y] = [Number(a), Number(b)];
  if (Number.isNaN(x) || Number.isNaN(y)) return sign * a.localeCompare(b, "en", { numeric: true });
  return sign * (x - y);
}
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const now = head.getAttribute("aria-sort");
    const first = head.classList.contains("number") ? "descending" : "ascending";
    const other = first === "ascending" ? "descending" : "ascending";
    const direction = now === first ? other : first;
    for (const each of heads) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", direction);
    const sign = direction === "ascending" ? 1 : -1;
    const body = table.tBodies[0];
    body.append(...[...body.rows].sort((a, b) => order(a.cells[column], b.cells[column], sign)));
  }));
}
// A figure in large, until Escape or a click.
const dialog = document.querySelector("dialog");
const large = dialog.querySelector("img");
for (const button of document.querySelectorAll(".zoom")) {
  button.addEventListener("click", () => {
    const image = button.querySelector("img");
    large.src = image.src;
    large.alt = image.alt;
    dialog.classList.toggle("matrix", button.classList.contains("matrix"));
    dialog.showModal();
  });
}
large.addEventListener("click", () => dialog.close());
// What is folded up would be missing on paper.
addEventListener("beforeprint", () => {
  for (const each of document.querySelectorAll("details")) each.open = true;
});

"use strict";
// The tables of a report: a click on a head sorts, what is typed filters. Nothing else runs here.
const filter = document.querySelector("input[data-filter]");
document.querySelectorAll("table[data-sort]").forEach((table) => {
  const rows = () => [...table.rows].slice(1);
  const value = (row, i) => row.cells[i].textContent.trim();
  [...table.rows[0].cells].forEach((head, i) => {
    head.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      [...table.rows[0].cells].forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const compare = (a, b) => {
        const [x, y] = [value(a, i), value(b, i)];
        const [m, n] = [Number(x), Number(y)];
        const both = x !== "" && y !== "" && !Number.isNaN(m) && !Number.isNaN(n);
        return (both ? m - n : x.localeCompare(y)) * (down ? -1 : 1);
      };
      const parent = table.rows[1] && table.rows[1].parentNode;
      rows().sort(compare).forEach((row) => parent.appendChild(row));
    });
  });
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().replace(/rank (\d+)/g, "").split(/\s+/).filter(Boolean);
    const rank = /rank (\d+)/.exec(filter.value.toLowerCase());
    const ranked = table.rows[0].cells[1].textContent === "rank";
    rows().forEach((row) => {
      const text = row.textContent.toLowerCase();
      const there = words.every((word) => text.includes(word));
      row.hidden = !(there && (!rank || !ranked || value(row, 1) === rank[1]));
    });
  });
});

/* Draws the figures in the colours of the theme, sorts tables, and saves charts and records as files. */
"use strict";
(() => {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const toggle = document.getElementById("theme");

  // The page's own colours, as plotly settings. Computed styles resolve light-dark() for us.
  function themed(layout) {
    const page = getComputedStyle(document.body);
    const card = getComputedStyle(document.querySelector(".card"));
    const axis = { gridcolor: card.borderTopColor, linecolor: card.borderTopColor, zerolinecolor: card.borderTopColor };
    return {
      ...layout,
      font: { family: page.fontFamily, size: 12, color: page.color },
      paper_bgcolor: card.backgroundColor,
      plot_bgcolor: card.backgroundColor,
      hoverlabel: { bgcolor: card.backgroundColor, bordercolor: page.color, font: { color: page.color }, align: "left" },
      xaxis: { ...layout.xaxis, ...axis },
      yaxis: { ...layout.yaxis, ...axis },
    };
  }

  function draw() {
    const isDark = (root.style.colorScheme || (dark.matches ? "dark" : "light")) === "dark";
    toggle.textContent = isDark ? "Light" : "Dark";
    toggle.setAttribute("aria-pressed", String(isDark));
    for (const [id, figure] of Object.entries(figures)) {
      Plotly.react(id, figure.data, themed(figure.layout), { responsive: true, displayModeBar: false });
    }
  }

  function sort(table, column) {
    const headings = [...table.tHead.rows[0].cells];
    const up = headings[column].getAttribute("aria-sort") !== "ascending";
    headings.forEach((heading) => heading.removeAttribute("aria-sort"));
    headings[column].setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => row.cells[column].dataset.value;
    const order = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined); // missing values last
      const difference = isNaN(x) || isNaN(y) ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
      return up ? difference : -difference;
    };
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(order));
  }

  function save(record) {
    const url = URL.createObjectURL(new Blob([document.getElementById(record).textContent], { type: "application/json" }));
    Object.assign(document.createElement("a"), { href: url, download: `${record}.json` }).click();
    URL.revokeObjectURL(url);
  }

  // A picture leaves the page, so it carries its own title. innerHTML, because plotly reads tags in titles.
  function png(id) {
    const text = document.getElementById(`${id}-title`).innerHTML;
    const title = { text, subtitle: { text: document.querySelector("h1").innerHTML }, x: 0.02, xanchor: "left" };
    const layout = themed(figures[id].layout);
    const figure = { data: figures[id].data, layout: { ...layout, title, margin: { ...layout.margin, t: 80 } } };
    Plotly.downloadImage(figure, { format: "png", width: 1000, height: layout.height + 160, scale: 2, filename: id });
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      heading.firstElementChild.addEventListener("click", () => sort(table, column));
    });
  }
  for (const button of document.querySelectorAll("button.record")) {
    button.addEventListener("click", () => save(button.dataset.record));
  }
  for (const button of document.querySelectorAll("button.png")) {
    button.addEventListener("click", () => png(button.dataset.chart));
  }
  toggle.addEventListener("click", () => {
    root.style.colorScheme = toggle.getAttribute("aria-pressed") === "true" ? "light" : "dark";
    draw();
  });
  dark.addEventListener("change", draw);
  draw();
})();

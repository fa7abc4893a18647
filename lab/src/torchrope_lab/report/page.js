"use strict";
// Draws figures when they scroll into view, sorts tables, and offers SVG, PNG and CSV downloads.
(() => {
  const formatted = (value) => {
    if (value === null || value === undefined) return "\u2013";
    if (typeof value === "boolean") return value ? "yes" : "no";
    if (typeof value !== "number") return String(value);
    const whole = Math.abs(value) >= 1e6 || Number.isInteger(value);
    return whole ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : String(Number(value.toPrecision(4)));
  };

  // Fits the width of a figure; several panels are in as many columns as it has space for.
  const fitted = (plot, width) => {
    const spec = structuredClone(plot.spec);
    const single = spec.spec || spec;
    if (plot.hover) single.layer.push(plot.hover);
    if (width < 450) spec.config.axis.labelLimit = 110;
    if (plot.panels) {
      const [beside, between] = spec.resolve ? [80, 50] : [45, 18];
      spec.columns = Math.max(1, Math.min(plot.panels, 6, Math.floor((width - beside) / 190)));
      const wide = Math.max(80, Math.min(420, Math.floor((width - beside) / spec.columns - between)));
      if (spec.resolve) single.height = Math.max(40, Math.round(single.height * wide / single.width));
      single.width = wide;
      spec.config.axis.titleLimit = Math.max(wide + 10, single.height);
      spec.config.header.labelLimit = wide + 30;
    } else {
      spec.width = "container";
      if (width < 500 && spec.height > 280) spec.height = 280;
    }
    for (const { legend } of single.layer.flatMap((layer) => Object.values(layer.encoding))) {
      if (legend && legend.columns) legend.columns = Math.max(1, Math.floor(width / 150));
    }
    const values = plot.rows.map((row) => Object.fromEntries(row.map((value, index) => ["c" + index, value])));
    return { ...spec, data: { values } };
  };

  const draw = (figure, plot) => {
    const host = figure.querySelector(".drawing");
    const stage = document.createElement("div");
    stage.className = "live";
    const tooltip = {
      disableDefaultStyle: true,
      formatTooltip: (datum, escaped) => "<table>" + plot.columns.map(([, title], index) =>
        `<tr><td>${escaped(title)}</td><td>${escaped(formatted(datum["c" + index]))}</td></tr>`).join("") + "</table>",
    };
    stage.style.height = 0;
    host.append(stage);
    return vegaEmbed(stage, fitted(plot, host.clientWidth), {
      mode: "vega-lite", renderer: "svg", actions: false, ast: true, defaultStyle: false, hover: false, tooltip,
    }).then(({ view }) => {
      stage.style.height = "";
      host.replaceChildren(stage);
      figure.dataset.drawn = "yes";
      return view;
    });
  };

  const save = (name, type, ...content) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob(content, { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };

  // Spreadsheets evaluate text that begins with these characters as a formula.
  const quoted = (value) => {
    if (typeof value !== "string") return String(value ?? "");
    const text = /^[=+\-@\t\r]/.test(value) ? "'" + value : value;
    return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
  };

  const csv = (plot) => [plot.columns.map(([key]) => key), ...plot.rows]
    .map((row) => row.map(quoted).join(",") + "\r\n").join("");

  // Adds a row of buttons below a drawing that download it in several formats.
  const addDownloads = (figure, formats) => {
    const tools = document.createElement("div");
    tools.className = "tools";
    for (const [name, act] of Object.entries(formats)) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = name;
      button.setAttribute("aria-label", `Download as ${name}: ${figure.querySelector("h4").textContent}`);
      button.addEventListener("click", () => act(`${figure.id}.${name.toLowerCase()}`));
      tools.append(button);
    }
    figure.querySelector(".drawing").after(tools);
  };

  const sortable = (table) => {
    const body = table.tBodies[0];
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, index) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      heading.append(button);
      heading.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        // The first click sorts numbers in descending, words in ascending order; gaps are last.
        const numeric = heading.classList.contains("n");
        const orders = numeric ? ["descending", "ascending"] : ["ascending", "descending"];
        const order = orders[Number(heading.getAttribute("aria-sort") === orders[0])];
        for (const other of headings) other.setAttribute("aria-sort", "none");
        heading.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        const number = (cell) => Number(cell.dataset.sort ?? sign * Infinity);
        const key = ({ cells }) => numeric ? number(cells[index]) : cells[index].textContent;
        const compare = numeric ? (a, b) => a - b : new Intl.Collator("en", { numeric: true }).compare;
        body.append(...[...body.rows].sort((a, b) => sign * compare(key(a), key(b)) || 0));
      });
    });
  };

  document.querySelectorAll("table.sortable").forEach(sortable);

  for (const figure of document.querySelectorAll("figure.shots")) {
    const text = () => new XMLSerializer().serializeToString(figure.querySelector("svg"));
    addDownloads(figure, { SVG: (name) => save(name, "image/svg+xml", text()) });
    figure.dataset.drawn = "yes";
  }

  const drawings = new Map();
  for (const figure of document.querySelectorAll("figure.plotted")) {
    const plot = JSON.parse(figure.querySelector("script.plot").textContent);
    let view = null;
    const drawn = () => view ??= draw(figure, plot);
    drawings.set(figure, drawn);
    addDownloads(figure, {
      SVG: async (name) => save(name, "image/svg+xml", await (await drawn()).toSVG()),
      PNG: async (name) => (await (await drawn()).toCanvas(2)).toBlob((blob) => save(name, "image/png", blob)),
      CSV: (name) => save(name, "text/csv;charset=utf-8", "\ufeff", csv(plot)),
    });
  }
  const seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) if (isIntersecting) drawings.get(target)();
  }, { rootMargin: "600px" });
  for (const figure of drawings.keys()) seen.observe(figure);

  document.addEventListener("keydown", ({ key }) => {
    if (key === "Escape") document.getElementById("vg-tooltip-element")?.classList.remove("visible");
  });

  // Collapsed details are opened for printing.
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details.again").forEach((element) => { element.open = true; });
  });
})();

"use strict";
// Draws figures when they scroll into view, sorts tables, and offers SVG, PNG and CSV downloads. Uses textContent only.
(() => {
  const tip = document.getElementById("tip");
  const missing = "\u2013";

  const shown = (value) => {
    if (value === null || value === undefined) return missing;
    if (typeof value === "boolean") return value ? "yes" : "no";
    if (typeof value !== "number") return String(value);
    const digits = Math.abs(value) >= 1e6 || Number.isInteger(value) ? 0 : 4;
    return digits ? String(Number(value.toPrecision(digits))) : value.toLocaleString("en");
  };

  const showTooltip = (plot, handler, event, item) => {
    const datum = item && item.datum;
    if (!datum || !("c0" in datum)) {
      tip.hidden = true;
      return;
    }
    tip.replaceChildren(...plot.columns.map(([, title], index) => {
      const line = document.createElement("div");
      const name = document.createElement("span");
      const value = document.createElement("b");
      name.textContent = title;
      value.textContent = shown(datum["c" + index]);
      line.append(name, value);
      return line;
    }));
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const x = Math.min(event.clientX + 14, window.innerWidth - box.width - 6);
    const below = event.clientY + 14;
    tip.style.left = Math.max(6, x) + "px";
    tip.style.top = (below + box.height > window.innerHeight ? event.clientY - box.height - 10 : below) + "px";
  };

  const fitted = (plot, width) => {
    const spec = structuredClone(plot.spec);
    const values = plot.rows.map((row) => Object.fromEntries(row.map((value, index) => ["c" + index, value])));
    const legend = Math.max(1, Math.floor(width / 150));
    if (width < 450) spec.config.axis.labelLimit = 110;
    if (plot.panels) {
      const inner = spec.spec;
      const beside = spec.resolve ? 80 : 45;
      const between = spec.resolve ? 50 : 18;
      spec.columns = Math.max(1, Math.min(plot.panels, 6, Math.floor((width - beside) / 190)));
      const wide = Math.max(80, Math.min(420, Math.floor((width - beside) / spec.columns - between)));
      if (spec.resolve) inner.height = Math.max(40, Math.round(inner.height * wide / inner.width));
      inner.width = wide;
      spec.config.axis.titleLimit = Math.max(wide + 10, inner.height);
      spec.config.header.labelLimit = wide + 30;
    } else {
      spec.width = width;
      if (width < 500 && spec.height > 280) spec.height = 280;
    }
    for (const layer of (spec.spec || spec).layer) {
      for (const channel of Object.values(layer.encoding)) {
        if (channel.legend && channel.legend.columns) channel.legend.columns = legend;
      }
    }
    return { ...spec, data: { values } };
  };

  const save = (name, blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };

  // Spreadsheets evaluate text that begins with these characters as a formula.
  const quoted = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value !== "string") return String(value);
    const text = /^[=+\-@\t\r]/.test(value) ? "'" + value : value;
    return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
  };

  const csv = (plot) => [plot.columns.map(([key]) => key), ...plot.rows]
    .map((row) => row.map(quoted).join(",") + "\r\n").join("");

  const scaled = (domain, factor, log) => {
    const [low, high] = log ? domain.map(Math.log) : domain.map(Number);
    const middle = (low + high) / 2;
    const ends = [middle - (middle - low) * factor, middle + (high - middle) * factor];
    return log ? ends.map(Math.exp) : ends;
  };

  // Returns the row of buttons below a drawing, and a function that adds a button.
  const toolbar = (figure) => {
    const tools = document.createElement("div");
    tools.className = "tools";
    const title = figure.querySelector("h4").textContent;
    const add = (text, label, act) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.setAttribute("aria-label", `${label}: ${title}`);
      button.addEventListener("click", act);
      tools.append(button);
    };
    figure.querySelector(".drawing").after(tools);
    return [tools, add];
  };

  class Figure {
    constructor(element) {
      this.element = element;
      this.host = element.querySelector(".drawing");
      this.plot = JSON.parse(element.querySelector("script.plot").textContent);
      this.view = null;
      this.width = 0;
      this.addTools();
    }

    addTools() {
      const [tools, add] = toolbar(this.element);
      if (this.plot.zoom.length) {
        add("+", "Zoom in", () => this.zoom(0.6));
        add("\u2212", "Zoom out", () => this.zoom(1 / 0.6));
        add("Reset", "Reset the zoom", () => this.draw());
        tools.title = "Ctrl and the wheel zoom, dragging moves, a double click resets";
      }
      add("SVG", "Download as SVG", async () => {
        await this.drawn();
        save(this.element.id + ".svg", new Blob([await this.view.toSVG()], { type: "image/svg+xml" }));
      });
      add("PNG", "Download as PNG", async () => {
        await this.drawn();
        (await this.view.toCanvas(2)).toBlob((blob) => save(this.element.id + ".png", blob), "image/png");
      });
      add("CSV", "Download as CSV", () => {
        save(this.element.id + ".csv", new Blob(["\ufeff" + csv(this.plot)], { type: "text/csv;charset=utf-8" }));
      });
    }

    drawn() {
      return this.view ? Promise.resolve() : this.draw();
    }

    async draw() {
      this.width = this.host.clientWidth;
      const stage = document.createElement("div");
      stage.className = "live";
      const made = await vegaEmbed(stage, fitted(this.plot, this.width), {
        mode: "vega-lite", renderer: "svg", actions: false, ast: true, defaultStyle: false, hover: false,
        tooltip: (...given) => showTooltip(this.plot, ...given),
      });
      if (this.view) this.view.finalize();
      this.view = made.view;
      this.host.replaceChildren(stage);
      this.element.dataset.drawn = "yes";
    }

    async zoom(factor) {
      await this.drawn();
      for (const [channel, field] of this.plot.zoom) {
        const scale = this.view.scale(channel);
        this.view.signal("zoom_" + field, scaled(scale.domain(), factor, scale.type === "log"));
      }
      await this.view.runAsync();
    }
  }

  const sortable = (table) => {
    const body = table.tBodies[0];
    const headings = [...table.tHead.rows[0].cells];
    const key = (row, index) => {
      const cell = row.cells[index];
      return cell.dataset.sort === undefined ? null : Number(cell.dataset.sort);
    };
    headings.forEach((heading, index) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      heading.append(button);
      heading.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        // The first click sorts numbers in descending, words in ascending order.
        const numeric = heading.classList.contains("n");
        const first = numeric ? "descending" : "ascending";
        const second = numeric ? "ascending" : "descending";
        const order = heading.getAttribute("aria-sort") === first ? second : first;
        for (const other of headings) other.setAttribute("aria-sort", "none");
        heading.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        const rows = [...body.rows].sort((one, other) => {
          if (!numeric) {
            const [a, b] = [one, other].map((row) => row.cells[index].textContent);
            return sign * a.localeCompare(b, "en", { numeric: true });
          }
          const [a, b] = [key(one, index), key(other, index)];
          if (a === null || b === null) return (a === null) - (b === null);
          return sign * (a - b);
        });
        body.append(...rows);
      });
    });
  };

  document.querySelectorAll("table.sortable").forEach(sortable);

  for (const element of document.querySelectorAll("figure.shots")) {
    const [, add] = toolbar(element);
    add("SVG", "Download as SVG", () => {
      const text = new XMLSerializer().serializeToString(element.querySelector("svg"));
      save(element.id + ".svg", new Blob([text], { type: "image/svg+xml" }));
    });
    element.dataset.drawn = "yes";
  }

  const figures = new Map([...document.querySelectorAll("figure:not(.shots)")].map((element) => [element, new Figure(element)]));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      figures.get(entry.target).draw();
    }
  }, { rootMargin: "600px" });
  for (const element of figures.keys()) seen.observe(element);

  let waiting = 0;
  window.addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      for (const figure of figures.values()) {
        if (figure.view && Math.abs(figure.host.clientWidth - figure.width) > 8) figure.draw();
      }
    }, 200);
  });
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });

  // Collapsed details are opened for printing.
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details.again").forEach((element) => { element.open = true; });
  });
})();

// Comforts only: every page is complete without this file.
"use strict";

(function () {
  const root = document.documentElement;
  const KEY = "decode-harness-theme";

  function stored(storage, key) {
    try { return storage().getItem(key); } catch { return null; } // storage may be switched off
  }
  function store(storage, key, value) {
    try { storage().setItem(key, value); } catch { /* as above */ }
  }
  const local = () => window.localStorage;
  const session = () => window.sessionStorage;

  // Before the body is drawn, so that a page does not flash in the other theme.
  const chosen = stored(local, KEY);
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;

  function isDark() {
    if (root.dataset.theme) return root.dataset.theme === "dark";
    return window.matchMedia("(prefers-color-scheme: dark)").matches;
  }

  function addThemeButton() {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "theme";
    const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
    button.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      store(local, KEY, root.dataset.theme);
      name();
    });
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
    name();
    document.querySelector(".top-row").append(button);
  }

  function addCopyButtons() {
    if (!navigator.clipboard) return;
    for (const box of document.querySelectorAll(".command")) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "copy";
      button.textContent = "Copy";
      button.addEventListener("click", async () => {
        try {
          await navigator.clipboard.writeText(box.querySelector("code").textContent);
          button.textContent = "Copied";
        } catch {
          button.textContent = "Not allowed";
        }
      });
      box.append(button);
    }
  }

  // Sorting keeps the server's order among equals; numbers come from data-value.
  function makeSortable(table) {
    const body = table.tBodies[0];
    const headers = [...table.tHead.rows[0].cells];
    headers.forEach((header, index) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...header.childNodes);
      header.append(button);
      button.addEventListener("click", () => {
        const down = header.getAttribute("aria-sort") === "ascending";
        headers.forEach((other) => other.removeAttribute("aria-sort"));
        header.setAttribute("aria-sort", down ? "descending" : "ascending");
        const value = (row) => {
          const cell = row.cells[index];
          return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
        };
        const compare = (a, b) => {
          const [x, y] = [value(a), value(b)];
          if (typeof x === "number" && typeof y === "number") return x - y;
          if (typeof x === "number") return -1;
          if (typeof y === "number") return 1;
          return x.localeCompare(y, undefined, { numeric: true });
        };
        const rows = [...body.rows].sort((a, b) => (down ? compare(b, a) : compare(a, b)));
        body.append(...rows);
      });
    });
  }

  // A line at the pointer and, above the drawing, the values there.
  function addHover(svg) {
    const rows = JSON.parse(svg.dataset.hover);
    if (!rows.length) return;
    const readout = document.createElement("p");
    readout.className = "readout";
    svg.before(readout);
    const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
    line.setAttribute("class", "cursor");
    svg.append(line);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      let near = rows[0];
      for (const row of rows) if (Math.abs(row[0] - x) < Math.abs(near[0] - x)) near = row;
      line.setAttribute("d", `M${near[0]} ${svg.dataset.top}V${svg.dataset.bottom}`);
      readout.textContent = near[1];
    });
    svg.addEventListener("pointerleave", () => {
      line.removeAttribute("d");
      readout.textContent = "";
    });
  }

  function keepDetailsOpen() {
    const key = "open:" + location.pathname;
    const open = new Set(JSON.parse(stored(session, key) || "[]"));
    for (const one of document.querySelectorAll("details[id]")) {
      if (open.has(one.id)) one.open = true;
      one.addEventListener("toggle", () => {
        if (one.open) open.add(one.id); else open.delete(one.id);
        store(session, key, JSON.stringify([...open]));
      });
    }
  }

  // A served page asks whether it was rebuilt. Files opened from disk have nobody to ask.
  function watch() {
    if (!location.protocol.startsWith("http")) return;
    let known = null;
    async function ask() {
      if (document.hidden) return;
      let answer;
      try {
        answer = await fetch(location.pathname, { method: "HEAD", cache: "no-store" });
      } catch {
        return; // the server has ended; what is on the screen stays
      }
      const tag = answer.headers.get("ETag");
      if (!answer.ok || !tag) return;
      if (known === null) known = tag;
      else if (known !== tag) location.reload();
    }
    ask();
    setInterval(ask, 4000);
  }

  document.addEventListener("DOMContentLoaded", () => {
    addThemeButton();
    addCopyButtons();
    document.querySelectorAll("table.sortable").forEach(makeSortable);
    document.querySelectorAll("svg[data-hover]").forEach(addHover);
    keepDetailsOpen();
    watch();
  });
})();

"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const root = document.documentElement;

  // Theme: that of the system until the reader chooses. Storage may be refused to a local file.
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  const nameTheme = () => { byId("theme-name").textContent = theme() === "dark" ? "light" : "dark"; };
  try {
    const kept = localStorage.getItem("fuselane-theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch { /* the system's theme it is */ }
  byId("theme").hidden = false;
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = theme() === "dark" ? "light" : "dark";
    nameTheme();
    try { localStorage.setItem("fuselane-theme", root.dataset.theme); } catch { /* not kept */ }
  });
  dark.addEventListener("change", nameTheme);
  nameTheme();

  // Filters.
  const form = byId("filters");
  const cards = all(".card");
  const boxes = (name) => all(`input[name="${name}"]`, form);
  const apply = () => {
    const wanted = {};
    for (const name of ["family", "mode", "metric", "alloc"]) {
      wanted[name] = new Set(boxes(name).filter((box) => box.checked).map((box) => box.value));
    }
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (item) => {
      const of = item.dataset;
      return wanted.family.has(of.family) && wanted.mode.has(of.mode) && wanted.metric.has(of.metric)
        && (!of.alloc || wanted.alloc.has(of.alloc)) && words.every((word) => of.name.includes(word));
    };
    for (const item of [...cards, ...all(".heat-row")]) item.hidden = !fits(item);
    for (const body of all(".heat tbody")) body.hidden = !body.querySelector(".heat-row:not([hidden])");
    for (const map of all(".heat")) map.hidden = !map.querySelector("tbody:not([hidden])");
    for (const family of all(".family")) family.hidden = !family.querySelector(".card:not([hidden])");
    for (const box of boxes("provider")) document.body.classList.toggle(`no-${box.value}`, !box.checked);
    const shown = cards.filter((card) => !card.hidden).length;
    byId("shown").textContent = `${shown} of ${cards.length} tables shown`;
  };
  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", apply);
  // The fields have their new values only after the event.
  form.addEventListener("reset", () => setTimeout(apply));
  apply();

  // Heat map: the whole row leads to its table.
  for (const row of all(".heat-row")) {
    row.addEventListener("click", (event) => {
      if (!event.target.closest("a")) row.querySelector("a").click();
    });
  }

  // Charts: the values of all providers at the nearest n.
  const data = new Map(JSON.parse(byId("data").textContent).map((table) => [table.table, table]));
  const tip = byId("tip");
  const element = (tag, text, className) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };
  for (const chart of all(".chart")) {
    const table = data.get(chart.dataset.table);
    const svg = chart.querySelector("svg");
    const area = {};
    for (const side of ["left", "right", "top", "bottom", "nMin", "nMax"]) area[side] = Number(chart.dataset[side]);
    const guide = element("div", undefined, "guide");
    guide.hidden = true;
    chart.append(guide);
    const pixel = (n) => area.left
      + (area.right - area.left) * Math.log(n / area.nMin) / Math.log(area.nMax / area.nMin);
    let at = -1;

    const hide = () => { tip.hidden = guide.hidden = true; at = -1; };
    const show = (index, pointer) => {
      const box = svg.getBoundingClientRect();
      const zoom = box.width / svg.viewBox.baseVal.width;
      const x = pixel(table.n[index]) * zoom;
      if (index !== at) {
        at = index;
        const series = table.series.filter((line) => !document.body.classList.contains(`no-${line.key}`));
        const values = series.filter((line) => line.key !== "limit").map((line) => line.values[index]);
        const best = Math.min(...values.filter((value) => value !== null));
        tip.replaceChildren(element("b", `n = ${table.n[index]}`));
        for (const line of series) {
          const row = element("div");
          const chip = element("span", undefined, "chip");
          chip.dataset.c = line.key;
          if (line.key === "limit") chip.classList.add("dashed");
          else if (line.values[index] === best) row.className = "best";
          row.append(chip, element("span", line.label), element("span", line.shown[index]));
          tip.append(row);
        }
        if (table.ratio[index] !== null) {
          const row = element("div");
          row.append(element("span", "best peer / ours"), element("span", table.ratio[index]));
          tip.append(row);
        }
      }
      guide.style.cssText = `left:${x}px;top:${area.top * zoom}px;height:${(area.bottom - area.top) * zoom}px`;
      tip.hidden = guide.hidden = false;
      // Beside the pointer, on the side where there is room.
      const from = pointer || { x: box.left + x, y: box.top + area.top * zoom };
      const size = tip.getBoundingClientRect();
      const left = from.x + 16 + size.width < innerWidth ? from.x + 16 : from.x - 16 - size.width;
      const top = Math.min(from.y + 8, innerHeight - size.height - 8);
      tip.style.left = `${Math.max(4, left)}px`;
      tip.style.top = `${Math.max(4, top)}px`;
    };
    const nearest = (x) => {
      const away = table.n.map((n) => Math.abs(pixel(n) - x));
      return away.indexOf(Math.min(...away));
    };
    const move = (event) => {
      const box = svg.getBoundingClientRect();
      show(nearest((event.clientX - box.left) * svg.viewBox.baseVal.width / box.width), { x: event.clientX, y: event.clientY });
    };
    chart.addEventListener("pointermove", move);
    chart.addEventListener("pointerdown", move);
    // A finger that is lifted leaves; what it asked for stays until it touches something else.
    chart.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hide(); });
    chart.addEventListener("blur", hide);
    chart.addEventListener("keydown", (event) => {
      const last = table.n.length - 1;
      const steps = { ArrowLeft: Math.max(0, at - 1), ArrowRight: Math.min(last, at + 1), Home: 0, End: last };
      if (event.key === "Escape") hide();
      else if (event.key in steps) {
        event.preventDefault();
        show(steps[event.key]);
      }
    });
  }
})();

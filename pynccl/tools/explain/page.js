"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const stageBox = byId("stage"), slider = byId("slider"), playButton = byId("play");
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const icons = {
    play: "M5 3l14 9-14 9z", pause: "M6 4h4v16H6zM14 4h4v16h-4z",
    back: "M6 4h3v16H6zM20 4v16L9 12z", next: "M15 4h3v16h-3zM4 4l11 8-11 8z",
  };
  const state = { name: "", op: "", grad: "", ranks: 4, adjoint: false, at: 0, playing: false };
  let scene = null; // the elements of what is shown, and when each of them is where

  // ---------------------------------------------------------------- what is chosen

  const rowOf = (name) => data.operations.find((row) => row.name === name);
  const run = () => data.runs[[state.name, state.op, state.grad, state.ranks].join("|")];
  const shownPass = () => data.passes[run()[state.adjoint ? 1 : 0]];
  const texts = () => data.texts[run()[2]];

  function choose(change, play = true) {
    Object.assign(state, change, { at: 0 });
    const row = rowOf(state.name);
    if (!row.ops.includes(state.op)) state.op = row.ops[0];
    if (!row.grads.includes(state.grad)) state.grad = row.grads[0];
    stop();
    build();
    if (play && !still.matches) start();
  }

  function buttons(box, name, values, chosen, pick) {
    box.textContent = "";
    if (values.length < 2) return;
    if (name) box.append(element("span", "name", name));
    for (const [value, text] of values) {
      const button = element("button", "", text);
      button.type = "button";
      button.dataset.value = value;
      button.setAttribute("aria-pressed", String(value === chosen));
      button.addEventListener("click", (event) => {
        pick(value);
        const again = box.querySelector(`[data-value="${value}"]`); // the buttons are new
        if (again && event.detail === 0) again.focus({ preventScroll: true }); // pressed by a key: goes on from there
      });
      box.append(button);
    }
  }

  function element(tag, kind, text = "") {
    const made = document.createElement(tag);
    if (kind) made.className = kind;
    if (text) made.textContent = text;
    return made;
  }

  function controls() {
    const row = rowOf(state.name);
    const same = (values) => values.map((value) => [value, String(value)]);
    buttons(byId("operations"), "", same(data.operations.map((one) => one.name)), state.name, (name) => choose({ name }));
    const list = byId("operations");
    for (const button of list.children) {
      button.title = rowOf(button.dataset.value).brief;
      const over = button.offsetLeft + button.offsetWidth - list.offsetLeft - list.clientWidth; // of a row that scrolls
      if (button.getAttribute("aria-pressed") === "true") list.scrollLeft = Math.max(0, over + 40);
    }
    buttons(byId("direction"), "", [["forward", "forward ↓"], ["adjoint", "adjoint ↑"]], state.adjoint ? "adjoint" : "forward",
      (value) => choose({ adjoint: value === "adjoint" }));
    buttons(byId("ranks"), "ranks", same(data.ranks), state.ranks, (ranks) => choose({ ranks }));
    buttons(byId("op"), "op", same(row.ops), state.op, (op) => choose({ op }));
    buttons(byId("grad"), "grad", same(row.grads), state.grad, (grad) => choose({ grad, adjoint: true }));
  }

  function words() {
    const text = texts();
    byId("title").textContent = state.name;
    either(byId("does"), text.does, text.back);
    either(byId("formula"), text.formula, text.backFormula);
    const box = byId("words");
    box.textContent = "";
    const section = (title) => { box.append(element("h3", "", title)); };
    if (text.other) { section("which gradient"); box.append(element("p", "", text.other + ".")); }
    section("shapes");
    box.append(element("p", "", text.shapes));
    section("calls");
    box.append(table(text.calls, true));
    section("commonly confused");
    const list = element("ul", "");
    for (const one of text.confused) list.append(element("li", "", one));
    box.append(list);
    if (text.snippet.length) {
      section("around dist.all_gather");
      box.append(element("p", "", text.snippet[0][1]), table(text.snippet.slice(1), false));
    }
  }

  // Both texts keep their room, so that nothing jumps when the direction changes.
  function either(box, forward, adjoint) {
    box.textContent = "";
    [forward, adjoint].forEach((text, at) => {
      const one = element("span", "", text);
      one.style.visibility = state.adjoint === Boolean(at) ? "" : "hidden";
      box.append(one);
    });
  }

  function table(rows, asCode) {
    const made = element("dl", "");
    for (const [name, text] of rows) {
      const cell = element("dd", "");
      cell.append(asCode ? element("code", "", text) : text);
      made.append(element("dt", "", name), cell);
    }
    return made;
  }

  // ---------------------------------------------------------------- what is shown

  function build() {
    const pass = shownPass();
    stageBox.textContent = "";
    const areas = [{ label: pass.labels[0], values: pass.values, cuts: pass.cuts }];
    pass.stages.forEach((stage, s) => areas.push({ label: pass.labels[s + 1], values: stage.values, cuts: stage.cuts }));
    scene = { areas, flyers: [], lanes: [], pills: [], steps: 0, captions: [] };
    for (let rank = 0; rank < state.ranks; rank++) {
      const lane = element("div", "lane"), name = element("div", "rank");
      name.style.color = `var(--rank${rank})`;
      stageBox.append(lane, name);
      scene.lanes.push([lane, name, rank]);
    }
    areas.forEach((area, a) => {
      area.name = element("div", "area", area.label);
      stageBox.append(area.name);
      area.cells = area.values.map((own, rank) => own.map((value, i) => {
        const box = element("div", "cell");
        Object.assign(box.dataset, { area: a, rank, at: i });
        stageBox.append(box);
        return { box, value, history: a ? [] : [{ time: 0, value, written: "", from: [rank], sum: false }] };
      }));
    });
    pass.stages.forEach((stage, s) => addStage(stage, s));
    slider.max = scene.steps;
    controls();
    words();
    layout();
  }

  function addStage(stage, s) {
    const pill = element("div", "between");
    pill.append(element("span", "", `${state.adjoint ? "↑" : "↓"} ${stage.text}`));
    stageBox.append(pill);
    scene.pills.push(pill);
    const start = scene.steps, end = start + stage.steps.length;
    for (const text of stage.steps) scene.captions.push(text || stage.text);
    for (const [source, at, target, to, step, value, factor] of stage.moves) {
      const from = scene.areas[s].cells[source][at], into = scene.areas[s + 1].cells[target][to];
      const ranks = from.history.length ? from.history[from.history.length - 1].from : [];
      const before = into.history.length ? into.history[into.history.length - 1] : { from: [], parts: [] };
      const parts = [...before.parts, [source, from.value]].sort((one, two) => one[0] - two[0]);
      const sum = stage.sign && parts.length > 1 ? parts.map((part) => part[1]).join(stage.sign) : "";
      into.history.push({
        time: start + step + 1, value, parts, written: factor ? `${from.value}×${factor}` : sum,
        sum: parts.length > 1, from: [...new Set([...before.from, ...ranks])],
      });
      const box = element("div", "cell flyer", factor ? `${from.value}×${factor}` : from.value);
      Object.assign(box.dataset, { stage: s, source, at, target, to });
      paint(box, ranks);
      stageBox.append(box);
      scene.flyers.push({ box, from, into, start: start + step });
    }
    for (const own of scene.areas[s + 1].cells) {
      for (const cell of own) if (!cell.history.length) cell.filled = end; // nothing comes here
    }
    scene.steps = end;
  }

  function paint(box, ranks) {
    const part = 100 / Math.max(ranks.length, 1);
    const stops = [...ranks].sort((one, two) => one - two).map((rank, i) => `var(--pale${rank}) ${i * part}% ${(i + 1) * part}%`);
    box.style.background = stops.length ? `linear-gradient(90deg, ${stops.join(", ")})` : "";
  }

  function layout() {
    const width = stageBox.clientWidth, wide = width >= 520;
    const gutter = wide ? 64 : 0, pitch = Math.min(124, (width - gutter) / state.ranks);
    const left = gutter + Math.max(0, (width - gutter - gutter - pitch * state.ranks) / 2);
    const between = wide ? 10 : pitch > 56 ? 8 : 2, inside = pitch > 56 ? 7 : 1;
    const tallest = Math.max(...scene.areas.flatMap((area) => area.values.map((own) => own.length)));
    const height = tallest > 6 ? 27 : 36, shift = tallest > 6 ? 3 : 4;
    stageBox.classList.toggle("narrow", pitch < 48);
    let y = 28;
    const order = scene.areas.map((_, a) => a);
    if (state.adjoint) order.reverse();
    order.forEach((a, place) => {
      const area = scene.areas[a];
      if (!wide) y += 16;
      area.top = y;
      const divided = Math.max(...area.cuts.flat()) > 1;
      let bottom = y + height;
      area.cells.forEach((own, rank) => {
        const starts = new Set();
        let sum = 0;
        for (const count of area.cuts[rank]) { if (count && sum) starts.add(sum); sum += count; }
        let top = y;
        own.forEach((cell, i) => {
          if (divided && starts.has(i)) top += 7;
          put(cell, left + rank * pitch + between / 2 + inside, top, pitch - between - 2 * inside, height);
          top += height + shift;
        });
        bottom = Math.max(bottom, top - shift);
      });
      area.name.style.cssText = wide
        ? `transform:translate(${Math.max(left - gutter, 0)}px,${y + height / 2 - 7}px);width:${gutter - 14}px`
        : `transform:translate(0px,${y - 15}px);width:auto`;
      y = bottom;
      if (place < order.length - 1) {
        const s = state.adjoint ? a - 1 : a;
        scene.pills[s].style.cssText = `transform:translate(${left}px,${y + 19}px);width:${pitch * state.ranks}px`;
        y += 62;
      }
    });
    for (const [lane, name, rank] of scene.lanes) {
      const x = left + rank * pitch + between / 2, across = pitch - between;
      lane.style.cssText = `transform:translate(${x}px,0px);width:${across}px;height:${y + 10}px`;
      name.textContent = pitch >= 56 ? `rank ${rank}` : String(rank);
      name.style.transform = `translate(${x}px,3px)`;
      name.style.width = `${across}px`;
    }
    for (const flyer of scene.flyers) Object.assign(flyer.box.style, { width: `${flyer.from.w}px`, height: `${flyer.from.h}px` });
    stageBox.style.height = `${y + 10}px`;
    show();
  }

  function put(cell, x, y, w, h) {
    Object.assign(cell, { x, y, w, h, shown: undefined });
    Object.assign(cell.box.style, { transform: `translate(${x}px,${y}px)`, width: `${w}px`, height: `${h}px` });
  }

  const clamped = (value) => Math.min(Math.max(value, 0), 1);
  const eased = (value) => { const p = clamped(value); return p * p * (3 - 2 * p); };

  function show() {
    for (const area of scene.areas) for (const own of area.cells) for (const cell of own) showCell(cell);
    for (const { box, from, into, start } of scene.flyers) {
      const part = state.at - start, flies = part > 0 && part < 1;
      box.hidden = !flies;
      box.style.display = flies ? "" : "none";
      if (!flies) continue;
      // along its row to the other rank first, then up or down
      const across = from.x === into.x ? 0 : eased(part / 0.6), down = eased(from.x === into.x ? part : (part - 0.4) / 0.6);
      box.style.transform = `translate(${from.x + (into.x - from.x) * across}px,${from.y + (into.y - from.y) * down}px)`;
    }
    slider.value = state.at;
    slider.setAttribute("aria-valuetext", caption());
    if (byId("caption").textContent !== caption()) byId("caption").textContent = caption();
  }

  function showCell(cell) {
    const there = cell.history.filter((one) => one.time <= state.at + 1e-9);
    const last = there[there.length - 1];
    const empty = !last && cell.filled !== undefined && cell.filled <= state.at + 1e-9;
    const key = last ? there.length : empty ? -1 : 0;
    if (cell.shown === key) return;
    cell.shown = key;
    cell.box.textContent = last ? last.value : empty ? cell.value : "";
    cell.box.className = "cell" + (last ? " full" : empty ? " none" : "") + (last && last.sum ? " sum" : "");
    cell.box.title = last && last.written ? `${last.written} = ${last.value}` : "";
    if (last && last.written && last.written.length * 6 + 8 <= cell.w && cell.h > 30) cell.box.append(element("small", "", last.written));
    paint(cell.box, last ? last.from : []);
  }

  function caption() {
    const done = Math.ceil(state.at - 1e-9);
    if (done === 0) return `step 0 of ${scene.steps}: ${scene.areas[0].label} is there`;
    const end = state.at >= scene.steps ? `; ${scene.areas[scene.areas.length - 1].label} is complete` : "";
    return `step ${done} of ${scene.steps}: ${scene.captions[done - 1]}${end}`;
  }

  // ---------------------------------------------------------------- moving

  let before = 0;

  function start() {
    if (state.at >= scene.steps) state.at = 0;
    state.playing = true;
    before = 0;
    icon(playButton, "pause");
    playButton.setAttribute("aria-label", "pause");
    requestAnimationFrame(frame);
  }

  function stop() {
    state.playing = false;
    icon(playButton, "play");
    playButton.setAttribute("aria-label", "play");
    if (scene) remember();
  }

  function frame(now) {
    if (!state.playing) return;
    const seconds = Math.min(1.5, Math.max(0.5, 4.5 / scene.steps));
    if (!before) before = now;
    const gone = (now - before) / 1000 / seconds;
    if (!still.matches) { state.at += gone; before = now; }
    else if (gone >= 1) { state.at = Math.floor(state.at + 1e-9) + 1; before = now; } // in jumps
    if (state.at >= scene.steps) { state.at = scene.steps; show(); stop(); return; }
    show();
    requestAnimationFrame(frame);
  }

  function go(at) {
    state.at = Math.min(Math.max(at, 0), scene.steps);
    stop();
    show();
  }

  const forth = () => go(Math.floor(state.at + 1e-6) + 1);
  const back = () => go(Math.ceil(state.at - 1e-6) - 1);
  const toggle = () => (state.playing ? stop() : start());

  function icon(button, name) {
    button.innerHTML = `<svg viewBox="0 0 24 24" aria-hidden="true"><path d="${icons[name]}"/></svg>`;
  }

  icon(byId("back"), "back");
  icon(byId("next"), "next");
  playButton.addEventListener("click", toggle);
  byId("back").addEventListener("click", back);
  byId("next").addEventListener("click", forth);
  slider.addEventListener("input", () => go(Number(slider.value)));

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const onButton = event.target.tagName === "BUTTON";
    const keys = {
      ArrowRight: forth, ArrowLeft: back, Home: () => go(0), End: () => go(scene.steps),
      a: () => choose({ adjoint: !state.adjoint }),
    };
    if (!onButton) keys[" "] = toggle;
    for (const ranks of data.ranks) keys[ranks] = () => choose({ ranks });
    const act = keys[event.key];
    if (act) { event.preventDefault(); act(); }
  });

  // ---------------------------------------------------------------- what is in the address

  let soon = 0;

  // Not at once: browsers refuse addresses that change many times a second, as while the slider is dragged.
  function remember() {
    clearTimeout(soon);
    soon = setTimeout(() => {
      const direction = state.adjoint ? "adjoint" : "forward";
      const parts = [state.name, state.op, state.grad, state.ranks, direction, +state.at.toFixed(2)];
      history.replaceState(null, "", "#" + parts.join(":"));
    }, 300);
  }

  function recall() {
    const [name, op, grad, ranks, direction, at] = location.hash.slice(1).split(":");
    const row = rowOf(name);
    if (!row) return false;
    const count = data.ranks.includes(Number(ranks)) ? Number(ranks) : state.ranks;
    choose({ name, op: op || row.ops[0], grad: grad || row.grads[0], ranks: count, adjoint: direction === "adjoint" }, at === undefined);
    if (at !== undefined) go(Number(at) || 0);
    return true;
  }

  addEventListener("hashchange", () => { clearTimeout(soon); recall(); });
  let across = 0;
  new ResizeObserver(() => {
    if (scene && across !== stageBox.clientWidth) layout(); // not where its height alone has changed
    across = stageBox.clientWidth;
  }).observe(stageBox);
  if (!recall()) {
    const [name, op, grad, ranks] = data.start;
    choose({ name, op, grad, ranks });
  }
})();

"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const stage = byId("stage"), slider = byId("slider"), play = byId("play");
  const state = { name: "reduce_scatter", grad: "", ranks: 4, adjoint: false, at: 0, playing: false };
  let scene = null; // cells with the history of their values, and the flyers: elements moving between cells

  function element(tag, kind, text = "", inside = []) {
    const made = document.createElement(tag);
    if (kind) made.className = kind;
    if (text) made.textContent = text;
    made.append(...inside);
    return made;
  }

  // Paths of icons, since a font may lack their characters.
  const PLAY = "M3 1l12 7-12 7z", PAUSE = "M3 1h4v14H3zM9 1h4v14H9z";
  const UP = "M7 15V6H3l5-5 5 5H9v9z", DOWN = "M7 1v9H3l5 5 5-5H9V1z";

  function icon(path) {
    const made = byId("play").firstElementChild.cloneNode(true);
    made.firstElementChild.setAttribute("d", path);
    return made;
  }

  // ---------------------------------------------------------------- controls

  function choose(change, at) { // without `at`, starts to play
    Object.assign(state, change, { playing: false });
    const grads = data.grads[state.name];
    if (!grads.includes(state.grad)) state.grad = grads[0];
    const variant = `${state.name}|${state.grad}`, direction = state.adjoint ? "adjoint" : "forward";
    build(data.runs[`${variant}|${state.ranks}`][Number(state.adjoint)]);
    buttons("operations", Object.keys(data.grads), state.name, (name) => choose({ name }));
    buttons("direction", ["forward", "adjoint"], direction, (chosen) => choose({ adjoint: chosen === "adjoint" }));
    buttons("ranks", data.ranks, state.ranks, (ranks) => choose({ ranks }));
    buttons("grad", grads, state.grad, (grad) => choose({ grad, adjoint: true }));
    describe(data.texts[variant]);
    history.replaceState(null, "", "#" + [state.name, state.grad, state.ranks, direction].join(":"));
    go(at || 0);
    if (at === undefined && !matchMedia("(prefers-reduced-motion: reduce)").matches) start();
  }

  function buttons(id, values, chosen, pick) {
    const box = byId(id);
    box.textContent = "";
    if (values.length < 2) return;
    if (!["operations", "direction"].includes(id)) box.append(element("span", "name", id));
    for (const value of values) {
      const button = element("button", "", String(value));
      button.dataset.value = value;
      button.setAttribute("aria-pressed", String(value === chosen));
      button.addEventListener("click", () => pick(value));
      box.append(button);
    }
  }

  function describe(texts) {
    byId("title").textContent = state.name;
    for (const field of ["does", "formula"]) { // both directions take up space, so that nothing jumps on a change
      byId(field).replaceChildren(...texts[field].map((text, at) => element("span", state.adjoint === Boolean(at) ? "" : "other", text)));
    }
    const calls = texts.calls.flatMap(([name, text]) => [element("dt", "", name), element("dd", "", "", [element("code", "", text)])]);
    byId("words").replaceChildren(
      ...(texts.grad_note ? [element("h3", "", "which gradient"), element("p", "", texts.grad_note)] : []),
      element("h3", "", "shapes"), element("p", "", texts.shapes),
      element("h3", "", "calls"), element("dl", "", "", calls),
      element("h3", "", "note"), element("p", "", texts.note));
  }

  // ---------------------------------------------------------------- drawing

  function build({ labels, values, moves, text }) {
    scene = { labels, cells: [], flyers: [], distances: [] };
    stage.style.setProperty("--ranks", state.ranks);
    const heads = [...Array(state.ranks).keys()].map((rank) => {
      const head = element("span", "head", state.ranks > 5 && stage.clientWidth < 520 ? String(rank) : `rank ${rank}`);
      head.style.color = `color-mix(in srgb, var(--rank${rank}) 75%, var(--ink))`;
      return head;
    });
    const [before, after] = values.map((ofRanks, a) => element("div", "row", "", [element("span", "label", labels[a]), ...memories(ofRanks, a)]));
    const rows = [before, element("div", "between", "", [icon(state.adjoint ? UP : DOWN), ` ${text}`]), after];
    if (state.adjoint) rows.reverse(); // x and its gradient are always at the top, y and its cotangent below
    stage.replaceChildren(element("div", "row", "", [element("span", "label"), ...heads]), ...rows);
    addMoves(moves);
    slider.max = scene.distances.length;
  }

  function memories(values, a) {
    scene.cells.push(values.map((own, rank) => own.map((value, at) => {
      const box = element("div", "cell");
      Object.assign(box.dataset, { area: a, rank, at });
      return { box, value, history: a ? [] : [{ time: 0, value, from: [rank] }] };
    })));
    return scene.cells[a].map((own) => element("div", "memory", "", own.map((cell) => cell.box)));
  }

  function addMoves(moves) { // ordered for display: first a rank's own block, then the previous rank's block, and so on
    const distance = ([source, , target]) => (target - source + state.ranks) % state.ranks;
    scene.distances = [...new Set(moves.map(distance))].sort();
    for (const move of [...moves].sort((a, b) => distance(a) - distance(b))) {
      const [source, at, target, to] = move, start = scene.distances.indexOf(distance(move));
      const from = scene.cells[0][source][at], into = scene.cells[1][target][to];
      const held = into.history.at(-1) || { value: 0, from: [] };
      into.history.push({ time: start + 1, value: held.value + from.value, from: [...held.from, source].sort() });
      const box = element("div", "cell flyer", String(from.value));
      Object.assign(box.dataset, { source, at, target, to });
      paint(box, [source]);
      stage.append(box);
      scene.flyers.push({ box, from: from.box, into: into.box, start });
    }
    for (const cell of scene.cells[1].flat()) if (cell.history.length) cell.history.at(-1).value = cell.value;
  }

  function paint(box, ranks) {
    const part = 100 / Math.max(ranks.length, 1);
    const pale = (rank) => `color-mix(in srgb, var(--rank${rank}) var(--part), var(--card))`;
    const stops = ranks.map((rank, i) => `${pale(rank)} ${i * part}% ${(i + 1) * part}%`);
    box.style.background = stops.length ? `linear-gradient(90deg, ${stops.join(", ")})` : "";
  }

  function show() {
    const end = scene.distances.length;
    for (const cell of scene.cells.flat(2)) {
      const last = cell.history.filter((entry) => entry.time <= state.at + 1e-9).at(-1);
      const empty = !cell.history.length && state.at > end - 1e-9; // no move ends here: the cell holds 0
      cell.box.textContent = last ? last.value : empty ? cell.value : "";
      cell.box.classList.toggle("full", Boolean(last));
      cell.box.classList.toggle("sum", Boolean(last && last.from.length > 1));
      cell.box.classList.toggle("none", empty);
      paint(cell.box, last ? last.from : []);
    }
    for (const { box, from, into, start } of scene.flyers) {
      const part = state.at - start;
      box.style.display = part > 0 && part < 1 ? "" : "none";
      const x = from.offsetLeft + (into.offsetLeft - from.offsetLeft) * part;
      const y = from.offsetTop + (into.offsetTop - from.offsetTop) * part;
      Object.assign(box.style, { width: `${from.offsetWidth}px`, transform: `translate(${x}px,${y}px)` });
      box.style.fontSize = getComputedStyle(from).fontSize;
    }
    slider.value = state.at;
    const done = Math.ceil(state.at - 1e-9), far = scene.distances[done - 1];
    const moved = far ? `elements for rank r + ${far}` : "elements that stay on their rank";
    const text = done ? moved : "nothing has moved";
    const complete = state.at >= end ? `; ${scene.labels[1]} is complete` : "";
    byId("caption").textContent = `step ${done} of ${end}: ${text}${complete}`;
  }

  // ---------------------------------------------------------------- animation

  function playing(yes) {
    state.playing = yes;
    play.replaceChildren(icon(yes ? PAUSE : PLAY));
    play.setAttribute("aria-label", yes ? "pause" : "play");
  }

  function start() {
    if (state.at >= scene.distances.length) state.at = 0;
    playing(true);
    let before = performance.now();
    const shown = scene;
    requestAnimationFrame(function frame(now) {
      if (!state.playing || scene !== shown) return;
      state.at += Math.max(now - before, 0) / 1000 / Math.min(1.5, Math.max(0.5, 4.5 / scene.distances.length));
      before = now;
      if (state.at >= scene.distances.length) go(state.at);
      else { show(); requestAnimationFrame(frame); }
    });
  }

  function go(at) {
    state.at = Math.min(Math.max(at, 0), scene.distances.length);
    playing(false);
    show();
  }

  play.addEventListener("click", () => (state.playing ? go(state.at) : start()));
  byId("back").addEventListener("click", () => go(Math.ceil(state.at - 1e-6) - 1));
  byId("next").addEventListener("click", () => go(Math.floor(state.at + 1e-6) + 1));
  slider.addEventListener("input", () => go(Number(slider.value)));

  function recall() { // the URL fragment: name:grad:ranks:direction, and the position of the slider
    const [name, grad, ranks, direction, at] = location.hash.slice(1).split(":");
    if (!data.grads[name]) return choose({});
    const count = data.ranks.includes(Number(ranks)) ? Number(ranks) : state.ranks;
    choose({ name, grad, ranks: count, adjoint: direction === "adjoint" }, at === undefined ? undefined : Number(at) || 0);
  }

  addEventListener("hashchange", recall);
  new ResizeObserver(() => scene && show()).observe(stage);
  recall();
})();

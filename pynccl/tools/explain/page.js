"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const stage = byId("stage"), slider = byId("slider"), play = byId("play");
  const state = { name: "", op: "", grad: "", ranks: 4, root: 0, adjoint: false, at: 0, playing: false };
  let scene = null; // what is shown: cells with what they hold from which time on, and elements that fly between them

  function element(tag, kind, text = "", inside = []) {
    const made = document.createElement(tag);
    if (kind) made.className = kind;
    if (text) made.textContent = text;
    made.append(...inside);
    return made;
  }

  // ---------------------------------------------------------------- what is chosen

  const rowOf = (name) => data.operations.find((row) => row.name === name);

  function choose(change, at) { // without `at` it begins to play
    Object.assign(state, change, { playing: false });
    const row = rowOf(state.name);
    if (!row.ops.includes(state.op)) state.op = row.ops[0];
    if (!row.grads.includes(state.grad)) state.grad = row.grads[0];
    if (!row.rooted || state.root >= state.ranks) state.root = 0;
    const key = [state.name, state.op, state.grad, state.ranks, state.root].join("|");
    const [forward, adjoint, words] = data.runs[key].map((part) => data.parts[part]);
    build(state.adjoint ? adjoint : forward);
    controls(row);
    explain(words);
    const direction = state.adjoint ? "adjoint" : "forward";
    history.replaceState(null, "", "#" + [state.name, state.op, state.grad, state.ranks, direction, state.root].join(":"));
    go(at || 0);
    if (at === undefined && !matchMedia("(prefers-reduced-motion: reduce)").matches) start();
  }

  function controls(row) {
    buttons("operations", data.operations.map((one) => one.name), state.name, (name) => choose({ name }));
    buttons("direction", ["forward", "adjoint"], state.adjoint ? "adjoint" : "forward", (one) => choose({ adjoint: one === "adjoint" }));
    buttons("ranks", data.ranks, state.ranks, (ranks) => choose({ ranks }));
    buttons("root", row.rooted ? [...Array(state.ranks).keys()] : [], state.root, (root) => choose({ root }));
    buttons("op", row.ops, state.op, (op) => choose({ op }));
    buttons("grad", row.grads, state.grad, (grad) => choose({ grad, adjoint: true }));
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

  function explain(words) {
    byId("title").textContent = state.name;
    for (const field of ["does", "formula"]) { // both keep their room: nothing jumps when the direction changes
      byId(field).replaceChildren(...words[field].map((one, at) => element("span", state.adjoint === Boolean(at) ? "" : "other", one)));
    }
    const calls = words.calls.flatMap(([name, text]) => [element("dt", "", name), element("dd", "", "", [element("code", "", text)])]);
    byId("words").replaceChildren(
      ...(words.other ? [element("h3", "", "which gradient"), element("p", "", words.other)] : []),
      element("h3", "", "shapes"), element("p", "", words.shapes),
      element("h3", "", "calls"), element("dl", "", "", calls),
      element("h3", "", "note"), element("p", "", words.note));
  }

  // ---------------------------------------------------------------- what is shown

  function build(pass) {
    scene = { labels: pass.areas.map((area) => area[0]), cells: [], flyers: [], captions: [] };
    stage.style.setProperty("--ranks", state.ranks);
    const heads = [...Array(state.ranks).keys()].map((rank) => {
      const head = element("span", "head", state.ranks > 5 && stage.clientWidth < 520 ? String(rank) : `rank ${rank}`);
      head.style.color = `color-mix(in srgb, var(--rank${rank}) 75%, var(--ink))`;
      return head;
    });
    const rows = pass.areas.flatMap((area, a) => {
      const between = a ? [element("div", "between", `${state.adjoint ? "↑" : "↓"} ${pass.stages[a - 1].text}`)] : [];
      return [...between, element("div", "row", "", [element("span", "label", area[0]), ...memories(area, a)])];
    });
    if (state.adjoint) rows.reverse(); // y and its cotangent stand below, x and its gradient above
    stage.replaceChildren(element("div", "row", "", [element("span", "label"), ...heads]), ...rows);
    pass.stages.forEach(addMoves);
    slider.max = scene.captions.length;
  }

  function memories([, values, cuts], a) {
    const divided = Math.max(...cuts.flat()) > 1;
    scene.cells.push(values.map((own, rank) => own.map((value, at) => {
      const box = element("div", "cell");
      Object.assign(box.dataset, { area: a, rank, at });
      return { box, value, history: a ? [] : [{ time: 0, value, from: [rank], parts: 1 }] };
    })));
    return scene.cells[a].map((own, rank) => {
      let begin = 0;
      for (const count of cuts[rank]) {
        if (divided && count && begin) own[begin].box.classList.add("block");
        begin += count;
      }
      return element("div", "memory", "", own.map((cell) => cell.box));
    });
  }

  function addMoves({ steps, moves }, s) {
    const begin = scene.captions.length;
    for (const [source, at, target, to, step, value] of moves) {
      const from = scene.cells[s][source][at], into = scene.cells[s + 1][target][to];
      const sent = from.history.at(-1) || { from: [] }, held = into.history.at(-1) || { from: [], parts: 0 };
      const ranks = [...new Set([...held.from, ...sent.from])].sort();
      into.history.push({ time: begin + step + 1, value, from: ranks, parts: held.parts + 1 });
      const box = element("div", "cell flyer", from.value);
      Object.assign(box.dataset, { stage: s, source, at, target, to });
      paint(box, sent.from);
      stage.append(box);
      scene.flyers.push({ box, from: from.box, into: into.box, start: begin + step });
    }
    scene.captions.push(...steps);
    for (const cell of scene.cells[s + 1].flat()) if (!cell.history.length) cell.filled = scene.captions.length;
  }

  function paint(box, ranks) {
    const part = 100 / Math.max(ranks.length, 1);
    const pale = (rank) => `color-mix(in srgb, var(--rank${rank}) var(--part), var(--card))`;
    const stops = ranks.map((rank, i) => `${pale(rank)} ${i * part}% ${(i + 1) * part}%`);
    box.style.background = stops.length ? `linear-gradient(90deg, ${stops.join(", ")})` : "";
  }

  function show() {
    for (const cell of scene.cells.flat(2)) {
      const last = cell.history.filter((one) => one.time <= state.at + 1e-9).at(-1);
      const empty = !last && cell.filled <= state.at + 1e-9; // nothing comes here: it holds 0
      cell.box.textContent = last ? last.value : empty ? cell.value : "";
      cell.box.classList.toggle("full", Boolean(last));
      cell.box.classList.toggle("sum", Boolean(last && last.parts > 1));
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
    const done = Math.ceil(state.at - 1e-9), end = scene.captions.length;
    const text = done ? scene.captions[done - 1] : `${scene.labels[0]} is there`;
    const complete = state.at >= end ? `; ${scene.labels.at(-1)} is complete` : "";
    byId("caption").textContent = `step ${done} of ${end}: ${text}${complete}`;
  }

  // ---------------------------------------------------------------- moving

  function playing(yes) {
    state.playing = yes;
    play.textContent = yes ? "⏸" : "▶";
    play.setAttribute("aria-label", yes ? "pause" : "play");
  }

  function start() {
    if (state.at >= scene.captions.length) state.at = 0;
    playing(true);
    let before = performance.now();
    const shown = scene;
    requestAnimationFrame(function frame(now) {
      if (!state.playing || scene !== shown) return;
      state.at += Math.max(now - before, 0) / 1000 / Math.min(1.5, Math.max(0.5, 4.5 / scene.captions.length));
      before = now;
      if (state.at >= scene.captions.length) go(state.at);
      else { show(); requestAnimationFrame(frame); }
    });
  }

  function go(at) {
    state.at = Math.min(Math.max(at, 0), scene.captions.length);
    playing(false);
    show();
  }

  play.addEventListener("click", () => (state.playing ? go(state.at) : start()));
  byId("back").addEventListener("click", () => go(Math.ceil(state.at - 1e-6) - 1));
  byId("next").addEventListener("click", () => go(Math.floor(state.at + 1e-6) + 1));
  slider.addEventListener("input", () => go(Number(slider.value)));

  function recall() { // the address: name:op:grad:ranks:direction:root, and how far it has moved
    const [name, op, grad, ranks, direction, root, at] = location.hash.slice(1).split(":");
    if (!rowOf(name)) return false;
    const count = data.ranks.includes(Number(ranks)) ? Number(ranks) : state.ranks;
    const change = { name, op, grad, ranks: count, root: Number(root) || 0, adjoint: direction === "adjoint" };
    choose(change, at === undefined ? undefined : Number(at));
    return true;
  }

  addEventListener("hashchange", recall);
  new ResizeObserver(() => scene && show()).observe(stage);
  if (!recall()) {
    const [name, op, grad, ranks, root] = data.start;
    choose({ name, op, grad, ranks, root });
  }
})();

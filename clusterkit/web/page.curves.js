// Curves: which points are requested as they grow or are zoomed, and how they are drawn.

const compared = () => [...new Set([state.run, ...state.ticked])].filter(Boolean);
const shownNames = () => ($("metric").value && $("metric").value !== DEFAULT_METRICS ? [$("metric").value] : ["loss", "eval_loss", "tokens_per_second"]);

async function loadCurves(anew) {
  const names = shownNames();
  await Promise.all(compared().map(async (run) => {
    const have = state.curves[run];
    const grows = !report && !anew && !state.zoom && have && have.names === names.join() && have.length < 2 * POINTS;
    const query = [["points", POINTS], ...names.map((name) => ["name", name])];
    if (grows) query.push(["from", have.last]);
    else if (state.zoom) query.push(["from", state.zoom[0]], ["to", state.zoom[1]]);
    const answer = await get(`/api/runs/${run}/series`, query);
    if (grows && have.replaced === answer.replaced) for (const name of names) extend(have, name, answer.series[name]);
    else if (grows) { delete state.curves[run]; return loadCurves(true); }
    else state.curves[run] = { names: names.join(), replaced: answer.replaced, series: answer.series };
    const now = state.curves[run];
    now.last = Math.max(0, ...names.map((name) => (now.series[name] ? now.series[name][0].at(-1) ?? 0 : 0)));
    now.length = Math.max(0, ...names.map((name) => (now.series[name] ? now.series[name][0].length : 0)));
  }));
  drawCurves();
}

function extend(have, name, more) {
  if (!more || !more[0].length) return;
  if (!have.series[name]) { have.series[name] = more; return; }
  const [steps, values] = have.series[name];
  while (steps.length && steps.at(-1) >= more[0][0]) { steps.pop(); values.pop(); }
  steps.push(...more[0]);
  values.push(...more[1]);
}

function drawCurves() {
  if (state.tab !== "curves") return;
  const names = shownNames();
  const wanted = names.length > 1 ? [["loss", ["loss", "eval_loss"]], ["tokens/s", ["tokens_per_second"]]] : [[names[0], names]];
  const shape = JSON.stringify([wanted, compared(), $("logscale").checked, theme(), wanted.map(([, keys]) => keys.map((key) => compared().map((run) => has(run, key))))]);
  const data = wanted.map(([, keys]) => dataOf(keys));
  if (state.charts.shape === shape) {
    state.charts.forEach((chart, at) => chart.setData(data[at]));
    return;
  }
  state.charts.forEach((chart) => chart.destroy());
  state.charts = [];
  fill($("charts"));
  const places = wanted.map(([title]) => el("div", { className: "chart" }, el("h2", {}, title)));
  $("charts").append(...places);
  wanted.forEach(([, keys], at) => {
    const place = places[at];
    if (data[at].length < 2) { place.append(el("p", { className: "quiet" }, "Nothing was reported.")); return; }
    state.charts.push(new uPlot(chartOptions(keys, place.clientWidth), data[at], place));
  });
  state.charts.shape = data.every((each) => each.length > 1) ? shape : null;
  $("unzoom").hidden = !state.zoom;
}

const has = (run, name) => Boolean(state.curves[run] && state.curves[run].series[name] && state.curves[run].series[name][0].length);
const shownCurves = (keys) => keys.flatMap((key) => compared().filter((run) => has(run, key)).map((run) => [run, key]));

function dataOf(keys) {
  const positive = $("logscale").checked;
  const tables = shownCurves(keys).map(([run, key]) => {
    const [steps, values] = state.curves[run].series[key];
    return [steps, positive ? values.map((value) => (value > 0 ? value : null)) : values];
  });
  return tables.length ? uPlot.join(tables) : [[]];
}

function chartOptions(keys, width) {
  const style = getComputedStyle(document.documentElement);
  const [text, line] = [style.getPropertyValue("--text").trim(), style.getPropertyValue("--line").trim()];
  const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 } };
  const runs = compared();
  return {
    width, height: 280, scales: { x: { time: false }, y: { distr: $("logscale").checked ? 3 : 1 } },
    axes: [axis, { ...axis, size: 70, values: (chart, ticks) => ticks.map((value) => (value === null ? "" : number(value))) }],
    cursor: { drag: { x: true, y: false, setScale: false } },
    hooks: { setSelect: [guarded(async (chart) => {
      if (chart.select.width < 4 || report) return;
      state.zoom = [chart.select.left, chart.select.left + chart.select.width].map((at) => chart.posToVal(at, "x"));
      chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      await loadCurves(true);
      $("unzoom").hidden = false;
    })] },
    series: [{ label: "step", value: (chart, value) => number(value) }, ...shownCurves(keys).map(([run, key]) => {
      const colour = COLOURS[runs.indexOf(run) % COLOURS.length];
      const held = key === "eval_loss";
      return { label: runs.length > 1 ? (held ? `${run}, held out` : run) : held ? "held out" : key, stroke: colour, width: 1.5, spanGaps: true,
        dash: held ? [6, 4] : undefined, points: { show: held ? true : undefined }, value: (chart, value) => number(value) };
    })],
  };
}

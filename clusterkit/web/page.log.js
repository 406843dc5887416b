// The log of a node or rank: the last lines, earlier or new ones, or those that match a search.

const logQuery = () => [["attempt", $("attempt").value], ["node", $("node").value || "0"], ["rank", $("rank").value], ["search", $("search").value]];

// One request at a time: two that ask for what comes after the same line would both append it.
let lastLoad = Promise.resolve();
function loadLog(way) {
  lastLoad = lastLoad.catch(() => {}).then(() => readLog(way));
  return lastLoad;
}

async function readLog(way) {
  if (!state.about) return;
  const key = JSON.stringify([state.run, logQuery()]);
  const run = state.run;
  const again = !state.log || state.log.key !== key;
  if (again || report) way = null;
  const query = logQuery();
  if (way === "older") query.push(["before", state.log.before]);
  if (way === "newer") query.push(["after", state.log.after]);
  const answer = report ? fromReport(run) : await get(`/api/runs/${run}/log`, query);
  if (run !== state.run || JSON.stringify([run, logQuery()]) !== key) return;
  const place = $("lines");
  const lines = answer.lines.map(lineOf);
  if (way === "older") {
    const high = place.scrollHeight;
    place.prepend(...lines);
    place.scrollTop += place.scrollHeight - high;
    state.log.before = answer.before;
  } else if (way === "newer" && !answer.skipped) {
    place.append(...lines);
    state.log.after = answer.after;
    if ($("follow").checked) while (place.childElementCount > MOST_LINES) place.firstChild.remove();
  } else {
    fill(place, ...lines);
    state.log = { key, before: answer.before, after: answer.after };
  }
  if ($("follow").checked && way !== "older") place.scrollTop = place.scrollHeight;
  $("older").hidden = !state.log.before;
  const more = state.log.before ? " of those looked at so far" : "";
  $("found").textContent = $("search").value ? `${place.childElementCount} lines hold it${more}` : "";
}

function fromReport(run) {
  const answer = report.answers[`/api/runs/${run}/log`] || {};
  const rank = $("rank").value, word = $("search").value.toLowerCase();
  const all = answer[$("node").value || "0"] || [];
  return { before: 0, after: 0, lines: all.filter((line) => (rank === "" || String(line.rank) === rank) && line.text.toLowerCase().includes(word)) };
}

function lineOf(line) {
  const text = el("span", { className: "text" });
  const word = $("search").value.toLowerCase();
  const found = word ? line.text.toLowerCase().indexOf(word) : -1;
  if (found < 0) text.append(line.text);
  else text.append(line.text.slice(0, found), el("mark", {}, line.text.slice(found, found + word.length)), line.text.slice(found + word.length));
  if (line.cut) {
    const more = el("button", { type: "button", onclick: guarded(async () => {
      const query = [["attempt", $("attempt").value], ["node", $("node").value || "0"], ["at", line.at]];
      fill(text, (await get(`/api/runs/${state.run}/line`, query)).text);
    }) }, `all of its ${number(line.cut)} bytes`);
    text.append(" ... ", report ? `(${number(line.cut)} bytes)` : more);
  }
  return el("div", { className: "line" }, el("span", { className: "when" }, `${clock(line.time)} ${line.rank === null ? "-" : `r${line.rank}`}`), text);
}

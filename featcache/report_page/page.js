"use strict";
(() => {
  const root = document.documentElement, all = (where, what) => [...where.querySelectorAll(what)];
  root.classList.add("js");
  const text = number => number.toLocaleString("en-US");
  const share = part => (100 * part).toFixed(part > 0 && part < 0.0995 || part > 0.9 && part < 1 ? 1 : 0) + " %";

  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  for (const button of all(document, "button.copy")) button.addEventListener("click", async () => {
    const line = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(line.textContent);
      button.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(line);  // the file is opened without a server: to be copied by hand
      button.textContent = document.execCommand("copy") ? "copied" : "selected";
    }
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  });

  const key = cell => {
    const number = cell.querySelector("data");
    return number ? Number(number.value) : cell.textContent.toLowerCase();
  };
  for (const table of all(document, "table.sorts")) all(table, "th").forEach((heading, column) => {
    if (heading.classList.contains("bars")) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const up = heading.getAttribute("aria-sort") !== "ascending", body = table.tBodies[0];
      all(table, "th").forEach(each => each.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      const rows = [...body.rows].map(row => [key(row.cells[column]), row]);
      rows.sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0) * (up ? 1 : -1));
      body.append(...rows.map(([, row]) => row));
    });
  });

  // Buckets of about as many frames each; padding of batches at random within each, as in lengths.py.
  const padding = (rows, buckets, batch) => {
    const total = rows.reduce((sum, row) => sum + row[2], 0);
    let held = 0, done = 0, begin = 0, next = 1;
    rows.forEach((row, at) => {
      done += row[2];
      if (at < rows.length - 1 && done < total * next / buckets) return;
      while (next < buckets && done >= total * next / buckets) next++;
      const mine = rows.slice(begin, at + 1), count = mine.reduce((sum, each) => sum + each[1], 0);
      let before = 0, sum = 0;
      for (const each of mine) {
        const after = before + each[1];
        held += count * each[0] * ((after / count) ** batch - (before / count) ** batch);
        before = after;
      }
      begin = at + 1;
    });
    return held ? 1 - total / held : 0;
  };
  for (const form of all(document, "form.cut")) {
    const data = JSON.parse(document.getElementById(form.dataset.counts).textContent);
    const rows = data.longest.map((longest, at) => [longest, data.utterances[at], data.frames[at]]);
    const sum = (some, column) => some.reduce((total, row) => total + row[column], 0);
    const utterances = sum(rows, 1), frames = sum(rows, 2);
    const answer = () => {
      const least = Number(form.least.value), most = Number(form.most.value), buckets = Number(form.buckets.value);
      const kept = rows.filter(row => row[0] >= least && row[0] <= most);
      form.querySelector(".buckets").textContent = buckets;
      form.querySelector("output").textContent =
        `keeps ${text(sum(kept, 1))} of ${text(utterances)} utterances, ${share(frames ? sum(kept, 2) / frames : 0)} of all frames; ` +
        `padding ${share(padding(kept, buckets, data.batch))} with ${buckets} bucket${buckets > 1 ? "s" : ""}`;
      const code = form.querySelector(".python code");
      code.textContent = code.textContent.replace(/\(-?[\d.]+, -?[\d.]+\)/, `(${least}, ${most})`);
    };
    form.addEventListener("input", answer);
    form.addEventListener("submit", event => event.preventDefault());
    answer();
  }

  const unpacked = async packed => {
    const bytes = Uint8Array.from(atob(packed), letter => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  };
  for (const search of all(document, ".search")) {
    const block = document.getElementById(search.dataset.ids), input = search.querySelector("input");
    const place = search.dataset.ids.split("-").pop();
    let loading = null;
    input.addEventListener("input", async () => {
      loading ??= unpacked(block.textContent);
      const data = await loading, wanted = input.value.toLowerCase(), hits = [];
      let count = 0;
      if (wanted) data.ids.forEach((id, at) => {
        if (id.toLowerCase().includes(wanted) && count++ < 20) hits.push(at);
      });
      const some = data.rows ? `, of ${text(data.ids.length)} that are in this page` : "";
      search.querySelector("output").textContent = wanted ? `${text(count)} match${count === 1 ? "" : "es"}${some}` : "";
      search.querySelector(".hits").replaceChildren(...hits.map(at => {
        const item = document.createElement("li"), name = document.createElement("code");
        name.textContent = data.ids[at];
        item.append(name, data.frames.length ? `  ${text(data.frames[at])} frames` : "", data.odd[at] ? `  ${data.odd[at]}` : "");
        const row = data.rows ? data.rows[at] : at;
        if (document.getElementById(`picture-${row}-${place}`)) {
          const link = document.createElement("a");
          link.href = `#picture-${row}-${place}`;
          link.textContent = "picture";
          item.append("  ", link);
        }
        return item;
      }));
    });
  }

  addEventListener("beforeprint", () => all(document, "details").forEach(each => {
    if (!each.open) { each.open = true; each.dataset.printed = "1"; }
  }));
  addEventListener("afterprint", () => all(document, "details[data-printed]").forEach(each => {
    each.open = false;
    delete each.dataset.printed;
  }));
})();

"use strict";
(() => {
  const shown = new Map();
  const connection = document.getElementById("connection");
  let failures = 0;
  async function update() {
    try {
      const answer = await fetch("/update" + location.search, {cache: "no-store"});
      if (!answer.ok) throw new Error(await answer.text());
      const page = await answer.json();
      for (const [name, html] of Object.entries(page.parts)) {
        if (shown.get(name) === html) continue;
        document.getElementById(name).innerHTML = html;
        shown.set(name, html);
      }
      document.title = page.title;
      document.body.dataset.updated = Number(document.body.dataset.updated || 0) + 1;
      connection.hidden = true;
      failures = 0;
      if (page.ended) return;
    } catch (error) {
      failures += 1;
      connection.textContent = "skyctl watch does not answer; the figures are of before. " +
        (error instanceof TypeError ? "" : error.message);
      connection.hidden = failures < 3;
    }
    setTimeout(update, failures < 3 ? 1000 : 5000);
  }
  setTimeout(update, 1000);
})();

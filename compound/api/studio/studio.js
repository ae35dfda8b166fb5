// Live updates, keys and buttons of the studio. Every page is readable without this script.
"use strict";

/** Load the page again and replace its content, keeping focus, open parts and the place on the page. */
async function refresh() {
  const answer = await fetch(location.href);
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const before = document.getElementById("main"), after = page.getElementById("main");
  const focused = document.activeElement && document.activeElement.dataset.post;
  const open = [...before.querySelectorAll("details")].map((each) => each.open);
  after.querySelectorAll("details").forEach((each, place) => (each.open = open[place] ?? each.open));
  before.replaceWith(after);
  document.title = page.title;
  if (focused) document.querySelector(`[data-post="${CSS.escape(focused)}"]`)?.focus();
  start(after);
}

/** Send JSON, and show the reason if the server refuses. */
async function post(address, body) {
  const answer = await fetch(address, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  }).catch((error) => ({ ok: false, json: async () => ({ error: { message: String(error) } }) }));
  if (answer.ok) return true;
  const problem = await answer.json().catch(() => ({}));
  alert(problem.error?.message || "The studio does not answer.");
  return false;
}

let events = null;

function follow(address) {
  if (events) return;
  let waiting = false;
  events = new EventSource(address);
  events.onmessage = async () => {
    if (waiting) return;
    waiting = true;
    // a choice that is being made would be lost
    while (document.activeElement.matches("main select, main input"))
      await new Promise((done) => setTimeout(done, 1000));
    await refresh();
    waiting = false;
  };
}

async function choose(button) {
  const pair = button.closest("[data-label]");
  const { label, split, before, after, example } = pair.dataset;
  for (const each of pair.querySelectorAll("button")) each.disabled = true;
  const stored = await post(label, { split, before, after, example, choice: button.dataset.choice });
  if (stored) await refresh();
  else for (const each of pair.querySelectorAll("button")) each.disabled = false;
}

function start(main) {
  if (main.dataset.live) follow(main.dataset.live);
  else if (events) {
    events.close();
    events = null;
  }
  if (main.dataset.refresh) setTimeout(refresh, Number(main.dataset.refresh));
  for (const button of main.querySelectorAll("[data-post]")) {
    button.addEventListener("click", async () => {
      if (confirm(button.dataset.confirm) && (await post(button.dataset.post, {}))) refresh();
    });
  }
  for (const button of main.querySelectorAll("[data-choice]")) {
    button.addEventListener("click", () => choose(button));
  }
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const button = document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
  if (button && !button.disabled) button.click();
  const step = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  if (step && !event.target.closest(".wide")) document.querySelector(`a[rel="${step}"]`)?.click();
});

start(document.getElementById("main"));

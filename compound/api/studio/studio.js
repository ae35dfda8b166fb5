// Live updates, keys and buttons of the studio. Every page is readable without this script.
"use strict";

let shown = ""; // the content as the server sent it
let waiting = 0; // the timer of the next look at the page

/** Load the page again; replace content that differs, keeping focus, open parts, ticks and the place on the page. */
async function refresh() {
  const answer = await fetch(location.href);
  if (!answer.ok) return look(document.getElementById("main"));
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const before = document.getElementById("main"), after = page.getElementById("main");
  if (after.innerHTML === shown && !after.dataset.live) return look(before);
  shown = after.innerHTML;
  const focused = before.contains(document.activeElement) && document.activeElement;
  const open = [...before.querySelectorAll("details")].map((each) => each.open);
  after.querySelectorAll("details").forEach((each, place) => (each.open = open[place] ?? each.open));
  for (const { name, value } of before.querySelectorAll("input:checked"))
    same(after, name, value)?.setAttribute("checked", "");
  before.replaceWith(after);
  document.title = page.title;
  if (focused.dataset?.post) document.querySelector(`[data-post="${CSS.escape(focused.dataset.post)}"]`)?.focus();
  else if (focused.type === "checkbox") same(after, focused.name, focused.value)?.focus();
  start(after);
}

function same(part, name, value) {
  return part.querySelector(`input[name="${CSS.escape(name)}"][value="${CSS.escape(value)}"]`);
}

/** Wait until no choice is being made that a new page would lose. */
async function settled() {
  while (document.hidden || document.activeElement.matches("main select, main input:not([type=checkbox])"))
    await new Promise((done) => setTimeout(done, 1000));
}

/** Load a page again after the time that it names, also if the server did not answer meanwhile. */
function look(main) {
  clearTimeout(waiting);
  if (main.dataset.refresh)
    waiting = setTimeout(() => settled().then(refresh).catch(() => look(main)), Number(main.dataset.refresh));
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
  let busy = false;
  events = new EventSource(address);
  events.onmessage = async () => {
    if (busy) return;
    busy = true;
    await settled().then(refresh).catch(() => null);
    busy = false;
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
  look(main);
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

shown = document.getElementById("main").innerHTML;
start(document.getElementById("main"));

"use strict";
const lists = [...document.querySelectorAll("ol")];
const status_ = document.getElementById("status");
const byOrigin = new Map();
for (const list of lists) {
  [...list.children].forEach((line, i) => {
    line.setAttribute("role", "option");
    line.setAttribute("aria-selected", "false");
    line.id = `${list.parentElement.id}-${i}`;
    if (!line.textContent.trim()) line.setAttribute("aria-label", "blank");
    for (const origin of origins(line)) {
      if (!byOrigin.has(origin)) byOrigin.set(origin, []);
      byOrigin.get(origin).push(line);
    }
  });
}
let marked = [];

// Colours of IR, assembly and machine code; Python has its own.
const TOKEN = new RegExp(
  String.raw`(?<c>\/\/.*|^;.*)|(?<s>"[^"]*")|(?<v>[%@!$#^][\w.$-]+)` +
    String.raw`|(?<m>\b(?:0x[\da-fA-F]+|0[fd][\dA-F]{8,}|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\b)|(?<k>[A-Za-z_]\w*(?:\.\w+)+)`,
  "g",
);
const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;" };

function colour(line) {
  const text = line.lastChild;
  if (text?.nodeType !== Node.TEXT_NODE) return;
  const html = text.data.trimEnd().replace(/[&<>]/g, (each) => ESCAPES[each]).replace(TOKEN, (token, ...found) => {
    const [kind] = Object.entries(found.at(-1)).find(([, part]) => part !== undefined);
    return `<i class=${kind}>${token}</i>`;
  });
  text.remove();
  line.insertAdjacentHTML("beforeend", html);
}

const dressed = new WeakSet();

// Colours a line, and says what the note beside it is.
function dress(line) {
  if (dressed.has(line)) return;
  dressed.add(line);
  const list = line.parentElement;
  if (list.parentElement.id !== "python") colour(line);
  const note = line.querySelector("u");
  if (!note) return;
  const words = JSON.parse(list.dataset.words || "{}");
  note.title = words[note.textContent] || `${note.textContent} warp instructions ran`;
}

// The lines in view alone, and some around them: all of a large kernel take seconds.
function dressInView(list) {
  const { children, scrollTop, clientHeight } = list;
  const height = children[0]?.offsetHeight;
  if (!height) return;
  const first = Math.max(0, Math.floor(scrollTop / height) - 40);
  for (const line of [...children].slice(first, first + Math.ceil(clientHeight / height) + 80)) dress(line);
}

for (const list of lists) {
  list.addEventListener("scroll", () => dressInView(list), { passive: true });
  new ResizeObserver(() => dressInView(list)).observe(list);
}

function origins(line) {
  return (line.dataset.o || "").split(" ").filter(Boolean);
}

function moveTo(line) {
  const list = line.parentElement;
  list.querySelector(".at")?.classList.remove("at");
  line.classList.add("at");
  list.setAttribute("aria-activedescendant", line.id);
  const end = line.offsetTop + line.offsetHeight - list.clientHeight;
  list.scrollTop = Math.max(Math.min(list.scrollTop, line.offsetTop), end);
}

function clear() {
  for (const line of marked) {
    line.classList.remove("on");
    line.setAttribute("aria-selected", "false");
  }
  marked = [];
  status_.textContent = "";
}

function show(list, line) {
  if (line) list.scrollTop = line.offsetTop - list.clientHeight / 3;
}

// Marks the lines of a line's or a button's operations.
function mark(from) {
  clear();
  marked = [...new Set(origins(from).flatMap((origin) => byOrigin.get(origin) || []))];
  for (const each of marked) {
    each.classList.add("on");
    each.setAttribute("aria-selected", "true");
  }
  for (const list of lists) if (list !== from.parentElement) show(list, list.querySelector(".on"));
  const counts = lists.map((list) => `${list.querySelectorAll(".on").length} in ${list.parentElement.id}`);
  status_.textContent = marked.length ? `Marked lines: ${counts.join(", ")}` : "This line belongs to no operation";
}

function pick(line) {
  dress(line);
  mark(line);
  const note = line.querySelector("u")?.title;
  if (note) status_.textContent += `; ${note}`;
  moveTo(line);
}

function beside(list, step) {
  const shown = lists.filter((each) => !each.parentElement.hidden);
  return shown[shown.indexOf(list) + step];
}

const keys = {
  ArrowDown: (at) => at.nextElementSibling && moveTo(at.nextElementSibling),
  ArrowUp: (at) => at.previousElementSibling && moveTo(at.previousElementSibling),
  Home: (at) => moveTo(at.parentElement.firstElementChild),
  End: (at) => moveTo(at.parentElement.lastElementChild),
  Enter: pick,
  " ": pick,
  Escape: clear,
  ArrowRight: (at) => beside(at.parentElement, 1)?.focus(),
  ArrowLeft: (at) => beside(at.parentElement, -1)?.focus(),
};
for (const list of lists) {
  list.addEventListener("click", (event) => {
    const line = event.target.closest("li");
    if (line) pick(line);
  });
  list.addEventListener("focus", () => {
    if (!list.querySelector(".at")) moveTo(list.querySelector(".on") || list.firstElementChild);
  });
  list.addEventListener("keydown", (event) => {
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    act(list.querySelector(".at") || list.firstElementChild);
  });
}
for (const button of document.querySelectorAll("button[data-o]")) {
  button.addEventListener("click", () => {
    mark(button);
    document.querySelector(".panes").scrollIntoView();
  });
}

// Pictures: a cell is said when it is tapped, or gone to with arrows.
function say(cell) {
  const scroll = cell.closest(".scroll");
  scroll.querySelector(".at")?.classList.remove("at");
  cell.classList.add("at");
  cell.scrollIntoView({ block: "nearest", inline: "nearest" });
  status_.textContent = cell.title;
}

function cellBeside(cell, across, down) {
  const said = (row) => [...(row?.querySelectorAll("[title]") || [])];
  const row = cell.closest("tr");
  const place = said(row).indexOf(cell);
  if (across) return said(row)[place + across];
  const other = said(down > 0 ? row.nextElementSibling : row.previousElementSibling);
  return other[Math.min(place, other.length - 1)];
}

const steps = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
for (const scroll of document.querySelectorAll(".scroll")) {
  const first = scroll.querySelector("[title]");
  if (!first) continue;
  scroll.addEventListener("click", (event) => {
    const cell = event.target.closest("[title]");
    if (cell) say(cell);
  });
  scroll.addEventListener("keydown", (event) => {
    if (!steps[event.key]) return;
    event.preventDefault();
    const at = scroll.querySelector(".at");
    const cell = at ? cellBeside(at, ...steps[event.key]) : first;
    if (cell) say(cell);
  });
}
for (const button of document.querySelectorAll("button[data-pane]")) {
  button.addEventListener("click", () => {
    const pane = document.getElementById(button.dataset.pane);
    pane.hidden = !pane.hidden;
    button.setAttribute("aria-pressed", String(!pane.hidden));
  });
}
// page.html#panes=python,ptx&line=ptx-40 shows these stages, with a line picked.
const asked = new URLSearchParams(location.hash.slice(1));
const wanted = asked.get("panes")?.split(",");
for (const button of document.querySelectorAll("button[data-pane]")) {
  if (wanted && !wanted.includes(button.dataset.pane)) button.click();
}
const line = document.getElementById(asked.get("line"));
if (line?.matches("li")) pick(line);

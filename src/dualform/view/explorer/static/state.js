// The address of the page is its whole state: what is asked, and how the levers stand.

export function parameters() {
  return new URLSearchParams(location.search);
}

// Change some parameters; null or "" takes one away. `replace` makes no new entry in the history.
export function change(changes, replace = false) {
  const next = parameters();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") next.delete(name);
    else next.set(name, value);
  }
  const text = next.toString();
  const address = location.pathname + (text ? `?${text}` : "");
  if (replace) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
  return next;
}

export class Refused extends Error {}

export async function getJSON(path, query = null, options = {}) {
  const text = query?.toString();
  const answer = await fetch(text ? `${path}?${text}` : path, {
    headers: { accept: "application/json" },
    ...options,
  });
  const content = await answer.json();
  if (!answer.ok) throw new Refused(content.error ?? answer.statusText);
  return content;
}

// Make an element: el("p", { class: "soft" }, "text", child, …)
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function number(value, digits = 4) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("-", "−");
  const places = Number.isInteger(value) ? 0 : Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places }).replace("-", "−");
}

export function tell(text) {
  document.getElementById("told").textContent = text;
}

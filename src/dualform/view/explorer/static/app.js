// The frame of the page: which view is open, the theme, and what goes wrong. A view is one module in views/.
import { getJSON } from "/static/state.js";

const opened = { view: null };

async function start() {
  const about = await getJSON("/about.json");
  document.getElementById("run").textContent = about.title;
  document.title = `${about.title} · dualform`;
  setTheme(localStorage.getItem("theme"));
  document.getElementById("theme").addEventListener("click", turnTheme);
  const here = about.views.find((view) => location.pathname === `/${view.name}`) ?? about.views[0];
  document.getElementById("nav").replaceChildren(
    ...about.views.map((view) => {
      const link = document.createElement("a");
      link.href = `/${view.name}`;
      link.textContent = view.title;
      if (view === here) link.setAttribute("aria-current", "page");
      return link;
    }),
  );
  const main = document.getElementById("view");
  const module = await import(`/static/views/${here.name}.js`);
  opened.view = await module.open(main, about);
  main.setAttribute("aria-busy", "false");
  addEventListener("popstate", () => opened.view.restore?.());
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function setTheme(theme) {
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = isDark() ? "Light" : "Dark";
}

function turnTheme() {
  const theme = isDark() ? "light" : "dark";
  localStorage.setItem("theme", theme);
  setTheme(theme);
  opened.view?.redraw?.();
}

start().catch((problem) => {
  document.getElementById("told").textContent = `The page could not be opened: ${problem.message}`;
});

// Keyboard: "/" goes to the search field. Pages can be read without this file, and forms be sent.
document.addEventListener("keydown", (event) => {
  const field = document.getElementById("find");
  const typing = /^(input|select|textarea)$/i.test(event.target.tagName);
  if (event.key === "/" && field && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    field.focus();
  }
});

// An action that is opened asks why: its first field gets the focus.
document.addEventListener("toggle", (event) => {
  if (event.target.matches("details.action[open]")) {
    event.target.querySelector("input:not([type=hidden]), select").focus();
  }
}, true);

// A live page stays as it is while the keyboard or a selection is in it: new content would lose them.
document.addEventListener("htmx:beforeRequest", (event) => {
  const part = event.detail.target;
  const selection = document.getSelection();
  const isSelected = selection && !selection.isCollapsed && part.contains(selection.anchorNode);
  if (part.id === "live" && (part.querySelector(":focus-visible") || isSelected)) event.preventDefault();
});

// A live page that cannot be loaded says so, until it can. Streams end once a minute, and begin again at once.
const SILENT_MILLISECONDS = 10000;
let silent = null;
const setStale = (isStale) => { document.getElementById("stale").hidden = !isStale; };
document.addEventListener("htmx:responseError", (event) => {
  if (event.detail.xhr.status >= 500) setStale(true);
});
document.addEventListener("htmx:sendError", () => setStale(true));
document.addEventListener("htmx:sseError", () => {
  silent = silent || window.setTimeout(() => setStale(true), SILENT_MILLISECONDS);
});
document.addEventListener("htmx:sseOpen", () => {
  window.clearTimeout(silent);
  silent = null;
});
document.addEventListener("htmx:afterSwap", () => setStale(false));

// On a phone the navigation is one line, which begins before the current page.
const current = document.querySelector("nav [aria-current]");
if (current) current.closest("nav").scrollLeft = current.offsetLeft - 64;

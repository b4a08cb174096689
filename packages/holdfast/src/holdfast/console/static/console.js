// Keyboard: "/" goes to the search field. Everything else works without this file.
document.addEventListener("keydown", (event) => {
  const field = document.getElementById("find");
  const typing = /^(input|select|textarea)$/i.test(event.target.tagName);
  if (event.key === "/" && field && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    field.focus();
  }
});

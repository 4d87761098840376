/* Sets the theme before the first paint; loaded in the head, blocking on purpose. */
(() => {
  "use strict";
  try {
    const theme = localStorage.getItem("mm-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch { /* storage is switched off: the system's theme it is */ }
})();

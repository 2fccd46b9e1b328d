// Applies the chosen theme before the first paint; without a choice the system's theme counts.
(() => {
  const chosen = localStorage.getItem("streamfold-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();

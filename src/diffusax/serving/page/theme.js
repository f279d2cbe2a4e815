// Runs before the page is shown, so that a dark page never flashes white.
(() => {
  const theme = localStorage.getItem("diffusax-theme");
  if (theme) document.documentElement.dataset.theme = theme;
})();

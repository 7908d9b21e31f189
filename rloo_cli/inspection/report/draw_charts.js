// Draws the charts of the page; `vegaEmbed` is in the script before this one.
const specs = JSON.parse(document.getElementById("specs").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
function drawCharts() {
  const ink = dark.matches ? "#cbd5e1" : "#475569", line = dark.matches ? "#334155" : "#e2e8f0";
  const config = {
    background: "transparent", view: {stroke: line}, font: "system-ui, sans-serif",
    axis: {labelColor: ink, titleColor: ink, gridColor: line, domainColor: line, tickColor: line},
    legend: {labelColor: ink, titleColor: ink},
  };
  for (const [id, spec] of Object.entries(specs)) {
    vegaEmbed("#" + id, spec, {actions: false, renderer: "svg", config: config})
      .catch(error => console.error(id, error));
  }
}
dark.addEventListener("change", drawCharts);
drawCharts();

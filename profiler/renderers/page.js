"use strict";
for (const figure of JSON.parse(document.getElementById("figures").textContent)) {
  const place = document.getElementById("chart-" + figure.id);
  if (place.clientWidth < 500) {
    figure.layout.margin = Object.assign({}, figure.layout.margin, { l: Math.min(44, figure.layout.margin.l), r: 6 });
    figure.layout.font.size = 11;
  }
  Plotly.newPlot(place, figure.data, figure.layout, { responsive: true, displaylogo: false, displayModeBar: false });
}

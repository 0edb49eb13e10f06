// What canvases share: sharp pixels, and colours of the theme.

export function fit(canvas) {
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  const [columns, rows] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== columns || canvas.height !== rows) Object.assign(canvas, { width: columns, height: rows });
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

export function colours(...names) {
  const style = getComputedStyle(document.documentElement);
  return names.map((name) => style.getPropertyValue(`--${name}`).trim());
}
